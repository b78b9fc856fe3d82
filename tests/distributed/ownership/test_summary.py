"""The summary of a dedicated model."""

from __future__ import annotations

from typing import Any

import dmuown
from dmuown.ownership import dedicated_records, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import POLICY, batch, build, loss_of
from tests.distributed.ownership.training import (
    assert_nothing_but_homes,
    dedicated,
    matrices_in_layers,
    mesh_of,
    shard_rest,
)


def _summary(rank: int, world_size: int) -> dict[str, Any]:
    model = build(layers=2)
    policy = {
        "defaults": {"route": "muon", "param_dtype": "bf16", "grad_dtype": "fp32"},
        "overrides": [*POLICY["overrides"], {"name": "lm_head", "set": {"output_dtype": "fp32"}}],
    }
    plan = dedicated(model, mesh_of(world_size), param_policy=policy)
    optimizer = dmuown.Muown(model, lr=0.1)
    summary = dmuown.summarize_param_groups(model, optimizer)
    rows = {row.name: row for row in summary.parameters}
    gate = rows["model.layers.0.gate_proj.weight"]
    record = dedicated_records(model)["model.layers.0.gate_proj.weight"]
    assert gate.owner == plan.owners[gate.name]
    assert gate.owned == record.owned == (gate.owner == rank)
    assert (gate.route, gate.param_dtype, gate.grad_dtype, gate.master_dtype) == (
        "muon",
        "bfloat16",
        "float32",
        "float32",
    )
    assert gate.boundary == ("model.layers.0",)
    # 24 x 16 elements: twice broadcast in bf16, once reduced in fp32.
    assert gate.comm_bytes == 24 * 16 * (2 * 2 + 4)
    assert gate.local_bytes == (24 * 16 * 4 if record.owned else 0)
    head = rows["lm_head.weight"]
    assert (head.route, head.owner, head.output_dtype, head.matched) == ("sharded_adamw", "shards", "float32", (0, 2))
    assert head.comm_bytes == 40 * 16 * (2 * 2 + 4)
    assert head.local_bytes == 40 * 16 * 4 // world_size
    assert [(row.route, row.parameters) for row in summary.routes] == [("muon", 6), ("adamw", 5), ("sharded_adamw", 2)]
    assert sum(row.owned for row in summary.routes if row.route == "muon") <= 6
    # Padding and flags apart, the rows add up to the plan.
    total = sum(total["bytes"] for total in summary.per_step.values())
    rows_total = sum(row.comm_bytes for row in summary.parameters)
    assert rows_total <= total <= rows_total * 1.1
    assert "per step: " in str(summary)
    loss_of(model, batch(0, rank)).backward()
    counts = {kind: count for kind, (count, _) in runtime_of(model).link.counts.items()}
    assert counts == {kind: total["collectives"] for kind, total in summary.per_step.items()}
    assert_nothing_but_homes(model)
    return {"owned": sum(row.owned for row in summary.parameters if row.owner != "shards")}


def test_dedicated(ranks2: RankPool) -> None:
    results = ranks2.run(_summary, timeout=180)
    assert sum(result["owned"] for result in results) == 11


def _mixed(rank: int, world_size: int) -> None:
    model = build(layers=2)
    mesh = mesh_of(world_size)
    dedicated(model, mesh, predicate=matrices_in_layers, param_policy=None)
    shard_rest(model, mesh)
    summary = dmuown.summarize_param_groups(model, dmuown.Muown(model, lr=0.1))
    assert [(row.route, row.parameters, row.algorithms) for row in summary.routes] == [
        ("muon", 6, ("muown",)),
        ("", 7, ("adamw",)),
    ]
    rows = {row.name: row for row in summary.parameters}
    assert rows["lm_head.weight"].owner == "shards"
    assert rows["lm_head.weight"].local_bytes == 40 * 16 * 4 // world_size
    assert_nothing_but_homes(model)


def test_beside_fsdp2(ranks2: RankPool) -> None:
    ranks2.run(_mixed, timeout=180)
