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


def _step(rank: int, world_size: int, algorithm: str, replicas: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    entries = []
    for entry in model_parameters(CONFIG):
        whole = torch.randn(entry.parameter.shape, dtype=torch.float32)
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
        parameter.grad = distribute_tensor(torch.randn_like(whole), mesh, [Replicate(), Shard(0)])
        entries.append(ParameterRole(entry.name, parameter, entry.role, entry.transposed, entry.aliases, entry.reason))
    options = OPTIONS_BY_ALGORITHM[algorithm](**OPTIONS)
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


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("algorithm", ["muown", "normuon"])
def test_plan_is_what_ranks_do(ranks4: RankPool, tmp_path: Path, algorithm: str, replicas: int) -> None:
    done = ranks4.run(_step, algorithm, replicas)
    target = {"muown": "MuownConfig", "normuon": "NorMuonConfig"}[algorithm]
    model = tmp_path / "config.json"
    model.write_text(json.dumps(CONFIG))
    recipe = {
        "model": {"torch_dtype": "float32", "force_hf": True},
        "optimizer": {"_target_": f"dmuown.automodel.{target}", **OPTIONS},
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
            assert sum(bucket.collectives.get(kind, 0) for bucket in plan.buckets) == real[kind]
    assert plan.matrices == 21
