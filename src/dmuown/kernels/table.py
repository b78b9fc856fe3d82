"""Tile shapes by problem, measured on the cards named, checked in: nothing is tuned at run time.

The measurements are in `docs/lab-log.md` and `benchmarks/results`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PointerShape(NamedTuple):
    """Tile of the pointer kernel."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


class CopyShape(NamedTuple):
    """Tile of the copy-engine kernel (`hopper`); rows are always 128."""

    block_n: int
    block_k: int
    stages: int
    consumers: int  # 1: two warpgroups share a tile; 2: one warpgroup each, on tiles in turn
    group: int = 8  # row tiles that stay together for the second-level cache (general products)

    @property
    def warps(self) -> int:
        """Warps of one consumer."""
        return 8 // self.consumers


def pointer_shape(m: int, n: int, k: int, element_size: int, symmetric: bool) -> PointerShape:
    """The tile for [m, k] @ [k, n]; square where symmetric."""
    small = min(m, n) <= 64
    if element_size > 2:
        side = 32 if small else 64
        return PointerShape(side, side, 32, 4, 3)
    if small:
        return PointerShape(64, 64, 64, 4, 3)
    return PointerShape(128, 128, 64, 8, 3)


_WIDE = CopyShape(block_n=256, block_k=64, stages=3, consumers=1)
_TURNS = CopyShape(block_n=128, block_k=64, stages=5, consumers=2)


def copy_shape(batch: int, m: int, n: int, k: int, symmetric: bool, adds: bool) -> CopyShape:
    """The tile of the copy-engine kernel for [m, k] @ [k, n]; `adds`: with a third operand.

    H200: taking turns hides the epilogue, which weighs most where k is short, where C is read and where the result
    is stored twice; wide tiles read their operands less often, which weighs most where k is long.
    """
    if symmetric:
        return _WIDE if m >= 3072 or k > 4096 else _TURNS
    return _TURNS if k <= 512 or (adds and k <= 2048) else _WIDE


def triton_preferred(capability: tuple[int, int], dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
    """Whether these kernels beat torch's batched products for [batch, rows, columns], rows <= columns.

    Measured on H200 only (benchmarks/results); elsewhere torch is the safe answer.
    """
    _, rows, columns = shape
    return capability[0] == 9 and dtype.itemsize == 2 and rows >= 64 and rows % 8 == 0 and columns % 8 == 0


class ChainShape(NamedTuple):
    """Tile of the chain kernel (`hopper_chain`)."""

    ratio: int  # 1: two consumers on 128 x 128 in turn; 2: one on 128 x 256
    stages: int
    with_gram: bool  # whether x x^T is its first stage


_CHAIN_TURNS = ChainShape(ratio=1, stages=5, with_gram=True)
_CHAIN_WIDE = ChainShape(ratio=2, stages=3, with_gram=True)


def chain_shape(batch: int, m: int, stages: int) -> ChainShape | None:
    """The tile for `stages` products of [batch, m, m] after x x^T in one kernel, or None where a kernel each is faster.

    H200: wide tiles read a quarter less from the second-level cache, whose rate limits the narrow ones (some 10 TB/s),
    and show their epilogue, which weighs less the longer a tile multiplies. Few large matrices fill the card better
    with narrow tiles. A single product after x x^T is as fast by itself. Fewer tiles a stage than multiprocessors wait
    for memory between stages (12 matrices of 512 rows: 0.229 ms captured for 0.213 apart), but take half the host's
    time (0.33 ms eager for 0.71), which is what bounds small batches.
    """
    if stages == 1:
        return None
    return _CHAIN_WIDE if m >= 1536 and batch * m >= 6144 else _CHAIN_TURNS
