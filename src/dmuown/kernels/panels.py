"""Host side of the panel kernel (`hopper_panels`): who may use it, its descriptors, its grid."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dmuown.kernels import products
from dmuown.kernels.launch import INT32_LIMIT, INTERPRETED, launch


def multiply(q: Tensor, x: Tensor, free: Tensor, turn: int) -> bool:
    """x <- q x with the columns moved by one panel of 256 (columns contiguous) or 128 (rows contiguous).

    Args:
        q: [B, m, m], 16-bit, contiguous.
        x: [B, m, n], as `q`; rows or columns contiguous. Changed in place.
        free: [B, m, m], contiguous, overwritten in part.
        turn: -1 moves towards the first column, what leaves there arriving at the end; 1 the other way.

    Returns:
        False, with nothing done, where the kernel does not run: by sizes, strides and addresses alone, so that two
        calls on one x agree.
    """
    batch, m, n = x.shape
    if INTERPRETED or not products.is_hopper(x.device) or x.dtype.itemsize != 2 or m % 8:
        return False
    # Gluon is imported where it runs.
    from dmuown.kernels import hopper, hopper_panels
    from dmuown.kernels.hopper_launch import describe, multiprocessors, row_major

    block_m, block_n, block_k = hopper_panels.BLOCK_M.value, hopper_panels.BLOCK_N.value, hopper_panels.BLOCK_K.value
    columns = row_major(x.stride(), n)
    stored = x if columns else x.mT
    width = block_n if columns else block_m
    addresses = q.data_ptr() | x.data_ptr() | free.data_ptr()
    if not row_major(stored.stride(), stored.size(2)) or addresses % 16 or width > m or n < 2 * width:
        return False
    panels, tiles = triton.cdiv(n, width), triton.cdiv(m, block_m if columns else block_n)
    items = batch * panels * tiles
    if items + 2 * multiprocessors(x.device) > INT32_LIMIT:
        return False
    first = free.flatten(1)[:, : m * width].unflatten(1, (m, width) if columns else (width, m))
    half = hopper_panels.HALF.value
    layout = (tuple(stored.shape), stored.stride())
    square = (tuple(q.shape), q.stride())
    dtype = x.dtype
    if columns:
        a = describe(q.data_ptr(), dtype, square, (1, block_m, block_k))
        b = describe(x.data_ptr(), dtype, layout, (1, block_k, block_n))
    else:
        a = describe(x.data_ptr(), dtype, layout, (1, block_m, block_k))
        b = describe(q.data_ptr(), dtype, square, (1, block_n, block_k))
    counters = torch.zeros(1 + batch * panels, dtype=torch.int32, device=x.device)
    launch(
        hopper_panels.panel_kernel,
        (min(multiprocessors(x.device), items), 1, 1),
        (
            a,
            b,
            describe(x.data_ptr(), dtype, layout, (1, block_m, half)),
            describe(first.data_ptr(), dtype, (tuple(first.shape), first.stride()), (1, block_m, half)),
            counters[:1],
            counters[1:],
            items,
            panels,
            tiles,
            triton.cdiv(m, block_k),
            0 if turn < 0 else n - width,
            width if turn < 0 else -width,
        ),
        (columns,),
        x.device,
        key=dtype,
        num_warps=8,
        launch_pdl=hopper.PDL.value,
    )
    moved = x[..., n - width :] if turn < 0 else x[..., :width]
    moved.copy_(first if columns else first.mT)
    return True
