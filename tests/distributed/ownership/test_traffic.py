"""Bytes and collectives of a step, counted where torch calls its process groups: against the plan and FSDP2's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuown
from dmuown.diagnostics.traffic import TrafficCounter
from dmuown.ownership import no_sync
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import POLICY, batch, build, loss_of
from tests.distributed.ownership.training import assert_nothing_but_homes, dedicated, mesh_of

ITEM = 4


def _against_the_plan(
    rank: int, world_size: int, reshard: bool, microbatches: int, defer: bool, replicate: int = 1
) -> None:
    model = build(layers=3)
    plan = dedicated(
        model, mesh_of(world_size, replicate=replicate), param_policy=POLICY, reshard_after_forward=reshard
    )
    optimizer = dmuown.Muown(model, lr=0.01)
    for step in range(2):
        with TrafficCounter() as traffic:
            for micro in range(microbatches):
                loss = loss_of
                if defer and micro < microbatches - 1:
                    with no_sync(model):
                        loss(model, batch(step, rank)).backward()
                else:
                    loss(model, batch(step, rank)).backward()
        counted = {kind: {"collectives": count, "bytes": size} for kind, (count, size) in traffic.kinds.items()}
        # The one message between hosts at the end of a backward pass that reduces: a number per transfer.
        reducing = 1 if defer else microbatches
        message = counted.pop("all_reduce")
        assert message == {"collectives": reducing, "bytes": reducing * ITEM * len(plan.transfers)}
        assert counted == plan.per_step(microbatches=microbatches, deferred=defer, rank=rank)
        assert_nothing_but_homes(model)
        with TrafficCounter() as traffic:
            optimizer.step()
        # Shards of several ranks agree on which gradients there are; no tensor of the model moves.
        assert set(traffic.kinds) <= {"all_reduce"}
        assert traffic.bytes < 100
        optimizer.zero_grad()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    "reshard, microbatches, defer",
    [(True, 1, False), (False, 1, False), (True, 3, False), (True, 3, True)],
    ids=["given up", "kept", "accumulation", "no_sync"],
)
def test_against_the_plan(
    ranks2: RankPool, ranks4: RankPool, world_size: int, reshard: bool, microbatches: int, defer: bool
) -> None:
    pool = ranks2 if world_size == 2 else ranks4
    pool.run(_against_the_plan, reshard, microbatches, defer, timeout=120)


@pytest.mark.parametrize("reshard, defer", [(True, False), (False, True)])
def test_against_the_plan_in_replicas(ranks4: RankPool, reshard: bool, defer: bool) -> None:
    """Owners' transfers go in two stages: a rank at the owner's place in its replica takes part in both."""
    ranks4.run(_against_the_plan, reshard, 2, defer, replicate=2, timeout=120)


class Wide(nn.Module):
    """Matrices large enough that what transfers add to parameters is little; every one divides over four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 128, bias=False), nn.SiLU(), nn.Linear(128, 64, bias=False))
            for _ in range(3)
        )
        self.lm_head = nn.Linear(64, 128, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


WIDE_POLICY: dict[str, Any] = {
    "defaults": {"route": "muon"},
    "overrides": [
        {"name": ["embed_tokens", "lm_head"], "set": {"route": "sharded_adamw"}},
        {"name": ["0.weight"], "set": {"route": "adamw"}},
    ],
}


def _against_fsdp2(rank: int, world_size: int, reshard: bool) -> dict[str, int]:
    mesh = mesh_of(world_size)
    torch.manual_seed(0)
    model, sharded = Wide(), Wide()
    elements = sum(param.numel() for param in model.parameters())
    dedicated(model, mesh, param_policy=WIDE_POLICY, reshard_after_forward=reshard)
    for module in (*sharded.layers, sharded.embed_tokens, sharded.lm_head):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)
    optimizers = {
        "dedicated": dmuown.Muown(model, lr=0.01),
        "fsdp2": dmuown.Muown(dmuown.param_groups(sharded, WIDE_POLICY), lr=0.01),
    }
    found: dict[str, int] = {"elements": elements}
    for name, each in (("dedicated", model), ("fsdp2", sharded)):
        for step in range(2):  # FSDP2 sets up in its first
            with TrafficCounter() as passes:
                loss_of(each, batch(step, rank)).backward()
            with TrafficCounter() as stepping:
                optimizers[name].step()
            optimizers[name].zero_grad()
        found |= {name: passes.bytes, f"{name} step": stepping.bytes}
        found |= {f"{name} {kind}": size for kind, (_, size) in passes.kinds.items()}
    assert_nothing_but_homes(model)
    return found


@pytest.mark.parametrize("reshard", [True, False], ids=["given up", "kept"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_against_fsdp2(ranks2: RankPool, ranks4: RankPool, world_size: int, reshard: bool) -> None:
    """Forward and backward move what FSDP2 moves; `step`, which costs it an exchange, moves nothing."""
    pool = ranks2 if world_size == 2 else ranks4
    for found in pool.run(_against_fsdp2, reshard, timeout=120):
        times = 3 if reshard else 2  # fetched once or twice, reduced once
        assert found["fsdp2"] == times * found["elements"] * ITEM
        assert found["fsdp2"] <= found["dedicated"] <= 1.01 * found["fsdp2"]
        assert math.isclose(
            found["dedicated broadcast"] + found["dedicated all_gather"], found["fsdp2 all_gather"], rel_tol=0.01
        )
        assert math.isclose(
            found["dedicated reduce"] + found["dedicated reduce_scatter"], found["fsdp2 reduce_scatter"], rel_tol=0.01
        )
        assert found["dedicated step"] < 100
        assert found["fsdp2 step"] > 3 * 2 * 64 * 128  # every matrix element, once at least
