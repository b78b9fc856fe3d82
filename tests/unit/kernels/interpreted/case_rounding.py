"""The kernel of stochastic rounding against its torch form, bit for bit, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from dmuown.kernels import rounding as kernel
from dmuown.state.rounding import Rounding, words_of_positions


def rounding(shape: tuple[int, ...], key: int = -123456789) -> Rounding:
    words = words_of_positions("w", [torch.arange(3, 3 + size) for size in shape])
    return Rounding(words, torch.tensor(key, dtype=torch.int32))


@pytest.mark.parametrize(
    "shape", [(1,), (37,), (5000,), (1, 1), (33, 17), (3, 2500), (2500, 3), (4, 5, 6), (1, 7, 8), (7, 1, 3)], ids=str
)
def test_bits(shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100
    for key in (-123456789, 0, 2**31 - 1):
        draw = rounding(shape, key)
        got = kernel.round_stochastically(value, draw.positions, draw.key)
        assert got is not None
        assert torch.equal(got, draw.by_torch(value))


def test_what_is_not_finite() -> None:
    words = [0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F7FFFFF, -1, -0x800000, -0x7FFFFF, -0x800001, 0]
    value = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    for key in range(20):
        draw = rounding(value.shape, key)
        got = kernel.round_stochastically(value, draw.positions, draw.key)
        assert got is not None
        torch.testing.assert_close(got, draw.by_torch(value), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.isnan(), value.isnan())


def test_what_it_leaves_to_torch() -> None:
    for value in (
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones(2, 2, 2, 2),
        torch.ones(3, 4).mT,
        torch.ones(4, 4)[:, ::2],
    ):
        draw = rounding(tuple(value.shape))
        assert kernel.round_stochastically(value, draw.positions, draw.key) is None
        assert torch.equal(draw(value), value.bfloat16())
