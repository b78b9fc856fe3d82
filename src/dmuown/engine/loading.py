"""Load a state dict into declared buffers, checked whole before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.algorithms import is_registered
from dmuown.engine.layout import local_part, local_tensor
from dmuown.engine.matching import match_by_name
from dmuown.engine.options import MATRIX_OPTIONS, RUN_LEVEL_OPTIONS, validate_group
from dmuown.engine.records import ParamRecord, make_records
from dmuown.engine.state_version import upgrade
from dmuown.errors import CheckpointError, DmuownError
from dmuown.state import BufferSpec, lowbit
from dmuown.state.spec import MASTER_WEIGHT

if TYPE_CHECKING:
    from dmuown.engine.optimizer import MuonEngine

logger = logging.getLogger(__name__)

#: Group keys that a checkpoint does not set.
KEPT_KEYS = frozenset({"params", "param_names", "algorithm", "state_version", *RUN_LEVEL_OPTIONS})

#: Options that say how a weight is stored: state cannot be carried from one value to another.
_STORAGE_OPTIONS = ("matrix_transposed", "flatten")


@dataclass(frozen=True)
class CheckedState:
    """What a state dict was found to hold for an optimizer.

    Attributes:
        buffers: Per parameter, its saved buffers; none for a frozen parameter that torch left out.
        options: Per group, the options to set.
        replan: Whether options change that the plan depends on.
    """

    buffers: list[tuple[ParamRecord, Mapping[str, Any]]]
    options: list[dict[str, Any]]
    replan: bool


def check(optimizer: MuonEngine, state_dict: dict[str, Any]) -> CheckedState:
    """Check a state dict against an optimizer; nothing is changed, and tensors may be on the meta device.

    Args:
        optimizer: The optimizer.
        state_dict: What `state_dict()` returned, here or elsewhere; parameters are matched by name
            where both sides have names, else by position.

    Raises:
        CheckpointError: See `MuonEngine.load_state_dict`.
    """
    state_dict = upgrade(_checked_form(state_dict))
    state_dict = match_by_name(optimizer.param_groups, state_dict)
    saved_groups, saved_state = state_dict["param_groups"], state_dict["state"]
    _check_groups(optimizer.param_groups, saved_groups)
    record_of = {record.param: record for record in optimizer.records}
    # Parameters without a record are dedicated ones of other ranks: their owners load them.
    buffers = [
        (record_of[param], saved_state.get(saved_id, {}))
        for group, saved in zip(optimizer.param_groups, saved_groups, strict=True)
        for param, saved_id in zip(group["params"], saved["params"], strict=True)
        if param in record_of
    ]
    for record, saved in buffers:
        _check_buffers(record, saved)
    options = [
        _merged_group(group, saved, f"param group {index}")
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True))
    ]
    return CheckedState(buffers, options, _plan_changes(optimizer.param_groups, options))


def apply(optimizer: MuonEngine, checked: CheckedState) -> None:
    """Copy a checked state dict into an optimizer's buffers and groups, in place."""
    for record, saved in checked.buffers:
        if saved:
            for key in (key for key in record.state_spec if key in saved):
                copy_into(optimizer.state[record.param][key], saved[key])
    for group, options in zip(optimizer.param_groups, checked.options, strict=True):
        for key, value in options.items():
            _set_option(group, key, value)


def _checked_form(state_dict: dict[str, Any]) -> dict[str, Any]:
    for key in ("state", "param_groups"):
        if not isinstance(state_dict, Mapping) or key not in state_dict:
            raise CheckpointError(
                "state_dict",
                f"has no {key!r}",
                "Pass what state_dict() returned; flattened state dicts go through dmuown.set_optimizer_state_dict",
            )
    extra = sorted(map(str, state_dict["state"].keys() - set(_ids(state_dict))))
    if extra:
        raise CheckpointError(f"state of {extra[0]!r}", "belongs to no parameter of the checkpoint's groups")
    return state_dict


def _ids(state_dict: Mapping[str, Any]) -> list[Any]:
    return [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]


def _check_groups(groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    if len(groups) != len(saved_groups):
        raise CheckpointError(
            "param_groups",
            f"the checkpoint has {len(saved_groups)} groups, this optimizer has {len(groups)}",
            "Build the optimizer from named parameters, or load with dmuown.set_optimizer_state_dict: "
            "names make groups interchangeable",
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise CheckpointError(
                f"param group {index}",
                f"the checkpoint has {len(saved['params'])} parameters in it, this optimizer {len(group['params'])}",
            )
        written = saved.get("algorithm")
        if written != group["algorithm"]:
            remedy = "Use the same algorithm, or convert the checkpoint with dmuown.convert_optimizer_state"
            if written is not None and not is_registered(str(written)):
                source = saved.get("algorithm_source")
                remedy = f"Import {source or 'the package that registers it'}, and use it in this group"
            first = (saved.get("param_names") or group.get("param_names") or saved["params"] or ["no parameters"])[0]
            raise CheckpointError(
                f"param group {index} ({first}, ...)",
                f"the checkpoint was written by algorithm {written!r}, this group runs {group['algorithm']!r}",
                remedy,
            )


# ---------------------------------------------------------------------------------------- buffers


def expected_shape(record: ParamRecord, spec: BufferSpec) -> tuple[int, ...]:
    """Global shape of a declared buffer."""
    if spec.like == "scalar":
        return ()
    if spec.like == "grad_rows":
        assert record.layout is not None
        return record.layout.rows_shape
    return tuple(record.param.shape)


def _check_buffers(record: ParamRecord, saved: Mapping[str, Any]) -> None:
    declared = record.state_spec
    if not saved and declared and not record.param.requires_grad:
        # torch's set_optimizer_state_dict leaves out the state of frozen parameters.
        logger.info("%s is frozen and has no state in the state dict: its state stays as it is", record.name)
        return
    for key, spec in declared.items():
        if key not in saved and spec.fate == "weights":
            continue  # taken from the parameter itself before the next step
        if key not in saved:
            raise CheckpointError(
                record.name,
                f"the checkpoint has no {key!r} for it",
                "State of another optimizer is converted by dmuown.convert_optimizer_state",
            )
        shape = _shape_of(record.name, key, saved[key])
        if shape != expected_shape(record, spec):
            raise CheckpointError(
                record.name,
                f"{key!r} has shape {shape} in the checkpoint and {expected_shape(record, spec)} here",
                "Build the model that the checkpoint was written for",
            )
    unknown = sorted(saved.keys() - declared.keys() - {MASTER_WEIGHT})
    if unknown:
        raise CheckpointError(
            record.name,
            f"the checkpoint has {unknown[0]!r} for it, which {record.algorithm.name} does not keep",
            "State of another optimizer is converted by dmuown.convert_optimizer_state",
        )


def _shape_of(name: str, key: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, Tensor):
        # A counter may have travelled as a tensor of one element.
        return tuple(value.shape) if value.shape != (1,) or key != "step" else ()
    if isinstance(value, (int, float)):
        return ()
    raise CheckpointError(name, f"{key!r} is a {type(value).__name__} in the checkpoint, not a tensor or number")


@torch.no_grad()
def copy_into(target: Tensor, value: Any) -> None:
    """Copy a saved value into a buffer, keeping the buffer's dtype, device and placements.

    Args:
        target: A buffer, plain or DTensor.
        value: A number; a plain tensor of the buffer's global shape, the same on every rank; or a
            DTensor of any mesh and placements (collective over its mesh if they differ).
    """
    if value is target:
        return
    if not isinstance(value, Tensor):
        target.fill_(value)
        return
    if isinstance(target, DTensor) and isinstance(value, DTensor) and _same_layout(target, value):
        lowbit.copy(target.to_local(), value.to_local())
        return
    if not isinstance(target, DTensor) and not isinstance(value, DTensor) and lowbit.is_low_bit(target):
        lowbit.copy(target, value)
        return
    value = lowbit.decoded(value)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(target, DTensor):
        whole = local_part(whole, target.device_mesh, target.placements)
    # Contiguous, since low-bit tensors are viewed flat.
    local_tensor(target).copy_(whole.reshape(local_tensor(target).shape).contiguous())


def _same_layout(one: DTensor, other: DTensor) -> bool:
    return one.device_mesh == other.device_mesh and one.placements == other.placements


# ---------------------------------------------------------------------------------------- groups


def _merged_group(group: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values that a group takes from the checkpoint, validated as the group they will make."""
    values = {key: value for key, value in saved.items() if key not in KEPT_KEYS}
    if "scheme" in values and "coefficients" in group:
        values.setdefault("coefficients", None)  # which belong to the scheme that they were saved with
    merged = {**group, **values}
    for key in _STORAGE_OPTIONS:
        if key in group and merged[key] != group[key]:
            raise CheckpointError(
                f"{where}: {key}",
                f"is {saved[key]!r} in the checkpoint and {group.get(key)!r} here",
                "Configure the group as it was saved",
            )
    with _as_checkpoint_error():
        validate_group(merged, where)
    return {key: merged[key] for key in values}


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option in the type that is in use: a live tensor stays that tensor, a number stays a number."""
    current = group.get(key)
    if isinstance(current, Tensor) and isinstance(value, (Tensor, int, float)):
        current.fill_(value)
    elif isinstance(current, (int, float)) and isinstance(value, Tensor) and value.numel() == 1:
        group[key] = value.item()
    else:
        group[key] = deepcopy(value)


def _plan_changes(groups: Sequence[Mapping[str, Any]], merged: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the checkpoint changes options that the plan depends on; refused here if they do not fit."""
    changed = False
    for index, (group, values) in enumerate(zip(groups, merged, strict=True)):
        if any(key in MATRIX_OPTIONS and _plain(value) != _plain(group.get(key)) for key, value in values.items()):
            with _as_checkpoint_error():
                make_records(group["params"], group.get("param_names"), {**group, **values}, index)
            changed = True
    return changed


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    """Say of an error in options that it comes from the checkpoint."""
    try:
        yield
    except DmuownError as error:
        raise CheckpointError(error.subject, f"in the checkpoint: {error.rule}", error.remedy) from error


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
