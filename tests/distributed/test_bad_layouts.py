"""Odd and bad layouts: each works, or is refused at construction with the parameter's name and the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dmuown
from dmuown.engine import planning
from dmuown.errors import LayoutError, ParameterError, PlanMismatchError
from tests.distributed.harness import RankPool, run_ranks
from tests.distributed.sharding import (
    ALGORITHMS,
    MATRIX_ALGORITHMS,
    Layout,
    Run,
    assert_sharded_equals_whole,
    build_mesh,
    local,
    parameters,
    train_sharded,
    train_whole,
)
from tests.distributed.test_layouts import GRID, LINE, on


def build(rank: int, world_size: int, what: str, algorithm: str) -> str:
    mesh = build_mesh(tuple(range(world_size)))
    whole = torch.ones(8, 6)
    if what == "partial":
        param = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    elif what == "outside":
        half = DeviceMesh("cpu", torch.tensor([0]))
        param = DTensor.from_local(whole, half, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        if rank == 0:
            return "leaf: this rank is not in the parameter's mesh"
    elif what == "torn":
        mine = torch.ones(5 if rank == 0 else 3, 6)
        param = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    else:
        mine = torch.ones(4, 6, 2, 2).to(memory_format=torch.channels_last)
        param = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
    group: dict[str, Any] = {"params": [("leaf", torch.nn.Parameter(param))], "algorithm": algorithm}
    if what == "channels last":
        group["flatten"] = True
    try:
        dmuown.Muown([group], lr=0.1)
    except (LayoutError, ParameterError) as error:
        return str(error)
    return "built"


@pytest.mark.parametrize(
    "what, algorithm, rule",
    [
        ("partial", "muon", "on mesh dimension 0 holds unreduced partial sums"),
        ("partial", "adamw", "hold unreduced partial sums"),
        ("outside", "muon", "this rank is not in the parameter's mesh"),
        ("outside", "lion", "this rank is not in the parameter's mesh"),
        ("torn", "normuon", "does not follow from placements (Shard(dim=0),) on a mesh of shape (2,)"),
        ("channels last", "muon", "cannot be viewed as matrices"),
    ],
)
def test_layouts_that_are_refused(ranks2: RankPool, what: str, algorithm: str, rule: str) -> None:
    """Invariant 9: at construction, on every rank, by name, with a remedy."""
    for message in ranks2.run(build, what, algorithm, timeout=120):
        assert message.startswith("leaf: ")
        assert rule in message


def other_mesh(rank: int, world_size: int) -> str:
    order = (0, 1, 3, 2) if rank == 3 else (0, 1, 2, 3)
    layout = Layout((8, 6), order, ("S0",))
    with pytest.raises(PlanMismatchError) as caught:
        dmuown.Muon([("leaf", torch.nn.Parameter(layout.distribute(torch.ones(8, 6))))])
    return str(caught.value)


def test_meshes_that_differ_between_ranks_are_refused_by_name(ranks4: RankPool) -> None:
    for message in ranks4.run(other_mesh, timeout=120):
        assert message.startswith("leaf: ranks 0 and 3 disagree on it: mesh [0, 1, 2, 3] and mesh [0, 1, 3, 2]")


# ---------------------------------------------------------------------- what works


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 4, 4), (3, 0, 2)])
def test_parameters_of_no_elements_are_left_alone(ranks2: RankPool, shape: tuple[int, ...]) -> None:
    run = Run(Layout(shape, (0, 1), ("S0",)), ALGORITHMS)
    for _, states in ranks2.run(train_sharded, run):
        assert all(value.isfinite().all() for state in states for value in state.values())
    assert all(state["weight"].shape == shape for state in train_whole(run))


@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("name", ["rows, uneven", "columns, uneven"])
def test_other_dtypes(ranks2: RankPool, name: str, dtype: torch.dtype, rtol: float) -> None:
    """Narrow storage rounds: two roundings of a weight may differ, by a unit in its last place, where sums do."""
    run = Run(on(LINE[name], 2), ALGORITHMS, dtype=dtype)
    assert_sharded_equals_whole(run, ranks2.run(train_sharded, run), train_whole(run), rtol, movement=10)


@pytest.mark.parametrize("name", ["rows", "FSDP x row-wise TP", "HSDP by columns"])
def test_16_bit_exchange_rounds_as_one_process_does(ranks4: RankPool, name: str) -> None:
    """Momentum travels in bf16 where it is orthogonalized in 16 bits; one process rounds it alike."""
    layout = GRID[name] if name in GRID else on(LINE[name], 4)
    for dtype in (torch.bfloat16, torch.float16):
        run = Run(layout, MATRIX_ALGORITHMS, options={"ns_dtype": dtype})
        whole, results = train_whole(run), ranks4.run(train_sharded, run)
        assert_sharded_equals_whole(run, results, whole, rtol=2e-3, movement=10)


def strided_alone(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A stride that no mesh dimension explains: each rank has its part of each of three pieces."""
    mesh = build_mesh((0, 1))
    whole = torch.randn(12, 7, generator=torch.Generator().manual_seed(6))
    pieces = [piece.chunk(2)[rank] for piece in whole.chunk(3)]
    placements = [_StridedShard(0, split_factor=3)]

    def distribute(values: list[Tensor]) -> DTensor:
        return DTensor.from_local(
            torch.cat(values), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    param = torch.nn.Parameter(distribute(pieces))
    alone = torch.nn.Parameter(whole.clone())
    for weight, grad in ((param, distribute([piece * piece for piece in pieces])), (alone, whole * whole)):
        weight.grad = grad
        dmuown.NorMuown([weight], lr=0.1, ns_dtype=torch.float32).step()
    return local(param).detach(), torch.cat([piece.chunk(2)[rank] for piece in alone.detach().chunk(3)])


def test_rows_that_are_not_contiguous(ranks2: RankPool) -> None:
    for got, expected in ranks2.run(strided_alone):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def mixed_group(rank: int, world_size: int, groups: int) -> list[bool]:
    """Plain tensors, shards and replicas of one shape, in one group or several."""
    layouts = [Layout((6, 4)), on(LINE["rows"], 2), Layout((6, 4), (0, 1), ("R",)), Layout((6, 4))]
    layouts = [replace(layout, shape=(6, 4)) for layout in layouts]
    run = Run(layouts[0], ("muown",), per_group=4)
    params = [torch.nn.Parameter(layout.distribute(run.whole(0, i))) for i, layout in enumerate(layouts)]
    alone = [torch.nn.Parameter(run.whole(0, index)) for index in range(4)]

    def optimizer(weights: list[torch.nn.Parameter]) -> dmuown.Muown:
        size = 4 // groups
        return dmuown.Muown([{"params": weights[i : i + size]} for i in range(0, 4, size)], ns_dtype=torch.float32)

    sharded, whole = optimizer(params), optimizer(alone)
    for step in range(1, 4):
        for index, layout in enumerate(layouts):
            params[index].grad = layout.distribute(run.whole(step, index))
            alone[index].grad = run.whole(step, index)
        sharded.step()
        whole.step()
    return [
        torch.allclose(local(param), layout.cut(other.detach(), [rank]), rtol=1e-5, atol=1e-6)
        for param, layout, other in zip(params, layouts, alone, strict=True)
    ]


@pytest.mark.parametrize("groups", [1, 4])
def test_plain_tensors_beside_dtensors(ranks2: RankPool, groups: int) -> None:
    """AutoModel#1252: parameters born after sharding are plain tensors in a group of DTensors."""
    assert ranks2.run(mixed_group, groups) == [[True] * 4] * 2


def plain_gradient_on_one_rank(rank: int, world_size: int) -> list[float]:
    """Plain tensors are each rank's own: one that steps on this rank alone must not shift the others' exchanges."""
    layout = on(LINE["rows"], 2)
    sharded = [torch.nn.Parameter(layout.distribute(torch.eye(12, 20) * (i + 1))) for i in range(5)]
    own = [torch.nn.Parameter(torch.ones(12, 20)) for _ in range(4)]
    groups: list[dict[str, Any]] = []
    for index in range(4):  # many buckets of both kinds, in turn
        groups += [{"params": [own[index]]}, {"params": [sharded[index]]}]
    optimizer = dmuown.NorMuon([*groups, {"params": [sharded[4]]}], lr=0.1, ns_dtype=torch.float32)
    for _ in range(2):
        for index, param in enumerate(sharded):
            param.grad = layout.distribute(torch.full((12, 20), float(index + 1)))
        for param in own:
            param.grad = torch.ones(12, 20) if rank == 0 else None
        optimizer.step()
    return [float(local(param).sum()) for param in sharded]


def test_ranks_may_have_plain_tensors_of_their_own(ranks2: RankPool) -> None:
    first, second = ranks2.run(plain_gradient_on_one_rank, timeout=120)
    alone = [torch.nn.Parameter(torch.eye(12, 20) * (i + 1)) for i in range(5)]
    optimizer = dmuown.NorMuon([{"params": [param]} for param in alone], lr=0.1, ns_dtype=torch.float32)
    for _ in range(2):
        for index, param in enumerate(alone):
            param.grad = torch.full((12, 20), float(index + 1))
        optimizer.step()
    sums = [a + b for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(sums, [float(param.sum()) for param in alone], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["rows, uneven", "columns, uneven", "one row", "experts, uneven", "heads"])
def test_three_ranks(name: str) -> None:
    run = Run(on(LINE[name], 3), per_group=2)
    assert_sharded_equals_whole(run, run_ranks(3, train_sharded, run), train_whole(run), rtol=1e-5)


def replicated_buffer(rank: int, world_size: int) -> bool:
    """Row state is replicated over the ranks that share rows, and sharded over the others."""
    layout = Layout((8, 6), ((0, 1), (2, 3)), ("S0", "S1"))
    param = torch.nn.Parameter(layout.distribute(torch.ones(8, 6)))
    state = dmuown.Muown([param]).state[param]
    return state["magnitude"].placements == (Shard(0), Replicate()) and tuple(state["magnitude"].shape) == (8, 1)


def test_row_state_is_sharded_as_rows_are(ranks4: RankPool) -> None:
    assert ranks4.run(replicated_buffer) == [True] * 4


def add_unlike_groups(rank: int, world_size: int) -> tuple[int, int, bool]:
    layout = on(LINE["rows"], 2)
    run = Run(layout, ("muown",))
    optimizer = run.optimizer(layout.distribute)
    added = torch.nn.Parameter(layout.distribute(run.whole(0, 9)))
    with pytest.raises(PlanMismatchError):
        optimizer.add_param_group({"params": [("late", added)], "lr": 0.1 * (rank + 1)})
    counts = len(optimizer.param_groups), len(optimizer.records)
    for param in parameters(optimizer):
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.add_param_group({"params": [("late", added)]})
    return *counts, added in optimizer.state


def test_a_group_that_ranks_disagree_on_is_not_added(ranks2: RankPool) -> None:
    """It stayed in the optimizer, outside of the plan: its parameters were never stepped."""
    assert ranks2.run(add_unlike_groups) == [(1, 1, True)] * 2


def build_with_ranks_that_stay_away(rank: int, world_size: int) -> str:
    def timed_out(*arguments: Any) -> None:
        raise RuntimeError("Timed out waiting 1800000ms for recv operation to complete")

    vars(planning)["first_difference"] = timed_out
    param = torch.nn.Parameter(on(LINE["rows"], 2).distribute(torch.ones(12, 20)))
    with pytest.raises(PlanMismatchError) as caught:
        dmuown.Muon([("w", param)])
    return str(caught.value)


def test_a_rank_that_does_not_come_to_compare_is_an_error_that_names_the_parameter() -> None:
    """With another mesh, or a plain tensor, on one rank, the others wait for it until their group's timeout."""
    for message in run_ranks(2, build_with_ranks_that_stay_away):
        assert message.startswith("w: not all of its ranks [0, 1] came to compare it: Timed out")
