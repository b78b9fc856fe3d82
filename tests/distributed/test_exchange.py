"""The exchange: how many collectives, how many bytes, who works; all as planned, and never a full gather."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dmuown
from dmuown.engine import joint
from dmuown.engine.bounds import _bytes_per_owned
from dmuown.engine.collectives import ALL_GATHER
from dmuown.engine.exchange import ExchangeCount, orthogonalize
from dmuown.orthogonalize.backends import TorchOperations
from tests.distributed.harness import RankPool
from tests.distributed.sharding import (
    MATRIX_ALGORITHMS,
    Layout,
    Run,
    assert_sharded_equals_whole,
    local,
    parameters,
    train_sharded,
    train_whole,
)
from tests.distributed.test_layouts import GRID, LINE, SQUARE, on
from tests.memory import Held

COLLECTIVES = (
    "all_to_all_single",
    "all_to_all",
    ALL_GATHER,
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "broadcast",
    "barrier",
    "send",
    "recv",
    "batch_isend_irecv",
)


@contextmanager
def counting() -> Iterator[list[tuple[str, int, tuple[int, ...], str]]]:
    """Record every collective: name, bytes handed to others (to all-reduces: in all), ranks, dtype."""
    calls: list[tuple[str, int, tuple[int, ...], str]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def record(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            here = ranks.index(dist.get_rank())
            # Other tasks compute meanwhile.
            assert kwargs.get("async_op") or name not in ("all_to_all_single", ALL_GATHER)
            if name == "all_to_all_single":
                _, source, _, sizes = args
                assert all(type(size) is int for size in (*args[2], *sizes))
                handed = (sum(sizes) - sizes[here]) * source.element_size()
                dtype = str(source.dtype)
            elif name == ALL_GATHER:
                handed, dtype = args[1].numel() * args[1].element_size() * (len(ranks) - 1), str(args[1].dtype)
            elif name == "all_reduce":
                handed, dtype = args[0].numel() * args[0].element_size(), str(args[0].dtype)
            else:
                handed, dtype = -1, ""
            calls.append((name, handed, ranks, dtype))
            return originals[name](*args, **kwargs)

        return call

    def no_full_tensor(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("a full tensor was gathered")

    full_tensor, redistribute = DTensor.full_tensor, DTensor.redistribute
    for name in COLLECTIVES:
        setattr(dist, name, record(name))
    for name in ("full_tensor", "redistribute"):
        setattr(DTensor, name, no_full_tensor)
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        DTensor.full_tensor, DTensor.redistribute = full_tensor, redistribute  # type: ignore[method-assign]


def count_a_step(rank: int, world_size: int, runs: list[Run]) -> dict[str, Any]:
    """Step once to get over what only a first step does, and count the second."""
    groups = [
        group | {"params": list(zip(group["param_names"], group["params"], strict=True))}
        for run in runs
        for group in run.optimizer(run.layout.distribute).param_groups
    ]
    for index, group in enumerate(groups):
        group["params"] = [(f"{index}.{name}", param) for name, param in group["params"]]
        del group["param_names"]
    optimizer = dmuown.Muon(groups, lr=0.05)
    for param in parameters(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = optimizer.exchange_count.bytes_sent, optimizer.exchange_count.matrices
    planned = dmuown.summarize_exchange(optimizer)
    with counting() as calls:
        optimizer.step()
    return {
        "calls": calls,
        "planned": planned.to_dict(),
        "table": str(planned),
        "sent": optimizer.exchange_count.bytes_sent - before[0],
        "matrices": optimizer.exchange_count.matrices - before[1],
        "updated": optimizer.orthogonalized,
    }


def assert_as_planned(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        planned = result["planned"]["ranks"][rank]
        # The agreement on gradients: int32, one message.
        control = [call for call in result["calls"] if call[3] == "torch.int32"]
        calls = [call for call in result["calls"] if call[3] != "torch.int32"]
        assert len(control) == result["planned"]["agreements"]
        counted = {
            "all_to_alls": sum(call[0] == "all_to_all_single" for call in calls),
            "all_gathers": sum(call[0] == ALL_GATHER for call in calls),
            "all_reduces": sum(call[0] == "all_reduce" for call in calls),
            "bytes_exchanged": sum(call[1] for call in calls if call[0] != "all_reduce"),
            "bytes_reduced": sum(call[1] for call in calls if call[0] == "all_reduce"),
            "matrices": result["matrices"],
        }
        assert counted == {key: planned[key] for key in counted}, rank
        assert sum(counted[key] for key in ("all_to_alls", "all_gathers", "all_reduces")) == len(calls)
        assert result["sent"] == planned["bytes_exchanged"]
        # Every rank plans the same for every rank.
        assert result["planned"]["ranks"] == results[0]["planned"]["ranks"]
        for bucket in result["planned"]["buckets"]:
            assert bucket["traffic"]["all_to_alls"] <= 2
    # Each matrix was orthogonalized once, wherever its shards and replicas are.
    assert len({result["updated"] for result in results}) <= 2


NAMES = [
    "rows",
    "columns",
    "rows, uneven",
    "one row",
    "columns, transposed",
    "replicated",
    "experts by columns",
    "convolution by inputs",
    "fused blocks cut by a shard",
    "fused blocks by columns",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_line_sends_what_was_planned(ranks4: RankPool, name: str) -> None:
    """Invariant 6: no full gather; every collective is in the plan."""
    run = Run(on(LINE[name], 4), algorithms=MATRIX_ALGORITHMS, per_group=3)
    results = ranks4.run(count_a_step, [run])
    assert_as_planned(results)
    matrices = sum(result["matrices"] for result in results)
    layout = run.layout
    blocks = max(1, len(layout.options.get("split_sizes", ())))
    leading = 1 if layout.options.get("flatten") else math.prod(layout.shape[:-2])
    assert matrices == len(MATRIX_ALGORITHMS) * 3 * leading * blocks
    assert {result["updated"] for result in results} == {matrices}


@pytest.mark.parametrize("name", [name for name in GRID if "permuted TP" not in name])
def test_a_grid_sends_what_was_planned(ranks4: RankPool, name: str) -> None:
    """Invariant 6: no full gather; every collective is in the plan."""
    assert_as_planned(ranks4.run(count_a_step, [Run(GRID[name], algorithms=("muon", "normuown"), per_group=3)]))


def test_an_optimizer_of_many_layouts_sends_what_was_planned(ranks4: RankPool) -> None:
    layouts = [on(LINE["rows"], 4), GRID["HSDP by rows"], GRID["EP x FSDP, uneven experts"], Layout((6, 4))]
    results = ranks4.run(count_a_step, [Run(layout, algorithms=("muown", "adamw"), per_group=2) for layout in layouts])
    for rank, result in enumerate(results):
        del result["planned"]["buckets"]
        planned = result["planned"]["ranks"][rank]
        assert result["sent"] == planned["bytes_exchanged"] > 0
        assert result["matrices"] == planned["matrices"]
        assert result["planned"]["agreements"] == sum(call[3] == "torch.int32" for call in result["calls"]) == 1
        assert f"Exchange of a step on rank {rank}" in result["table"]


@pytest.mark.parametrize("name", ["experts", "experts, uneven", "two leading axes", "convolution, not flattened"])
def test_layouts_that_shard_a_leading_axis_send_nothing(ranks4: RankPool, name: str) -> None:
    for result in ranks4.run(count_a_step, [Run(on(LINE[name], 4), algorithms=MATRIX_ALGORITHMS, per_group=2)]):
        assert [call[:1] + call[3:] for call in result["calls"]] == [("all_reduce", "torch.int32")]
        assert result["planned"]["ranks"][0]["bytes_exchanged"] == 0


def test_hsdp_divides_the_work_and_exchanges_within_shard_groups(ranks4: RankPool) -> None:
    """ByteDance-Seed/VeOmni#1011: no silent gather of whole parameters under HSDP."""
    run = Run(Layout((12, 20), SQUARE, ("R", "S0")), algorithms=("muon",), per_group=8)
    results = ranks4.run(count_a_step, [run])
    for rank, result in enumerate(results):
        assert result["matrices"] == 2  # eight matrices over two replicas of two ranks
        row = SQUARE[rank // 2]
        column = (rank % 2, rank % 2 + 2)
        ranks = {call[0]: call[2] for call in result["calls"] if call[3] == "torch.float32"}
        assert ranks == {"all_to_all_single": row, ALL_GATHER: column}


def what_a_step_warns_of(rank: int, world_size: int, run: Run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_sharded(rank, world_size, run)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("placements", [("R", "S0"), ("R", "S1"), ("S0", "S1"), ("R", "R")], ids=str)
def test_a_step_warns_of_nothing(ranks4: RankPool, placements: tuple[str, ...]) -> None:
    """Not of names of collectives that this torch deprecates, either."""
    run = Run(Layout((12, 20), SQUARE, placements), MATRIX_ALGORITHMS)
    assert ranks4.run(what_a_step_warns_of, run) == [[]] * 4


def train_and_count(rank: int, world_size: int, run: Run) -> Any:
    return train_sharded(rank, world_size, run), count_a_step(rank, world_size, [run])


def test_many_replicas_with_few_matrices_form_teams(ranks4: RankPool) -> None:
    """A gather is padded to the replica that has most: four replicas of one matrix would gather four times as much."""
    run = Run(on(LINE["replicated"], 4), algorithms=("muown", "normuon"), per_group=1)
    trained, results = zip(*ranks4.run(train_and_count, run), strict=True)
    assert_sharded_equals_whole(run, list(trained), train_whole(run), rtol=1e-5)
    assert_as_planned(list(results))
    elements = math.prod(run.layout.shape)
    for rank, result in enumerate(results):
        # Two matrices, one for each of the two replicas of a team: each sends its own, and padding for the other.
        assert result["matrices"] == 1
        gathers = [call for call in result["calls"] if call[0] == ALL_GATHER]
        assert [call[1:3] for call in gathers] == [(elements * 4, (0, 1) if rank < 2 else (2, 3))] * 2


def test_owners_are_balanced_by_cost_over_buckets(ranks4: RankPool) -> None:
    """Six matrices of one shape and one of eight times the cost: who owns the large one owns no other."""
    small = Run(on(Layout((8, 8), placements=("S0",)), 4), algorithms=("muon",), per_group=6)
    large = replace(small, layout=on(Layout((16, 16), placements=("S0",)), 4), per_group=1)
    results = ranks4.run(count_a_step, [small, large])
    flops = [results[0]["planned"]["ranks"][rank]["flops"] for rank in range(4)]
    assert sorted(flops) == [2 * flops_of(8)] * 3 + [flops_of(16)]
    assert sorted(result["matrices"] for result in results) == [1, 2, 2, 2]


def flops_of(size: int) -> float:
    """Five steps of A = X X^T, A^2 and (b A + c A^2) X: three products of size^3 multiply-adds each."""
    return 5 * 3 * 2 * size**3


def test_a_plan_on_two_ranks_by_hand(ranks2: RankPool) -> None:
    """Two fp32 [6, 4] matrices by rows: each rank owns one, sends half of the other there and back: 2 x 12 x 4 B."""
    run = Run(on(Layout((6, 4), placements=("S0",)), 2), algorithms=("normuon",), per_group=2)
    for rank, result in enumerate(ranks2.run(count_a_step, [run])):
        traffic = result["planned"]["ranks"][rank]
        assert (traffic["all_to_alls"], traffic["bytes_exchanged"], traffic["matrices"]) == (2, 96, 1)
        # NorMuon's norms before and after: one number each for two matrices, fp32, in one message.
        assert (traffic["all_reduces"], traffic["bytes_reduced"]) == (1, 16)
        assert result["planned"]["buckets"][0]["owners"] == (0, 1)


def test_one_process_plans_no_traffic() -> None:
    run = Run(Layout((6, 4)), algorithms=("muown", "adamw"), per_group=2)
    summary = dmuown.summarize_exchange(run.optimizer(torch.clone))
    assert summary.total.all_to_alls == summary.total.all_reduces == summary.agreements == 0
    assert summary.total.matrices == 2
    assert "muown.0 and 1 more" in str(summary)


def in_fp32(x: Tensor, epsilon: float) -> Tensor:
    """A custom orthogonalizer whose result has a wider dtype than was asked for."""
    return x.float() / (x.float().norm(dim=(-2, -1), keepdim=True) + epsilon)


def step_with_function(rank: int, world_size: int) -> list[Tensor]:
    moved = []
    for layout in (Layout((6, 4)), Layout((6, 4), (0, 1), ("S1",))):
        run = Run(layout)
        param = torch.nn.Parameter(layout.distribute(run.whole(0, 0)))
        param.grad = layout.distribute(run.whole(1, 0))
        dmuown.Muon([param], ns_dtype=torch.bfloat16, newton_schulz_func=in_fp32).step()
        moved.append(param.to_local() if isinstance(param, DTensor) else param.chunk(2, 1)[rank])
    return moved


def test_a_function_of_another_dtype_gives_the_same_on_every_layout(ranks2: RankPool) -> None:
    for whole, sharded in ranks2.run(step_with_function):
        assert torch.equal(whole, sharded)


def normalize_in_place(
    self: object, x: Tensor, dtype: torch.dtype, *, factor: float, epsilon: float, clamp: bool, overwrite: bool = False
) -> Tensor:
    """As the kernels do, where torch would make a copy."""
    assert overwrite
    assert x.dtype == dtype
    return x.div_(torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) * factor + epsilon)


def memory_of_a_task(rank: int, world_size: int, shape: tuple[int, int], replicas: int, most: int) -> float:
    """The most bytes that this rank holds in any task, over a bound that is room for `most` matrices.

    The least of three times: gloo's threads may keep a message for a moment longer.
    """
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas))
    placements = [Replicate(), Shard(0)]
    params = [torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, placements)) for _ in range(12)]
    probe = dmuown.Muon(params, ns_dtype=torch.float32, batch_bytes=1).plan.buckets[0]
    budget = most * _bytes_per_owned(probe, probe.owners)
    optimizer = dmuown.Muon(params, ns_dtype=torch.float32, batch_bytes=budget)
    (bucket,) = optimizer.plan.buckets
    (joint_of_it,) = (one for part in optimizer.plan.parts for one in part)
    mine = local(params[0]).shape
    tasks = optimizer.plan.splits(bucket, optimizer.param_groups[0], range(12))
    peaks: list[list[float]] = [[] for _ in tasks]
    usual = TorchOperations.normalize
    TorchOperations.normalize = normalize_in_place  # type: ignore[method-assign]
    try:
        for _ in range(3):
            for task, peak in zip(tasks, peaks, strict=True):
                with Held() as held:
                    momentum = torch.randn(len(task), 1, *mine)  # side by side, as row kernels write it
                    work = orthogonalize(bucket, list(momentum), ExchangeCount(), first=task[0], disposable=True)
                    for _ in joint.run(joint_of_it, [work], ExchangeCount()):  # type: ignore[list-item]
                        pass
                peak.append(held.most / budget)
    finally:
        TorchOperations.normalize = usual  # type: ignore[method-assign]
    return max(map(min, peaks))


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("shape", [(128, 512), (130, 300), (40, 64), (3, 500), (2, 400)], ids=str)
def test_no_rank_takes_more_than_its_group_allows(
    ranks4: RankPool, shape: tuple[int, int], replicas: int, most: int
) -> None:
    """Its own matrices, and its parts of all; uneven and empty shards included. A little is norms."""
    taken = ranks4.run(memory_of_a_task, shape, replicas, most)
    assert 0.6 < max(taken) < 1.02


def test_messages_are_let_go_once_read(ranks4: RankPool) -> None:
    """While a matrix is orthogonalized its rank holds momentum, the matrix and what that needs: three quarters."""
    assert max(ranks4.run(memory_of_a_task, (128, 512), 1, 1)) < 0.78


def divided(rank: int, world_size: int, stepping: list[int], bounds: dict[str, Any]) -> int:
    """Matrices that this rank orthogonalizes, of eight equal ones of which some have a gradient."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = [torch.nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])) for _ in range(8)]
    optimizer = dmuown.Muon(params, ns_dtype=torch.float32, **bounds)
    for index in stepping:
        params[index].grad = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])
    optimizer.step()
    return optimizer.exchange_count.matrices


@pytest.mark.parametrize("bounds", [{"batch_size": count} for count in (None, 1, 2, 4)] + [{"batch_bytes": 1}], ids=str)
@pytest.mark.parametrize("stepping", [range(8), range(4), range(4, 8), (0, 2, 4, 6), (1, 7)], ids=str)
def test_owners_have_equal_work_whatever_steps(
    ranks2: RankPool, stepping: Sequence[int], bounds: dict[str, Any]
) -> None:
    """Gradual unfreezing leaves part of a bucket without gradients."""
    assert ranks2.run(divided, list(stepping), bounds) == [len(stepping) // 2] * 2
