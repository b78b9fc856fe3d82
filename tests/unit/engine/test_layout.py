"""Which part of an axis lies where: pure index arithmetic, against cutting real data in the order it was cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuown.engine.layout import _cut_axis


def piece(whole: Tensor, parts: int, position: int) -> Tensor:
    chunks = torch.chunk(whole, parts)
    return chunks[position] if position < len(chunks) else whole[:0]


def strided(axis: int, factor: int) -> Placement:
    placement: Placement = _StridedShard(axis, split_factor=factor)
    return placement


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 11, 16, 17])
@pytest.mark.parametrize(
    "sizes, placements, order",
    [
        ((4,), [Shard(0)], [0]),
        ((4, 2), [Shard(0), Shard(0)], [0, 1]),
        ((4, 2), [strided(0, 2), Shard(0)], [1, 0]),
        ((4, 2), [strided(0, 2), Shard(-2)], [1, 0]),
        ((2, 3, 2), [strided(0, 6), strided(0, 2), Shard(0)], [2, 1, 0]),
        ((2, 3, 2), [strided(0, 2), Replicate(), Shard(0)], [2, 0]),
        ((2, 3, 2), [strided(0, 3), Shard(0), Shard(1)], [1, 0]),
        ((2, 3, 2), [strided(0, 3), Shard(0), Shard(0)], [1, 0, 2]),
        ((1, 4), [strided(0, 4), Shard(0)], [1, 0]),
    ],
)
def test_cuts_follow_the_order_in_which_they_were_made(
    rows: int, sizes: tuple[int, ...], placements: list[Placement], order: list[int]
) -> None:
    """Invariant 1: FSDP2 cuts what TP has cut; reading its placements from left to right differs on 4 x 2 ranks."""
    held = []
    for coordinate in itertools.product(*map(range, sizes)):
        expected = torch.arange(rows)
        for mesh_dim in order:
            expected = piece(expected, sizes[mesh_dim], coordinate[mesh_dim])
        got = _cut_axis(torch.arange(rows), 0, 0, 2, placements, sizes, coordinate)
        assert torch.equal(got, expected), coordinate
        held += got.tolist()
    copies = torch.tensor(sizes).prod().item() // torch.tensor([sizes[dim] for dim in order]).prod().item()
    assert sorted(held) == sorted(list(range(rows)) * int(copies))


def test_a_stride_that_no_dimension_explains_cuts_every_piece() -> None:
    placements = [strided(0, 3)]
    for position in range(2):
        expected = torch.cat([piece(part, 2, position) for part in torch.arange(12).chunk(3)])
        assert torch.equal(_cut_axis(torch.arange(12), 0, 0, 2, placements, (2,), (position,)), expected)
