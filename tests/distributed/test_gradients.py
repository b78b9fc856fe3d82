"""Gradients that are missing, late, unusable or not finite: no hang, no drift, the same on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import dmuown
from dmuown.errors import GradientError, PlanMismatchError
from tests.distributed.harness import RankPool, run_ranks
from tests.distributed.sharding import (
    ALGORITHMS,
    Layout,
    Run,
    assert_sharded_equals_whole,
    build_mesh,
    local,
    parameters,
    snapshot,
    train_sharded,
    train_whole,
    zero_where_absent,
)
from tests.distributed.test_layouts import GRID, LINE, SQUARE, on

ROWS = on(LINE["rows, uneven"], 4)


ABSENT: dict[str, dict[tuple[int, int], tuple[int, ...]]] = {
    "on one rank": {(0, i): (1,) for i in range(8)},
    "on all ranks at first": {(0, i): (0, 1, 2, 3) for i in range(8)},
    "on all ranks later": {(1, i): (0, 1, 2, 3) for i in range(8)},
    "always": {(step, i): (0, 1, 2, 3) for step in range(4) for i in range(8)},
    "on other ranks each step": {(step, i): (step,) for step in range(4) for i in range(8)},
    "on other ranks for each parameter": {(1, i): (i % 4, (i + 1) % 4) for i in range(8)},
    "but on one rank": {(0, i): (0, 1, 3) for i in range(8)},
}


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize(
    "layout",
    [ROWS, GRID["HSDP by rows"], GRID["permuted HSDP"], GRID["replicated twice"], GRID["EP x FSDP, uneven experts"]],
    ids=["rows", "HSDP", "permuted HSDP", "replicated", "experts"],
)
def test_a_missing_gradient_is_zero_or_its_replicas(ranks4: RankPool, layout: Layout, absent: str) -> None:
    """Invariant 5: never a hang. And 1: replicas without a gradient take it from those that have it."""
    run = Run(layout, ALGORITHMS, steps=4, absent=ABSENT[absent])
    whole = train_whole(run, lambda step, index: zero_where_absent(run, step, index))
    results = ranks4.run(train_sharded, run, timeout=120)
    assert_sharded_equals_whole(run, results, whole, rtol=1e-5)
    if absent == "always":
        assert all(torch.equal(state["weight"], run.whole(0, index)) for index, state in enumerate(whole))


def test_a_parameter_that_never_has_a_gradient_has_its_state(ranks4: RankPool) -> None:
    """Invariant 3; dion#89, AutoModel#2088: complete from construction, the same keys on every rank."""
    run = Run(on(LINE["one row"], 4), ALGORITHMS, steps=2, absent=ABSENT["always"])
    keys = [[sorted(state) for state in states] for _, states in ranks4.run(train_sharded, run)]
    assert all(key == keys[0] for key in keys)
    assert all(len(state) >= 2 for state in keys[0])


def collect_keys(rank: int, world_size: int, run: Run) -> list[Any]:
    """State keys, shapes and dtypes before any step, of a group added late as well."""
    optimizer = run.optimizer(run.layout.distribute)
    added = torch.nn.Parameter(run.layout.distribute(run.whole(0, 99)))
    optimizer.add_param_group(run.group("normuown", [added], ["late"]))
    return [
        sorted((key, tuple(value.shape), str(value.dtype)) for key, value in optimizer.state[param].items())
        for param in parameters(optimizer)
    ]


@pytest.mark.parametrize("name", ["rows, empty tail", "columns, uneven", "experts, fewer than ranks", "replicated"])
def test_state_is_complete_and_symmetric_from_construction(ranks4: RankPool, name: str) -> None:
    """Invariant 3: before any step, with global shapes, on every rank alike."""
    results = ranks4.run(collect_keys, Run(on(LINE[name], 4), ALGORITHMS))
    assert all(result == results[0] for result in results)
    assert all(len(state) >= 1 for state in results[0])
    assert results[0][-1][0][0] == "direction_norm"


# ---------------------------------------------------------------------- drift


def replicas_after_churn(rank: int, world_size: int) -> list[Tensor]:
    """Many steps with allocations in between and gradients that differ in which ranks have them."""
    layout = GRID["HSDP, uneven"]
    run = Run(layout, ("muown", "normuon"), per_group=3)
    optimizer = run.optimizer(layout.distribute)
    generator = torch.Generator().manual_seed(5)
    for step in range(40):
        for index, param in enumerate(parameters(optimizer)):
            absent = int(torch.randint(0, 8, (), generator=generator)) == rank
            param.grad = None if absent else layout.distribute(run.whole(step % 7 + 1, index))
        optimizer.step()
        del absent
        _ = [torch.full((64 + step, 64), float("nan")) for _ in range(4)]  # reuse freed buffers, if any are
    return [local(param).detach() for param in parameters(optimizer)]


def test_replicas_stay_bit_equal_through_allocator_churn(ranks4: RankPool) -> None:
    """karpathy/nanochat#843: buffers freed before their collective ended let ranks drift apart."""
    results = ranks4.run(replicas_after_churn)
    for one, other in ((0, 2), (1, 3)):
        for a, b in zip(results[one], results[other], strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()


# ---------------------------------------------------------------------- faults


def step_with(rank: int, world_size: int, kind: str, bad_rank: int, nonfinite: str) -> tuple[str, bool]:
    """One rank's gradient of one of two parameters is bad; return the error and whether anything changed."""
    run = Run(ROWS, ("muown", "muon"))
    groups = [
        run.group(name, [torch.nn.Parameter(ROWS.distribute(run.whole(0, 0)))], [name]) for name in run.algorithms
    ]
    # A second mesh over a part of the ranks, and plain tensors: their ranks must hear of it as well.
    halves = [(0, 1), (2, 3)]
    for half in halves:
        build_mesh(half)  # on every rank, whether it is in it or not
    pair = Layout((6, 4), halves[rank // 2], ("S0",))
    groups.append(run.group("normuon", [torch.nn.Parameter(pair.distribute(torch.ones(6, 4)))], ["pair"]))
    groups.append(run.group("muon", [torch.nn.Parameter(torch.ones(4, 4))], ["plain"]))
    optimizer = dmuown.Muon(groups, lr=0.1, nonfinite=nonfinite)  # type: ignore[arg-type]
    before = snapshot(optimizer)
    params = parameters(optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    if rank == bad_rank:
        target = params[{"pair": 2, "plain": 3}.get(kind.partition(" ")[2], 1)]
        spoil(target, kind.partition(" ")[0])
    try:
        optimizer.step()
    except GradientError as error:
        changed = any(
            not torch.equal(a[key], b[key]) for a, b in zip(before, snapshot(optimizer), strict=True) for key in a
        )
        return str(error), changed
    moved = [not torch.equal(a["weight"], b["weight"]) for a, b in zip(before, snapshot(optimizer), strict=True)]
    return " ".join(str(index) for index, yes in enumerate(moved) if yes), True


def spoil(param: Tensor, kind: str) -> None:
    assert param.grad is not None
    if kind == "nan":
        local(param.grad).view(-1)[0] = float("nan")
    elif kind == "inf":
        local(param.grad).view(-1)[-1] = float("inf")
    elif kind == "sparse":
        param.grad = torch.ones(param.shape).to_sparse()
    elif kind == "placement":
        assert isinstance(param, DTensor)
        param.grad = DTensor.from_local(torch.ones(param.shape), param.device_mesh, [Replicate()], run_check=False)
    elif kind == "partial":
        assert isinstance(param, DTensor)
        param.grad = DTensor.from_local(torch.ones(param.shape), param.device_mesh, [Partial()], run_check=False)


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize(
    "kind, rule",
    [("nan", "has a NaN or an infinity"), ("inf", "has a NaN or an infinity"), ("placement", "laid out unlike")],
)
def test_an_unusable_gradient_raises_on_every_rank_before_anything_changes(
    ranks4: RankPool, kind: str, rule: str, bad_rank: int
) -> None:
    """Invariant 8, agreed across ranks; and no state is poisoned."""
    for message, changed in ranks4.run(step_with, kind, bad_rank, "raise"):
        assert message.startswith("muon: its gradient")
        assert rule in message
        assert not changed


@pytest.mark.parametrize("where", ["pair", "plain"])
def test_a_fault_of_some_ranks_reaches_all_that_share_a_parameter_with_them(ranks4: RankPool, where: str) -> None:
    for rank, (message, changed) in enumerate(ranks4.run(step_with, f"nan {where}", 3, "raise")):
        knows = rank == 3 or (where == "pair" and rank == 2)
        assert message.startswith(f"{where}: its" if knows else "a parameter that this rank has no part of: its")
        assert not changed


def test_a_partial_gradient_is_refused_by_name(ranks4: RankPool) -> None:
    for message, changed in ranks4.run(step_with, "partial", 1, "propagate"):
        assert message.startswith("muon: its gradient is a DTensor laid out unlike the parameter")
        assert not changed


def test_a_non_finite_gradient_is_skipped_on_every_rank(ranks4: RankPool) -> None:
    """Invariant 8: one rank's NaN, and no rank steps that parameter; the others step."""
    assert ranks4.run(step_with, "nan", 3, "skip") == [("0 2 3", True)] * 4


def test_a_non_finite_gradient_propagates_as_torch_lets_it(ranks4: RankPool) -> None:
    assert ranks4.run(step_with, "nan", 3, "propagate") == [("0 1 2 3", True)] * 4


# ---------------------------------------------------------------------- plans that differ


def build_differently(rank: int, world_size: int, what: str) -> str:
    odd = rank == 2
    shape = (8, 6) if odd and what == "shape" else (8, 4)
    dtype = torch.bfloat16 if odd and what == "dtype" else torch.float32
    placements = ("S1",) if odd and what == "placements" else ("S0",)
    layout = Layout(shape, (0, 1, 2, 3), placements)
    params = [(f"layer.{i}", torch.nn.Parameter(layout.distribute(torch.ones(shape, dtype=dtype)))) for i in range(3)]
    if odd and what == "count":
        params.pop()
    if odd and what == "order":
        params[0], params[1] = params[1], params[0]
    options: dict[str, Any] = {"mu": 0.5} if odd and what == "option" else {}
    if odd and what == "algorithm":
        options["algorithm"] = "muown"
    with pytest.raises(PlanMismatchError) as caught:
        dmuown.Muon(params, lr=0.2 if odd and what == "lr" else 0.1, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "what, name, words",
    [
        ("shape", "layer.0", "shape (8, 4) and shape (8, 6)"),
        ("dtype", "layer.0", "dtype torch.float32 and dtype torch.bfloat16"),
        ("placements", "layer.0", "(Shard(dim=0),) and placements (Shard(dim=1),)"),
        ("count", "layer.2", "absent"),
        ("order", "layer.0", "name layer.0 and name layer.1"),
        ("option", "layer.0", "mu 0.95 and mu 0.5"),
        ("algorithm", "layer.0", "algorithm muon"),
        ("lr", "layer.0", "lr 0.1 and lr 0.2"),
    ],
)
def test_ranks_with_another_config_are_told_where(ranks4: RankPool, what: str, name: str, words: str) -> None:
    """Invariant 9: an error on every rank that names the parameter and what differs, and no hang."""
    messages = ranks4.run(build_differently, what, timeout=120)
    for rank, message in enumerate(messages):
        absent_here = rank == 2 and what == "count"
        here = name if not (rank == 2 and what == "order") else "layer.1"
        assert message.startswith("a parameter:" if absent_here else f"{here}: ranks 0 and 2 disagree on it"), message
        assert words in message, message


def late_group(rank: int, world_size: int) -> bool:
    """A parameter that was frozen, is unfrozen, and joins as a new group in the middle of training."""
    layout = GRID["HSDP by rows"]
    run = Run(layout, ("muown", "normuon"))
    weights = [torch.nn.Parameter(layout.distribute(run.whole(0, index))) for index in range(2)]
    optimizer = dmuown.Muon([run.group("muown", weights[:1], ["a"])], lr=0.05)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group(run.group("normuon", weights[1:], ["b"]))
        for index, param in enumerate(parameters(optimizer)):
            param.grad = layout.distribute(run.whole(step + 1, index))
        optimizer.step()
    alone = [torch.nn.Parameter(run.whole(0, index)) for index in range(2)]
    whole = dmuown.Muon([run.group("muown", alone[:1], ["a"]), run.group("normuon", alone[1:], ["b"])], lr=0.05)
    for step in range(4):
        alone[0].grad = run.whole(step + 1, 0)
        alone[1].grad = run.whole(step + 1, 1) if step >= 2 else None
        whole.step()
    coordinate = list(build_mesh(SQUARE).get_coordinate() or ())
    pairs = zip(weights, alone, strict=True)
    return all(torch.allclose(local(a), layout.cut(b.detach(), coordinate), rtol=1e-5, atol=1e-6) for a, b in pairs)


def test_a_group_that_joins_late_equals_gradients_that_appear_late(ranks4: RankPool) -> None:
    assert ranks4.run(late_group) == [True] * 4


def overlapping(rank: int, world_size: int, fault: bool) -> str:
    """Rank 0 shares one parameter with rank 1 and another one with rank 2."""
    meshes = [DeviceMesh("cpu", torch.tensor([0, other])) for other in (1, 2)]
    named = [
        (f"with {other}", torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])))
        for other, mesh in zip((1, 2), meshes, strict=True)
        if rank in (0, other)
    ]
    params = [param for _, param in named]
    optimizer = dmuown.Muon(named, nonfinite="raise")
    for param in params:
        param.grad = torch.ones_like(param)
    if fault and rank == 2:
        params[0].grad.to_local()[0] = float("nan")  # type: ignore[union-attr]
    try:
        for _ in range(2):
            optimizer.step()
    except GradientError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fault", [False, True])
def test_ranks_may_share_with_unlike_others(fault: bool) -> None:
    """Invariant 5: what rank 2 knows reaches rank 1, which shares nothing with it, through rank 0."""
    messages = run_ranks(3, overlapping, fault, timeout=60)
    assert all(("NaN or an infinity" in message) is fault for message in messages), messages
