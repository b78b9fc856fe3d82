"""Low-bit storage of state, by torchao's tensor subclasses (extra `lp`). The only importer of torchao.

A low-bit tensor keeps codes of 8 or 4 bits and one fp32 scale for each block of consecutive
elements of this rank's storage (8-bit: arXiv 2110.02861; 4-bit: arXiv 2309.01507; fp8: E4M3).
"""

from __future__ import annotations

import importlib
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.errors import MissingDependencyError, install_extra
from dmuown.state.shards import local_sizes

logger = logging.getLogger(__name__)

#: Storage of `"grad"` buffers by the group option `state_precision`; the others are torch dtypes.
LOW_BIT = ("int8", "int4", "fp8")

#: Elements that share a scale: torchao's defaults first, then smaller ones for shapes that need them.
_BLOCK_SIZES = {"int8": (256, 128, 64), "int4": (128, 64), "fp8": (256, 128, 64)}

_CLASSES = {
    "int8": ("subclass_8bit", "OptimState8bit"),
    "int4": ("subclass_4bit", "OptimState4bit"),
    "fp8": ("subclass_fp8", "OptimStateFp8"),
}


def _class_of(precision: str) -> Any:
    module, name = _CLASSES[precision]
    try:
        return getattr(importlib.import_module(f"torchao.optim.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"state_precision={precision!r}",
            f"needs torchao 0.15 or newer, which cannot be used here ({error})",
            f"{install_extra('lp')}, or choose 'bf16' or 'fp32'",
        ) from error


def register_classes() -> None:
    """Let `torch.load(..., weights_only=True)` read low-bit tensors, as importing their classes does.

    Raises:
        MissingDependencyError: torchao is missing or too old.
    """
    for precision in LOW_BIT:
        _class_of(precision)


def is_low_bit(tensor: Tensor) -> bool:
    """Whether a tensor, or the local part of a DTensor, is stored in 8 or 4 bits."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return type(local).__module__.startswith("torchao.")


def block_size_for(param: Tensor, precision: str) -> int | None:
    """Elements that share a scale, or None where no rank-independent choice fits the parameter's shards.

    Args:
        param: Tensor or DTensor. Every rank's shard must divide into blocks, so that every rank stores the
            state in the same way.
        precision: One of `LOW_BIT`.
    """
    common = math.gcd(*local_sizes(param))
    return next((size for size in _BLOCK_SIZES[precision] if common and common % size == 0), None)


def zeros_like(param: Tensor, precision: str, *, signed: bool, device: torch.device) -> Tensor | None:
    """Low-bit zeros of a parameter's shape and placements; None where its shards do not divide into blocks.

    Args:
        param: Tensor or DTensor.
        precision: One of `LOW_BIT`.
        signed: Whether values may be negative. fp8 has a sign always.
        device: Where the local part lives.

    Raises:
        MissingDependencyError: torchao is missing or too old.
    """
    kind = _class_of(precision)
    size = block_size_for(param, precision)
    if size is None:
        return None
    local = param.to_local() if isinstance(param, DTensor) else param
    if local.numel() == 0:
        made = torch.zeros(local.shape, dtype=torch.float32, device=device)
    else:
        sign = {} if precision == "fp8" else {"signed": signed}
        made = kind.zeros(tuple(local.shape), block_size=size, device=device, dtype=torch.float32, **sign)
    if isinstance(param, DTensor):
        made = DTensor.from_local(
            made, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        made = made.to(device)  # from_local moves to the mesh's device
    return made


def dequantize(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain tensor of a low-bit one's values; for a DTensor, its local part's."""
    local: Any = stored._local_tensor if isinstance(stored, DTensor) else stored
    values: Tensor = local.dequantize()
    return values.to(dtype).view(local.shape)


def decoded(stored: Tensor) -> Tensor:
    """The plain fp32 tensor or DTensor of a low-bit one's values; another tensor as it is."""
    if not is_low_bit(stored):
        return stored
    values = dequantize(stored, torch.float32)
    if not isinstance(stored, DTensor):
        return values
    return DTensor.from_local(
        values,
        stored.device_mesh,
        stored.placements,
        run_check=False,
        shape=stored.shape,
        stride=torch.empty(stored.shape, device="meta").stride(),
    )


def copy(target: Tensor, value: Tensor) -> None:
    """Copy between local tensors of any storage: codes as they are where both are stored alike, else values."""
    if is_low_bit(value) and type(value) is type(target) and value.block_size == target.block_size:  # type: ignore[attr-defined]
        target.copy_(value)
    else:
        target.copy_(decoded(value).to(target.device).contiguous())


def storage_bytes(stored: Tensor) -> int:
    """Bytes that this rank keeps for a buffer, scales included and shared lookup tables left out."""
    local: Any = stored._local_tensor if isinstance(stored, DTensor) else stored
    parts = [local.codes, local.scale] if is_low_bit(local) else [local]
    return sum(part.numel() * part.element_size() for part in parts)
