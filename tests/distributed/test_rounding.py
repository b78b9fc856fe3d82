"""`stochastic_rounding=True` over ranks whose generators have advanced unequally: replicas stay equal, shards fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import dmuown
from dmuown.errors import LayoutError, PlanMismatchError
from dmuown.ownership import dedicated_records
from dmuown.ownership.shards import part_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import POLICY, build
from tests.distributed.ownership.training import dedicated, mesh_of
from tests.distributed.sharding import ALGORITHMS, Layout, Run, local, parameters, snapshot, train_whole
from tests.distributed.test_layouts import GRID, LINE, SQUARE, on

ROUNDED = {"stochastic_rounding": True, "weight_decay": 0.0}

#: Steps and weights are exact in fp32, so that shards and the whole round the same numbers.
EXACT = {**ROUNDED, "lr": 2.0**-9}


def train_apart(rank: int, world_size: int, run: Run, first: int = 0) -> tuple[list[int], list[dict[str, Tensor]]]:
    """Like `train_sharded`, on ranks that draw unlike numbers of numbers between steps, as dropout does."""
    torch.manual_seed(rank + first)
    optimizer = run.optimizer(run.layout.distribute)
    for step in range(run.steps):
        torch.rand(1 + 3 * rank)
        for index, param in enumerate(parameters(optimizer)):
            param.grad = run.layout.distribute(run.whole(step + 1, index))
        before = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
    coordinate = run.layout.build_mesh().get_coordinate() if run.layout.placements else ()
    assert coordinate is not None
    return list(coordinate), snapshot(optimizer)


def assert_equal(one: Sequence[dict[str, Tensor]], other: Sequence[dict[str, Tensor]]) -> None:
    for index, (here, there) in enumerate(zip(one, other, strict=True)):
        for key, value in here.items():
            assert torch.equal(value, there[key]), (index, key)


def test_plain_replicas_stay_equal(ranks2: RankPool) -> None:
    """As under DDP: nothing is sent that could mend a difference. Every algorithm, to the bit."""
    run = Run(Layout((12, 20)), dtype=torch.bfloat16, options=ROUNDED, steps=4, per_group=2)
    (_, one), (_, other) = ranks2.run(train_apart, run)
    assert_equal(one, other)
    assert_equal(one, ranks2.run(train_apart, run, 5)[0][1])
    torch.manual_seed(99)
    assert_equal(one, train_whole(run))


REPLICATED = {
    "replicated twice": GRID["replicated twice"],
    "HSDP by rows": GRID["HSDP by rows"],
    "HSDP, uneven": GRID["HSDP, uneven"],
    "HSDP the other way": GRID["HSDP the other way"],
    "permuted HSDP": GRID["permuted HSDP"],
    "EP x replicas": GRID["EP x replicas"],
}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_among_shards_stay_equal(ranks4: RankPool, name: str) -> None:
    """Every algorithm, to the bit: weights, and the state that follows from them."""
    run = Run(REPLICATED[name], dtype=torch.bfloat16, options=ROUNDED, per_group=2)
    results = ranks4.run(train_apart, run, timeout=120)
    shards: dict[tuple[int, ...], list[dict[str, Tensor]]] = {}
    for coordinate, states in results:
        place = tuple(at for at, kind in zip(coordinate, run.layout.placements, strict=True) if kind != "R")
        assert_equal(states, shards.setdefault(place, states))
    assert len(shards) < len(results)


VECTORS = {
    "norm replicated by tensor parallelism": Layout((13,), SQUARE, ("S0", "R")),
    "norm over FSDP x TP": Layout((13,), SQUARE, ("SS0:2", "S0")),
    "norm, empty tail": Layout((5,), (0, 1, 2, 3), ("S0",)),
}
SHARDED = {**{name: on(layout, 4) for name, layout in LINE.items()}, **GRID, **VECTORS}


@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_rounded_as_their_part_of_the_whole(ranks4: RankPool, name: str) -> None:
    """Invariants 1 and 2, to the bit where shards and the whole round the same numbers."""
    layout = replace(SHARDED[name], options={})
    run = Run(layout, ("lion",), dtype=torch.bfloat16, options=EXACT, steps=4, per_group=2)
    whole = train_whole(run)
    for coordinate, states in ranks4.run(train_apart, run, timeout=120):
        for state, expected in zip(states, whole, strict=True):
            assert torch.equal(state["weight"], layout.cut(expected["weight"], coordinate))
    nearest = train_whole(replace(run, options={**EXACT, "stochastic_rounding": False}))
    assert not torch.equal(nearest[0]["weight"], whole[0]["weight"])


@pytest.mark.parametrize("name", ["HSDP, uneven", "FSDP x column-wise TP, uneven", "EP x FSDP by columns"])
def test_shards_of_every_algorithm_are_rounded_as_the_whole(ranks4: RankPool, name: str) -> None:
    """Sums over ranks round otherwise: here and there a number crosses its threshold, and no more than that."""
    run = Run(GRID[name], dtype=torch.bfloat16, options={**ROUNDED, "state_precision": "fp32"}, per_group=3)
    whole = train_whole(run)
    names = [algorithm for algorithm in ALGORITHMS for _ in range(run.per_group)]
    unlike, elements = dict.fromkeys(ALGORITHMS, 0), dict.fromkeys(ALGORITHMS, 0)
    for coordinate, states in ranks4.run(train_apart, run, timeout=120):
        for algorithm, state, expected in zip(names, states, whole, strict=True):
            unlike[algorithm] += int((state["weight"] != run.layout.cut(expected["weight"], coordinate)).sum())
            elements[algorithm] += state["weight"].numel()
    assert all(unlike[algorithm] <= 0.02 * elements[algorithm] for algorithm in ALGORITHMS), unlike


def dedicated_and_whole(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Per route: elements that this rank steps, and those of them that are not as where one process steps all."""
    model = build(layers=2)
    whole = {name: torch.nn.Parameter(param.detach().bfloat16()) for name, param in model.named_parameters()}
    wide = {"route": "muon", "param_dtype": "float32", "master_dtype": "bfloat16", "optim_dtype": "float32"}
    dedicated(model, mesh_of(world_size), param_policy={**POLICY, "defaults": wide})
    options: dict[str, Any] = {**EXACT, "ns_dtype": "float32"}
    optimizer = dmuown.Muon(model, **options)
    records = {name: record for name, record in dedicated_records(model).items() if record.owned}
    route = {name: record.route.route for name, record in dedicated_records(model).items()}
    groups = [
        {"params": [pair for pair in whole.items() if (route[pair[0]] == "muon") == (algorithm == "muon")]}
        | {"algorithm": algorithm, "optim_dtype": "float32"}
        for algorithm in ("muon", "adamw")
    ]
    reference = dmuown.Muon(groups, **options)
    for step in range(3):
        torch.rand(1 + 3 * rank)
        for index, (name, param) in enumerate(whole.items()):
            generator = torch.Generator().manual_seed(100 * index + step)
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            if name in records:
                home = records[name].home
                part: Tensor = param.grad.to(home.grad_dtype)
                if isinstance(home, DTensor):
                    local = part_of(records[name], part)
                    mesh, placements = home.device_mesh, home.placements
                    part = DTensor.from_local(
                        local, mesh, placements, run_check=False, shape=home.shape, stride=home.stride()
                    )
                home.grad = part
        optimizer.step()
        reference.step()
    counts: dict[str, tuple[int, int]] = dict.fromkeys(set(route.values()), (0, 0))
    for name, record in records.items():
        weight = whole[name].detach()
        expected = part_of(record, weight) if isinstance(record.home, DTensor) else weight
        elements, unlike = counts[route[name]]
        unlike += int((record.local_home() != expected).sum())
        counts[route[name]] = elements + expected.numel(), unlike
    return counts


def test_owners_round_as_one_process_does(ranks2: RankPool) -> None:
    """Whole parameters at their owners and shards on `sharded_adamw`: by the model's names, and positions."""
    one, other = ranks2.run(dedicated_and_whole)
    for route in ("muon", "adamw", "sharded_adamw"):
        elements, unlike = (sum(pair) for pair in zip(one[route], other[route], strict=True))
        assert elements > 30
        assert unlike <= 0.02 * elements, (route, unlike, elements)


def resumed(rank: int, world_size: int, run: Run) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """What a run that went on and one that was saved and resumed have in the end."""
    ends = []
    for stop in (None, 2):
        torch.manual_seed(7 * rank)
        optimizer: Any = run.optimizer(run.layout.distribute)
        for step in range(4):
            if step == stop:
                saved = optimizer.state_dict()
                weights = [param.detach().clone() for param in parameters(optimizer)]
                torch.manual_seed(1000 - rank)
                optimizer = run.optimizer(run.layout.distribute)
                for param, weight in zip(parameters(optimizer), weights, strict=True):
                    param.detach().copy_(weight)
                optimizer.load_state_dict(saved)
            for index, param in enumerate(parameters(optimizer)):
                param.grad = run.layout.distribute(run.whole(step + 1, index))
            optimizer.step()
        ends.append(snapshot(optimizer))
    return ends[0], ends[1]


def test_resumed_shards_repeat_a_run_that_went_on(ranks4: RankPool) -> None:
    """Invariant 4, to the bit, whatever was drawn before."""
    run = Run(GRID["HSDP, uneven"], dtype=torch.bfloat16, options=ROUNDED, per_group=2)
    for went_on, stopped in ranks4.run(resumed, run, timeout=120):
        assert_equal(went_on, stopped)


def unlike_ranks(rank: int, world_size: int, option: str) -> None:
    layout = Layout((8, 4), (0, 1), ("S0",))
    param = torch.nn.Parameter(layout.distribute(torch.ones(8, 4, dtype=torch.bfloat16)))
    group = {"params": [("w", param)], "algorithm": "lion", option: rank}
    if option == "step":
        dmuown.Muown([group])  # without harm
    with pytest.raises(PlanMismatchError, match=f"w: ranks 0 and 1 disagree on it: {option} 0 and {option} 1"):
        dmuown.Muown([{**group, "stochastic_rounding": True}])


@pytest.mark.parametrize("option", ["step", "rounding_seed"])
def test_ranks_that_would_draw_apart_are_refused(ranks2: RankPool, option: str) -> None:
    ranks2.run(unlike_ranks, option)


def sound_and_odd(held: int) -> tuple[Any, DTensor]:
    """Eight elements over two ranks as their placements say, and with `held` of them here instead of four."""
    layout = Layout((8,), (0, 1), ("S0",))
    shard: Any = layout.distribute(torch.ones(8, dtype=torch.bfloat16))
    part = torch.ones(held, dtype=torch.bfloat16)
    mesh, placements = shard.device_mesh, shard.placements
    return shard, DTensor.from_local(part, mesh, placements, run_check=False, shape=shard.shape, stride=shard.stride())


def not_from_placements(rank: int, world_size: int) -> None:
    shard, odd = sound_and_odd(3 if rank == 0 else 5)
    group = {"params": [("norm", torch.nn.Parameter(odd))], "algorithm": "lion"}
    dmuown.Muown([group])
    sound = torch.nn.Parameter(shard.detach().clone())
    optimizer = dmuown.Muown(
        [{"params": [("sound", sound)], "algorithm": "lion"}], lr=2**-7, weight_decay=0.0, stochastic_rounding=True
    )
    also = torch.nn.Parameter(shard.detach().clone())
    with pytest.raises(LayoutError, match=r"norm: the local shard \([35],\) of global shape \(8,\) does not follow"):
        optimizer.add_param_group({**group, "params": [("also", also), *group["params"]]})
    sound.grad = shard.detach().clone()
    optimizer.step()  # as if nothing had been added
    assert torch.equal(local(sound).detach(), torch.full((4,), 1 - 2**-7).bfloat16())
    assert set(optimizer._roundings.of) == {sound}


def test_shards_of_unknown_positions_are_refused(ranks2: RankPool) -> None:
    ranks2.run(not_from_placements)


def one_odd_shard(rank: int, world_size: int) -> None:
    _, odd = sound_and_odd(3 if rank == 0 else 4)
    group = {"params": [("norm", torch.nn.Parameter(odd))], "algorithm": "lion", "stochastic_rounding": True}
    with pytest.raises(PlanMismatchError, match="norm: ranks 0 and 1 disagree on it: shard follows placements False"):
        dmuown.Muown([group])


def test_a_shard_of_unknown_positions_on_one_rank_is_refused_on_all(ranks2: RankPool) -> None:
    ranks2.run(one_odd_shard)
