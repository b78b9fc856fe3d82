"""State of other libraries' optimizers, converted into this package's: one small module a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dmuown.checkpoint.flat import unflatten
from dmuown.checkpoint.importers import automodel, dion, muonium, muown, torch_optim
from dmuown.checkpoint.importers.common import Importer
from dmuown.checkpoint.importers.targets import Target, fresh_buffers, targets_of
from dmuown.engine.optimizer import MuonEngine
from dmuown.engine.state_version import STATE_VERSION
from dmuown.errors import CheckpointError, OptionError

_IMPORTERS: dict[str, Importer] = {
    importer.source: importer
    for importer in (automodel.IMPORTER, dion.IMPORTER, muonium.IMPORTER, muown.IMPORTER, torch_optim.IMPORTER)
}


def convert_optimizer_state(
    state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    source: str,
    model_or_optimizer: nn.Module | MuonEngine,
) -> dict[str, Any]:
    """Convert another library's optimizer state into this package's.

    Options travel with the state, so that the continued run is theirs: lr, decay, momentum, betas. What
    they keep outside of checkpoints, such as Dion's choice of an orthogonalizer, stays as configured here.

    Args:
        state_dict: What their `state_dict()` or torch's `get_optimizer_state_dict` returned, nested or
            flattened, DTensors or whole tensors. A list of several (torch.optim.Muon beside AdamW, say)
            is taken as their groups in this order.
        source: `"automodel"` (AutoModel's Muown; its `"muon"` groups become `"muown"`), `"dion"` (Muon,
            NorMuon, AdamW and Lion groups of either generation), `"muonium"`, `"muown"` (the authors' Muown and
            NorMuown) or `"torch"` (torch.optim.Muon, AdamW and Adam).
        model_or_optimizer: The optimizer that will load it, for parameters by position or names, then
            `optimizer.load_state_dict(converted)`; or the model, for state keyed by parameter name, then
            `dmuown.set_optimizer_state_dict(model, optimizer, converted)`.

    Returns:
        `{"state": ..., "param_groups": ...}`; the input is left as it is. Parameters that never had a gradient
        there, and so no state, get that of a fresh start.

    Raises:
        OptionError: An unknown `source`.
        CheckpointError: State or options that cannot be mapped; it names the parameter or group.
    """
    if source not in _IMPORTERS:
        raise OptionError("source", f"must be one of {', '.join(map(repr, sorted(_IMPORTERS)))}, got {source!r}")
    importer = _IMPORTERS[source]
    whole = _joined([state_dict] if isinstance(state_dict, Mapping) else state_dict)
    targets = targets_of(model_or_optimizer, whole)
    state: dict[Any, dict[str, Any]] = {}
    groups = []
    for index, group in enumerate(whole["param_groups"]):
        members = [(key, targets[key]) for key in group["params"]]
        where = f"param group {index}"
        options = importer.convert_group(where, dict(group), [target for _, target in members])
        for key, target in members:
            buffers = dict(whole["state"].get(key, {}))
            converted = importer.convert_buffers(target, buffers, group, options) if buffers else None
            state[key] = converted if converted is not None else fresh_buffers(target, options["algorithm"])
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        groups.append({"step": 0, **options, **names, "state_version": STATE_VERSION, "params": list(group["params"])})
    return {"state": state, "param_groups": groups}


def _joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One nested state dict of several, positions counted on."""
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        nested = unflatten(part)
        for key in ("state", "param_groups"):
            if key not in nested:
                raise CheckpointError(f"state_dict {number}", f"has no {key!r}", "Pass an optimizer's state dict")
        count = sum(len(group["params"]) for group in groups)
        for group in nested["param_groups"]:
            groups.append({**group, "params": [_shifted(key, count) for key in group["params"]]})
        state.update({_shifted(key, count): dict(buffers) for key, buffers in nested["state"].items()})
    return {"state": state, "param_groups": groups}


def _shifted(key: Any, count: int) -> Any:
    return key + count if isinstance(key, int) else key


__all__ = ["Importer", "Target", "convert_optimizer_state"]
