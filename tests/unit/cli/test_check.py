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
from dmuown.cli import app
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


@pytest.mark.parametrize("value", [5, True, "x", [1]])
def test_sections_that_are_no_mappings_are_refused(value: object, tmp_path: Path) -> None:
    recipe = load(SHIPPED[-1], tmp_path)
    for name in sorted(key for key, section in recipe.items() if isinstance(section, dict)):
        report = checked({**recipe, name: value}, tmp_path)
        assert any(problem.key == name for problem in report.errors), name


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
    recipe["distributed"]["tp_size"] = 3
    assert not checked(recipe, tmp_path).errors
    (problem,) = checked(recipe, tmp_path, world_size=8).errors
    assert problem.key == "distributed.tp_size"


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
