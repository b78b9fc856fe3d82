"""State dicts of models and optimizers, keyed by canonical name, as torch's functions of these names return them.

They take torch's `StateDictOptions` and return torch's forms, so that `dcp.save` and `dcp.load` work
with them. What they add: names are canonical in both directions; state of frozen parameters is loaded
too; nothing runs a step to create state; groups may be cut differently than when they were saved; and
errors come before changes and name the parameter.

Torch's own `get_optimizer_state_dict` and `set_optimizer_state_dict` work with the optimizers of this
package as well: state is complete from construction, so torch never initializes it by a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from dmuown.checkpoint.broadcast import broadcast_optimizer_state, broadcast_values, cut
from dmuown.checkpoint.dedicated import dedicated_names, load_entries, whole_entries, without_absent
from dmuown.checkpoint.entries import optimizer_entries
from dmuown.checkpoint.flat import flatten, unflatten
from dmuown.checkpoint.names import as_optimizers, optimizer_fqns
from dmuown.engine import loading
from dmuown.engine.matching import regroup, resolve_name, saved_params
from dmuown.engine.optimizer import MuonEngine
from dmuown.errors import CheckpointError
from dmuown.ownership.record import Record
from dmuown.policy.names import nearest, without_wrappers
from dmuown.state import lowbit


def get_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return a model's parameters and buffers by canonical name.

    Args:
        model: Plain, FSDP2, DDP, compiled or checkpoint-wrapped.
        options: As torch's: full or sharded, offloaded to the CPU, without frozen parameters.

    Returns:
        Live tensors (DTensors with their placements), or whole copies with `full_state_dict`. Of a dedicated
        model, the entries that this rank holds; see `dmuown.checkpoint.dedicated`.
    """
    records = dedicated_names(model)
    if records and options is not None and options.full_state_dict:
        return _whole_of_dedicated(model, records, options)
    state_dict = torch_state_dict.get_model_state_dict(model, options=options)
    return without_absent({without_wrappers(name): value for name, value in state_dict.items()}, records)


def _whole_of_dedicated(model: nn.Module, records: Mapping[str, Record], options: StateDictOptions) -> dict[str, Any]:
    """Gather a dedicated model, entry by entry; with `cpu_offload`, onto rank 0 alone."""
    local = get_model_state_dict(model, options=replace(options, full_state_dict=False, cpu_offload=False))
    whole = whole_entries(model, records, cpu_offload=options.cpu_offload)
    for name, value in local.items():
        if name not in records:
            copied = _copied(value, options)
            if not options.cpu_offload or dist.get_rank() == 0:
                whole[name] = copied
    return whole


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> _IncompatibleKeys:
    """Load a model's parameters and buffers by canonical name.

    Call `resync_magnitudes()` of an optimizer that already holds these parameters, unless its own state
    is loaded too.

    Args:
        model: As `get_model_state_dict`.
        model_state_dict: By name, with or without wrappers' prefixes; left as it is.
        options: As torch's.

    Returns:
        Missing and unexpected keys, where `options.strict` is False.

    Raises:
        CheckpointError: A missing or extra name, or a wrong shape (with `strict`, the default).
    """
    options = options or StateDictOptions()
    records = dedicated_names(model)
    if records:
        model_state_dict = _loaded_into_dedicated(model, model_state_dict, records, options)
        options = replace(options, full_state_dict=False, broadcast_from_rank0=False, cpu_offload=False)
    if not options.broadcast_from_rank0 and model_state_dict:
        check_model_state(model, model_state_dict, strict=options.strict)
    # torch's own names of the same entries; they keep a wrapper's component where wrappers are nested.
    torch_names = {without_wrappers(name): name for name in torch_state_dict.get_model_state_dict(model)}
    saved = {}
    for name, value in model_state_dict.items():
        resolved = resolve_name(name, torch_names)
        saved[torch_names.get(resolved, resolved)] = value
    if options.full_state_dict:
        live = torch_state_dict.get_model_state_dict(model)
        if not any(isinstance(value, Tensor) and value.is_meta for value in live.values()):
            # torch cannot cut uneven shards under FSDP2 and tensor parallelism together.
            if options.broadcast_from_rank0 and dist.is_initialized():
                saved = broadcast_values(saved, live)
            saved = {name: cut(value, live.get(name)) for name, value in saved.items()}
            options = replace(options, full_state_dict=False, broadcast_from_rank0=False, cpu_offload=False)
    return torch_state_dict.set_model_state_dict(model, saved, options=options)


def _loaded_into_dedicated(
    model: nn.Module, saved: Mapping[str, Any], records: Mapping[str, Record], options: StateDictOptions
) -> dict[str, Any]:
    """Load dedicated parameters; returns what torch may load: the other entries, and what this rank holds now."""
    live = get_model_state_dict(model)
    saved = {resolve_name(name, {**records, **live}): value for name, value in saved.items()}
    if options.broadcast_from_rank0 and dist.is_initialized():
        homes = {name: record.home for name, record in records.items()}
        saved = broadcast_values(saved, {**live, **homes})
    check_model_state(model, saved, strict=options.strict)
    load_entries(saved, records)
    rest = {name: cut(value, live.get(name)) for name, value in saved.items() if name not in records}
    return {**rest, **{name: value for name, value in live.items() if name in records}}


def check_model_state(model: nn.Module, saved: Mapping[str, Any], *, strict: bool = True) -> None:
    """Check names and shapes of a model's state dict; tensors may be on the meta device.

    Raises:
        CheckpointError: See `set_model_state_dict`.
    """
    expected = get_model_state_dict(model)
    records = dedicated_names(model)
    saved = {resolve_name(name, {**records, **expected}): value for name, value in saved.items()}
    saved = without_absent(saved, records)  # other ranks load those
    if strict:
        for name in sorted(expected.keys() - saved.keys()):
            raise CheckpointError(name, "is not in the checkpoint", nearest(name, saved) if saved else "")
        for name in sorted(saved.keys() - expected.keys()):
            raise CheckpointError(name, "is in the checkpoint and not in the model", nearest(name, expected))
    for name, value in saved.items():
        if isinstance(value, Tensor) and name in expected and value.shape != expected[name].shape:
            raise CheckpointError(
                name, f"has shape {tuple(value.shape)} in the checkpoint and {tuple(expected[name].shape)} here"
            )


@torch.no_grad()
def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizer | Iterable[Optimizer], *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of one or several optimizers by canonical parameter name.

    Args:
        model: Has all parameters of the optimizers.
        optimizers: This package's, or any of torch's beside them.
        options: As torch's. `full_state_dict` gathers buffer by buffer (collective), with `cpu_offload`
            onto rank 0 alone, the others getting an empty dict, and low-bit state decoded to fp32;
            `flatten_optimizer_state_dict` returns one level of keys (`state.<fqn>.<buffer>`,
            `param_groups.<fqn>.<option>`).

    Returns:
        `{"state": {fqn: {buffer: tensor}}, "param_groups": [{"params": [fqn, ...], option: value}]}`, of
        live tensors unless `options` ask for copies: what `dcp.load` reads goes into the optimizer.

    Raises:
        ParameterError: An optimizer has a parameter that the model does not have.
    """
    options = options or StateDictOptions()
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in as_optimizers(optimizers):
        if not isinstance(optimizer, MuonEngine):
            other: Any = torch_state_dict.get_optimizer_state_dict(model, optimizer)
            state.update({without_wrappers(fqn): dict(buffers) for fqn, buffers in other["state"].items()})
            for group in other["param_groups"]:
                groups.append({**group, "params": [without_wrappers(fqn) for fqn in group["params"]]})
            continue
        for entry in optimizer_entries(model, optimizer):
            state.setdefault(entry.fqn, {})[entry.key] = entry.value
        saved_groups = optimizer.state_dict()["param_groups"]
        for group, fqns in zip(saved_groups, optimizer_fqns(model, optimizer), strict=True):
            groups.append({**group, "params": fqns})
    if options.full_state_dict or options.cpu_offload:
        copied = {
            fqn: {key: _copied(value, options) for key, value in buffers.items()} for fqn, buffers in state.items()
        }
        if options.full_state_dict and options.cpu_offload and dist.is_initialized() and dist.get_rank() > 0:
            return {}
        state = copied
    state_dict: dict[str, Any] = {"state": state, "param_groups": groups}
    return flatten(state_dict) if options.flatten_optimizer_state_dict else state_dict


def _copied(value: Any, options: StateDictOptions) -> Any:
    if not isinstance(value, Tensor):
        return value
    if options.full_state_dict:
        value = lowbit.decoded(value)  # scales belong to one rank's blocks, and their tensors gather rows alone
    if options.full_state_dict and isinstance(value, DTensor):
        value = value.full_tensor()
        if options.cpu_offload and dist.get_rank() > 0:
            return None
    return value.to("cpu", copy=True) if options.cpu_offload else value.clone()


@torch.no_grad()
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of one or several optimizers by canonical parameter name.

    Args:
        model: Has all parameters of the optimizers.
        optimizers: As `get_optimizer_state_dict`.
        optim_state_dict: Nested or flattened; DTensors of any mesh and placements, or whole tensors. Left as it is.
        options: As torch's. `broadcast_from_rank0` sends rank 0's whole state to all, one buffer at a time.
            `strict=False` ignores state of parameters that no optimizer here has.

    Raises:
        CheckpointError: As `MuonEngine.load_state_dict`; the optimizer concerned has not been changed then.
        ParameterError: An optimizer has a parameter that the model does not have.
    """
    options = options or StateDictOptions()
    optimizers = as_optimizers(optimizers)
    if options.broadcast_from_rank0:
        optim_state_dict = broadcast_optimizer_state(model, optimizers, dict(optim_state_dict))
    if not optim_state_dict:
        raise CheckpointError("optim_state_dict", "is empty", "Pass rank 0's state with broadcast_from_rank0=True")
    nested = unflatten(optim_state_dict)
    for optimizer, part in zip(optimizers, _parts(model, optimizers, nested, options.strict), strict=True):
        optimizer.load_state_dict(state_dict=part)


def check_optimizer_state(model: nn.Module, optimizers: Iterable[Optimizer], nested: Mapping[str, Any]) -> None:
    """Check a nested state dict against optimizers; tensors may be on the meta device.

    Optimizers whose hooks will change what they load, and other packages' optimizers, are checked
    for the names of their parameters alone.

    Raises:
        CheckpointError: See `set_optimizer_state_dict`.
    """
    optimizers = as_optimizers(optimizers)
    for optimizer, part in zip(optimizers, _parts(model, optimizers, nested, True), strict=True):
        if isinstance(optimizer, MuonEngine) and not optimizer._optimizer_load_state_dict_pre_hooks:
            loading.check(optimizer, part)


def _parts(
    model: nn.Module, optimizers: list[Optimizer], nested: Mapping[str, Any], strict: bool
) -> list[dict[str, Any]]:
    """Cut a state dict of names into one of positions per optimizer."""
    names = [optimizer_fqns(model, optimizer) for optimizer in optimizers]
    known = {name for optimizer_names in names for group in optimizer_names for name in group}
    saved = saved_params(nested, known) if nested else {}
    if saved is None:
        raise CheckpointError(
            "optim_state_dict", "has no parameter names", "Load it with optimizer.load_state_dict, by position"
        )
    for name in sorted(saved.keys() - known) if strict else ():
        raise CheckpointError(
            name,
            "is in the checkpoint and in no optimizer here",
            "Build the optimizer with the same parameters, or pass StateDictOptions(strict=False) if others hold it",
        )
    return [regroup(fqns, saved, nested, ignore_extra=True) for fqns in names]
