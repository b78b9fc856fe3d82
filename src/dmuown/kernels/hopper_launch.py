"""Host side of the copy-engine kernel: who may use it, its descriptors, its grid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dmuown.kernels import hopper, table
from dmuown.kernels.launch import launch

BLOCK_M = 128

_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides


@dataclass(frozen=True)
class _Plan:
    """How one problem runs: everything but the pointers."""

    swapped: bool  # compute out^T = b^T a^T
    a: tuple[_Layout, tuple[int, ...]]  # layout and box
    b: tuple[_Layout, tuple[int, ...]]
    out: tuple[_Layout, tuple[int, ...]]
    mirror: tuple[_Layout, tuple[int, ...]]
    c: tuple[_Layout, tuple[int, ...]] | None
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]  # batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n
    constants: tuple[Any, ...]
    options: dict[str, int]


class _Base:
    """Stands for a tensor in a descriptor without keeping its memory alive."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer = pointer
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.pointer


def multiply(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    shift: float,
    symmetric: bool,
    out: Tensor,
    shape: table.CopyShape | None = None,
) -> bool:
    """As `products.multiply` on Hopper; False, with nothing done, where the operands cannot be addressed."""
    if shift and (c is None or not symmetric):
        return False
    pointers = a.data_ptr() | b.data_ptr() | out.data_ptr() | (0 if c is None else c.data_ptr())
    if pointers % 16 or a.dtype not in (torch.bfloat16, torch.float16):
        return False
    if b.dtype != a.dtype or out.dtype != a.dtype or (c is not None and c.dtype != a.dtype):
        return False
    plan = _plan(
        (*a.shape, b.shape[2]),
        a.stride(),
        b.stride(),
        None if c is None else c.stride(),
        out.stride(),
        symmetric,
        a.device,
        shape,
    )
    if plan is None:
        return False
    if plan.swapped:
        a, b = b, a
    dtype = a.dtype
    out_desc = describe(out.data_ptr(), dtype, *plan.out)
    launch(
        hopper.product_kernel,
        plan.grid,
        (
            describe(a.data_ptr(), dtype, *plan.a),
            describe(b.data_ptr(), dtype, *plan.b),
            out_desc if c is None or plan.c is None else describe(c.data_ptr(), dtype, *plan.c),
            out_desc,
            describe(out.data_ptr(), dtype, *plan.mirror),
            float(alpha),
            float(beta),
            float(shift),
            *plan.sizes,
        ),
        plan.constants,
        a.device,
        key=dtype,
        **plan.options,
    )
    return True


@lru_cache(maxsize=4096)
def _plan(
    sizes: tuple[int, ...],
    a: tuple[int, ...],
    b: tuple[int, ...],
    c: tuple[int, ...] | None,
    out: tuple[int, ...],
    symmetric: bool,
    device: torch.device,
    shape: table.CopyShape | None,
) -> _Plan | None:
    """The plan for [B, m, k] @ [B, k, n] with these strides, or None where an operand cannot be addressed."""
    batch, m, k, n = sizes
    swapped = False
    if not row_major(out, n):
        if symmetric or not row_major(_turn(out), m):
            return None
        # The result's columns are stored contiguously: its transpose is a product with contiguous rows.
        swapped = True
        m, n = n, m
        a, b, out = _turn(b), _turn(a), _turn(out)
        c = None if c is None else _turn(c)
    if c is not None and not row_major(c, n):
        if not symmetric or not row_major(_turn(c), m):
            return None
        c = _turn(c)
    a_k_major, b_k_major = row_major(a, k), row_major(_turn(b), k)
    if not (a_k_major or row_major(_turn(a), m)) or not (b_k_major or row_major(b, n)):
        return None
    shape = shape or table.copy_shape(batch, m, n, k, symmetric, c is not None)
    block_n, block_k = shape.block_n, shape.block_k
    half = block_n // 2
    tiles_m, tiles_n = triton.cdiv(m, BLOCK_M), triton.cdiv(n, block_n)
    tiles_per_matrix = triangle(tiles_m, block_n // BLOCK_M) if symmetric else tiles_m * tiles_n
    tiles = batch * tiles_per_matrix
    out_box = (((batch, m, n), out), (1, BLOCK_M, half))
    return _Plan(
        swapped=swapped,
        a=(((batch, m, k), a), (1, BLOCK_M, block_k))
        if a_k_major
        else (((batch, k, m), _turn(a)), (1, block_k, BLOCK_M)),
        b=(((batch, n, k), _turn(b)), (1, block_n, block_k))
        if b_k_major
        else (((batch, k, n), b), (1, block_k, block_n)),
        out=out_box,
        mirror=(((batch, m, n), out), (1, half, BLOCK_M)) if symmetric else out_box,
        c=None if c is None else (((batch, m, n), c), (1, BLOCK_M, half)),
        grid=(min(multiprocessors(device), tiles), 1, 1),
        sizes=(batch, tiles, tiles_m, tiles_n, tiles_per_matrix, triton.cdiv(k, block_k), n),
        constants=(
            a_k_major,
            b_k_major,
            c is not None,
            symmetric,
            shape.group,
            BLOCK_M,
            block_n,
            block_k,
            shape.stages,
            shape.consumers,
            shape.warps,
        ),
        options={"num_warps": shape.warps, "launch_pdl": hopper.PDL.value},
    )


def row_major(strides: tuple[int, ...], columns: int) -> bool:
    """Whether the copy engine can address [B, rows, columns] as stored: columns contiguous, 16-byte steps."""
    batch_stride, row_stride, column_stride = strides
    return column_stride == 1 and row_stride % 8 == 0 and row_stride >= columns and batch_stride % 8 == 0


def _turn(strides: tuple[int, ...]) -> tuple[int, ...]:
    return strides[0], strides[2], strides[1]


def triangle(rows: int, ratio: int) -> int:
    """Tiles that reach the lower triangle when a column tile is `ratio` row tiles wide."""
    groups, rest = divmod(rows, ratio)
    return ratio * groups * (groups + 1) // 2 + rest * (groups + 1)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=8192)
def describe(pointer: int, dtype: torch.dtype, layout: _Layout, box: tuple[int, ...]) -> TensorDescriptor:
    shape, strides = layout
    swizzle = min(128, 2 * box[-1])
    return TensorDescriptor(
        _Base(pointer, dtype), list(shape), list(strides), list(box), gl.NVMMASharedLayout(swizzle, 16, rank=3)
    )
