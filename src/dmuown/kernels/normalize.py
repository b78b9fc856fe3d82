"""Division of every matrix of a batch by its Frobenius norm, with the cast to the compute dtype: two launches.

Bytes per element: the input twice (once for the norm, once to scale), the result once.
"""

# ruff: noqa: SIM108

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuown.kernels.launch import launch

_BLOCK = 4096
_MAX_PARTS = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["per_part", "parts"])
def _partial_kernel(x_ptr, partial_ptr, size, batch_stride, per_part, parts, BLOCK: tl.constexpr):
    """Sum of squares of one part (`per_part` blocks) of one matrix."""
    part = tl.program_id(0)
    matrix = tl.program_id(1)
    base = x_ptr + matrix.to(tl.int64) * batch_stride
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    first = part.to(tl.int64) * per_part * BLOCK
    for i in range(per_part):
        offsets = first + i * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(base + offsets, mask=offsets < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(partial_ptr + matrix * parts + part, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["per_part", "parts"])
def _scale_kernel(
    x_ptr,
    partial_ptr,
    out_ptr,
    size,
    batch_stride,
    out_batch,
    per_part,
    parts,
    factor,
    epsilon,
    CLAMP: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """x / scale for one part of one matrix; every part adds up the same partial sums in the same order."""
    part = tl.program_id(0)
    matrix = tl.program_id(1)
    index = tl.arange(0, PARTS)
    squares = tl.load(partial_ptr + matrix * parts + index, mask=index < parts, other=0.0)
    norm = tl.sqrt(tl.sum(squares, axis=0)) * factor
    if CLAMP:
        scale = tl.where(norm < epsilon, epsilon, norm)
    else:
        scale = norm + epsilon
    first = part.to(tl.int64) * per_part * BLOCK
    base = x_ptr + matrix.to(tl.int64) * batch_stride
    out = out_ptr + matrix.to(tl.int64) * out_batch
    for i in range(per_part):
        offsets = first + i * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        x = tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offsets, (x / scale).to(out_ptr.dtype.element_ty), mask=mask)


def normalize(
    x: Tensor, dtype: torch.dtype, *, factor: float, epsilon: float, clamp: bool, overwrite: bool = False
) -> Tensor | None:
    """x / (factor * ||x||_F + epsilon), or / max(factor * ||x||_F, epsilon), per matrix, in `dtype`.

    Args:
        x: [B, m, n] fp32, fp16 or bf16; each matrix dense (rows or columns contiguous, no gaps).
        dtype: Of the result, which has x's strides within a matrix.
        factor: Multiplies the norm.
        epsilon: Added to, or lower bound of, the scaled norm.
        clamp: Which of the two.
        overwrite: Put the result into x's memory where `dtype` is as wide as x's: every element is read before it
            is written, by one thread.

    Returns:
        A new tensor or x's memory as `dtype`, or None where x is laid out otherwise. Norms are fp32: beyond 1e19
        or below 1e-19 per element the squares leave its range, as torch's own do.
    """
    batch, m, n = x.shape
    size = m * n
    columns_inner = x.stride(2) == 1 and x.stride(1) == n
    rows_inner = x.stride(1) == 1 and x.stride(2) == m
    if not (columns_inner or rows_inner) or batch > 65535 or size == 0:
        return None
    if x.dtype not in _DTYPES or dtype not in _DTYPES:
        return None
    in_place = overwrite and x.element_size() == dtype.itemsize
    if in_place and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0:  # as a new tensor would be aligned
        out = x.view(dtype)
    elif columns_inner:
        out = torch.empty((batch, m, n), dtype=dtype, device=x.device)
    else:
        out = torch.empty((batch, n, m), dtype=dtype, device=x.device).mT
    blocks = triton.cdiv(size, _BLOCK)
    # Enough programs to fill a card, and no more partial sums than one block adds up.
    parts = max(1, min(blocks, _MAX_PARTS, triton.cdiv(8192, batch)))
    per_part = triton.cdiv(blocks, parts)
    parts = triton.cdiv(blocks, per_part)
    partial = torch.empty((batch, parts), dtype=torch.float32, device=x.device)
    grid = (parts, batch, 1)
    arguments = (x, partial, size, x.stride(0), per_part, parts)
    launch(_partial_kernel, grid, arguments, (_BLOCK,), x.device, num_warps=8)
    scaled = (x, partial, out, size, x.stride(0), out.stride(0), per_part, parts, float(factor), float(epsilon))
    launch(_scale_kernel, grid, scaled, (clamp, _BLOCK, _MAX_PARTS), x.device, num_warps=8)
    return out
