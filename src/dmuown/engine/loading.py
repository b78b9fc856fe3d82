"""Load a state dict into declared buffers, checked whole before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuown.engine.options import RUN_LEVEL_OPTIONS
from dmuown.engine.records import ParamRecord
from dmuown.errors import CheckpointError

if TYPE_CHECKING:
    from dmuown.engine.optimizer import MuonEngine


def load(optimizer: MuonEngine, records: Sequence[ParamRecord], state_dict: Mapping[str, Any]) -> None:
    """Check a state dict against the optimizer, then copy it in.

    Raises:
        CheckpointError: See `MuonEngine.load_state_dict`.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise CheckpointError("state_dict", f"has no {key!r}", "Pass what state_dict() returned")
    saved_groups = state_dict["param_groups"]
    _check_groups(optimizer.param_groups, saved_groups)
    ids = list(chain.from_iterable(group["params"] for group in saved_groups))
    saved_state = state_dict["state"]
    pairs = [(record, saved_state.get(saved_id, {})) for record, saved_id in zip(records, ids, strict=True)]
    for record, saved in pairs:
        _check_buffers(record, saved)
    extra = [key for key in saved_state if key not in set(ids)]
    if extra:
        raise CheckpointError(f"state of {extra[0]!r}", "belongs to no parameter of this optimizer")
    for record, saved in pairs:
        for key in record.algorithm.state_spec:
            _copy_into(optimizer.state[record.param][key], saved[key])
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        for key, value in saved_group.items():
            if key not in ("params", *RUN_LEVEL_OPTIONS):
                group[key] = deepcopy(value)


def _check_groups(groups: Sequence[Mapping[str, Any]], saved_groups: Sequence[Mapping[str, Any]]) -> None:
    if len(groups) != len(saved_groups):
        raise CheckpointError(
            "param_groups", f"the checkpoint has {len(saved_groups)} groups, this optimizer has {len(groups)}"
        )
    for index, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise CheckpointError(
                f"param group {index}",
                f"the checkpoint has {len(saved['params'])} parameters in it, this optimizer {len(group['params'])}",
            )
        written = saved.get("algorithm")
        if written != group["algorithm"]:
            raise CheckpointError(
                f"param group {index}",
                f"the checkpoint was written by algorithm {written!r}, this group runs {group['algorithm']!r}",
                "Use the same algorithm, or convert the checkpoint",
            )


def _check_buffers(record: ParamRecord, saved: Mapping[str, Any]) -> None:
    for key, spec in record.algorithm.state_spec.items():
        if key not in saved:
            raise CheckpointError(
                record.name, f"the checkpoint has no {key!r} for it", "It may come from another optimizer: convert it"
            )
        if spec.like == "grad" and tuple(saved[key].shape) != tuple(record.param.shape):
            raise CheckpointError(
                record.name,
                f"{key!r} has shape {tuple(saved[key].shape)} in the checkpoint and {tuple(record.param.shape)} here",
            )
        if spec.like == "grad_rows":
            assert record.layout is not None
            if tuple(saved[key].shape) != record.layout.rows_shape:
                raise CheckpointError(
                    record.name,
                    f"{key!r} has shape {tuple(saved[key].shape)} in the checkpoint, not {record.layout.rows_shape}",
                )


def _copy_into(target: Tensor, value: Any) -> None:
    """Copy a saved value into a buffer, keeping the buffer's dtype, device and placements."""
    if not isinstance(value, Tensor):
        target.fill_(value)
        return
    if isinstance(target, DTensor):
        if not isinstance(value, DTensor):
            # Every rank has the whole value: each takes its shard, nothing is sent.
            value = distribute_tensor(
                value.to(target.to_local().device), target.device_mesh, target.placements, src_data_rank=None
            )
        elif value.placements != target.placements or value.device_mesh != target.device_mesh:
            value = value.redistribute(target.device_mesh, target.placements)
        target.to_local().copy_(value.to_local())
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        target.copy_(whole.reshape(target.shape))
