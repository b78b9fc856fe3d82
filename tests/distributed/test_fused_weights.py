"""Fused weights under sharding, where a shard may cut a block or a query group: sharded equals whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.harness import RankPool
from tests.distributed.sharding import (
    MATRIX_ALGORITHMS,
    Layout,
    Run,
    assert_sharded_equals_whole,
    train_sharded,
    train_whole,
)
from tests.unit.algorithms.oracles import assert_near, gradients, initial
from tests.unit.policy.fused_models import CASES, STEPS, fused_optimizer, stored, train_separate

GROUPED = {"split_sizes": (12, 3, 3), "split_groups": 3}
LINE = (0, 1)
SQUARE = ((0, 1), (2, 3))

TWO = {
    "query groups cut by TP": Layout((18, 8), LINE, ("S0",), GROUPED),
    "query groups by columns": Layout((18, 8), LINE, ("S1",), GROUPED),
    "query groups, transposed": Layout((8, 18), LINE, ("S1",), {**GROUPED, "matrix_transposed": True}),
    "gated attention": Layout((30, 8), LINE, ("S0",), {"split_sizes": (10, 10, 5, 5)}),
    "experts' gate and up, cut": Layout((3, 10, 6), LINE, ("S1",), {"split_sizes": (5, 5)}),
    "experts' gate and up, in turn": Layout(
        (3, 6, 10), LINE, ("S2",), {"split_sizes": (5, 5), "interleaved": True, "matrix_transposed": True}
    ),
}


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(ranks2: RankPool, name: str) -> None:
    run = Run(TWO[name], algorithms=MATRIX_ALGORITHMS)
    assert_sharded_equals_whole(run, ranks2.run(train_sharded, run), train_whole(run), rtol=1e-5)


def test_tensor_parallel_and_fsdp(ranks4: RankPool) -> None:
    run = Run(Layout((18, 8), SQUARE, ("SS0:2", "S0"), GROUPED), algorithms=MATRIX_ALGORITHMS)
    assert_sharded_equals_whole(run, ranks4.run(train_sharded, run), train_whole(run), rtol=1e-5)


def _train_auto_split(rank: int, world_size: int, name: str, algorithm: str, axis: int) -> Tensor:
    case = CASES[name]
    mesh = DeviceMesh("cpu", torch.arange(world_size))

    def shard(logical: Tensor) -> DTensor:
        whole = stored(case, logical)
        return distribute_tensor(whole, mesh, [Shard(whole.ndim + axis)], src_data_rank=None)

    optimizer, param = fused_optimizer(case, algorithm, shard(initial(*case.shape)))
    for grad in gradients(case.shape, steps=STEPS):
        param.grad = shard(grad)
        optimizer.step()
    assert isinstance(param, DTensor)
    return param.full_tensor()


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("name", CASES)
def test_auto_split_where_ranks_cut_blocks(ranks4: RankPool, name: str, axis: int) -> None:
    """Four ranks cut q, gates and heads anywhere; the result is that of parameters of their own on one."""
    for algorithm in ("muon", "normuown", "angular_muown"):
        expected = train_separate(CASES[name], algorithm)
        for result in ranks4.run(_train_auto_split, name, algorithm, axis):
            assert_near(result, expected, 2e-6)
