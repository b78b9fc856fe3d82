"""Model state dicts of dedicated models: each rank has the entries of what it holds.

An owner's parameter is whole under its name, a shard is a DTensor, and a parameter of another rank has
no entry: DCP writes what each rank yields, so that owners write their own entries, and reads what each
asks for, so that any world size and a model that is not dedicated read the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuown.algorithms.whole import full_tensor
from dmuown.errors import CheckpointError
from dmuown.ownership.hooks import load_into
from dmuown.ownership.record import Record
from dmuown.ownership.registry import find_runtime
from dmuown.ownership.sync import gather_whole


def dedicated_names(model: nn.Module) -> dict[str, Record]:
    """Return the record of every dedicated parameter by each of its canonical names; empty if there are none."""
    runtime = find_runtime(model)
    if runtime is None:
        return {}
    return {name: record for record in runtime.records.values() for name in (record.name, *record.aliases)}


def without_absent(state_dict: Mapping[str, Any], records: Mapping[str, Record]) -> dict[str, Any]:
    """Leave out the entries of parameters that are on other ranks."""
    return {name: value for name, value in state_dict.items() if name not in records or records[name].owned}


@torch.no_grad()
def whole_entries(model: nn.Module, records: Mapping[str, Record], *, cpu_offload: bool) -> dict[str, Tensor]:
    """Return every dedicated parameter, whole. Collective; one at a time.

    Args:
        model: The dedicated model.
        records: What `dedicated_names` returned.
        cpu_offload: Whether to keep them on the CPU, and on rank 0 alone.
    """
    runtime = find_runtime(model)
    assert runtime is not None
    gathered: dict[int, Tensor | None] = {}
    result: dict[str, Tensor] = {}
    for name, record in records.items():
        if id(record) not in gathered:
            whole = gather_whole(record, record.home, runtime.link)
            if isinstance(whole, DTensor):
                whole = whole.full_tensor()
            kept = not cpu_offload or dist.get_rank() == 0
            gathered[id(record)] = (whole.cpu() if cpu_offload else whole) if kept else None
        value = gathered[id(record)]
        if value is not None:
            result[name] = value
    return result


@torch.no_grad()
def load_entries(saved: Mapping[str, Any], records: Mapping[str, Record]) -> None:
    """Load the entries of dedicated parameters that this rank holds; whole tensors or DTensors.

    Raises:
        CheckpointError: A value that is no tensor of the parameter's shape; nothing has been changed then.
    """
    for name, record in records.items():
        value = saved.get(name)
        if value is not None and (not isinstance(value, Tensor) or tuple(value.shape) != record.shape):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(name, f"has shape {shape} in the checkpoint and {record.shape} here")
    for name, record in records.items():
        value, home = saved.get(name), record.home
        if value is None:
            continue
        if isinstance(value, DTensor):
            if (
                isinstance(home, DTensor)
                and value.placements == home.placements
                and value.device_mesh == home.device_mesh
            ):
                home.to_local().copy_(value.to_local())
                continue
            # Every rank of its mesh takes part, those too that keep nothing of it.
            value = full_tensor(value)
        if not record.owned or load_into(record, value):
            continue
        home.copy_(value)
