"""Invariants 2 and 7 on ranks: results depend on nothing but the inputs, and nothing but the outputs changes."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dmuown
from dmuown.engine import joint, planning
from tests.distributed.harness import RankPool, run_ranks
from tests.distributed.sharding import MATRIX_ALGORITHMS, Layout, Run, local, parameters
from tests.distributed.test_layouts import GRID, LINE, on

LAYOUTS = [GRID["HSDP, uneven"], GRID["EP x FSDP, uneven experts"], GRID["FSDP x row-wise TP, uneven"]]


def train(order: list[int], tasks: int = 3, **options: Any) -> list[Tensor]:
    """Several layouts and algorithms in one optimizer; weights in the original order."""
    runs = [Run(layout, MATRIX_ALGORITHMS, options=options) for layout in (*LAYOUTS, on(LINE["rows, uneven"], 4))]
    groups, params = [], []
    for number, run in enumerate(runs):
        for index, algorithm in enumerate(run.algorithms):
            members = [torch.nn.Parameter(run.layout.distribute(run.whole(0, 3 * index + i))) for i in range(3)]
            groups.append(run.group(algorithm, members, [f"{number}.{algorithm}.{i}" for i in range(3)]))
            params += [(run, 3 * index + i, param) for i, param in enumerate(members)]
    before, planning.MAX_CONCURRENT_TASKS = planning.MAX_CONCURRENT_TASKS, tasks
    try:
        optimizer = dmuown.Muon([groups[index] for index in order], lr=0.05)
        for step in range(2):
            for run, index, param in params:
                param.grad = run.layout.distribute(run.whole(step + 1, index))
            optimizer.step()
    finally:
        planning.MAX_CONCURRENT_TASKS = before
    return [local(param).detach() for _, _, param in params]


def variants(rank: int, world_size: int) -> float:
    """The largest difference between ways to run the same step, relative to the size of weights."""
    count = len(MATRIX_ALGORITHMS) * (len(LAYOUTS) + 1)
    order = list(range(count))
    expected = train(order)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(9)).tolist()
    others = [
        train(order, tasks=1),
        train(order, tasks=7),
        train(shuffled),
        train(order, batch_size=1),
        train(order, batch_size=2),
        *(train(order, batch_bytes=size) for size in (1, 20_000)),
    ]
    return max(
        float((a - b).abs().max()) for other in others for a, b in zip(other, expected, strict=True) if a.numel()
    )


def test_overlap_order_and_bucket_size_do_not_matter(ranks4: RankPool) -> None:
    """Invariant 2. Experts that some ranks have fewer of must not shift the order of collectives."""
    assert max(ranks4.run(variants, timeout=120)) < 2e-6


def in_place(rank: int, world_size: int, layout: Layout) -> bool:
    run = Run(layout, MATRIX_ALGORITHMS, per_group=2)
    optimizer = run.optimizer(layout.distribute)
    params = parameters(optimizer)
    for index, param in enumerate(params):
        param.grad = layout.distribute(run.whole(1, index))
    places = [
        [local(param).data_ptr(), *(local(v).data_ptr() for v in optimizer.state[param].values())] for param in params
    ]
    grads = [param.grad for param in params]
    for _ in range(2):
        optimizer.step()
    return all(
        [local(param).data_ptr(), *(local(v).data_ptr() for v in optimizer.state[param].values())] == place
        and param.grad is grad
        and torch.equal(local(grad), layout.distribute(run.whole(1, index)).to_local())  # type: ignore[attr-defined]
        for index, (param, place, grad) in enumerate(zip(params, places, grads, strict=True))
        if grad is not None
    )


def test_storage_and_gradients_stay_where_they_are(ranks4: RankPool) -> None:
    """Invariant 7."""
    for name in ("HSDP by rows", "FSDP x column-wise TP, transposed", "convolution on two axes"):
        assert ranks4.run(in_place, GRID[name]) == [True] * 4


def chunk_sizes(rank: int, world_size: int) -> list[list[int]]:
    """Parameters of each task, experts that this rank has more or fewer of."""
    run = Run(GRID["EP x FSDP, uneven experts"], MATRIX_ALGORITHMS, options={"batch_size": 2}, per_group=3)
    optimizer = run.optimizer(run.layout.distribute)
    gradients = {param: local(param) for param in parameters(optimizer)}
    plan = optimizer.plan
    return [
        [len(chunk.selected) for _, chunks in plan.tasks(gradients, optimizer.param_groups, part) for chunk in chunks]
        for part in plan.parts
    ]


def test_ranks_split_buckets_alike(ranks4: RankPool) -> None:
    """Invariant 2: three experts on two places are two and one; a task of two matrices is one parameter on both."""
    assert ranks4.run(chunk_sizes) == [[[1] * 3 * len(MATRIX_ALGORITHMS)]] * 4


def replicas_of_many_teams(rank: int, world_size: int) -> list[Tensor]:
    """Experts that ranks divide, beside a router that all of them have, of shapes that could be joined."""
    mesh = init_device_mesh("cpu", (world_size,))
    routers = []
    for shape in ((31, 33), (15, 17), (33, 47), (7, 9)):
        generator = torch.Generator().manual_seed(1)
        laid_out = [((5, *shape), Shard(0)), (shape, Replicate())]

        def drawn(size: tuple[int, ...], placement: Any, generator: torch.Generator = generator) -> Tensor:
            whole = torch.randn(size, generator=generator, dtype=torch.float64)
            return distribute_tensor(whole, mesh, [placement])

        params = [torch.nn.Parameter(drawn(size, placement)) for size, placement in laid_out]
        optimizer = dmuown.Muon(params, lr=0.1, ns_dtype=torch.float64)
        for _ in range(5):
            for param, (size, placement) in zip(params, laid_out, strict=True):
                param.grad = drawn(size, placement)
            optimizer.step()
        routers.append(local(params[1]))
    return routers


def test_replicas_in_several_teams_stay_equal_to_the_bit(ranks4: RankPool) -> None:
    """Each team has a batch of its own: joined with what only some ranks have, rounding would part them."""
    first, *others = ranks4.run(replicas_of_many_teams)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def yields_of_a_step(rank: int, world_size: int) -> list[int]:
    """Of each task, on three replicas of two shards: two experts make a team of three, one expert makes none."""
    mesh = init_device_mesh("cpu", (3, 2))
    experts = torch.nn.Parameter(distribute_tensor(torch.ones(3, 12, 20), mesh, [Replicate(), Shard(0)]))
    experts.grad = distribute_tensor(torch.ones(3, 12, 20), mesh, [Replicate(), Shard(0)])
    optimizer = dmuown.Muon([("experts", experts)])
    counts = []
    real = joint.run

    def counted(*arguments: Any) -> Generator[None, None, None]:
        counts.append(0)
        for _ in real(*arguments):
            counts[-1] += 1
            yield

    joint.run = counted  # type: ignore[assignment]
    optimizer.step()
    return counts


def test_tasks_yield_alike_where_teams_differ_along_a_mesh() -> None:
    """Yields decide how tasks interleave, and so the order of collectives that all ranks of a mesh share."""
    assert run_ranks(6, yields_of_a_step) == [[1]] * 6


def unlike_teams(rank: int, world_size: int, bounds: dict[str, Any]) -> tuple[list[int], list[int], float]:
    """(Replicas of each bucket's team, tasks of each bucket, the largest difference from one process)."""
    mesh = init_device_mesh("cpu", (4, world_size // 4))
    shapes = [(3, 40, 64), *[(3, 32, 64)] * 5, *[(rows, 64) for rows in (36, 20, 12) for _ in range(3)]]
    generator = torch.Generator().manual_seed(0)
    sharded: list[Any] = []
    whole: list[torch.nn.Parameter] = []
    for shape in shapes:
        values = [torch.randn(shape, generator=generator) for _ in range(2)]
        placements = [Replicate(), Shard(0 if len(shape) == 3 else 1)]
        for params, place in (
            (sharded, lambda value: distribute_tensor(value, mesh, placements)),  # noqa: B023 -- called at once
            (whole, lambda value: value.clone()),
        ):
            params.append(torch.nn.Parameter(place(values[0])))
            params[-1].grad = place(values[1])
    for params in (sharded, whole):
        optimizer = dmuown.Muown(params, lr=0.1, ns_dtype=torch.float32, **bounds)
        plan = optimizer.plan
        if params is sharded:
            tasks = [
                len(plan.splits(bucket, optimizer.param_groups[0], range(len(bucket.params))))
                for bucket in plan.buckets
            ]
            teams = [len(bucket.owners.team) for bucket in plan.buckets]
        optimizer.step()
    pairs = zip(sharded, whole, strict=True)
    return teams, tasks, max(float((one.full_tensor() - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("bounds", [{"batch_bytes": 1}, {"batch_bytes": 2**17}, {"batch_size": 2}], ids=str)
def test_ranks_of_unlike_teams_have_as_many_tasks(bounds: dict[str, Any]) -> None:
    """Two experts here and one there: four replicas divide the work of some, two that of others."""
    results = run_ranks(8, unlike_teams, bounds, timeout=120)
    assert results[0][0] != results[1][0]
    assert len({tuple(tasks) for _, tasks, _ in results}) == 1
    assert max(error for _, _, error in results) < 1e-5
