"""Stochastic rounding in one launch, with the numbers that `dmuown.state.rounding` writes down in torch.

Bytes per element: 4 read, 2 written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, bfloat16, empty_like, int16, int32

from dmuown.kernels.launch import launch

_COLS = 2048
_ELEMENTS = 4096


@triton.jit
def _hashed(words):
    words ^= words >> 16
    words *= 0x604BAA5D
    words ^= words >> 15
    words *= 0x43D6CE97
    return words ^ (words >> 15)


@triton.jit
def _keyed(words_ptr, index, key, mask):
    """The words of some indices of one axis, in this step."""
    return _hashed((tl.load(words_ptr + index, mask=mask, other=0) ^ key).to(tl.uint32, bitcast=True))


@triton.jit(do_not_specialize=["outer", "middle"])
def _round_kernel(
    value_ptr,
    out_ptr,
    words_ptr,
    key_ptr,
    outer,
    middle,
    inner,
    AXES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A tile of [outer * middle, inner]; where there are fewer than 3 axes, the first have length 1 and no word."""
    col_tiles = tl.cdiv(inner, COLS)
    row = (tl.program_id(0) // col_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % col_tiles) * COLS + tl.arange(0, COLS)
    row_mask = row < outer * middle
    col_mask = col < inner
    key = tl.load(key_ptr)
    if AXES == 3:
        words = _keyed(words_ptr, row // middle, key, row_mask)[:, None]
        words = words ^ _keyed(words_ptr + outer, row % middle, key, row_mask)[:, None]
        words = words ^ _keyed(words_ptr + outer + middle, col, key, col_mask)[None, :]
    elif AXES == 2:
        words = _keyed(words_ptr, row, key, row_mask)[:, None] ^ _keyed(words_ptr + middle, col, key, col_mask)[None, :]
    else:
        words = tl.broadcast_to(_keyed(words_ptr, col, key, col_mask)[None, :], (ROWS, COLS))
    number = _hashed(words) & 0xFFFF
    offsets = row[:, None] * inner + col[None, :]
    mask = row_mask[:, None] & col_mask[None, :]
    bits = tl.load(value_ptr + offsets, mask=mask, other=0).to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits + number)  # a carry would leave NaN's range
    tl.store(out_ptr + offsets, (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)


def round_stochastically(value: Tensor, words: Tensor, key: Tensor) -> Tensor | None:
    """Round fp32 to bf16 as `dmuown.state.rounding.Rounding` does, bit for bit.

    Args:
        value: fp32, any shape.
        words: int32, one for each index of each axis, axis after axis.
        key: 0-d int32.

    Returns:
        A new tensor, or None where the value has no axis, more than three, no element, or gaps.
    """
    if not 1 <= value.ndim <= 3 or value.numel() == 0 or not value.is_contiguous():
        return None
    outer, middle, inner = (1,) * (3 - value.ndim) + tuple(value.shape)
    cols = min(triton.next_power_of_2(inner), _COLS)
    rows = min(triton.next_power_of_2(outer * middle), _ELEMENTS // cols)
    out = empty_like(value, dtype=bfloat16)
    tiles = triton.cdiv(outer * middle, rows) * triton.cdiv(inner, cols)
    arguments = (value.view(int32), out.view(int16), words, key, outer, middle, inner)
    launch(_round_kernel, (tiles, 1, 1), arguments, (value.ndim, rows, cols), value.device, num_warps=8)
    return out
