"""Row blocks of fused weights: each equals a parameter of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dmuown.errors import OptionError
from dmuown.orthogonalize import (
    Blocks,
    Orthogonalizer,
    blocks_from_heads,
    blocks_from_split_sizes,
    interleaved_blocks,
    orthogonalize_blocks,
)
from dmuown.orthogonalize.blocks import block_rows
from tests.reference.orthogonalize import by_blocks, newton_schulz

LAYOUTS: dict[str, Blocks] = {
    "grouped-query": blocks_from_split_sizes([12, 4, 4], 20),
    "gated attention": blocks_from_split_sizes((8, 8, 2, 2), 20),
    "gate/up": blocks_from_split_sizes([10, 10], 20),
    "interleaved gate/up": interleaved_blocks(2, 20),
    "heads": blocks_from_heads(5, 20),
    "heads of one row": blocks_from_heads(20, 20),
    "whole": blocks_from_heads(1, 20),
    "none": (),
    "mixed": (slice(0, 10, 2), slice(1, 10, 2), slice(10, 20, 1)),
}


class Counting:
    """An orthogonalizer that notes the shapes it was given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.orthogonalizer = Orthogonalizer(dtype=torch.float64)

    def __call__(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return self.orthogonalizer(x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_each_block_is_a_matrix_of_its_own(layout: str, transposed: bool, batch: tuple[int, ...]) -> None:
    x = torch.randn(*batch, 20, 14, dtype=torch.float64)
    if transposed:
        x = x.mT.contiguous().mT
    kept = x.clone()
    out = orthogonalize_blocks(x, LAYOUTS[layout], Orthogonalizer(dtype=torch.float64))
    torch.testing.assert_close(out, by_blocks(x, LAYOUTS[layout], newton_schulz), rtol=1e-12, atol=1e-12)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    "layout,shapes",
    [
        ("grouped-query", [(3, 12, 14), (6, 4, 14)]),
        ("gated attention", [(6, 8, 14), (6, 2, 14)]),
        ("interleaved gate/up", [(6, 10, 14)]),
        ("heads", [(15, 4, 14)]),
        ("whole", [(3, 20, 14)]),
    ],
)
def test_equal_shapes_share_a_call(layout: str, shapes: list[tuple[int, ...]]) -> None:
    counting = Counting()
    orthogonalize_blocks(torch.randn(3, 20, 14), LAYOUTS[layout], counting)
    assert counting.shapes == shapes


def test_uniform_heads_are_not_copied() -> None:
    x = torch.randn(3, 20, 14)
    addresses: list[int] = []

    def note(heads: Tensor) -> Tensor:
        addresses.append(heads.data_ptr())
        return heads.clone()

    orthogonalize_blocks(x, LAYOUTS["heads"], note)
    assert addresses == [x.data_ptr()]


def test_a_non_finite_block_leaves_the_others_alone() -> None:
    x = torch.randn(2, 20, 14)
    x[0, 13, 3] = float("nan")
    out = orthogonalize_blocks(x, LAYOUTS["grouped-query"], Orthogonalizer(dtype=torch.float32))
    assert not bool(out[0, 12:16].isfinite().any())
    assert bool(out[0, :12].isfinite().all())
    assert bool(out[0, 16:].isfinite().all())
    assert bool(out[1].isfinite().all())


def test_helpers_give_explicit_slices() -> None:
    assert blocks_from_split_sizes([3, 1], 4) == (slice(0, 3, 1), slice(3, 4, 1))
    assert blocks_from_heads(2, 6) == (slice(0, 3, 1), slice(3, 6, 1))
    assert interleaved_blocks(2, 6) == (slice(0, 6, 2), slice(1, 6, 2))
    assert [block_rows(block) for block in interleaved_blocks(3, 9)] == [3, 3, 3]


@pytest.mark.parametrize(
    "sizes,message",
    [
        ([8, 8], r"must sum to the 20 output rows of the weight, but \(8, 8\) sums to 16"),
        ([], "must be a non-empty sequence of ints"),
        (20, "must be a non-empty sequence of ints"),
        ("55", "must be a non-empty sequence of ints"),
        ([True, 19], "must hold ints of at least 1, got True"),
        ([10.0, 10.0], "must hold ints of at least 1, got 10.0"),
        ([20, 0], "must hold ints of at least 1, got 0"),
        ([21, -1], "must hold ints of at least 1, got -1"),
    ],
)
def test_bad_split_sizes(sizes: Any, message: str) -> None:
    with pytest.raises(OptionError, match=f"^split_sizes: {message}"):
        blocks_from_split_sizes(sizes, 20)


@pytest.mark.parametrize("heads", [3, 0, -4, True, 4.0, "4", 40])
def test_bad_num_heads(heads: Any) -> None:
    with pytest.raises(OptionError, match=r"^num_heads: must"):
        blocks_from_heads(heads, 20)


@pytest.mark.parametrize("count", [3, 0, True, 2.0])
def test_bad_interleaving(count: Any) -> None:
    with pytest.raises(OptionError, match=r"^split_sizes: must interleave a divisor"):
        interleaved_blocks(count, 20)


@pytest.mark.parametrize(
    "blocks",
    [
        (slice(0, 10, 1),),
        (slice(0, 10, 1), slice(9, 20, 1)),
        (slice(0, 10, 1), slice(11, 20, 1)),
        (slice(0, 20, 2), slice(0, 20, 2)),
        (slice(0, 10, 1), slice(10, 21, 1)),
    ],
)
def test_blocks_must_cover_each_row_once(blocks: Blocks) -> None:
    with pytest.raises(OptionError, match="must cover each of the 20 output rows exactly once"):
        orthogonalize_blocks(torch.randn(20, 4), blocks, Orthogonalizer(dtype=torch.float32))
