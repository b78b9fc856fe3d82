"""Invariant 1, sharded equals whole: every layout and every algorithm, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.distributed.harness import RankPool, run_ranks
from tests.distributed.sharding import Layout, Run, assert_sharded_equals_whole, train_sharded, train_whole
from tests.reference.adam import Adam
from tests.reference.adamw import AdamW
from tests.reference.angular_muown import AngularMuown
from tests.reference.lion import Lion
from tests.reference.muon import Muon
from tests.reference.muown import Muown
from tests.reference.normuon import NorMuon
from tests.reference.normuown import NorMuown
from tests.reference.orthogonalize import polar_express

#: What Muon and NorMuon orthogonalize with by default, as Dion does.
DION = functools.partial(polar_express, safety_factor=1.02)

TRANSPOSED = {"matrix_transposed": True}
FLATTEN = {"flatten": True}

#: One mesh dimension; shapes that 2, 3 and 4 ranks cut differently.
LINE = {
    "rows": Layout((12, 20), placements=("S0",)),
    "columns": Layout((12, 20), placements=("S1",)),
    "columns, tall": Layout((20, 12), placements=("S1",)),
    "axis counted from the end": Layout((12, 8), placements=("S-1",)),
    "rows, transposed": Layout((12, 20), placements=("S1",), options=TRANSPOSED),
    "columns, transposed": Layout((12, 20), placements=("S0",), options=TRANSPOSED),
    "rows, uneven": Layout((10, 7), placements=("S0",)),
    "columns, uneven": Layout((7, 10), placements=("S1",)),
    "rows, transposed, uneven": Layout((10, 7), placements=("S1",), options=TRANSPOSED),
    "rows, empty tail": Layout((5, 16), placements=("S0",)),
    "columns, empty tail": Layout((8, 5), placements=("S1",)),
    "one row": Layout((1, 16), placements=("S0",)),
    "one column": Layout((9, 1), placements=("S1",)),
    "rows, fewer than ranks": Layout((3, 8), placements=("S0",)),
    "replicated": Layout((12, 20), placements=("R",)),
    "experts": Layout((8, 6, 4), placements=("S0",)),
    "experts, uneven": Layout((3, 6, 4), placements=("S0",)),
    "experts, fewer than ranks": Layout((1, 6, 4), placements=("S0",)),
    "experts, transposed": Layout((4, 6, 10), placements=("S0",), options=TRANSPOSED),
    "experts by rows": Layout((3, 10, 6), placements=("S1",)),
    "experts by columns": Layout((3, 6, 10), placements=("S2",)),
    "experts by rows, transposed": Layout((3, 6, 10), placements=("S2",), options=TRANSPOSED),
    "two leading axes": Layout((2, 3, 6, 4), placements=("S1",)),
    "two leading axes by rows": Layout((2, 2, 5, 4), placements=("S2",)),
    "convolution by outputs": Layout((10, 3, 2, 2), placements=("S0",), options=FLATTEN),
    "convolution by inputs": Layout((6, 5, 3, 2), placements=("S1",), options=FLATTEN),
    "convolution by kernel": Layout((6, 5, 3, 2), placements=("S2",), options=FLATTEN),
    "convolution, not flattened": Layout((6, 5, 3, 2), placements=("S0",)),
    "fused blocks cut by a shard": Layout((18, 8), placements=("S0",), options={"split_sizes": (8, 8, 1, 1)}),
    "fused blocks by columns": Layout((12, 10), placements=("S1",), options={"split_sizes": (6, 4, 2)}),
    "fused blocks, transposed": Layout((8, 18), placements=("S1",), options={"split_sizes": (9, 5, 4), **TRANSPOSED}),
    "fused blocks of experts": Layout((3, 12, 6), placements=("S1",), options={"split_sizes": (6, 6)}),
    "fused blocks, empty tail": Layout((5, 8), placements=("S0",), options={"split_sizes": (3, 2)}),
    "interleaved blocks": Layout((14, 6), placements=("S0",), options={"split_sizes": (7, 7), "interleaved": True}),
    "query groups cut by a shard": Layout((18, 6), placements=("S0",), options={"split_sizes": (6, 3, 6, 3)}),
    "heads": Layout((12, 8), placements=("S0",), options={"num_heads": 6}),
    "heads by columns": Layout((12, 8), placements=("S1",), options={"num_heads": 3}),
}

SQUARE = ((0, 1), (2, 3))
PERMUTED = ((3, 0), (2, 1))

#: Several mesh dimensions over four ranks.
GRID = {
    "HSDP by rows": Layout((12, 20), SQUARE, ("R", "S0")),
    "HSDP by columns": Layout((12, 20), SQUARE, ("R", "S1")),
    "HSDP the other way": Layout((12, 20), SQUARE, ("S0", "R")),
    "HSDP, uneven": Layout((7, 10), SQUARE, ("R", "S0")),
    "HSDP, empty tail": Layout((1, 16), SQUARE, ("R", "S0")),
    "HSDP, fused blocks": Layout((11, 8), SQUARE, ("R", "S0"), {"split_sizes": (6, 3, 2)}),
    "replicated twice": Layout((6, 10), SQUARE, ("R", "R")),
    "FSDP x column-wise TP": Layout((12, 20), SQUARE, ("SS0:2", "S0")),
    "FSDP x column-wise TP, uneven": Layout((9, 6), SQUARE, ("SS0:2", "S0")),
    "FSDP x column-wise TP, empty tail": Layout((5, 6), SQUARE, ("SS0:2", "S0")),
    "FSDP x column-wise TP, transposed": Layout((20, 12), SQUARE, ("SS1:2", "S1"), TRANSPOSED),
    "FSDP x row-wise TP": Layout((12, 20), SQUARE, ("S0", "S1")),
    "FSDP x row-wise TP, uneven": Layout((7, 9), SQUARE, ("S0", "S1")),
    "FSDP x row-wise TP, empty corner": Layout((1, 9), SQUARE, ("S0", "S1")),
    "FSDP by columns x column-wise TP": Layout((12, 20), SQUARE, ("S1", "S0")),
    "FSDP by columns x row-wise TP": Layout((8, 11), SQUARE, ("SS1:2", "S1")),
    "one axis cut left to right": Layout((11, 8), SQUARE, ("S0", "S0")),
    "TP x FSDP, fused blocks": Layout((12, 8), SQUARE, ("SS0:2", "S0"), {"split_sizes": (7, 5)}),
    "TP x FSDP, heads": Layout((12, 8), SQUARE, ("S0", "S1"), {"num_heads": 4}),
    "EP x FSDP by rows": Layout((8, 10, 6), SQUARE, ("S1", "S0")),
    "EP x FSDP by experts": Layout((8, 10, 6), SQUARE, ("SS0:2", "S0")),
    "EP x FSDP by experts, uneven": Layout((5, 6, 4), SQUARE, ("SS0:2", "S0")),
    "EP x FSDP by columns": Layout((4, 6, 10), SQUARE, ("S2", "S0")),
    "EP x FSDP, uneven experts": Layout((3, 7, 6), SQUARE, ("S1", "S0")),
    "EP x FSDP, one expert": Layout((1, 7, 6), SQUARE, ("S1", "S0")),
    "EP x replicas": Layout((4, 6, 5), SQUARE, ("R", "S0")),
    "convolution on two axes": Layout((6, 5, 3, 2), SQUARE, ("S0", "S1"), FLATTEN),
    "convolution on two input axes": Layout((6, 5, 3, 2), SQUARE, ("S2", "S1"), FLATTEN),
    "named dimensions": Layout((12, 20), SQUARE, ("S0", "S1"), names=("dp", "tp")),
    "dimension of size 1": Layout((10, 8), ((0, 1, 2, 3),), ("S1", "S0")),
    "last dimension of size 1": Layout((10, 8), ((0,), (1,), (2,), (3,)), ("S0", "S1")),
    "three dimensions": Layout((10, 8), (((0, 1),), ((2, 3),)), ("R", "S0", "S1")),
    "permuted line": Layout((10, 8), (3, 0, 2, 1), ("S0",)),
    "permuted HSDP": Layout((10, 8), PERMUTED, ("R", "S0")),
    "permuted HSDP the other way": Layout((10, 8), PERMUTED, ("S0", "R")),
    "permuted TP x FSDP": Layout((10, 8), PERMUTED, ("SS0:2", "S0")),
    "permuted TP x FSDP on two axes": Layout((10, 8), PERMUTED, ("S0", "S1")),
}


def on(layout: Layout, world_size: int) -> Layout:
    """The layout on a line of `world_size` ranks."""
    return replace(layout, mesh=tuple(range(world_size)))


@pytest.mark.parametrize("name", LINE)
def test_a_line_of_two_ranks_equals_one_process(ranks2: RankPool, name: str) -> None:
    """Invariants 1 and 2."""
    run = Run(on(LINE[name], 2), per_group=3)
    assert_sharded_equals_whole(run, ranks2.run(train_sharded, run, timeout=120), train_whole(run), rtol=1e-5)


@pytest.mark.parametrize("name", LINE)
def test_a_line_of_four_ranks_equals_one_process(ranks4: RankPool, name: str) -> None:
    """Invariants 1 and 2."""
    run = Run(on(LINE[name], 4), per_group=2)
    assert_sharded_equals_whole(run, ranks4.run(train_sharded, run, timeout=120), train_whole(run), rtol=1e-5)


@pytest.mark.parametrize("name", GRID)
def test_a_grid_of_four_ranks_equals_one_process(ranks4: RankPool, name: str) -> None:
    """Invariants 1 and 2."""
    run = Run(GRID[name], per_group=5)  # more than ranks: some own several
    assert_sharded_equals_whole(run, ranks4.run(train_sharded, run, timeout=120), train_whole(run), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(18, 6), (4, 6), (5, 64)])
def test_eight_ranks_equal_one_process(shape: tuple[int, int]) -> None:
    """dion#74 and #83, AutoModel#2997: (18, D) and fewer rows than eight ranks leave tail ranks without any."""
    run = Run(on(Layout(shape, placements=("S0",)), 8), per_group=2)
    assert_sharded_equals_whole(run, run_ranks(8, train_sharded, run, timeout=120), train_whole(run), rtol=1e-5)


def train_beside_other_groups(rank: int, world_size: int, run: Run) -> Any:
    """Before the optimizer, ranks 0 and 2 share groups that the others know nothing of, as pipeline stages do."""
    if rank in (0, 2):
        for _ in range(3):
            dist.new_group([0, 2], use_local_synchronization=True)
    return train_sharded(rank, world_size, run)


def test_ranks_may_know_unlike_numbers_of_groups() -> None:
    """Torch names a group after the number of groups that each member knows: unlike names never find each other."""
    run = Run(GRID["FSDP x row-wise TP, uneven"], ("muown", "normuon"))
    results = run_ranks(4, train_beside_other_groups, run)
    assert_sharded_equals_whole(run, results, train_whole(run), rtol=1e-5)


# ---------------------------------------------------------------------- against the equations

ORACLES: dict[str, Callable[[Tensor], Any]] = {
    "muon": lambda w: Muon(w, lr=0.05, weight_decay=0.1, nesterov=True, orthogonalize=DION),
    "normuon": lambda w: NorMuon(w, lr=0.05, weight_decay=0.1, orthogonalize=DION),
    "muown": lambda w: Muown(w, lr=0.05, weight_decay=0.1),
    "normuown": lambda w: NorMuown(w, lr=0.05, weight_decay=0.1),
    "angular_muown": lambda w: AngularMuown(w, lr=0.05),
    "adamw": lambda w: AdamW(w, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1),
    "adam": lambda w: Adam(w, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1),
    "lion": lambda w: Lion(w, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1),
}


@pytest.mark.parametrize(
    "layout",
    [
        on(LINE["rows, uneven"], 4),
        on(LINE["columns, empty tail"], 4),
        GRID["FSDP x row-wise TP, uneven"],
        GRID["EP x FSDP, uneven experts"],
    ],
    ids=["rows", "columns", "both", "experts"],
)
def test_shards_equal_the_float64_oracles(ranks4: RankPool, layout: Layout) -> None:
    """Invariant 1, against the papers' equations rather than against this package on one process."""
    run = Run(layout, tuple(ORACLES), steps=4)
    expected = []
    for index, oracle in enumerate(map(ORACLES.__getitem__, run.algorithms)):
        reference = oracle(run.whole(0, index))
        for step in range(run.steps):
            reference.step(run.whole(step + 1, index))
        expected.append(reference.weight)
    for rank, (coordinate, states) in enumerate(ranks4.run(train_sharded, run, timeout=120)):
        for name, state, weight in zip(run.algorithms, states, expected, strict=True):
            part = layout.cut(weight, coordinate)
            error = float((state["weight"].double() - part).norm() / weight.norm())
            assert error < 1e-5, (name, rank, error)
