"""Batched matrix products with a symmetric short cut, on the fastest kernel that can address the operands.

`multiply(a, b, ...)` is the one entry: `triton_operations` names its uses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from dmuown.kernels import pointer_products, table
from dmuown.kernels.launch import INT32_LIMIT, INTERPRETED


def multiply(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    shift: float = 0.0,
    symmetric: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = alpha * a[i] @ b[i] + beta * c[i] + shift * I.

    Args:
        a: [B, m, k], any strides, a floating dtype of at most 32 bits.
        b: [B, k, n], any strides, as `a`.
        c: [B, m, n], any strides; read only where given.
        alpha, beta, shift: Applied to the fp32 accumulator, before the one rounding to the result; shift only
            where n == m.
        symmetric: The caller's promise that the exact result is symmetric (n == m): tiles above the diagonal
            are copied from below it, so the stored result is symmetric bit for bit off the diagonal tiles.
        out: [B, m, n], may be uninitialised, overlaps no operand, `c` included.

    Returns:
        `out`, or a new contiguous [B, m, n].
    """
    batch, m, k = a.shape
    n = b.shape[2]
    if out is None:
        out = torch.empty((batch, m, n), dtype=a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    if k == 0:
        out = out.zero_() if c is None else torch.mul(c, beta, out=out)
        if shift:
            diagonal = out.diagonal(dim1=-2, dim2=-1)
            diagonal.copy_(diagonal.float() + shift)
        return out
    if not (is_hopper(a.device) and _by_copy_engine(a, b, c, alpha, beta, shift, symmetric, out)):
        _by_pointers(a, b, c, alpha, beta, shift, symmetric, out)
    return out


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the copy-engine kernel runs there: compute capability 9.x."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _by_copy_engine(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, shift: float, symmetric: bool, out: Tensor
) -> bool:
    from dmuown.kernels import hopper_launch

    return hopper_launch.multiply(a, b, c, alpha, beta, shift, symmetric, out)


def _by_pointers(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, shift: float, symmetric: bool, out: Tensor
) -> None:
    batch, m, k = a.shape
    n = b.shape[2]
    shape = table.pointer_shape(m, n, k, a.element_size(), symmetric)
    tiles_m, tiles_n = triton.cdiv(m, shape.block_m), triton.cdiv(n, shape.block_n)
    tiles = tiles_m * (tiles_m + 1) // 2 if symmetric else tiles_m * tiles_n
    used: list[Tensor] = [a, b, out] if c is None else [a, b, c, out]
    wide = any(_span(x) > INT32_LIMIT for x in used)
    third = out if c is None else c
    per_launch = max(1, INT32_LIMIT // tiles)
    for first in range(0, batch, per_launch):
        count = min(per_launch, batch - first)
        operands: list[Any] = [x[first : first + count] for x in (a, b, third, out)]
        pointer_products.product_kernel[(count * tiles,)](
            *operands,
            float(alpha),
            float(beta),
            float(shift),
            m,
            n,
            k,
            tiles_m,
            tiles_n,
            tiles,
            *(stride for x in operands for stride in x.stride()),
            HAS_C=c is not None,
            SHIFTED=shift != 0,
            SYMMETRIC=symmetric,
            WIDE_OFFSETS=wide,
            UPCAST=INTERPRETED,
            GROUP=8,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            BLOCK_K=shape.block_k,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )


def _span(x: Tensor) -> int:
    """The largest element offset a kernel forms within one matrix, tile overhang included."""
    return sum((size + 256) * abs(stride) for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
