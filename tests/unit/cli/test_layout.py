"""`dmuown check` and `dmuown plan` of another layout of the ranks than the YAML's."""

from __future__ import annotations

import copy
import itertools
import json
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dmuown.automodel.checks import Report, check_config
from dmuown.automodel.checks.document import SIZES, read_document
from dmuown.automodel.planned import plan_job
from dmuown.automodel.planned.cluster import stages
from dmuown.automodel.shapes import model_parameters
from dmuown.cli import app
from dmuown.commands.check import check
from dmuown.commands.plan import plan
from dmuown.errors import OptionError
from tests.unit.cli.recipes import SHIPPED, load

SMOLLM = next(file for file in SHIPPED if file.stem == "smollm2_muown")
OWNERS = next(file for file in SHIPPED if "dmuon" in file.stem)


def prepared(folder: Path, shipped: Path = SMOLLM, **model: int | None) -> dict[str, Any]:
    """A recipe that every layout of eight ranks can share, of a model that they can divide; nothing is frozen."""
    recipe = load(shipped, folder)
    file = folder / "model/config.json"
    content = json.loads(file.read_text()) | {"num_attention_heads": 8, "num_key_value_heads": 8} | model
    file.write_text(json.dumps(content))
    recipe.pop("freeze_config", None)
    recipe["distributed"] = {"strategy": "fsdp2", "pipeline": {}}
    recipe["step_scheduler"] |= {"global_batch_size": 8, "local_batch_size": 1}
    return recipe


def write(recipe: dict[str, Any], folder: Path) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return file


def checked(recipe: dict[str, Any], folder: Path, **options: Any) -> Report:
    return check_config(write(recipe, folder), **options)


def told(report: Report) -> dict[str, str]:
    return {problem.key: problem.rule for problem in report.errors}


def test_check_takes_the_options_of_plan_in_the_same_words() -> None:
    known, planned = (typing.get_type_hints(command, include_extras=True) for command in (check, plan))
    shared = set(SIZES) & set(planned)
    assert shared == {"tp", "ep", "pp", "replicas"}
    for name in shared:
        assert known[name] is planned[name], name
        (option,) = planned[name].__metadata__
        assert option.min == 1
        assert SIZES[name] in option.help


#: What only shows in a layout, on eight ranks: what the recipe has besides, the layout, key and rule of the error.
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, int], str, str]] = {
    "tp does not divide": (
        {"num_attention_heads": 6, "num_key_value_heads": 6},
        {"tp": 3},
        "distributed.tp_size",
        "= 3 does not divide 8 processes",
    ),
    "their product does not divide": ({}, {"tp": 4, "pp": 4}, "distributed.tp_size", "= 16 does not divide 8"),
    "replicas do not divide": ({}, {"replicas": 3}, "distributed.dp_replicate_size", "3 does not divide 8 data-"),
    "replicas of one shard": ({}, {"replicas": 4, "tp": 2}, "distributed.dp_replicate_size", "less than the 4 data-"),
    "ep does not divide a stage": ({}, {"pp": 2, "ep": 8}, "distributed.ep_size", "8 does not divide 4 ranks"),
    "ranks that samples do not divide": (
        {"step_scheduler.global_batch_size": 4},
        {"tp": 1},
        "step_scheduler.global_batch_size",
        "4 is no multiple of 1 (local_batch_size) x 8 data-parallel ranks",
    ),
    "a fixed number of ranks": ({"distributed.dp_size": 8}, {"tp": 2}, "distributed.dp_size", "must be 4 for 8"),
    "stages without a section": ({"distributed.pipeline": None}, {"pp": 2}, "distributed.pp_size", "needs a section"),
    "heads": (
        {"num_attention_heads": 12, "num_key_value_heads": 6},
        {"tp": 4},
        "distributed.tp_size",
        "4 does not divide the model's 6 num_key_value_heads",
    ),
    "heads that are not grouped": (
        {"num_attention_heads": 6, "num_key_value_heads": None},
        {"tp": 4},
        "distributed.tp_size",
        "4 does not divide the model's 6 num_attention_heads",
    ),
    "layers": ({"num_hidden_layers": 3}, {"pp": 4}, "distributed.pp_size", "4 stages are more than the 3 layers"),
    "a stage without anything to train": (
        {"freeze_config": {"freeze_modules": [{"path": "model"}], "unfreeze_modules": [{"glob": "model.layers.2*"}]}},
        {"pp": 4},
        "distributed.pp_size",
        "4 stages leave stage 1 nothing to train: all of it is frozen",
    ),
    "a strategy without replicas": (
        {"distributed.strategy": "ddp"},
        {"replicas": 2},
        "distributed.dp_replicate_size",
        "must be 1 with strategy ddp, got 2",
    ),
    "a strategy without stages": (
        {"distributed.strategy": "megatron_fsdp"},
        {"pp": 2},
        "distributed.pp_size",
        "must be 1 with strategy megatron_fsdp, got 2",
    ),
    "owners without stages": ({"owners": True}, {"pp": 2}, "distributed.pp_size", "must be 1 under DMuonConfig, got 2"),
    "owners without experts": ({"owners": True}, {"ep": 2}, "distributed.ep_size", "must be 1 under DMuonConfig"),
}


def spoilt(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    shipped = OWNERS if changes.get("owners") else SMOLLM
    recipe = prepared(folder, shipped, **{key: value for key, value in changes.items() if key.startswith("num_")})
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name and value is None:
            recipe[section].pop(name, None)
        elif name:
            recipe[section][name] = value
        elif isinstance(value, dict):
            recipe[section] = value
    return recipe


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_depends_on_the_layout_is_checked_in_the_layout_that_is_given(case: str, tmp_path: Path) -> None:
    changes, sizes, key, rule = LAYOUTS[case]
    recipe = spoilt(tmp_path, changes)
    found = told(checked(recipe, tmp_path, world_size=8, sizes=sizes))
    assert list(found) == [key]
    assert rule in found[key]
    # The YAML may be as wrong, and the option right; what it says of the YAML is what it says of the option.
    named = {SIZES[name]: size for name, size in sizes.items()}
    wrong = copy.deepcopy(recipe)
    wrong["distributed"] |= named
    assert told(checked(wrong, tmp_path, world_size=8)) == found
    if case == "ranks that samples do not divide":
        right = {"tp": 2}
    elif case == "a fixed number of ranks":
        right = {"tp": 1}
    else:
        right = dict.fromkeys(sizes, 1)
    assert told(checked(wrong, tmp_path, world_size=8, sizes=right)) == {}


def test_stages_that_are_cut_otherwise_are_not_judged(tmp_path: Path) -> None:
    """How many there are, and of which layers, is then another rule's matter."""
    changes = LAYOUTS["a stage without anything to train"][0]
    for pipeline, judged in (
        ({"layers_per_stage": 8}, False),
        ({"module_fqns_per_model_part": [["model"]]}, False),
        ({"pp_schedule": "Interleaved1F1B"}, False),
        ({"pp_schedule": "1F1B"}, True),
    ):
        recipe = spoilt(tmp_path, changes | {"distributed.pipeline": pipeline})
        assert bool(told(checked(recipe, tmp_path, world_size=8, sizes={"pp": 4}))) is judged, pipeline


def test_stages_are_frozen_for_optimizers_that_are_built_of_each(tmp_path: Path) -> None:
    """torch's classes are the host's matter, and what adapters train is not known without them."""
    recipe = spoilt(tmp_path, LAYOUTS["a stage without anything to train"][0])
    recipe["optimizer"] = {"_target_": "torch.optim.AdamW", "lr": 1e-3}
    assert told(checked(recipe, tmp_path, world_size=8, sizes={"pp": 4})) == {}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_stages_are_the_hosts(count: int) -> None:
    """The first stages have one layer more where they do not divide."""
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    for depth in range(count, 12):
        entries = model_parameters(config | {"vocab_size": 8, "num_hidden_layers": depth, "num_key_value_heads": 2})
        parts = stages(entries, count)
        layers = [sorted({int(e.name.split(".")[2]) for e in part if ".layers." in e.name}) for part in parts]
        assert [len(part) for part in layers] == [depth // count + (index < depth % count) for index in range(count)]
        assert [layer for part in layers for layer in part] == list(range(depth))
        assert [entry.name for part in parts for entry in part] == [entry.name for entry in entries]
    with pytest.raises(OptionError, match=f"^--pp: {count + 1} stages are more than the {count} layers"):
        config |= {"vocab_size": 8, "num_hidden_layers": count, "num_key_value_heads": 2}
        stages(model_parameters(config), count + 1)


def test_check_refuses_the_layouts_that_plan_refuses_and_no_others(tmp_path: Path) -> None:
    file = write(prepared(tmp_path, num_hidden_layers=2), tmp_path)
    refused = 0
    for tp, ep, pp, replicas in itertools.product((1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 3, 4)):
        sizes = {"tp": tp, "ep": ep, "pp": pp, "replicas": replicas}
        found = told(check_config(file, world_size=8, sizes=sizes))
        try:
            plan_job(file, world_size=8, sizes=sizes)
        except OptionError:
            refused += 1
            assert found, sizes
            assert all(key.startswith("distributed.") for key in found), found
        else:
            assert not found, (sizes, found)
    assert 0 < refused < 72


def test_sizes_are_overrides_that_win_and_are_on_no_line(tmp_path: Path) -> None:
    recipe = prepared(tmp_path)
    recipe["distributed"]["tp_size"] = 2
    file = write(recipe, tmp_path)
    document = read_document(file, ["--distributed.tp_size=4"], {"tp": 8, "pp": None, "replicas": 2})
    assert document.get("distributed.tp_size") == 8
    assert document.get("distributed.dp_replicate_size") == 2
    assert not document.has("distributed.pp_size")
    assert document.overridden == ("distributed.tp_size", "distributed.dp_replicate_size")  # which --deep hands on
    # A line of the file would show a value that is not the one at fault.
    (ours,) = check_config(file, world_size=4, sizes={"tp": 8}).errors
    (theirs,) = check_config(file, world_size=3).errors
    assert (ours.key, ours.line) == ("distributed.tp_size", None)
    assert theirs.line is not None
    assert "tp_size: 2" in file.read_text().splitlines()[theirs.line - 1]
    with pytest.raises(OptionError, match=r"^replica: is no size of a layout\. Did you mean 'replicas'"):
        read_document(file, (), {"replica": 2})


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--optimizer.param_policy", "{'defualts': {}}"]])
def test_what_an_override_got_wrong_is_on_no_line(arguments: list[str], tmp_path: Path) -> None:
    recipe = prepared(tmp_path)
    recipe["optimizer"]["param_policy"] = {"defaults": {"route": "adamw"}}
    (problem,) = check_config(write(recipe, tmp_path), arguments).errors
    assert problem.line is None
    (at_fault, _) = check_config(tmp_path / "recipe.yaml", arguments).text()
    assert at_fault.startswith(f"{tmp_path / 'recipe.yaml'}: error: {arguments[0].removeprefix('--')}")


def test_the_command_checks_the_layout(tmp_path: Path) -> None:
    file = str(write(prepared(tmp_path), tmp_path))
    run = CliRunner().invoke
    good = ["check", file, "--world-size", "8", "--strict", "--tp", "2", "--pp", "2", "--ep", "2", "--replicas", "1"]
    assert run(app, good).exit_code == 0
    for option, size, key in (
        ("--tp", "16", "tp_size"),
        ("--pp", "16", "pp_size"),
        ("--ep", "3", "ep_size"),
        ("--replicas", "8", "dp_replicate_size"),
    ):
        bad = run(app, ["check", file, "--world_size", "8", option, size, "--json"])
        assert bad.exit_code == 1
        assert [error["key"] for error in json.loads(bad.stdout)["errors"]] == [f"distributed.{key}"]
    assert run(app, ["check", file, "--tp", "0"]).exit_code == 2


@pytest.mark.parametrize("value", ["fsdp2", "[1, 2]", "3", "false"])
def test_a_key_within_a_value_is_refused_and_not_put_in_its_place(value: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"distributed: {value}\noptimizer:\n")
    for arguments, sizes in ((["--distributed.tp_size", "2"], {}), ([], {"tp": 2})):
        with pytest.raises(OptionError, match=r"distributed: must be a section of keys for distributed\.tp_size"):
            read_document(file, arguments, sizes)
    assert read_document(file, ["--optimizer.lr", "0.1"]).config["optimizer"] == {"lr": 0.1}  # an empty section
