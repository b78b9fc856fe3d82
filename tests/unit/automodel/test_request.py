"""A bad request for a run is refused before any work, with exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dmuown import cli
from dmuown.automodel.checks.document import parse_overrides
from dmuown.automodel.request import read_request
from dmuown.errors import CheckpointError, DmuownError, OptionError

RECIPE = "TrainFinetuneRecipeForNextTokenPrediction"


def write(folder: Path, **sections: Any) -> Path:
    content = {
        "recipe": RECIPE,
        "optimizer": {"_target_": "dmuown.automodel.MuownConfig"},
        "checkpoint": {"checkpoint_dir": str(folder / "run")},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content | sections), encoding="utf-8")
    return file


def test_a_good_request(tmp_path: Path) -> None:
    request = read_request(write(tmp_path), ["--optimizer.lr", "1e-3", "--step_scheduler.max_steps=7", "--flag"])
    assert request.recipe == f"nemo_automodel.recipes.llm.train_ft.{RECIPE}"
    assert (request.get("optimizer.lr"), request.get("step_scheduler.max_steps"), request.get("flag")) == (
        1e-3,
        7,
        True,
    )
    assert request.get("optimizer.none.such", "x") == "x"
    assert request.checkpoint_dir == tmp_path / "run"


def test_variables_in_paths_are_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the host reads them: the summary goes where its checkpoints go."""
    monkeypatch.setenv("RUNS_OF_TEST", str(tmp_path))
    monkeypatch.delenv("UNSET_IN_TEST", raising=False)
    for written in ("$RUNS_OF_TEST/run", "${RUNS_OF_TEST}/run", f"${{UNSET_IN_TEST,{tmp_path}}}/run"):
        assert read_request(write(tmp_path, checkpoint={"checkpoint_dir": written})).checkpoint_dir == tmp_path / "run"


def test_overrides() -> None:
    given = ["--a.b", "[0.9, 0.95]", "--c=x=y", "--d", "none", "--e.f=-1"]
    assert parse_overrides(given) == {"a.b": [0.9, 0.95], "c": "x=y", "d": None, "e.f": -1}
    with pytest.raises(OptionError, match="stray"):
        parse_overrides(["--a", "1", "stray"])


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"recipe": None}, "recipe: is missing"),
        ({"recipe": "NoSuchRecipe"}, "'NoSuchRecipe' is unknown"),
        ({"optimizer": None}, "optimizer: must be a section"),
        ({"optimizer": {"_target_": "dmuown.automodel.MuownConfig", "lrr": 1}}, "Did you mean 'lr'"),
        ({"optimizer": {"_target_": "dmuown.automodel.MuownConfig", "lr": "fast"}}, "lr: must be"),
        ({"optimizer": {"_target_": "dmuown.Muon"}}, "_target_: dmuown.automodel.MuonConfig"),
        ({"optimizer": {"_target_": "dmuown.engine.optimizers.NorMuon"}}, "_target_: dmuown.automodel.NorMuonConfig"),
        ({"optimizer": {"_target_": "dmuown.automodel.MuowConfig"}}, "Did you mean 'MuownConfig'"),
        ({"optimizer": {"_target_": "dmuown.MuonLP"}}, "Did you mean 'MuonConfig'"),
        ({"model": {"pretrained_model_name_or_path": "./nowhere/model"}}, "'./nowhere/model' does not exist"),
        ({"validation_dataset": {"path_or_dataset_id": "gone.jsonl"}}, "validation_dataset.path_or_dataset_id"),
        ({"checkpoint": {"restore_from": "gone/epoch_0_step_1"}}, "checkpoint.restore_from"),
    ],
)
def test_bad_requests(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(DmuownError) as caught:
        read_request(write(tmp_path, **sections))
    assert message in str(caught.value)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is no file"):
        read_request(tmp_path / "absent.yaml")
    cases = (
        ("a: [", "is no valid YAML"),
        ("a:\n  b: 1\n c: 2", r"bad\.yaml: is no valid YAML at line 3, column 2: "),
        ("seed: 1\nseed: 2", "^seed: appears twice in one mapping, again on line 2"),
        ("- a", "must be a mapping"),
    )
    for text, message in cases:
        (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(OptionError, match=message):
            read_request(tmp_path / "bad.yaml")


def test_loading_runs_no_code(tmp_path: Path) -> None:
    file = tmp_path / "unsafe.yaml"
    file.write_text(
        f"recipe: !!python/object/apply:pathlib.Path.touch [!!python/name:x {tmp_path}/made]", encoding="utf-8"
    )
    with pytest.raises(OptionError, match="is no valid YAML"):
        read_request(file)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("named", [None, "LATEST", "epoch_0_step_3"])
def test_a_checkpoint_of_another_algorithm(tmp_path: Path, named: str | None) -> None:
    saved = tmp_path / "run" / "epoch_0_step_3"
    (saved / "model").mkdir(parents=True)
    (saved / "config.yaml").write_text("optimizer: {_target_: dmuown.automodel.MuonConfig}", encoding="utf-8")
    checkpoint = {"checkpoint_dir": str(tmp_path / "run")} | ({"restore_from": named} if named else {})
    with pytest.raises(CheckpointError, match=r"was written by MuonConfig, and this run uses MuownConfig"):
        read_request(write(tmp_path, checkpoint=checkpoint))
    read_request(write(tmp_path, checkpoint=checkpoint, optimizer={"_target_": "dmuown.automodel.MuonConfig"}))


def test_the_command_exits_with_2_and_the_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["finetune", str(tmp_path / "absent.yaml"), "--nproc-per-node", "2"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/absent.yaml: is no file.")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from dmuown import __version__

    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"dmuown {__version__}\n"
