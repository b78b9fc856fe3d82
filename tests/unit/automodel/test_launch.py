"""`dmuown finetune` checks all sections as `dmuown check` does, on every rank, before any work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmuown import cli
from dmuown.automodel import launch as launching
from dmuown.automodel import worker
from dmuown.automodel.checks import check_config
from dmuown.errors import OptionError
from tests.unit.cli.recipes import SHIPPED, load

MUOWN = next(file for file in SHIPPED if file.stem == "smollm2_muown")

#: A misspelled key, and how the message ends.
MISSPELLED = {
    "step_scheduler.max_stesp": "Did you mean 'max_steps'?",
    "lr_scheduler.lr_warmup_step": "Did you mean 'lr_warmup_steps'?",
    "checkpoint.checkpoint_dri": "Did you mean 'checkpoint_dir'?",
    "dist_env.time_out_minutes": "Did you mean 'timeout_minutes'?",
    "clip_grad_norm.max_nrom": "Did you mean 'max_norm'?",
    "distributed.dp_szie": "Did you mean 'dp_size'?",
    "distributed.mp_policy.param_dtpye": "Did you mean 'param_dtype'?",
    "dataloader.shufle": "Did you mean 'shuffle'?",
    "dataset.path_or_dataset_di": "Did you mean 'path_or_dataset_id'?",
    "model.torch_dtpye": "Did you mean 'torch_dtype'?",
    "optimizer.nesterof": "Did you mean 'nesterov'?",
    "sed": "Did you mean 'seed'?",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was started: nothing is, here."""
    found: list[Any] = []

    def run(*arguments: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        found.append(arguments[0])
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(launching, "subprocess", types.SimpleNamespace(run=run))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return found


def write(folder: Path, recipe: dict[str, Any]) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return file


@pytest.mark.parametrize("as_override", [False, True], ids=["in the file", "as an override"])
@pytest.mark.parametrize("key", MISSPELLED)
def test_misspelled_keys_of_any_section(
    key: str, as_override: bool, tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load(MUOWN, tmp_path)
    if not as_override:
        *parents, name = key.split(".")
        section = recipe
        for parent in parents:
            section = section[parent]
        section[name] = 1
    file = write(tmp_path, recipe)
    arguments = [f"--{key}", "1"] if as_override else []
    with pytest.raises(SystemExit) as stopped:
        cli.main(["finetune", str(file), "--nproc-per-node", "2", *arguments])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {key}: ")
    assert message.rstrip().endswith(MISSPELLED[key])
    # And nothing else is wrong, for `dmuown check` as well.
    assert [problem.key for problem in check_config(file, arguments, world_size=2).errors] == [key]
    assert started == []


@pytest.mark.parametrize("spelling", [["--nproc_per_node", "2"], ["--nproc_per_node=2"], ["--nproc-per-node=2"]])
def test_processes_are_taken_in_either_spelling(spelling: list[str], tmp_path: Path, started: list[Any]) -> None:
    file = write(tmp_path, load(MUOWN, tmp_path))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["finetune", str(file), *spelling, "--step_scheduler.max_steps", "50"])
    assert stopped.value.code == 0
    (command,) = started
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[-1] == "--step_scheduler.max_steps=50", "keys of the YAML keep their underscores"


def test_all_errors_are_told_at_once(tmp_path: Path, started: list[Any]) -> None:
    file = write(tmp_path, load(MUOWN, tmp_path) | {"sed": 1})
    with pytest.raises(OptionError) as caught:
        launching.launch(file, ["--optimizer.lr", "-1", "--step_scheduler.max_stesp=3"], processes=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{file}: has 3 errors:"
    assert sorted(line.split(":")[0] for line in lines[1:-1]) == [
        "  optimizer.lr",
        "  sed",
        "  step_scheduler.max_stesp",
    ]
    assert lines[-1] == "dmuown check names their lines."
    assert started == []


def test_sizes_are_checked_against_the_number_of_processes(tmp_path: Path, started: list[Any]) -> None:
    file = write(tmp_path, load(MUOWN, tmp_path))
    with pytest.raises(OptionError, match=r"^step_scheduler.global_batch_size: .* 7 data-parallel ranks"):
        launching.launch(file, processes=7)
    assert started == []
    assert launching.launch(file, processes=2) == 0
    assert len(started) == 1


def test_every_rank_checks(tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is refused for what it reads itself, and counts the ranks of the job."""
    file = write(tmp_path, load(MUOWN, tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(OptionError, match=r"^step_scheduler.global_batch_size: .* 7 data-parallel ranks"):
        launching.launch(file)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"^sed: "):
        launching.launch(file, ["--sed", "1"])
    assert started == []
    assert launching.launch(file) == 0
    assert len(started) == 1


def test_the_check_comes_before_the_host_is_imported(tmp_path: Path) -> None:
    file = write(tmp_path, load(MUOWN, tmp_path) | {"sed": 1})
    code = f"""
import json, sys
from dmuown import cli
try:
    cli.main(["finetune", {str(file)!r}])
except SystemExit as stopped:
    print(json.dumps([stopped.code, "nemo_automodel" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert json.loads(done.stdout) == [2, False], done.stderr


def test_sections_of_a_recipe_of_ones_own_are_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "their_recipe.py").write_text("class TheirRecipe: pass\n", encoding="utf-8")
    recipe = load(MUOWN, tmp_path) | {"recipe": "their_recipe.TheirRecipe", "probing": {"every": 3}}
    report = check_config(write(tmp_path, recipe))
    assert "probing" in [problem.key for problem in report.warnings]
    assert "probing" not in [problem.key for problem in report.errors]
    report = check_config(write(tmp_path, recipe | {"recipe": load(MUOWN, tmp_path)["recipe"]}))
    assert [problem.key for problem in report.errors] == ["probing"]
    report = check_config(write(tmp_path, recipe | {"step_schedulr": {}}))
    assert "step_schedulr" in [problem.key for problem in report.errors]
