"""Host side of the copy-engine kernel: who may use it, its descriptors, its grid."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dmuown.kernels import hopper, table

BLOCK_M = 128
BLOCK_K = 64
_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=3)


def _row_major(x: Tensor) -> bool:
    """Whether the copy engine can address x: [B, rows, columns] as stored: columns contiguous, 16-byte steps."""
    batch_stride, row_stride, column_stride = x.stride()
    return (
        column_stride == 1
        and row_stride % 8 == 0
        and row_stride >= x.shape[2]
        and batch_stride % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def multiply(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, symmetric: bool, out: Tensor,
    shape: table.CopyShape | None = None,
) -> bool:
    """As `products.multiply` on Hopper; False, with nothing done, where the operands cannot be addressed."""
    if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype or out.dtype != a.dtype:
        return False
    if c is not None and c.dtype != a.dtype:
        return False
    if not _row_major(out):
        if symmetric or not _row_major(out.mT):
            return False
        # Columns stored contiguously: the transposed product has its rows so.
        a, b, out = b.mT, a.mT, out.mT
        c = None if c is None else c.mT
    if c is not None and not _row_major(c):
        if not symmetric or not _row_major(c.mT):
            return False
        c = c.mT
    a_k_major, b_k_major = _row_major(a), _row_major(b.mT)
    a_stored = a if a_k_major else a.mT
    b_stored = b.mT if b_k_major else b
    if not (_row_major(a_stored) and _row_major(b_stored)):
        return False
    batch, m, k = a.shape
    n = b.shape[2]
    shape = shape or table.copy_shape(batch, m, n, k, symmetric)
    block_n = shape.block_n
    half = block_n // 2
    tiles_m, tiles_n = triton.cdiv(m, BLOCK_M), triton.cdiv(n, block_n)
    tiles_per_matrix = _triangle(tiles_m, block_n // BLOCK_M) if symmetric else tiles_m * tiles_n
    tiles = batch * tiles_per_matrix
    box = [1, BLOCK_M, half]
    out_desc = _describe(out, box)
    grid = (min(_multiprocessors(a.device) * shape.per_sm, tiles),)
    extra: dict[str, Any] = {} if shape.per_sm == 1 else {"maxnreg": 128}
    hopper.product_kernel[grid](
        _describe(a_stored, [1, BLOCK_M, BLOCK_K] if a_k_major else [1, BLOCK_K, BLOCK_M]),
        _describe(b_stored, [1, block_n, BLOCK_K] if b_k_major else [1, BLOCK_K, block_n]),
        out_desc if c is None else _describe(c, box),
        out_desc,
        _describe(out, [1, half, BLOCK_M]) if symmetric else out_desc,
        alpha, beta, tiles, tiles_m, tiles_n, tiles_per_matrix, triton.cdiv(k, BLOCK_K), n,
        A_K_MAJOR=a_k_major, B_K_MAJOR=b_k_major, HAS_C=c is not None, SYMMETRIC=symmetric, GROUP=shape.group,
        BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=BLOCK_K, STAGES=shape.stages, DOUBLE=shape.double,
        num_warps=shape.warps, **extra,
    )
    return True


def _triangle(rows: int, ratio: int) -> int:
    """Tiles that reach the lower triangle when a column tile is `ratio` row tiles wide."""
    groups, rest = divmod(rows, ratio)
    return ratio * groups * (groups + 1) // 2 + rest * (groups + 1)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _describe(x: Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, _LAYOUT)
