"""`dmuown plan`: shapes, splits, sizes and the budget of time and memory."""

from __future__ import annotations

import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from dmuown.automodel.planned import JobPlan, plan_job
from dmuown.automodel.planned.cluster import Cluster, place
from dmuown.automodel.planned.exchange import local_numel
from dmuown.automodel.planned.routes import RouteRow, with_layers
from dmuown.automodel.shapes import FAMILIES, model_parameters
from dmuown.cli import app
from dmuown.errors import OptionError
from dmuown.policy.roles import Role, describe_parameters

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
MOE = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
LLAMA_70B = TINY | {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
}


def planned(folder: Path, config: dict[str, Any], optimizer: dict[str, Any] | None = None, **options: Any) -> JobPlan:
    file, recipe = write(folder, config, optimizer)
    return plan_job(recipe, model_config=file, **options)


def write(folder: Path, config: dict[str, Any], optimizer: dict[str, Any] | None = None) -> tuple[Path, Path]:
    file, recipe = folder / "config.json", folder / "recipe.yaml"
    file.write_text(json.dumps(config))
    section = {"_target_": "dmuown.automodel.MuownConfig", "lr": 1e-3, "weight_decay": 0.1} | (optimizer or {})
    recipe.write_text(yaml.safe_dump({"model": {"torch_dtype": "bfloat16"}, "optimizer": section}))
    return file, recipe


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = {**TINY, **MOE, "model_type": family, "tie_word_embeddings": tied, "head_dim": 8, "pad_token_id": 0}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    described = {entry.name: entry for entry in describe_parameters(model, trainable_only=False)}
    ours = {entry.name: entry for entry in model_parameters(config)}
    assert {name: tuple(entry.parameter.shape) for name, entry in ours.items()} == {
        name: tuple(entry.parameter.shape) for name, entry in described.items()
    }
    for name, entry in ours.items():
        # The gate of a shared expert is a matrix of one row: elementwise by either name.
        assert entry.role is described[name].role or "shared_expert_gate" in name, name
        assert entry.transposed == described[name].transposed


def test_every_rank_together_holds_every_parameter_once() -> None:
    config = TINY | MOE | {"model_type": "qwen3_moe", "hidden_size": 40, "head_dim": 10}
    cluster = Cluster(16, tp=2, ep=4)
    for entry in model_parameters(config, host_layout=True):
        tensor = place(entry, cluster, torch.float32)
        assert isinstance(tensor, DTensor)
        copies = math.prod(
            tensor.device_mesh.size(dim) for dim, at in enumerate(tensor.placements) if not hasattr(at, "dim")
        )
        assert sum(local_numel(tensor, rank) for rank in range(16)) == entry.parameter.numel() * copies, entry.name
        if entry.role is Role.EXPERT:  # spread over tensor-parallel ranks as well
            assert copies == 1, entry.name


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_stay_whole_on_their_ranks(tmp_path: Path, tp: int) -> None:
    config = TINY | MOE | {"model_type": "qwen3_moe", "head_dim": 8}
    whole = planned(tmp_path, config, world_size=8, sizes={"ep": 8, "tp": tp})
    experts = [bucket for bucket in whole.buckets if len(bucket.bucket.layout.shape) == 3]
    assert [bucket.collectives for bucket in experts] == [{}, {}]
    assert [bucket.matrices for bucket in experts] == [[4] * 8, [4] * 8]  # 8 experts of 4 layers over 8 ranks
    cut = planned(tmp_path, config, world_size=8, sizes={"ep": 2, "tp": tp})
    for bucket in cut.buckets:
        if len(bucket.bucket.layout.shape) == 3:
            assert bucket.collectives == {"all_to_all": 2}
            assert sum(bucket.matrices) == 32


def test_one_rank_sends_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path, TINY | {"model_type": "llama"}, world_size=1)
    assert plan.ranks.sent == [0.0]
    assert plan.ranks.parameters == [plan.elements * 2]
    assert plan.matrices == 28
    rows = {row.pattern: row for row in plan.routes}
    embedding = rows["model.embed_tokens.weight"]
    assert (embedding.algorithm, embedding.weight_decay, embedding.split) == ("adamw", 0.0, "whole")
    assert (rows["model.layers.*.mlp.up_proj.weight"].algorithm, rows["model.layers.*.mlp.up_proj.weight"].count) == (
        "muown",
        4,
    )


def test_frozen_parameters_have_neither_gradients_nor_state(tmp_path: Path) -> None:
    overrides = ["--freeze_config.freeze_modules", "[{'path': 'model'}]", "--freeze_config.unfreeze_modules"]
    file, recipe = write(tmp_path, TINY | {"model_type": "llama"})
    plan = plan_job(recipe, [*overrides, "[{'path': 'model.layers.3'}]"], world_size=1, model_config=file)
    assert plan.matrices == 7
    assert plan.ranks.gradients[0] == plan.trainable * 2
    layer = sum(
        entry.parameter.numel()
        for entry in model_parameters(TINY | {"model_type": "llama"})
        if entry.name.startswith("model.layers.3.") or entry.role is Role.HEAD
    )
    assert plan.trainable == layer


def test_rows_of_one_name_say_which_layers_are_theirs(tmp_path: Path) -> None:
    overrides = ["--freeze_config.freeze_modules", "[{'path': 'model.layers.0'}, {'path': 'model.layers.1'}, "]
    overrides[1] += "{'path': 'model.layers.3'}]"
    file, recipe = write(tmp_path, TINY | {"model_type": "llama", "num_hidden_layers": 5})
    plan = plan_job(recipe, overrides, world_size=1, model_config=file)
    patterns = [row.pattern for row in plan.routes]
    assert len(patterns) == len(set(patterns))
    rows = {row.pattern: (row.algorithm, row.count) for row in plan.routes}
    assert rows["model.layers.0-1,3.mlp.up_proj.weight"] == ("frozen", 3)
    assert rows["model.layers.2,4.mlp.up_proj.weight"] == ("muown", 2)
    assert rows["model.norm.weight"] == ("adamw", 1)
    assert "numbers" not in plan.to_dict()["routes"][0]


def test_numbers_that_rows_share_stay_open(tmp_path: Path) -> None:
    """Experts that transformers names one by one: the rows differ in their layers, not in their experts."""
    rows = [
        RouteRow("layers.*.experts.*.w", 4, (2, 2), "matrix", "", algorithm, None, None, "", "whole", numbers)
        for algorithm, numbers in (("frozen", ((0, 0), (0, 1))), ("muown", ((1, 0), (1, 1))))
    ]
    assert [row.pattern for row in with_layers(rows)] == ["layers.0.experts.*.w", "layers.1.experts.*.w"]


def test_pipeline_stages_share_a_row(tmp_path: Path) -> None:
    config = TINY | {"model_type": "llama"}
    alone = planned(tmp_path, config, world_size=2).routes
    stages = planned(tmp_path, config, world_size=4, sizes={"pp": 2}).routes
    assert [(row.pattern, row.count) for row in stages] == [(row.pattern, row.count) for row in alone]


def test_ownership_gives_each_matrix_one_owner(tmp_path: Path) -> None:
    config = TINY | {"model_type": "llama"}
    plan = planned(tmp_path, config, {"_target_": "dmuown.automodel.DMuonConfig", "algorithm": "muon"}, world_size=4)
    assert plan.matrices == 28
    assert {row.split for row in plan.routes if row.algorithm == "muon"} == {"one owner"}
    # Master copies are fp32, and nothing is held twice.
    assert sum(plan.ranks.parameters) == plan.elements * 4
    (owned,) = plan.ownership
    assert sorted(name for names in owned.owned for name in names) == sorted(
        entry.name for entry in model_parameters(config) if entry.role not in (Role.EMBEDDING, Role.HEAD)
    )
    totals = owned.plan.per_step()
    assert set(totals) == {"broadcast", "reduce", "all_gather", "reduce_scatter"}
    # A collective of one buffer has three ranks of four receive it, or give to it.
    assert sum(plan.ranks.sent) == sum(total["bytes"] for total in totals.values()) * 3
    largest = max(range(4), key=lambda rank: plan.ranks.parameters[rank])
    assert plan.ranks.sent[largest] == min(plan.ranks.sent), "an owner does not receive its own"


def test_owners_of_tensor_parallel_parts(tmp_path: Path) -> None:
    config = TINY | {"model_type": "llama"}
    optimizer = {"_target_": "dmuown.automodel.DMuonConfig", "algorithm": "muown"}
    plan = planned(tmp_path, config, optimizer, world_size=4, sizes={"tp": 2})
    (owned,) = plan.ownership
    assert len(owned.owned) == 2
    assert plan.matrices == 28
    rows = {row.pattern: row for row in plan.routes}
    assert rows["model.layers.*.self_attn.o_proj.weight"].split == "one owner, tp x2 cuts axis 1"
    assert (rows["lm_head.weight"].route, rows["lm_head.weight"].split) == (
        "sharded_adamw",
        "shards, tp x2 cuts axis 0",
    )
    assert rows["model.norm.weight"].split == "one owner"
    norms = sum(row.count * math.prod(row.shape) for row in plan.routes if row.role == "norm")
    # Tensor-parallel ranks share everything but norms, which both have.
    assert sum(plan.ranks.parameters) == (plan.elements + norms) * 4
    alone = planned(tmp_path, config, optimizer, world_size=2)
    within = planned(tmp_path, config, optimizer, world_size=2, sizes={"tp": 2})
    assert sum(within.ranks.work) == sum(alone.ranks.work)
    # One owner moves nothing over data-parallel ranks; its halves exchange matrices.
    assert within.ranks.sent == [sum(bucket_bytes(within)) / 2] * 2


def test_owners_that_cannot_be_are_refused_as_at_the_start(tmp_path: Path) -> None:
    config = TINY | {"model_type": "llama"}
    target = {"_target_": "dmuown.automodel.DMuonConfig"}
    for size in ("pp", "ep"):
        with pytest.raises(OptionError, match=rf"^distributed\.{size}_size: must be 1 under DMuonConfig, got 2: "):
            planned(tmp_path, config, target, world_size=4, sizes={size: 2})


def test_all_that_owners_cannot_serve_is_told_at_once(tmp_path: Path) -> None:
    """Before whether the sizes divide the ranks, which they do not."""
    target = {"_target_": "dmuown.automodel.DMuonConfig"}
    with pytest.raises(
        OptionError, match=r"^distributed: pp_size must be 1 .* got 3: .*; cp_size must be 1 .* got 2: "
    ):
        planned(tmp_path, TINY | {"model_type": "llama"}, target, world_size=7, sizes={"pp": 3, "cp": 2})


def bucket_bytes(plan: JobPlan) -> list[float]:
    """What two halves of every matrix send: half of it there, and half of its update back."""
    return [row.count * math.prod(row.shape) * 2.0 * 2 / 2 for row in plan.routes if row.algorithm == "muown"]


def test_precision_of_the_policy_counts(tmp_path: Path) -> None:
    policy = {
        "defaults": {"route": "muon", "master_dtype": "bf16", "optim_dtype": "fp32"},
        "overrides": [{"role": ["norm", "embedding", "head"], "set": {"route": "adamw"}}],
    }
    target = {"_target_": "dmuown.automodel.DMuonConfig", "algorithm": "muon", "param_policy": policy}
    plan = planned(tmp_path, TINY | {"model_type": "llama"}, target, world_size=2)
    assert sum(plan.ranks.parameters) == plan.elements * 2
    matrices = sum(row.count * math.prod(row.shape) for row in plan.routes if row.algorithm == "muon")
    others = sum(row.count for row in plan.routes if row.algorithm == "adamw")
    assert sum(plan.ranks.state) == 4 * matrices + 8 * (plan.elements - matrices) + 4 * others


def test_fused_weights_show_their_blocks(tmp_path: Path) -> None:
    config = TINY | MOE | {"model_type": "qwen3_moe", "head_dim": 8}
    whole = planned(tmp_path, config, world_size=2)
    cut = planned(tmp_path, config, {"auto_split": True}, world_size=2)
    assert {row.blocks for row in whole.routes} == {""}
    fused = {row.pattern: row.blocks for row in cut.routes if row.blocks}
    assert fused == {"model.layers.*.mlp.experts.gate_and_up_projs": "gate 24, up 24"}
    assert cut.matrices == whole.matrices + 4 * 8  # each of 8 experts in 4 layers is two matrices
    # Two matrices of 24 x 32 for one of 48 x 32, iterated on the shorter side.
    steps = 5
    before, after = (2.0 * steps * (2 * s * s * long + s**3) for s, long in ((32, 48), (24, 32)))
    assert sum(cut.ranks.work) - sum(whole.ranks.work) == pytest.approx(4 * 8 * (2 * after - before))


def test_heads_and_guessed_blocks_are_planned(tmp_path: Path) -> None:
    llama = TINY | {"model_type": "llama", "intermediate_size": 96}
    heads = planned(tmp_path, llama, {"auto_split": True, "per_head": True}, world_size=2)
    assert {row.pattern.split(".")[-2]: row.blocks for row in heads.routes if row.blocks} == {
        "q_proj": "4 heads",
        "k_proj": "2 heads",
        "v_proj": "2 heads",
    }
    assert heads.matrices == 4 * (4 + 2 + 2 + 1 + 3)
    # Up and gate have three times as many rows as columns; down the reverse.
    guessed = planned(tmp_path, llama, {"qkv_heuristic": True}, world_size=2)
    assert {row.pattern.split(".")[-2]: row.blocks for row in guessed.routes if row.blocks} == {
        "gate_proj": "3 x 32",
        "up_proj": "3 x 32",
    }
    assert guessed.matrices == 4 * (4 + 1 + 2 * 3)


LORA = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": 4}


def adapted(folder: Path, config: dict[str, Any], peft: Any, **options: Any) -> JobPlan:
    file, recipe = write(folder, config)
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"peft": peft}))
    return plan_job(recipe, model_config=file, **{"world_size": 1, **options})


def test_adapters_are_planned(tmp_path: Path) -> None:
    config = TINY | {"model_type": "llama"}
    plan = adapted(tmp_path, config, LORA | {"lora_dtype": "float32"})
    rows = {row.pattern: row for row in plan.routes}
    assert rows["model.layers.*.mlp.up_proj.weight"].algorithm == "frozen"
    assert rows["model.layers.*.mlp.up_proj.lora_A.weight"].shape == (4, 32)
    assert rows["model.layers.*.mlp.up_proj.lora_B.weight"].shape == (48, 4)
    assert plan.matrices == 2 * 28
    # q, o: 32 + 32; k, v: 32 + 16; gate, up, down: 32 + 48; times rank 4, in 4 layers.
    trained = 4 * 4 * (2 * 64 + 2 * 48 + 3 * 80)
    assert plan.trainable == trained
    assert plan.ranks.gradients == [trained * 4]
    assert plan.ranks.parameters == [(plan.elements - trained) * 2 + trained * 4]
    assert adapted(tmp_path, config, LORA | {"match_all_linear": True}).matrices == 2 * 29
    assert adapted(tmp_path, config | {"tie_word_embeddings": True}, LORA | {"match_all_linear": True}).matrices == 58
    assert adapted(tmp_path, config, LORA | {"exclude_modules": ["*_proj"]}).matrices == 2
    one = adapted(tmp_path, config, LORA | {"target_modules": "*.layers.1.*.q_proj", "use_dora": True})
    assert one.matrices == 2
    assert one.trainable == 4 * 64 + 32
    tensor_parallel = adapted(tmp_path, config, LORA, world_size=2, sizes={"tp": 2})
    cuts = {row.pattern.removeprefix("model.layers.*."): row.split for row in tensor_parallel.routes}
    assert cuts["self_attn.q_proj.lora_A.weight"] == "tp x2 cuts axis 0"
    assert cuts["mlp.down_proj.lora_B.weight"] == "tp x2 cuts axis 1"


def test_adapters_of_experts(tmp_path: Path) -> None:
    config = TINY | MOE | {"model_type": "qwen3_moe", "head_dim": 8}
    plan = adapted(tmp_path, config, LORA | {"target_modules": ["*experts"], "moe_rank_scaling": True})
    shapes = {row.pattern.rpartition(".")[2]: row.shape for row in plan.routes if row.algorithm == "muown"}
    assert shapes == {
        "lora_gate_and_up_A": (8, 32, 2),
        "lora_gate_and_up_B": (8, 2, 48),
        "lora_down_A": (8, 24, 2),
        "lora_down_B": (8, 2, 32),
    }
    assert plan.matrices == 4 * 4 * 8


@pytest.mark.parametrize(
    ("peft", "key"),
    [
        (3, "peft"),
        ({"_target_": "my.Adapters"}, r"peft\._target_"),
        (LORA | {"dim": 0}, r"peft\.dim"),
        (LORA | {"target_modules": 4}, r"peft\.target_modules"),
        (LORA | {"target_modules": ["("]}, r"peft\.target_modules"),
        (LORA | {"target_modules": ["*.nowhere"]}, "peft: adapts no module"),
        (LORA | {"target_modules": ["*_proj"], "match_all_linear": True}, "peft: takes one of"),
        (LORA | {"lora_dtype": "int3"}, r"peft\.lora_dtype"),
        (LORA | {"use_dora": "much"}, r"peft\.use_dora"),
    ],
)
def test_wrong_adapters(tmp_path: Path, peft: Any, key: str) -> None:
    with pytest.raises(OptionError, match=f"^{key}"):
        adapted(tmp_path, TINY | {"model_type": "llama"}, peft)


def test_a_recipe_without_a_model_says_what_to_write(tmp_path: Path) -> None:
    _, recipe = write(tmp_path, TINY)
    with pytest.raises(OptionError, match=r"^model\.pretrained_model_name_or_path: is missing.*--model-config"):
        plan_job(recipe, world_size=1)


def test_pipeline_stages_hold_their_layers(tmp_path: Path) -> None:
    plan = planned(tmp_path, TINY | {"model_type": "llama"}, world_size=4, sizes={"pp": 2})
    assert len(plan.ranks.parameters) == 4
    assert plan.matrices == 28
    assert sum(plan.ranks.parameters) == plan.elements * 2


def test_70b_on_512_ranks_within_ten_seconds_and_two_gibibytes(tmp_path: Path) -> None:
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = planned(tmp_path, LLAMA_70B, world_size=512)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 1024**2  # KiB
    assert plan.elements == 70_553_706_496
    assert plan.matrices == 560
    # Norms of 8192 elements are cut by 512 ranks as evenly as the matrices: bf16, a 512th each.
    assert plan.ranks.parameters[0] == pytest.approx(plan.elements * 2 / 512, rel=1e-2)
    # Whole matrices move: a matrix and its update, in bf16, but for the owner's own part.
    matrices = sum(row.count * math.prod(row.shape) for row in plan.routes if row.algorithm == "muown")
    assert sum(plan.ranks.sent) == pytest.approx(2 * 2 * matrices * 511 / 512, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"tp": 3}, "--world-size"),
        ({"replicas": 3}, "--replicas"),
        ({"replicas": 8}, "--replicas"),  # which would leave each replica one shard
        ({"replicas": 4, "cp": 4}, "--replicas"),
        ({"ep": 3}, "--ep"),
    ],
)
def test_sizes_that_do_not_divide(tmp_path: Path, sizes: dict[str, int], key: str) -> None:
    with pytest.raises(OptionError) as raised:
        planned(tmp_path, TINY | {"model_type": "llama"}, world_size=8, sizes=sizes)
    assert raised.value.subject == key


def test_a_fixed_number_of_data_parallel_ranks_must_be_what_is_left(tmp_path: Path) -> None:
    file, recipe = write(tmp_path, TINY | {"model_type": "llama"})
    fixed = ["--distributed.dp_size=2", "--distributed.tp_size=2"]
    with pytest.raises(OptionError, match=r"^distributed\.dp_size: must be 4 for 8 processes, got 2"):
        plan_job(recipe, fixed, world_size=8, model_config=file)
    assert plan_job(recipe, fixed, world_size=4, model_config=file).cluster.data_parallel == 2


def test_ranks_that_cannot_share_a_step_are_noted(tmp_path: Path) -> None:
    """Seven ranks have a mesh, with parameters cut unevenly; the samples of a step they cannot share."""
    file, recipe = write(tmp_path, TINY | {"model_type": "llama"})
    step = ["--step_scheduler.global_batch_size=16", "--step_scheduler.local_batch_size=2"]
    notes = {ranks: plan_job(recipe, step, world_size=ranks, model_config=file).notes for ranks in (7, 8)}
    wrong = "step_scheduler.global_batch_size: 16 is no multiple of 2 (local_batch_size) x 7 data-parallel ranks"
    assert [note for note in notes[7] if "step_scheduler" in note] == [f"{wrong}: the job would not start"]
    assert not [note for note in notes[8] if "step_scheduler" in note]


def test_what_cannot_be_planned_says_why(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"model_type.*--deep"):
        planned(tmp_path, TINY | {"model_type": "gpt2"}, world_size=1)
    with pytest.raises(OptionError, match=r"optimizer\.lr"):
        planned(tmp_path, TINY | {"model_type": "llama"}, {"lr": -1}, world_size=1)
    with pytest.raises(OptionError, match=r"hidden_size.*missing"):
        planned(
            tmp_path,
            {key: value for key, value in TINY.items() if key != "hidden_size"} | {"model_type": "llama"},
            world_size=1,
        )


def test_the_command_prints_a_table_and_json(tmp_path: Path) -> None:
    file, recipe = write(tmp_path, TINY | {"model_type": "llama"})
    arguments = ["plan", str(recipe), "--model-config", str(file), "--world-size", "2"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "28 matrices orthogonalized a step" in shown.output
    assert "shard x2 cuts axis 0" in shown.output
    # With underscores too: what is no option would be taken for a key of the YAML, and one rank be planned.
    arguments = ["plan", str(recipe), "--model_config", str(file), "--world_size=2"]
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--ranks", "--optimizer.lr", "2e-3"]).stdout)
    assert told["matrices"] == 28
    assert len(told["ranks"]["sent"]) == 2
    assert {row["lr"] for row in told["routes"]} == {2e-3}
