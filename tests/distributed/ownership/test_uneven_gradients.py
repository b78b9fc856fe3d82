"""Gradients that appear on some ranks only, late, or since a parameter was unfrozen: no rank waits, none is lost."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown
from dmuown.ownership import dedicated_records, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import WIDTH
from tests.distributed.ownership.training import (
    TIGHT,
    assert_nothing_but_homes,
    assert_state_of_owned_only,
    compare,
    dedicated,
    mesh_of,
    policy,
    whole_gradients,
    whole_parameters,
)

ROUTES = ("muon", "adamw", "sharded_adamw")
# What a rank does in a step, by its position in the step's list.
LATE = ("constant", "output", "attribute", "thread")


class Branching(nn.Module):
    """A block whose second matrix is used as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.penalty: Tensor | None = None

    def forward(self, hidden: Tensor, how: str) -> tuple[Tensor, Tensor | None]:
        self.penalty = None
        if how == "plain":
            return self.first(hidden), None
        if how == "other":
            return self.second(hidden), None
        if how == "both":
            return self.second(self.first(hidden)), None
        constant = torch.ones(1, WIDTH, dtype=hidden.dtype)
        if how == "constant":  # does not depend on the input, and is made first
            extra: Tensor = self.second(constant)
            return self.first(hidden) + extra, None
        if how == "thread":
            # Autograd goes by each thread's own count of operations: the backward of a new thread's comes last of all,
            # when the boundary's gradients have long been reduced.
            with ThreadPoolExecutor(1) as pool:
                extra = pool.submit(self.second, constant).result()
            return self.first(hidden) + extra, None
        penalty = self.second.weight.square().sum() + self.second(constant).square().sum()
        if how == "output":
            return self.first(hidden), penalty
        self.penalty = penalty
        return self.first(hidden), None


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branching() for _ in range(4))

    def forward(self, hidden: Tensor, hows: list[str]) -> Tensor:
        total = hidden.new_zeros(())
        for layer, how in zip(self.layers, hows, strict=True):
            hidden, penalty = layer(hidden, how)
            if penalty is not None:
                total = total + penalty
        for layer in self.layers:
            kept = vars(layer)["penalty"]
            total = total if kept is None else total + kept
        return hidden.square().mean() + total


def _inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def _hows(step: int, rank: int, late: str) -> list[str]:
    """One layer is late on one rank alone; the others differ too."""
    usual = ("plain", "other", "both")
    hows = [usual[(step + rank * layer) % 3] for layer in range(4)]
    if rank == step % 2:
        hows[(step + 1) % 4] = late
    return hows


def _uneven(
    rank: int, world_size: int, route: str, reshard: bool, late: str, frozen_at_first: bool, replicate: int = 1
) -> dict[str, Any]:
    torch.manual_seed(0)
    model, plain = Stack().double(), Stack().double()
    plain.load_state_dict(model.state_dict())
    if frozen_at_first:
        for each in (model, plain):
            for layer in each.layers[1:3]:
                layer.get_submodule("second").requires_grad_(False)
    dedicated(
        model,
        mesh_of(world_size, replicate=replicate),
        predicate=lambda name, param: True,
        param_policy={"defaults": {**policy()["defaults"], "route": route}},
        reshard_after_forward=reshard,
    )
    for step in range(6):
        if step in (2, 5):
            for each in (model, plain):
                each.layers.requires_grad_(True)
        if step == 4:
            for each in (model, plain):
                each.layers[0].get_submodule("first").requires_grad_(False)
        model(_inputs(step, rank), _hows(step, rank, late)).backward()
        losses = [plain(_inputs(step, each), _hows(step, each, late)) for each in range(world_size)]
        torch.stack(losses).mean().backward()
        assert_nothing_but_homes(model)
        expected = {name: param.grad for name, param in plain.named_parameters()}
        compare(whole_gradients(model), expected, f"step {step}: gradient of", TIGHT)
        if step % 2:
            for param in itertools.chain(model.parameters(), plain.parameters()):
                param.grad = None
    assert {record.route.route for record in dedicated_records(model).values()} == {route}
    return {kind: tuple(count) for kind, count in runtime_of(model).link.counts.items()}


@pytest.mark.parametrize("frozen_at_first", [False, True], ids=["trained", "unfrozen later"])
@pytest.mark.parametrize("reshard", [True, False], ids=["given up", "kept"])
@pytest.mark.parametrize(
    "late", [pytest.param(how, marks=pytest.mark.slow) if how in ("constant", "attribute") else how for how in LATE]
)
@pytest.mark.parametrize("route", ROUTES)
def test_on_two_ranks(ranks2: RankPool, route: str, late: str, reshard: bool, frozen_at_first: bool) -> None:
    counts = ranks2.run(_uneven, route, reshard, late, frozen_at_first, timeout=60)
    assert counts[0] == counts[1]  # every rank took part in every collective


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("late, replicate", [("output", 1), ("thread", 1), ("output", 2), ("thread", 2)])
def test_on_four_ranks(ranks4: RankPool, route: str, late: str, replicate: int) -> None:
    counts = ranks4.run(_uneven, route, True, late, True, replicate, timeout=120)
    assert all(count == counts[0] for count in counts)


def _unfrozen(rank: int, world_size: int) -> None:
    """An unfrozen parameter joins the optimizer by `add_param_group`, on owners and elsewhere alike."""
    torch.manual_seed(0)
    model, plain = Stack().double(), Stack().double()
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        each.layers[1:3].requires_grad_(False)
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    wide = {**policy()["defaults"], "route": "adamw"}
    shards = {"name": "second", "set": {"route": "sharded_adamw"}}
    dedicated(
        model,
        mesh_of(world_size),
        predicate=lambda name, param: True,
        param_policy={"defaults": wide, "overrides": [shards]},
    )
    optimizer = dmuown.Muon(model, **options)
    reference = torch.optim.AdamW(plain.layers.parameters(), betas=(0.9, 0.95), **options)
    for step in range(4):
        if step == 2:
            for each in (model, plain):
                each.requires_grad_(True)
            later = [(n, p) for n, p in model.named_parameters() if n.split(".")[1] in ("1", "2")]
            optimizer.add_param_group({"params": later, "algorithm": "adamw"})
        model(_inputs(step, rank), _hows(step, rank, "output")).backward()
        losses = [plain(_inputs(step, each), _hows(step, each, "output")) for each in range(world_size)]
        torch.stack(losses).mean().backward()
        for stepped in (optimizer, reference):
            stepped.step()
            stepped.zero_grad()
        assert_nothing_but_homes(model)
    compare(whole_parameters(model), dict(plain.named_parameters()), "parameter", TIGHT)
    assert_state_of_owned_only(model, optimizer)


def test_unfrozen_parameters_join_the_optimizer(ranks2: RankPool) -> None:
    ranks2.run(_unfrozen, timeout=60)
