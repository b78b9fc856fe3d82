"""Invariant 4: a checkpoint of N ranks in one layout loads on M ranks in another, and trains on alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from tests.distributed.checkpoint import layouts
from tests.distributed.harness import RankPool, run_ranks
from tests.unit.checkpoint.training import ALGORITHMS

TIMEOUT = 120.0

#: Between them: matrices with all row state, AdamW and Lion; all algorithms take minutes.
FEW = ("normuown", "lion")
SOME = pytest.mark.parametrize(
    "algorithms", [FEW, pytest.param(ALGORITHMS, marks=pytest.mark.slow)], ids=["few", "all"]
)


def run(pools: dict[int, RankPool], world_size: int, function: Any, *args: Any) -> Any:
    """Run on some ranks, or here; every rank's result is the same."""
    if world_size == 1:
        return function(0, 1, *args)
    if world_size in pools:
        results = pools[world_size].run(function, *args, timeout=TIMEOUT)
    else:
        results = run_ranks(world_size, function, *args, timeout=TIMEOUT)
    for result in results[1:]:
        for algorithm, values in result.items():
            assert_equal(_last(values), _last(results[0][algorithm]))
    return results[0]


def _last(values: Any) -> dict[str, Tensor]:
    last: dict[str, Tensor] = values[-1] if isinstance(values, tuple) else values
    return last


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype
        assert torch.equal(one[key], other[key]), key


def chain(
    pools: dict[int, RankPool], tmp_path: Path, algorithms: tuple[str, ...], stations: list[tuple[int, str]]
) -> None:
    """Save at the first station and move on two steps at a time; loading changes nothing, training is the whole's."""
    world_size, layout = stations[0]
    saved = run(pools, world_size, layouts.save, tmp_path / "0", layout, algorithms, 2)
    for number, (world_size, layout) in enumerate(stations[1:]):
        moved = run(
            pools,
            world_size,
            layouts.move,
            tmp_path / str(number),
            tmp_path / str(number + 1),
            layout,
            algorithms,
            2,
        )
        for algorithm in algorithms:
            assert_equal(moved[algorithm][0], saved[algorithm])
        saved = {algorithm: moved[algorithm][1] for algorithm in algorithms}
    expected = layouts.save(0, 1, tmp_path / "whole", "plain", algorithms, 2 * len(stations))
    for algorithm in algorithms:
        for key, value in expected[algorithm].items():
            error = (saved[algorithm][key] - value).norm() / value.norm().clamp_min(1e-12)
            assert error <= 1e-5, (algorithm, key, error)


@SOME
def test_4_2_1_3_ranks(algorithms: tuple[str, ...], ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    stations = [(4, "fsdp"), (2, "columns"), (1, "plain"), (3, "fsdp")]
    chain({2: ranks2, 4: ranks4}, tmp_path, algorithms, stations)


@SOME
def test_fsdp_hsdp_tp_plain(algorithms: tuple[str, ...], ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    stations = [(4, "fsdp"), (4, "hsdp"), (4, "fsdp_tp"), (4, "ep_fsdp"), (2, "tp"), (1, "plain"), (4, "tp")]
    chain({2: ranks2, 4: ranks4}, tmp_path, algorithms, stations)


def _resume(rank: int, world_size: int, folder: Path, layout: str, algorithms: tuple[str, ...]) -> list[str]:
    """Go on, and stop and resume; returns what differs."""
    different = []
    for algorithm in algorithms:
        model, optimizer = layouts.build(algorithm, layout, 0, world_size)
        layouts.train(model, optimizer, range(2))
        dmuown.save_checkpoint(folder / algorithm, model, optimizer)
        layouts.train(model, optimizer, range(2, 5))
        other, new = layouts.build(algorithm, layout, 1, world_size)
        dmuown.load_checkpoint(folder / algorithm, other, new)
        layouts.train(other, new, range(2, 5))
        one, two = layouts.whole(model, optimizer), layouts.whole(other, new)
        different += [f"{algorithm} {key}" for key in one if not torch.equal(one[key], two[key])]
    return different


@SOME
@pytest.mark.parametrize("layout", ["fsdp", "columns", "hsdp", "tp", "fsdp_tp", "ep_fsdp", "plain"])
def test_same_layout_resumes_bit_identically(
    layout: str, algorithms: tuple[str, ...], ranks4: RankPool, tmp_path: Path
) -> None:
    assert ranks4.run(_resume, tmp_path, layout, algorithms, timeout=TIMEOUT) == [[]] * 4
