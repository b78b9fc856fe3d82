"""The row kernels on sharded matrices, through Triton's interpreter on every rank."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.distributed.harness import run_ranks
from tests.distributed.sharding import (
    MATRIX_ALGORITHMS,
    Layout,
    Run,
    assert_sharded_equals_whole,
    train_sharded,
    train_whole,
)
from tests.distributed.test_layouts import GRID, LINE, on


def train_with_kernels(rank: int, world_size: int, runs: list[Run]) -> list[Any]:
    fused: Any = importlib.import_module("dmuown.algorithms.fused")
    fused._available = lambda device_type: True
    rows: Any = importlib.import_module("dmuown.kernels.rows")
    launch, launched = rows.launch, []

    def counted(*arguments: Any, **options: Any) -> None:
        launched.append(arguments[0])
        launch(*arguments, **options)

    rows.launch = counted
    results = []
    for run in runs:
        launched.clear()
        results.append((train_sharded(rank, world_size, run), len(launched)))
    return results


LAYOUTS: dict[int, list[Layout]] = {
    2: [on(LINE[name], 2) for name in ("rows, uneven", "fused blocks cut by a shard", "experts by rows", "one row")],
    4: [GRID["HSDP, uneven"], GRID["FSDP x column-wise TP, empty tail"]],
}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_kernels_on_shards_equal_one_process(world_size: int) -> None:
    """Invariant 1 where the row kernels run: neurons are normalized over logical matrices, not over shards."""
    runs = [Run(layout, MATRIX_ALGORITHMS, steps=2) for layout in LAYOUTS[world_size]]
    by_rank = run_ranks(world_size, train_with_kernels, runs, timeout=300)
    for index, run in enumerate(runs):
        assert by_rank[0][index][1] >= 2 * 2 * len(MATRIX_ALGORITHMS)  # two halves, two steps
        assert_sharded_equals_whole(run, [results[index][0] for results in by_rank], train_whole(run), rtol=1e-5)
