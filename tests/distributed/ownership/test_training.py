"""A dedicated model trains as one process does, and as plain FSDP2 does, whatever is combined with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuown
from dmuown.ownership import runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership import training
from tests.distributed.ownership.models import batch, build, loss_of
from tests.distributed.ownership.training import (
    STEPS,
    OneProcess,
    assert_nothing_but_homes,
    assert_state_of_owned_only,
    build_optimizer,
    compare,
    dedicated,
    deferred,
    matrices_in_layers,
    mean_over_ranks,
    mesh_of,
    policy,
    tolerance_of,
    use_checkpointing,
    whole_gradients,
    whole_parameters,
)


def _train(rank: int, world_size: int, case: dict[str, Any]) -> None:
    algorithm, model_options = case.get("algorithm", "muown"), case.get("model", {})
    microbatches = case.get("microbatches", 1)
    mesh = mesh_of(world_size, replicate=case.get("replicate", 1))
    model = build(**model_options).double()
    if case.get("rest"):
        plan = dedicated(model, mesh, predicate=matrices_in_layers, param_policy=policy_of_matrices())
    else:
        plan = dedicated(
            model,
            mesh,
            reshard_after_forward=case.get("reshard", True),
            prefetch=case.get("prefetch", 1),
        )
    caller: nn.Module = model
    if case.get("rest") == "fsdp2":
        training.shard_rest(model, mesh)
    elif case.get("rest") == "ddp":
        caller = DistributedDataParallel(model)
    if "checkpoint" in case:
        use_checkpointing(model, reentrant=case["checkpoint"] == "reentrant")
    if case.get("compile") == "model":
        caller = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    elif case.get("compile"):
        for index, layer in enumerate(model.model.layers):
            if case["compile"] == "wrapper":
                model.model.layers[index] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
            else:
                layer.compile(backend="aot_eager")
    optimizer = build_optimizer(algorithm, model)
    reference = OneProcess(world_size, algorithm, model_options, microbatches)
    assert_nothing_but_homes(model)
    if algorithm != "adamw":  # torch's own allocates state in the first step
        assert_state_of_owned_only(model, optimizer)
    tolerance = tolerance_of(algorithm)
    for step in range(case.get("steps", STEPS)):
        losses = []
        for micro in range(microbatches):
            with deferred(caller, bool(case.get("defer")) and micro < microbatches - 1):
                loss = loss_of(caller, batch(step * microbatches + micro, rank))
                loss.backward()
                losses.append(loss.detach())
        expected = reference.backward(step)
        torch.testing.assert_close(mean_over_ranks(torch.stack(losses).mean()), expected, **tolerance)
        assert_nothing_but_homes(model)
        if step in (0, case.get("steps", STEPS) - 1):
            compare(
                whole_gradients(model),
                {name: param.grad for name, param in reference.model.named_parameters()},
                "gradient of",
                tolerance,
            )
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    compare(
        whole_parameters(model),
        {name: param.detach() for name, param in reference.model.named_parameters()},
        "parameter",
        tolerance,
    )
    assert_nothing_but_homes(model)
    assert_state_of_owned_only(model, optimizer)
    if case.get("counted", True):
        counts = {kind: {"collectives": n, "bytes": size} for kind, (n, size) in runtime_of(model).link.counts.items()}
        per_step = plan.per_step(microbatches=microbatches, deferred=bool(case.get("defer")))
        steps = case.get("steps", STEPS)
        assert counts == {
            kind: {key: value * steps for key, value in total.items()} for kind, total in per_step.items()
        }


def policy_of_matrices() -> dict[str, Any]:
    return {"defaults": policy()["defaults"]}


CASES: dict[str, dict[str, Any]] = {
    "adamw": {"algorithm": "adamw"},
    "muown": {},
    "muon": {"algorithm": "muon"},
    "normuon": {"algorithm": "normuon"},
    "kept after forward": {"reshard": False},
    "no prefetch": {"prefetch": 0, "steps": 5},
    "prefetch of three": {"prefetch": 3, "steps": 5},
    "tied": {"model": {"tied": True}},
    "tied, kept after forward": {"model": {"tied": True}, "reshard": False, "steps": 5},
    "mixture of experts": {"model": {"moe": True, "layers": 4}, "algorithm": "adamw"},
    "mixture of experts, muown": {"model": {"moe": True, "layers": 4}, "steps": 5},
    "mixture of experts, kept after forward": {"model": {"moe": True, "layers": 4}, "reshard": False, "steps": 5},
    "checkpointing": {"checkpoint": "once"},
    "checkpointing, kept after forward": {"checkpoint": "once", "reshard": False, "steps": 5},
    "reentrant checkpointing": {"checkpoint": "reentrant", "steps": 5},
    "accumulation": {"microbatches": 2, "steps": 8},
    "accumulation under no_sync": {"microbatches": 3, "defer": True, "steps": 8},
    "FSDP2 for the rest": {"rest": "fsdp2"},
    "FSDP2 for the rest, accumulation under no_sync": {"rest": "fsdp2", "microbatches": 2, "defer": True, "steps": 5},
    "DDP for the rest": {"rest": "ddp", "steps": 8},
    "DDP for the rest, accumulation under no_sync": {"rest": "ddp", "microbatches": 2, "defer": True, "steps": 5},
    "compiled blocks": {"compile": "module", "steps": 4},
    "compiled blocks, wrapped": {"compile": "wrapper", "steps": 4},
    "compiled whole": {"compile": "model", "steps": 4},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_one_process_on_two_ranks(ranks2: RankPool, case: dict[str, Any]) -> None:
    ranks2.run(_train, case, timeout=240)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"replicate": 2},
        {"model": {"moe": True, "layers": 4}, "algorithm": "adamw"},
        {"model": {"tied": True}, "steps": 5},
        {"rest": "fsdp2", "replicate": 2, "steps": 5},
        {"checkpoint": "once", "steps": 5},
    ],
    ids=["plain", "HSDP", "mixture of experts", "tied", "HSDP with FSDP2 for the rest", "checkpointing"],
)
def test_equals_one_process_on_four_ranks(ranks4: RankPool, case: dict[str, Any]) -> None:
    ranks4.run(_train, case, timeout=240)


def _against_fsdp2(rank: int, world_size: int, algorithm: str, model_options: dict[str, Any]) -> None:
    mesh = mesh_of(world_size)
    model, sharded = build(**model_options).double(), build(**model_options).double()
    dedicated(model, mesh)
    for block in sharded.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = build_optimizer(algorithm, model)
    other = build_optimizer(algorithm, sharded, dmuown.param_groups(sharded, policy()))
    tolerance = tolerance_of(algorithm)
    for step in range(STEPS):
        losses = []
        for each in (model, sharded):
            loss = loss_of(each, batch(step, rank))
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], **tolerance)
        if step in (0, STEPS - 1):
            expected = {
                name: param.grad.full_tensor() if param.grad is not None else None  # type: ignore[attr-defined]
                for name, param in sharded.named_parameters()
            }
            compare(whole_gradients(model), expected, "gradient of", tolerance)
        for stepped in (optimizer, other):
            stepped.step()
            stepped.zero_grad()
    expected = {name: param.detach().full_tensor() for name, param in sharded.named_parameters()}  # type: ignore[attr-defined]
    compare(whole_parameters(model), expected, "parameter", tolerance)
    assert_nothing_but_homes(model)


@pytest.mark.parametrize("algorithm", ["adamw", "muown", "muon"])
def test_equals_fsdp2_on_two_ranks(ranks2: RankPool, algorithm: str) -> None:
    ranks2.run(_against_fsdp2, algorithm, {}, timeout=240)


def test_equals_fsdp2_on_four_ranks(ranks4: RankPool) -> None:
    ranks4.run(_against_fsdp2, "muown", {"layers": 2}, timeout=240)
