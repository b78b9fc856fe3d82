"""Bytes and dtypes of every transfer that `dmuown plan` shows under the ownership runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from dmuown.automodel.checks.document import read_document
from dmuown.automodel.planned import JobPlan, plan_job
from dmuown.automodel.planned.ownership import mixed_precision
from dmuown.automodel.planned.transfers import TransferRow, transfer_rows
from dmuown.cli import app
from dmuown.errors import OptionError

#: Norms of 20 elements, which fill no multiple of 16 bytes in bfloat16; 33 tokens, which two ranks cut unevenly.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 33,
    "tie_word_embeddings": False,
}
MATRICES = tuple(
    f"{name}.weight"
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
)
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
BF16, FP32 = torch.bfloat16, torch.float32


def write(folder: Path, optimizer: dict[str, Any] | None = None, **sections: Any) -> list[str]:
    """A recipe; returns the arguments of the command that plans it."""
    model, recipe = folder / "config.json", folder / "recipe.yaml"
    model.write_text(json.dumps(CONFIG))
    section = {"_target_": "dmuown.automodel.DMuonConfig", "lr": 1e-3} | (optimizer or {})
    recipe.write_text(yaml.safe_dump({"model": {"torch_dtype": "float32"}, "optimizer": section} | sections))
    return ["plan", str(recipe), "--model-config", str(model)]


def planned(
    folder: Path, optimizer: dict[str, Any] | None = None, *, ranks: int = 2, tp: int = 1, **sections: Any
) -> tuple[JobPlan, list[TransferRow]]:
    _, recipe, _, model = write(folder, optimizer, **sections)
    plan = plan_job(recipe, world_size=ranks, sizes={"tp": tp}, model_config=Path(model))
    (owned,) = plan.ownership
    return plan, transfer_rows(owned.plan)


def test_each_transfer_has_the_bytes_of_its_buffers_in_its_dtypes(tmp_path: Path) -> None:
    """By hand, for two ranks, each of which owns a layer, under the host's own precision."""
    plan, (embedding, layers, norm, head) = planned(tmp_path)
    # A layer in bfloat16, each parameter from a multiple of 8 elements on: q, o 20 x 20; k, v 10 x 20; gate, up,
    # down 28 x 20; two norms of 20, which take 24: 2 * 400 + 2 * 200 + 3 * 560 + 2 * 24 = 2928 elements of 2 bytes.
    assert (layers.fetch_bytes, layers.param_dtype) == (5856, BF16)
    # Gradients lie in the same places in float32, and after them a flag for each of the nine: (2928 + 9) * 4.
    assert (layers.reduce_bytes, layers.grad_dtype) == (11748, FP32)
    assert (layers.boundary, layers.count, layers.kind, layers.owners) == ("model.layers.*", 2, "owner", (0, 1))
    assert layers.parameters == (*MATRICES, *NORMS)
    # Of 33 rows a rank has 17, the second one of them empty: 17 * 20 elements a rank, with a flag a rank when reduced.
    for shards, name in ((embedding, "model.embed_tokens"), (head, "lm_head")):
        assert (shards.fetch_bytes, shards.reduce_bytes) == (2 * 17 * 20 * 2, 2 * (17 * 20 + 1) * 4) == (1360, 2728)
        assert (shards.boundary, shards.parameters, shards.owners) == (name, ("weight",), ())
        assert (shards.count, shards.kind, shards.param_dtype, shards.grad_dtype) == (1, "shards", BF16, FP32)
    # One alone is not padded: 20 * 2, and (20 + 1) * 4.
    assert (norm.boundary, norm.fetch_bytes, norm.reduce_bytes, len(norm.owners)) == ("model.norm", 40, 84, 1)
    # A step fetches each twice and reduces it once.
    (totals,) = plan.to_dict()["transfers"]
    assert totals == {
        "all_gather": {"collectives": 4, "bytes": 4 * 1360},
        "reduce_scatter": {"collectives": 2, "bytes": 2 * 2728},
        "broadcast": {"collectives": 6, "bytes": 2 * (2 * 5856 + 40)},
        "reduce": {"collectives": 3, "bytes": 2 * 11748 + 84},
    }


def test_parameters_of_unlike_dtypes_are_unlike_transfers(tmp_path: Path) -> None:
    policy = {
        "defaults": {"route": "adamw", "param_dtype": "fp32", "grad_dtype": "fp32"},
        "overrides": [{"role": "matrix", "set": {"route": "muon", "param_dtype": "bf16", "grad_dtype": "bf16"}}],
    }
    _, rows = planned(tmp_path, {"param_policy": policy})
    found = {(row.param_dtype, row.grad_dtype): row for row in rows if row.boundary == "model.layers.*"}
    assert {dtypes: row.parameters for dtypes, row in found.items()} == {(BF16, BF16): MATRICES, (FP32, FP32): NORMS}
    # 2 * 400 + 2 * 200 + 3 * 560 = 2880 elements, and seven flags; all in bfloat16.
    assert (found[BF16, BF16].fetch_bytes, found[BF16, BF16].reduce_bytes) == (2880 * 2, 2887 * 2)
    # Two norms of 20 elements, a multiple of the 4 that fill 16 bytes, and two flags.
    assert (found[FP32, FP32].fetch_bytes, found[FP32, FP32].reduce_bytes) == (40 * 4, 42 * 4)


def test_frozen_parameters_are_fetched_only(tmp_path: Path) -> None:
    _, rows = planned(tmp_path, freeze_config={"freeze_modules": [{"path": "model.layers.0"}]})
    found = {row.boundary: (row.count, row.fetch_bytes, row.reduce_bytes) for row in rows}
    assert found["model.layers.0"] == (1, 5856, 0)
    assert found["model.layers.1"] == (1, 5856, 11748)


def test_tensor_parallel_ranks_move_their_parts(tmp_path: Path) -> None:
    _, rows = planned(tmp_path, ranks=4, tp=2)
    layers = next(row for row in rows if row.boundary == "model.layers.*")
    # q 10 x 20; k, v 5 x 20, which take 104; o 20 x 10; gate, up 14 x 20; down 20 x 14; norms whole, as above.
    elements = 200 + 2 * 104 + 200 + 3 * 280 + 2 * 24
    assert (layers.fetch_bytes, layers.reduce_bytes) == (elements * 2, (elements + 9) * 4)
    # Of 17 tokens of the first, two data-parallel ranks have 9 each.
    assert rows[0].fetch_bytes == 2 * 9 * 20 * 2


def test_one_rank_transfers_nothing(tmp_path: Path) -> None:
    _, rows = planned(tmp_path, ranks=1)
    assert rows == []
    assert "Transfers" not in CliRunner().invoke(app, write(tmp_path)).stdout


PRECISION: dict[str, tuple[dict[str, Any], tuple[torch.dtype | None, torch.dtype]]] = {
    "none given: the host's own": ({}, (BF16, FP32)),
    "null, which is the same": ({"mp_policy": None}, (BF16, FP32)),
    "one given": ({"mp_policy": {"param_dtype": "torch.float16", "reduce_dtype": "bfloat16"}}, (torch.float16, BF16)),
    "half of one": ({"mp_policy": {"reduce_dtype": "float32"}}, (None, FP32)),
}


@pytest.mark.parametrize("case", PRECISION)
def test_the_hosts_mixed_precision_is_that_of_transfers(case: str, tmp_path: Path) -> None:
    distributed, (compute, reduce) = PRECISION[case]
    _, rows = planned(tmp_path, distributed=distributed)
    assert {(row.param_dtype, row.grad_dtype) for row in rows} == {(compute or FP32, reduce)}


@pytest.mark.parametrize("case", PRECISION)
def test_the_hosts_mixed_precision_is_as_the_host_reads_it(case: str, tmp_path: Path) -> None:
    pytest.importorskip("nemo_automodel", reason="the host is not installed")
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.recipes._dist_utils import parse_distributed_section

    distributed = dict(PRECISION[case][0])
    if distributed.get("mp_policy"):
        distributed["mp_policy"] = {
            "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
            **distributed["mp_policy"],
        }
    _, recipe, *_ = write(tmp_path, distributed=distributed)
    section = parse_args_and_load_config(recipe, argv=[]).get("distributed")
    policy = parse_distributed_section(section.to_dict())["strategy_config"].mp_policy
    assert mixed_precision(read_document(recipe)) == (policy.param_dtype, policy.reduce_dtype)


@pytest.mark.parametrize(
    ("policy", "key"), [(3, "distributed.mp_policy"), ({"param_dtype": "int3"}, "distributed.mp_policy.param_dtype")]
)
def test_a_wrong_mixed_precision_is_refused(policy: Any, key: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as raised:
        planned(tmp_path, distributed={"mp_policy": policy})
    assert raised.value.subject == key


def table(output: str) -> dict[str, list[str]]:
    """Cells of the table of transfers, by where they are."""
    lines = iter(output.splitlines())
    for line in lines:
        if line.startswith("Transfers: "):
            break
    rows: dict[str, list[str]] = {}
    for line in lines:
        if not line:
            return rows
        place, *cells = (cell.strip() for cell in line.split("  ") if cell.strip())
        rows[place] = cells
    raise AssertionError("no table of transfers")


def test_the_command_prints_them(tmp_path: Path) -> None:
    arguments = [*write(tmp_path), "--world-size", "2"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert "Transfers: bytes of one buffer; a micro-batch fetches each twice and reduces it once" in shown
    rows = table(shown)
    some = "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj and 6 more"
    assert rows["at"] == ["parameters", "from", "transfers", "fetch", "dtype", "reduce", "dtype"]
    # 5856 / 1024 and 11748 / 1024.
    assert rows["model.layers.*"] == [some, "2 owners", "2", "5.72 KiB", "bfloat16", "11.47 KiB", "float32"]
    assert rows["model.norm"][2:] == ["1", "40 B", "bfloat16", "84 B", "float32"]
    assert rows["lm_head"] == ["weight", "shards", "1", "1.33 KiB", "bfloat16", "2.66 KiB", "float32"]
    kept = CliRunner().invoke(app, [*arguments, "--optimizer.reshard_after_forward", "false"]).stdout
    assert "a micro-batch fetches each once and reduces it once" in kept
    frozen = CliRunner().invoke(app, [*arguments, "--freeze_config.freeze_modules", "[{'path': 'model.norm'}]"]).stdout
    assert table(frozen)["model.norm"][2:] == ["1", "40 B", "bfloat16", "frozen", "-"]
    halves = CliRunner().invoke(app, [*arguments[:-1], "4", "--tp", "2"]).stdout
    assert halves.count("of each of 2 tensor-parallel ranks") == 2


def test_json_has_every_transfer(tmp_path: Path) -> None:
    (plan,) = json.loads(CliRunner().invoke(app, [*write(tmp_path), "--world-size", "2", "--json"]).stdout)["ownership"]
    found = {transfer["boundaries"][0]: transfer for transfer in plan["transfers"]}
    assert list(found) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    layer = found["model.layers.1"]
    assert (layer["fetch_bytes"], layer["param_dtype"], layer["reduce_bytes"], layer["grad_dtype"]) == (
        5856,
        "bfloat16",
        11748,
        "float32",
    )
    assert layer["params"] == [f"model.layers.1.{name}" for name in (*MATRICES, *NORMS)]
    assert layer["owner"] == plan["owners"]["model.layers.1.mlp.up_proj.weight"]


def test_layers_that_are_treated_unlike_are_told_apart(tmp_path: Path) -> None:
    """More owners than layers: who has which parameters together differs between them."""
    plan, rows = planned(tmp_path, ranks=3)
    (owned,) = plan.ownership
    layers = [row for row in rows if row.boundary.startswith("model.layers.")]
    assert sum(row.count for row in rows) == len(owned.plan.transfers)
    assert sum(len(row.parameters) * row.count for row in layers) == 2 * 9
    for number in (0, 1):
        of_layer = [
            row for row in layers if row.boundary in (f"model.layers.{number}", "model.layers.*", "model.layers.0-1")
        ]
        assert sorted(name for row in of_layer for name in row.parameters) == sorted((*MATRICES, *NORMS))
