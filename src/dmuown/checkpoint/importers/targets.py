"""Where converted state will go: the parameters of a model or an optimizer, by key of the state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmuown.algorithms import get_algorithm
from dmuown.checkpoint.names import parameter_fqns
from dmuown.engine.matching import saved_params
from dmuown.engine.optimizer import MuonEngine
from dmuown.engine.records import ParamRecord
from dmuown.errors import CheckpointError
from dmuown.policy.names import nearest, without_wrappers


@dataclass(frozen=True)
class Target:
    """One parameter that state is converted for.

    Attributes:
        name: Its name.
        param: The parameter.
        record: What the optimizer knows of it; None where only a model was given.
        options: Its group in the optimizer; empty where only a model was given.
        state: Its state in the optimizer; likewise.
    """

    name: str
    param: Tensor
    record: ParamRecord | None
    options: Mapping[str, Any]
    state: Mapping[str, Any]


def targets_of(model_or_optimizer: nn.Module | MuonEngine, state_dict: Mapping[str, Any]) -> dict[Any, Target]:
    """Return the target of each key of a state dict's groups.

    Raises:
        CheckpointError: A parameter that is missing on one side, or no names where a model was given.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if isinstance(model_or_optimizer, MuonEngine):
        targets = _of_optimizer(model_or_optimizer)
        named = {without_wrappers(target.name): target for target in targets}
        saved = saved_params(state_dict, named)
        if saved is None or not saved.keys() & named.keys():
            if len(keys) != len(targets):
                raise CheckpointError(
                    "param_groups", f"the checkpoint has {len(keys)} parameters, this optimizer has {len(targets)}"
                )
            return dict(zip(keys, targets, strict=True))
    else:
        fqns = parameter_fqns(model_or_optimizer)
        named = {fqn: Target(fqn, param, None, {}, {}) for param, fqn in fqns.items()}
        saved = saved_params(state_dict, named)
        if saved is None:
            raise CheckpointError(
                "model_or_optimizer", "state without parameter names needs the optimizer that will load it", "Pass it"
            )
    for name in saved.keys() - named.keys():
        raise CheckpointError(name, "is in the checkpoint and not here", nearest(name, named))
    return {entry.state_key: named[name] for name, entry in saved.items()}


def _of_optimizer(optimizer: MuonEngine) -> list[Target]:
    return [
        Target(
            record.name,
            record.param,
            record,
            optimizer.param_groups[record.group_index],
            optimizer.state[record.param],
        )
        for record in optimizer.records
    ]


def fresh_buffers(target: Target, algorithm: str) -> dict[str, Tensor]:
    """State of a parameter that was never stepped.

    Raises:
        CheckpointError: It starts from the weights and only a model was given.
    """
    buffers: dict[str, Tensor] = {}
    declared = target.record.state_spec if target.record is not None else get_algorithm(algorithm).state_spec
    for key, spec in declared.items():
        if spec.like == "scalar":
            buffers[key] = torch.zeros((), dtype=torch.float32)
        elif key in target.state:
            live: Tensor = target.state[key]
            buffers[key] = live.clone() if spec.fate == "weight_rows" else torch.zeros_like(live)
        elif spec.like == "grad":
            buffers[key] = torch.zeros_like(target.param, requires_grad=False)
        else:
            raise CheckpointError(
                target.name,
                f"has no state in the checkpoint, and {algorithm} needs {key!r}, made from the weights",
                "Pass the optimizer instead of the model",
            )
    return buffers
