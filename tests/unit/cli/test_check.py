"""`dmuown check`: every spoilt recipe ends in one clear message that names the key."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dmuown.automodel.checks import Report, check_config
from dmuown.automodel.planned import plan_job
from dmuown.cli import app, main
from dmuown.errors import DmuownError
from tests.unit.cli.recipes import SHIPPED, load, mutations

NAMES = [file.stem for file in SHIPPED]


def checked(recipe: dict[str, Any], folder: Path, **options: Any) -> Report:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return check_config(file, **options)


@pytest.fixture(params=SHIPPED, ids=NAMES)
def shipped(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_shipped_recipes_are_clean(shipped: Path, tmp_path: Path) -> None:
    report = checked(load(shipped, tmp_path), tmp_path)
    assert list(report.text()) == [f"{tmp_path / 'recipe.yaml'}: no errors, no warnings"]


def assert_told(recipe: dict[str, Any], part: slice, folder: Path) -> int:
    """Every mutation is one error (or, where the host has a default, a warning) at its key, on a line or on none."""
    known = list(mutations(recipe))
    for mutation in known[part]:
        report = checked(mutation.recipe, folder)
        found = [problem for problem in report.problems if problem.key == mutation.key]
        assert found, (mutation.kind, mutation.key, report.problems)
        assert len(report.errors) <= 1, (mutation.kind, mutation.key, report.errors)
        if mutation.kind in ("misspelled", "type", "range"):
            assert report.errors, (mutation.kind, mutation.key, report.problems)
            assert found[0].line is not None
        assert found[0].rule
    return len(known[part])


def test_mutations(shipped: Path, tmp_path: Path) -> None:
    """A third of them for each recipe, another third for the next one."""
    assert assert_told(load(shipped, tmp_path), slice(SHIPPED.index(shipped) % 3, None, 3), tmp_path) >= 60


@pytest.mark.slow
def test_all_mutations(shipped: Path, tmp_path: Path) -> None:
    assert assert_told(load(shipped, tmp_path), slice(None), tmp_path) >= 180


def test_misspelled_keys_are_told_the_nearest_name_and_the_line(tmp_path: Path) -> None:
    recipe = load(SHIPPED[-1], tmp_path)
    recipe["step_scheduler"]["max_stesp"] = recipe["step_scheduler"].pop("max_steps")
    report = checked(recipe, tmp_path)
    (problem,) = report.errors
    assert problem.key == "step_scheduler.max_stesp"
    assert next(iter(report.text())).endswith(
        "step_scheduler.max_stesp: is no key of step_scheduler. Did you mean 'max_steps'?"
    )
    lines = (tmp_path / "recipe.yaml").read_text().splitlines()
    assert problem.line is not None
    assert "max_stesp" in lines[problem.line - 1]


def test_all_errors_are_found_at_once(tmp_path: Path) -> None:
    recipe = load(next(file for file in SHIPPED if "muown" in file.stem), tmp_path)
    recipe["optimizer"] |= {"lr": -1, "mu": 2, "nesterof": True, "ns_dtype": "float7"}
    recipe["seed"] = "x"
    keys = [problem.key for problem in checked(recipe, tmp_path).errors]
    assert sorted(keys) == ["optimizer.lr", "optimizer.mu", "optimizer.nesterof", "optimizer.ns_dtype", "seed"]


def test_keys_that_appear_twice_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("seed: 1\noptimizer:\n  lr: 1\n  lr: 2\n")
    (problem,) = check_config(file).errors
    assert (problem.key, problem.rule) == ("optimizer.lr", "appears twice in one mapping, again on line 4")


@pytest.mark.parametrize(
    "content", ["", "[1, 2]", "a: [", "recipe: !!python/object/apply:os.system ['true']", "\x00", "a: &a [*a]\nb: 1"]
)
def test_what_is_no_recipe_ends_in_a_message(content: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    assert check_config(file).errors


NO_YAML = {
    "optimizer:\n  lr: [1, 2\n  mu: 3\n": (
        3,
        5,
        "a flow sequence from line 2, column 7, expected ',' or ']'",
    ),
    "a:\n  b: 1\n c: 2\n": (3, 2, "expected <block end>"),
    "seed: *none\n": (1, 7, "found undefined alias 'none'"),
    "seed: 1\nrecipe: \x01\n": (2, 9, "the character U+0001 is not allowed"),
    "seed: 1\n--- \nseed: 2\n": (2, 1, "but found another document"),
}


@pytest.mark.parametrize("command", ["check", "plan", "finetune"])
@pytest.mark.parametrize("content", NO_YAML)
def test_a_file_that_is_no_yaml_is_named_once_with_line_and_column(
    content: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spoilt.yaml"
    file.write_text(content)
    line, column, what = NO_YAML[content]
    with pytest.raises(SystemExit):
        main([command, str(file)])
    told = capsys.readouterr()
    message = told.out.splitlines()[0] if command == "check" else told.err.rstrip()
    assert message.startswith(f"{file}:{line}: error: is no" if command == "check" else f"error: {file}: is no")
    assert f"is no valid YAML at line {line}, column {column}: " in message
    assert what in message
    assert message.count("spoilt.yaml") == 1
    assert check_config(file).to_dict()["errors"][0]["line"] == line


@pytest.mark.parametrize("content", [b"seed: \xff\n", b"[1, 2]", None])
def test_a_file_that_is_no_configuration_is_named_once(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "spoilt.yaml"
    if content is not None:
        file.write_bytes(content)
    first, _ = check_config(file).text()
    assert first.startswith(f"{file}: error: ")
    assert first.count("spoilt.yaml") == 1


@pytest.mark.parametrize("value", [5, True, "x", [1]])
def test_sections_that_are_no_mappings_are_refused(value: object, tmp_path: Path) -> None:
    recipe = load(SHIPPED[-1], tmp_path)
    for name in sorted(key for key, section in recipe.items() if isinstance(section, dict)):
        report = checked({**recipe, name: value}, tmp_path)
        assert any(problem.key == name for problem in report.errors), name


def test_keys_that_are_not_set_are_told_together(tmp_path: Path) -> None:
    recipe = load(next(file for file in SHIPPED if file.stem == "smollm2_muown"), tmp_path)
    for key in ("seed", "lr_scheduler", "dataloader"):
        del recipe[key]
    del recipe["optimizer"]["lr"]
    del recipe["clip_grad_norm"]["max_norm"]
    recipe["step_scheduler"]["val_every_steps"] = 10_000
    report = checked(recipe, tmp_path)
    file = tmp_path / "recipe.yaml"
    never, together, *lines, counts = report.text()
    assert ": warning: step_scheduler.val_every_steps: 10000 is above max_steps" in never
    assert together == f"{file}: warning: 5 keys are not set. Write those whose default is not meant:"
    assert lines == [
        "  clip_grad_norm.max_norm  1.0",
        "  dataloader               no shuffling, and the data set's own collation",
        "  lr_scheduler             a constant learning rate",
        "  optimizer.lr             0.0003",
        "  seed                     42",
    ]
    assert counts == f"{file}: no errors, 2 warnings"
    # Each has its own entry where programs read.
    told = {entry["key"]: entry["message"] for entry in report.to_dict()["warnings"]}
    assert len(told) == 6
    assert told["seed"] == "is not set: the host takes 42"
    assert told["optimizer.lr"] == "is not set: it is 0.0003"


def test_one_key_that_is_not_set_is_a_line_like_any_other(tmp_path: Path) -> None:
    recipe = load(next(file for file in SHIPPED if file.stem == "smollm2_muown"), tmp_path)
    del recipe["seed"]
    assert list(checked(recipe, tmp_path).text()) == [
        f"{tmp_path / 'recipe.yaml'}: warning: seed: is not set: the host takes 42. Write it.",
        f"{tmp_path / 'recipe.yaml'}: no errors, 1 warning",
    ]


def test_a_policy_that_leaves_vectors_on_muon_is_refused(tmp_path: Path) -> None:
    recipe = load(next(file for file in SHIPPED if file.stem == "smollm2_muown"), tmp_path)
    recipe["optimizer"]["param_policy"] = {"defaults": {"route": "muon"}}
    (problem,) = checked(recipe, tmp_path).errors
    assert problem.key == "optimizer.param_policy"
    # The first that is trained: those of the blocks below are frozen.
    assert problem.rule.startswith("model.layers.24.input_layernorm.weight is a vector on route 'muon'")
    assert "'adamw'" in problem.remedy
    recipe["optimizer"]["param_policy"]["overrides"] = [{"role": "norm", "set": {"route": "adamw"}}]
    assert not checked(recipe, tmp_path).problems


def test_world_size_must_divide(tmp_path: Path) -> None:
    recipe = load(SHIPPED[-1], tmp_path)
    file = tmp_path / "model/config.json"  # heads that three ranks can share
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 6, "num_key_value_heads": 3}))
    recipe["distributed"]["tp_size"] = 3
    assert not checked(recipe, tmp_path).errors
    (problem,) = checked(recipe, tmp_path, world_size=8).errors
    assert problem.key == "distributed.tp_size"


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"dp_replicate_size": 8}, "dp_replicate_size"),  # as many replicas as ranks would leave one shard each
        ({"dp_replicate_size": 3}, "dp_replicate_size"),
        ({"dp_size": 4}, "dp_size"),
        ({"ep_size": 3}, "ep_size"),
        ({"strategy": "megatron_fsdp", "ep_size": 2}, "ep_size"),
        ({"strategy": "ddp", "dp_replicate_size": 2}, "dp_replicate_size"),
        ({"dp_replicate_size": 4}, None),
        ({"tp_size": 2, "ep_size": 8}, None),  # experts lie over tensor-parallel ranks too
    ],
)
def test_meshes_that_the_host_cannot_make_are_refused(tmp_path: Path, sizes: dict[str, Any], key: str | None) -> None:
    recipe = load(next(file for file in SHIPPED if file.stem == "smollm2_muown"), tmp_path)
    recipe["distributed"] = {"strategy": "fsdp2", **sizes}
    recipe["step_scheduler"] |= {"global_batch_size": 16, "local_batch_size": 1}
    found = [problem.key for problem in checked(recipe, tmp_path, world_size=8).errors]
    assert found == ([] if key is None else [f"distributed.{key}"])


@pytest.mark.parametrize("named", ["epoch_0_step_3", "LOWEST_VAL", "{run}/epoch_0_step_3", "$OF_TEST/epoch_0_step_3"])
def test_a_checkpoint_to_resume_from_must_be_there(tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_TEST", str(tmp_path / "run"))
    recipe = load(next(file for file in SHIPPED if file.stem == "smollm2_muown"), tmp_path)
    recipe["checkpoint"]["restore_from"] = named.format(run=tmp_path / "run")
    (problem,) = checked(recipe, tmp_path).errors
    assert problem.key == "checkpoint.restore_from"
    assert problem.rule.endswith("does not exist")
    lines = (tmp_path / "recipe.yaml").read_text().splitlines()
    assert problem.line is not None
    assert lines[problem.line - 1].strip().startswith("restore_from:")

    saved = tmp_path / "run/epoch_0_step_3"
    saved.mkdir(parents=True)
    (tmp_path / "run/LOWEST_VAL.txt").write_text("epoch_0_step_3\n")  # where links cannot be made
    assert not checked(recipe, tmp_path).problems
    (saved / "config.yaml").write_text("optimizer: {_target_: dmuown.automodel.MuonConfig}")
    (problem,) = checked(recipe, tmp_path).errors
    assert problem.key == "checkpoint.restore_from"
    assert "was written by MuonConfig, and this run uses MuownConfig" in problem.rule
    (saved / ".incomplete").touch()
    (problem,) = checked(recipe, tmp_path).errors
    assert "incomplete" in problem.rule


def test_the_nearest_checkpoint_is_named(tmp_path: Path) -> None:
    recipe = load(next(file for file in SHIPPED if file.stem == "smollm2_muown"), tmp_path)
    (tmp_path / "run/epoch_0_step_300").mkdir(parents=True)
    for named, remedy in (("epoch_0_step_30", "Did you mean 'epoch_0_step_300'"), ("LATEST", None)):
        recipe["checkpoint"]["restore_from"] = named
        assert [problem.remedy for problem in checked(recipe, tmp_path).errors] == ([remedy] if remedy else [])


def test_environment_variables_in_paths_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(next(file for file in SHIPPED if file.stem == "smollm2_muown"), tmp_path)
    monkeypatch.setenv("ASSETS_OF_TEST", str(tmp_path))
    recipe["model"]["pretrained_model_name_or_path"] = "${ASSETS_OF_TEST}/model"
    recipe["dataset"]["path_or_dataset_id"] = "$ASSETS_OF_TEST/train.jsonl"
    assert not checked(recipe, tmp_path).problems
    recipe["dataset"]["path_or_dataset_id"] = "${ASSETS_OF_TEST}/none.jsonl"
    assert [problem.key for problem in checked(recipe, tmp_path).errors] == ["dataset.path_or_dataset_id"]


def test_unset_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(SHIPPED[0], tmp_path)
    recipe["checkpoint"]["checkpoint_dir"] = "$RUNS_OF_NOBODY/x"
    assert [problem.key for problem in checked(recipe, tmp_path).errors] == ["checkpoint.checkpoint_dir"]
    monkeypatch.setenv("RUNS_OF_NOBODY", str(tmp_path))
    assert not checked(recipe, tmp_path).errors


def test_precision_without_the_ownership_runtime_is_warned_about(tmp_path: Path) -> None:
    recipe = load(next(file for file in SHIPPED if "muown" in file.stem), tmp_path)
    recipe["optimizer"]["param_policy"] = {"defaults": {"param_dtype": "bfloat16"}}
    (problem,) = checked(recipe, tmp_path).warnings
    assert problem.key == "optimizer.param_policy"
    assert "param_dtype" in problem.rule


def test_exit_codes_and_json(tmp_path: Path) -> None:
    recipe = load(SHIPPED[0], tmp_path)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    run = CliRunner().invoke
    assert run(app, ["check", str(file)]).exit_code == 0
    broken = run(app, ["check", str(file), "--json", "--seed", "-1"])
    assert broken.exit_code == 1
    told = json.loads(broken.stdout)
    assert [error["key"] for error in told["errors"]] == ["seed"]
    assert told["ok"] is False
    del recipe["seed"]
    file.write_text(yaml.safe_dump(recipe))
    assert run(app, ["check", str(file)]).exit_code == 0
    assert run(app, ["check", str(file), "--strict"]).exit_code == 1
    assert run(app, ["check", str(tmp_path / "none.yaml")]).exit_code == 1


OWNERS = next(file for file in SHIPPED if "dmuon" in file.stem)


@pytest.mark.parametrize("size", ["pp_size", "ep_size", "cp_size"])
def test_parallelism_that_owners_cannot_serve_is_refused_with_its_reason(tmp_path: Path, size: str) -> None:
    recipe = load(OWNERS, tmp_path)
    recipe["distributed"] |= {size: 2, **({"pipeline": {}} if size == "pp_size" else {})}
    (problem,) = checked(recipe, tmp_path).errors
    assert problem.key == f"distributed.{size}"
    assert problem.rule.startswith("must be 1 under DMuonConfig, got 2: ")
    assert "MuownConfig" in problem.remedy


def test_all_that_owners_cannot_serve_is_told_at_once(tmp_path: Path) -> None:
    """Whatever else is wrong with the keys, or with the optimizer, and without remedies that end in a refusal."""
    recipe = load(OWNERS, tmp_path)
    recipe["distributed"] = {"strategy": "ddp", "pp_size": 2, "cp_size": 2, "ep_size": 2}
    recipe["optimizer"]["lr"] = -1
    found = {problem.key: problem for problem in checked(recipe, tmp_path).errors}
    refused = ["distributed.strategy", "distributed.pp_size", "distributed.cp_size", "distributed.ep_size"]
    assert sorted(found) == sorted([*refused, "optimizer.lr"])
    assert all("under DMuonConfig" in found[key].rule for key in refused)
    assert "pipeline" not in found["distributed.pp_size"].remedy


@pytest.mark.parametrize("policy", ["shipped", "default"])
def test_tensor_parallelism_bears_every_route(tmp_path: Path, policy: str) -> None:
    recipe = load(OWNERS, tmp_path)
    recipe["distributed"]["tp_size"] = 2
    routes = {rule["set"].get("route") for rule in recipe["optimizer"]["param_policy"]["overrides"]}
    assert "sharded_adamw" in routes, "the shipped policy has shards for tensor parallelism to cut as well"
    if policy == "default":
        del recipe["optimizer"]["param_policy"]
    assert not checked(recipe, tmp_path).errors


@pytest.mark.slow
def test_plan_answers_every_mutation_with_a_plan_or_one_message(shipped: Path, tmp_path: Path) -> None:
    """It reads a few sections only, and must not fall over what it reads in them."""
    read = ("model", "optimizer", "distributed", "freeze_config")
    refused = []
    for mutation in mutations(load(shipped, tmp_path)):
        if not mutation.key.startswith(read):
            continue
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(mutation.recipe, sort_keys=False))
        try:
            plan_job(file, world_size=4)
        except DmuownError as error:
            refused.append(str(error))
    assert len(refused) >= 20
    assert not [message for message in refused if "\n" in message]


def test_neither_the_host_nor_a_model_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(load(SHIPPED[-1], tmp_path)))
    script = (
        "import sys; from dmuown.automodel.checks import check_config; from dmuown.automodel.planned import plan_job\n"
        f"assert not check_config({str(file)!r}).errors\n"
        "heavy = {'nemo_automodel', 'transformers', 'datasets'} & set(sys.modules)\n"
        "compilers = {'torch._dynamo', 'triton'} & set(sys.modules)\n"
        "assert not heavy | compilers, heavy | compilers\n"
        f"plan_job({str(file)!r}, world_size=4)\n"
        "assert not {'nemo_automodel', 'transformers', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
