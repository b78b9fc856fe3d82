"""Allocation of declared state: complete from construction, sharded as the parameter is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuown.state import lowbit
from dmuown.state.spec import OPTIM_DTYPES, PRECISIONS, BufferSpec

logger = logging.getLogger(__name__)


def allocate_like_grad(param: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Zeros of a parameter's shape and placements.

    Args:
        param: Tensor or DTensor of any shape.
        dtype: Storage dtype.
        device: Where they live; None for where the parameter does. On the host beside an accelerator they
            are pinned, so that copies overlap with computation.
    """
    elsewhere: dict[str, Any] = {} if device is None else {"device": device}
    if device is not None and device.type == "cpu" and torch.cuda.is_available():
        elsewhere["pin_memory"] = True
    contiguous = torch.contiguous_format
    return torch.zeros_like(param, dtype=dtype, requires_grad=False, memory_format=contiguous, **elsewhere)


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


def allocate(
    spec: BufferSpec,
    param: Tensor,
    rows: Callable[[torch.dtype], Tensor],
    device: torch.device,
    *,
    name: str = "",
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Allocate one declared buffer.

    Args:
        spec: The declaration.
        param: The parameter, Tensor or DTensor.
        rows: Makes `"grad_rows"` storage of a dtype.
        device: Where a scalar lives.
        name: The parameter's name and the buffer's, for the log.
        options: The group's options. Read here: `state_precision`, else `optim_dtype`, and `offload_state`, of
            buffers shaped like the gradient.

    Raises:
        MissingDependencyError: Low-bit storage without torchao.
    """
    if spec.like == "scalar":
        return torch.zeros((), dtype=torch.float32, device=device)
    if spec.like == "grad_rows":
        return rows(spec.dtype or torch.float32)
    options = options or {}
    precision = None if spec.dtype else options.get("state_precision")
    local = param.to_local() if isinstance(param, DTensor) else param
    wide = OPTIM_DTYPES[options["optim_dtype"]] if options.get("optim_dtype") else param.dtype
    home = torch.device("cpu") if options.get("offload_state") else local.device
    if precision in lowbit.LOW_BIT:
        made = lowbit.zeros_like(param, precision, signed=spec.signed, device=home)
        if made is not None:
            return made
        logger.warning(
            "%s: shards of shape %s do not divide into the blocks that %s storage needs; it is kept in %s",
            name,
            tuple(local.shape),
            precision,
            wide,
        )
        precision = None
    dtype = spec.dtype or (PRECISIONS[precision] if precision else None) or wide
    made = allocate_like_grad(param, dtype, None if home == local.device else home)
    if spec.fate == "weights":
        made.copy_(param.detach())
    return made
