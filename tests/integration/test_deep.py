"""`check --deep` asks the host and `plan --deep` asks transformers; both agree with what is done without them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from dmuown.cli import app
from tests.integration.tiny import MATRICES, recipe, write_checkpoint, write_data, write_recipe
from tests.unit.cli.recipes import SHIPPED, load

# The first of them imports the host: 10 s on a machine at rest.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_checkpoint(folder / "model")
    write_data(folder / "train.jsonl", range(8))
    write_data(folder / "validation.jsonl", range(8, 12))
    return folder


def dmuown(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_host_agrees_with_a_good_recipe(assets: Path) -> None:
    file = write_recipe(assets / "good.yaml", recipe(assets, assets / "run"))
    checked = dmuown("check", str(file), "--deep", "--optimizer.scalar_opt", "lion", "--optimizer.lr", "1e-3")
    assert checked.exit_code == 0, checked.output
    assert checked.output == f"{file}: no errors, no warnings\n"
    assert logging.root.manager.disable == logging.NOTSET, "the log is as it was"
    assert not (assets / "run").exists(), "nothing is trained"


@pytest.mark.parametrize("shipped", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_the_host_reads_every_shipped_recipe(shipped: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(load(shipped, tmp_path), sort_keys=False))
    checked = dmuown("check", str(file), "--deep")
    assert checked.exit_code == 0, checked.output
    assert checked.output == f"{file}: no errors, no warnings\n"


def test_what_only_the_host_refuses_is_told_by_section(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_automodel.recipes._typed_config import RecipeConfig

    def refuse(self: Any) -> None:
        raise ValueError("no such style")

    monkeypatch.setattr(RecipeConfig, "lr_scheduler", property(refuse))
    file = write_recipe(assets / "bad.yaml", recipe(assets, assets / "run"))
    assert dmuown("check", str(file)).exit_code == 0
    told = dmuown("check", str(file), "--deep", "--json")
    assert told.exit_code == 1
    (problem,) = json.loads(told.stdout)["errors"]
    assert problem["key"] == "lr_scheduler"
    assert "no such style" in problem["message"]


def test_a_recipe_with_errors_is_not_loaded(assets: Path) -> None:
    file = write_recipe(assets / "spoilt.yaml", recipe(assets, assets / "run", mu=2))
    told = dmuown("check", str(file), "--deep")
    assert told.exit_code == 1
    assert "optimizer.mu" in told.output
    assert "1 error" in told.output


def test_the_plan_is_that_of_the_known_shapes(assets: Path) -> None:
    file = write_recipe(assets / "plan.yaml", recipe(assets, assets / "run"))
    ours, theirs = (
        json.loads(dmuown("plan", str(file), "--world-size", "4", "--json", *deep).stdout) for deep in ((), ("--deep",))
    )
    assert theirs["matrices"] == MATRICES
    assert theirs == ours


def test_the_plan_knows_any_architecture(tmp_path: Path) -> None:
    """GPT-2 stores its weights [input, output], and shapes of it are not known without transformers."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 16})
    )
    section = {"_target_": "dmuown.automodel.MuownConfig", "lr": 1e-3}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"model": {"torch_dtype": "bfloat16"}, "optimizer": section}))
    arguments = ("plan", str(file), "--model-config", str(tmp_path / "config.json"), "--world-size", "2", "--json")
    assert "--deep" in str(dmuown(*arguments).exception), "it is told what to do"
    told = json.loads(dmuown(*arguments, "--deep").stdout)
    assert told["matrices"] == 8
    block = 12 * 32 * 32 + 9 * 32 + 4 * 32  # weights, biases, norms
    assert told["parameters"] == 2 * block + 2 * 32 + (96 + 16) * 32


def test_a_model_that_cannot_be_built_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"optimizer": {"_target_": "dmuown.automodel.MuownConfig", "lr": 1e-3}}))
    named = dmuown("plan", str(file), "--deep", "--model-config", str(tmp_path / "config.json"))
    assert "transformers cannot build it" in str(named.exception)
    unnamed = dmuown("plan", str(file), "--deep")
    assert "model.pretrained_model_name_or_path" in str(unnamed.exception)


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "vocab_size": 96,
    "head_dim": 8,
    "pad_token_id": 0,
}
SELECTIONS: list[dict[str, Any]] = [
    {},
    {"match_all_linear": True},
    {"exclude_modules": ["*.mlp.*", "lm_head"]},
    {"target_modules": ["*.layers.1.*.q_proj", "*.layers.1.*"], "use_dora": True},
    {"target_modules": ["*layers.1.*"]},
    {"target_modules": ["*layers.1*"]},
    {"target_modules": ["model.layers.0.mlp.up_proj", "*self_attn.k.*"]},
    {"target_modules": [".*v_proj", "lm_*"]},
]


@pytest.mark.parametrize("selection", SELECTIONS, ids=str)
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_planned_adapters_are_those_of_the_host(family: str, tied: bool, selection: dict[str, Any]) -> None:
    import torch
    from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules
    from transformers import AutoConfig, AutoModelForCausalLM

    from dmuown.automodel.planned.adapters import TARGET, Adapters, linear_modules
    from dmuown.automodel.shapes import model_parameters
    from dmuown.policy.roles import describe_parameters

    config = {**TINY, "model_type": family, "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    apply_lora_to_linear_modules(model, PeftConfig(dim=4, **selection))
    theirs = {entry.name: entry for entry in describe_parameters(model, trainable_only=False)}
    entries = model_parameters(config)
    adapters = Adapters.read({"_target_": TARGET, "dim": 4, **selection})
    found, added = adapters.add(entries, linear_modules(entries))
    assert [entry.name for entry in found] == list(theirs)
    assert added == {name for name, entry in theirs.items() if entry.parameter.requires_grad}
    for entry in found:
        other = theirs[entry.name]
        assert (entry.parameter.shape, entry.role) == (other.parameter.shape, other.role), entry.name
