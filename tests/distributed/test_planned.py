"""`dmuown plan` says what real ranks then do: bytes sent, collectives, matrices and state, rank by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dmuown.automodel.grouping import group_parameters
from dmuown.automodel.optimizer_options import OPTIONS_BY_ALGORITHM
from dmuown.automodel.planned import plan_job
from dmuown.automodel.shapes import model_parameters
from dmuown.diagnostics.traffic import TrafficCounter
from dmuown.policy.roles import ParameterRole
from tests.distributed.harness import RankPool

#: Rows that 4 ranks cut unevenly, and fewer matrices of one shape than ranks.
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 3,
    "vocab_size": 50,
    "tie_word_embeddings": False,
}
OPTIONS: dict[str, Any] = {"lr": 1e-3, "ns_dtype": "bfloat16", "ns_steps": 2}


def _step(rank: int, world_size: int, algorithm: str, replicas: int, batch_bytes: int | None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    entries = []
    for entry in model_parameters(CONFIG):
        whole = torch.randn(entry.parameter.shape, dtype=torch.float32)
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
        parameter.grad = distribute_tensor(torch.randn_like(whole), mesh, [Replicate(), Shard(0)])
        entries.append(ParameterRole(entry.name, parameter, entry.role, entry.transposed, entry.aliases, entry.reason))
    options = OPTIONS_BY_ALGORITHM[algorithm](**OPTIONS, batch_bytes=batch_bytes)
    groups = group_parameters(entries, options.grouping_rules())
    optimizer: Any = options.optimizer_class()(groups, **options.optimizer_options())
    optimizer.step()
    count = optimizer.exchange_count
    state = 0
    for buffers in optimizer.state.values():
        for value in buffers.values():
            local = value.to_local() if isinstance(value, DTensor) else value
            state += local.numel() * local.element_size()
    return {
        "sent": count.bytes_sent,
        "all_to_all": count.all_to_alls,
        "all_gather": count.all_gathers,
        "matrices": count.matrices,
        "state": state,
        "parameters": sum(entry.parameter.to_local().numel() * 4 for entry in entries),  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("batch_bytes", [None, 1, 20_000])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("algorithm", ["muown", "normuon"])
def test_plan_is_what_ranks_do(
    ranks4: RankPool, tmp_path: Path, algorithm: str, replicas: int, batch_bytes: int | None
) -> None:
    done = ranks4.run(_step, algorithm, replicas, batch_bytes)
    target = {"muown": "MuownConfig", "normuon": "NorMuonConfig"}[algorithm]
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    recipe = {
        "model": {"torch_dtype": "float32", "force_hf": True},
        "optimizer": {"_target_": f"dmuown.automodel.{target}", "batch_bytes": batch_bytes, **OPTIONS},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    plan = plan_job(file, world_size=4, sizes={"replicas": replicas}, model_config=model)
    for rank, real in enumerate(done):
        assert plan.ranks.sent[rank] == real["sent"]
        assert plan.ranks.matrices[rank] == real["matrices"]
        assert plan.ranks.parameters[rank] == real["parameters"]
        assert plan.ranks.state[rank] == real["state"]
    for kind in ("all_to_all", "all_gather"):
        # A replica without a matrix in a task sends nothing there.
        most = max(real[kind] for real in done)
        assert sum(bucket.collectives.get(kind, 0) for bucket in plan.buckets) == most
        if batch_bytes is None:
            assert all(real[kind] == most for real in done)
    assert plan.matrices == 21


def _owners(
    rank: int, world_size: int, tp: int, replicas: int, precision: tuple[torch.dtype, torch.dtype]
) -> dict[str, Any]:
    import transformers
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from dmuown.automodel.dmuon_options import DMuonOptions
    from dmuown.automodel.grouping import build_param_groups
    from dmuown.automodel.ownership import policy_with_precision
    from dmuown.ownership import dedicate_params, dedicated_records, runtime_of
    from dmuown.ownership.groups import dedicated_param_groups

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIG, pad_token_id=0, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = (replicas, world_size // tp // replicas, tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    data_parallel = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
    if tp > 1:
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            "model.layers.*.self_attn.o_proj": RowwiseParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
    options = DMuonOptions(**OPTIONS)
    options.mixed_precision = precision
    dedicate_params(model, data_parallel, predicate=lambda *_: True, param_policy=policy_with_precision(options))
    (groups,) = build_param_groups([model], options.grouping_rules())
    optimizer: Any = options.optimizer_class()(dedicated_param_groups(model, groups), **options.optimizer_options())
    runtime = runtime_of(model)
    tokens = torch.randint(0, config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(rank // tp))
    with TrafficCounter() as traffic:
        model(input_ids=tokens, labels=tokens).loss.backward()
    del traffic.kinds["all_reduce"]  # the message between hosts at the end of a backward pass
    counts = {kind: list(count) for kind, count in runtime.link.counts.items()}
    parameters = gradients = state = 0
    for record in dedicated_records(model).values():
        if record.owned:
            parameters += record.local_home().numel() * 4
            gradients += record.local_home().numel() * 4
    optimizer.step()
    for buffers in optimizer.state.values():
        for value in buffers.values():
            local = value.to_local() if isinstance(value, DTensor) else value
            state += local.numel() * local.element_size()
    return {
        "owners": runtime.plan.owners,
        "transfers": runtime.plan.to_dict()["transfers"],
        "counts": counts,
        "called": {kind: {"collectives": calls, "bytes": size} for kind, (calls, size) in traffic.kinds.items()},
        "parameters": parameters,
        "gradients": gradients,
        "state": state,
        "exchanged": optimizer.exchange_count.bytes_sent,
        "matrices": optimizer.exchange_count.matrices,
    }


@pytest.mark.parametrize(("tp", "replicas", "mixed"), [(1, 1, False), (2, 1, False), (1, 2, False), (1, 1, True)])
def test_plan_is_what_owners_do(ranks4: RankPool, tmp_path: Path, tp: int, replicas: int, mixed: bool) -> None:
    """With the host's own mixed precision too, which counts where the YAML has none."""
    pytest.importorskip("transformers")
    fp32 = {"mp_policy": {"param_dtype": "float32", "reduce_dtype": "float32"}}
    done = ranks4.run(_owners, tp, replicas, (torch.bfloat16 if mixed else torch.float32, torch.float32))
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    optimizer = {"_target_": "dmuown.automodel.DMuonConfig", **OPTIONS}
    file = tmp_path / "recipe.yaml"
    recipe = {"model": {"torch_dtype": "float32", "force_hf": True}, "optimizer": optimizer}
    file.write_text(yaml.safe_dump(recipe | {"distributed": {} if mixed else fp32}))
    plan = plan_job(file, world_size=4, sizes={"tp": tp, "replicas": replicas}, model_config=model)
    (owned,) = plan.ownership
    totals = owned.plan.per_step()
    for rank, real in enumerate(done):
        assert owned.plan.owners == real["owners"]
        assert owned.plan.to_dict()["transfers"] == real["transfers"]
        # With replicas, ranks at an owner's place in theirs call twice: between replicas, and within.
        assert owned.plan.per_step(rank=rank // tp) == real["called"]
        assert {kind: [total["collectives"], total["bytes"]] for kind, total in totals.items()} == real["counts"]
        assert plan.ranks.parameters[rank] == real["parameters"]
        assert plan.ranks.sent[rank] - owned.moved[rank // tp] == real["exchanged"]
        assert plan.ranks.matrices[rank] == real["matrices"]
        assert plan.ranks.state[rank] == real["state"]
        assert plan.ranks.gradients[rank] == real["gradients"]
    # Every rank but one receives each buffer once, and gives to it once, on whatever ways: in each group that a buffer
    # goes through, all but one. An owner's goes through one, or through that between replicas and those within.
    groups = {kind: replicas + 1 if replicas > 1 and kind in ("broadcast", "reduce") else 1 for kind in totals}
    called = {kind: sum(real["called"][kind]["bytes"] for real in done) // tp for kind in totals}
    moved = {kind: called[kind] - groups[kind] * total["bytes"] for kind, total in totals.items()}
    assert moved == {kind: total["bytes"] * (4 // tp - 1) for kind, total in totals.items()}
    assert sum(owned.moved) == sum(moved.values())
