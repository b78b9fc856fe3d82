"""Stochastic rounding: exact on average, and a function of seed, step, name and position alone."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dmuown.state import rounding
from dmuown.state.rounding import Rounding, hashed, word_of, words_of_positions


def make(name: str, positions: Sequence[Tensor], step: int = 0, seed: int = 0) -> Rounding:
    key = hashed(torch.tensor(step, dtype=torch.int32) ^ word_of(f"seed {seed}"))
    return Rounding(words_of_positions(name, positions), key)


def whole(shape: Sequence[int]) -> list[Tensor]:
    return [torch.arange(size) for size in shape]


def uniform(name: str, shape: Sequence[int], step: int = 0, seed: int = 0) -> Tensor:
    """The numbers themselves, as float64 in [0, 1): 1 + k 2^-23 goes up where k + number >= 2^16, for k = 1, 2, ..."""
    draw = make(name, whole(shape), step, seed)
    count = torch.zeros(shape, dtype=torch.float64)
    for bit in reversed(range(16)):  # bisection: the smallest k that goes up is 2^16 - number
        threshold = 2**16 - count - 2**bit
        value = (1 + threshold * 2**-23).float()
        count += (draw(value) > 1) * 2**bit
    return count / 2**16


# --------------------------------------------------------------------------------- the function


def oracle_hash(word: int) -> int:
    word ^= word >> 16
    word = word * 0x604BAA5D % 2**32
    word ^= word >> 15
    word = word * 0x43D6CE97 % 2**32
    return word ^ word >> 15


def oracle_word(text: str) -> int:
    (word,) = struct.unpack("<I", hashlib.sha256(text.encode()).digest()[:4])
    return int(word)


def oracle(value: float, name: str, index: Sequence[int], step: int, seed: int) -> float:
    key = oracle_hash(step ^ oracle_word(f"seed {seed}"))
    number = 0
    for axis, position in enumerate(index):
        number ^= oracle_hash(oracle_hash(position ^ oracle_word(f"{axis} {name}")) ^ key)
    number = oracle_hash(number) % 2**16
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    kept, dropped = bits >> 16, bits & 0xFFFF
    rounded = (kept + (dropped + number >= 2**16)) << 16
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


@pytest.mark.parametrize("shape", [(), (37,), (5, 19), (3, 4, 5), (2, 3, 2, 2)], ids=str)
def test_every_element_is_as_written_down(shape: tuple[int, ...]) -> None:
    """In Python's integers: what torch's wrap to, in vector and scalar loops, and what later versions must repeat."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    for step, seed in ((0, 0), (7, -3), (2**31 - 1, 2**70)):
        got = make("layers.0.weight", whole(shape), step, seed)(value)
        assert got.dtype == torch.bfloat16
        assert got.shape == shape
        for index in itertools.product(*map(range, shape)):
            expected = oracle(float(value[index]), "layers.0.weight", index or (0,), step, seed)
            assert float(got[index]) == expected, (index, step, seed)


@pytest.mark.parametrize("at_once", [1, 12, 100])
def test_rounding_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    value = torch.randn(7, 3, 4)
    expected = make("w", whole(value.shape))(value)
    monkeypatch.setattr(rounding, "_AT_ONCE", {"cpu": at_once})
    assert torch.equal(make("w", whole(value.shape))(value), expected)


def test_a_shard_is_rounded_as_its_part_of_the_whole() -> None:
    """Any indices of any axes, in any order; and storage in any order."""
    value = torch.randn(9, 8, 6)
    rounded = make("w", whole(value.shape))(value)
    held = [torch.tensor([8, 1, 2]), torch.arange(4, 8), torch.tensor([0, 5])]
    part = value[held[0]][:, held[1]][:, :, held[2]]
    expected = rounded[held[0]][:, held[1]][:, :, held[2]]
    draw = make("w", held)
    assert torch.equal(draw(part), expected)
    assert torch.equal(draw(part.permute(2, 0, 1).contiguous().permute(1, 2, 0)), expected)
    assert make("w", [torch.arange(0), torch.arange(4)])(torch.zeros(0, 4)).shape == (0, 4)


def test_no_generator_is_read_or_advanced() -> None:
    value = torch.randn(64, 64)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(make("w", whole(value.shape))(value))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*results)


# --------------------------------------------------------------------------------- its values


def test_the_mean_of_many_steps_is_the_value() -> None:
    """In float64, for numbers of all sizes: only both neighbours occur, each as often as makes the mean exact."""
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(64, 48, generator=generator) * 2.0 ** torch.randint(-130, 100, (64, 1), generator=generator)
    steps = 4096
    low = (value.view(torch.int32) & -0x10000).view(torch.float32).double()  # towards zero
    high = ((value.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()  # away from it
    ups = torch.zeros(value.shape, dtype=torch.float64)
    for step in range(steps):
        rounded = make("w", whole(value.shape), step)(value).double()
        assert torch.equal((rounded == low) ^ (rounded == high), torch.ones_like(rounded, dtype=torch.bool))
        ups += rounded == high
    up = (value.double() - low) / (high - low)
    deviation = (ups - steps * up) / (steps * up * (1 - up)).sqrt().clamp_min(1e-3)
    assert float(deviation.abs().max()) < 5.5  # of 3072 normal numbers
    assert float(deviation.square().mean()) == pytest.approx(1, abs=0.1)
    assert float(deviation.mean()) == pytest.approx(0, abs=4 / math.sqrt(value.numel()))


def test_the_mean_over_elements_is_the_value() -> None:
    for value in (1 + 2**-9, -1 - 2**-9, 1 + 2**-10, 1.0):
        rounded = make("w", whole((1024, 1024)))(torch.full((1024, 1024), value)).double()
        assert float(rounded.mean()) == pytest.approx(value, abs=2e-5 if value != 1 else 0)


def test_bf16_numbers_and_what_is_not_finite_stay() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32) << 16
    every = bits.view(torch.float32)
    rounded = make("w", whole(every.shape))(every)
    assert torch.equal(rounded.isnan(), every.isnan())
    assert torch.equal(rounded[~every.isnan()].float(), every[~every.isnan()])
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    for step in range(20):
        assert make("w", whole(nans.shape), step)(nans).isnan().all()


# --------------------------------------------------------------------------------- their independence

SHAPE = (512, 512)
#: Standard deviation of a mean of products of independent uniform numbers of variance 1.
UNIT = 1 / 512


def centred(*args: object, **options: int) -> Tensor:
    return (uniform(*args, **options) + 2**-17 - 0.5) * math.sqrt(12)  # type: ignore[arg-type]


def test_numbers_are_uniform() -> None:
    counts = torch.histc(uniform("w", (1024, 1024)), 256, 0, 1)
    chi_squared = float((counts - 4096).square().sum() / 4096)
    assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize(
    "other",
    [{"step": 1}, {"step": 2}, {"seed": 1}, {"name": "v"}, {"name": "w2"}],
    ids=str,
)
def test_steps_seeds_and_parameters_differ(other: dict[str, object]) -> None:
    one, two = centred("w", SHAPE), centred(**{"name": "w", "shape": SHAPE, **other})  # type: ignore[arg-type]
    for turned in (two, two.mT, two.flip(0), two.flip(1)):
        assert abs(float((one * turned).mean())) < 5 * UNIT


def test_neighbours_differ() -> None:
    numbers = centred("w", SHAPE)
    for shift in ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (0, 64), (64, 0), (256, 256)):
        assert abs(float((numbers * numbers.roll(shift, (0, 1))).mean())) < 5 * UNIT, shift


@pytest.mark.parametrize("bit", range(4))
def test_a_matrix_of_them_has_no_pattern(bit: int) -> None:
    """Its largest singular value is a random matrix's, 2 sqrt(n); with a pattern of low rank it would be some n."""
    signs = (uniform("w", SHAPE) * 2 ** (bit + 1)).floor().remainder(2) * 2 - 1
    largest = float(torch.linalg.matrix_norm(signs, 2)) / math.sqrt(SHAPE[0])
    assert 1.9 < largest < 2.1
    corners = signs[::2, ::2] * signs[1::2, ::2] * signs[::2, 1::2] * signs[1::2, 1::2]
    assert abs(float(corners.mean())) < 5 * 2 * UNIT


def test_an_elements_numbers_are_independent_over_steps() -> None:
    series = torch.stack([centred("w", (32, 32), step=step) for step in range(300)])
    for lag in (1, 2, 3, 4, 8, 16, 64):
        products = series[lag:] * series[:-lag]
        assert abs(float(products.mean())) < 5 / math.sqrt(products.numel()), lag
