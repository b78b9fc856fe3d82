"""Allocation of declared state: complete from construction, sharded as the parameter is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuown.state.spec import BufferSpec


def allocate_like_grad(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of a parameter's shape, placements and device.

    Args:
        param: Tensor or DTensor of any shape.
        dtype: Storage dtype.
    """
    return torch.zeros_like(param, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)


def allocate_rows(
    param: Tensor,
    *,
    global_shape: tuple[int, ...],
    local_shape: tuple[int, ...],
    input_dims: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Zeros with one number per output row of a matrix parameter.

    Args:
        param: The parameter, Tensor or DTensor.
        global_shape: Shape of the rows over all ranks.
        local_shape: Shape of this rank's rows.
        input_dims: Mesh dimensions that shard the input axis; the rows are replicated over them.
        dtype: Storage dtype.
    """
    if not isinstance(param, DTensor):
        return torch.zeros(local_shape, dtype=dtype, device=param.device)
    local = torch.zeros(local_shape, dtype=dtype, device=param.to_local().device)
    placements: list[Placement] = list(param.placements)
    for dim in input_dims:
        placements[dim] = Replicate()
    stride = torch.empty(global_shape, device="meta").stride()
    return DTensor.from_local(
        local, param.device_mesh, placements, run_check=False, shape=torch.Size(global_shape), stride=stride
    )


def allocate(spec: BufferSpec, param: Tensor, rows: Callable[[torch.dtype], Tensor], device: torch.device) -> Tensor:
    """Allocate one declared buffer.

    Args:
        spec: The declaration.
        param: The parameter, Tensor or DTensor.
        rows: Makes `"grad_rows"` storage of a dtype.
        device: Where a scalar lives.
    """
    if spec.like == "scalar":
        return torch.zeros((), dtype=torch.float32, device=device)
    if spec.like == "grad_rows":
        return rows(spec.dtype or torch.float32)
    return allocate_like_grad(param, spec.dtype or param.dtype)
