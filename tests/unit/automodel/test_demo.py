"""The demo's data and recipes; the demo itself takes minutes and runs by `make demo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dmuown.automodel.demo import data
from dmuown.automodel.demo.plot import plot_losses
from dmuown.automodel.summary import RunSummary

CONFIGS = Path(__file__).parents[3] / "configs" / "automodel"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> data.DataFiles:
    return data.write_data(tmp_path_factory.mktemp("data"))


def rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_enough_pairs_and_a_disjoint_split(files: data.DataFiles) -> None:
    train, validation = rows(files.train), rows(files.validation)
    assert (len(train), len(validation)) == (files.train_pairs, files.validation_pairs)
    assert len(train) >= 1000
    assert len(validation) == data.VALIDATION_PAIRS
    for key in ("question", "answer"):
        assert {row[key] for row in train}.isdisjoint(row[key] for row in validation)
    modules = {row["question"].split("`")[1].split(".")[0] for row in validation}
    assert modules <= data.VALIDATION_MODULES
    assert not {row["question"].split("`")[1].split(".")[0] for row in train} & data.VALIDATION_MODULES
    assert data.PROMPT in validation[0]["question"]


def test_the_data_are_the_same_every_time(files: data.DataFiles, tmp_path: Path) -> None:
    again = data.write_data(tmp_path)
    assert again.train.read_bytes() == files.train.read_bytes()
    assert again.validation.read_bytes() == files.validation.read_bytes()


def test_pairs_come_from_public_documented_objects(tmp_path: Path) -> None:
    (tmp_path / "shelf.py").write_text(
        'class Box:\n    """Keeps things for later use.\n\n    More."""\n\n'
        '    def open(self):\n        """Open the box, as one would expect."""\n\n'
        '    def _hide(self):\n        """Hide what is inside the box."""\n\n'
        'def bare(): pass\n\ndef short():\n    """Too short."""\n',
        encoding="utf-8",
    )
    assert [pair[1:] for pair in data.standard_library_pairs(tmp_path)] == [
        ("What is `shelf.Box`?", "Keeps things for later use."),
        ("What does `shelf.Box.open` do?", "Open the box, as one would expect."),
    ]


def test_the_recipes_differ_in_the_optimizer_alone() -> None:
    recipes = {
        name: yaml.safe_load((CONFIGS / f"smollm2_{name}.yaml").read_text()) for name in ("muown", "muon", "adamw")
    }
    targets = {name: recipe.pop("optimizer")["_target_"] for name, recipe in recipes.items()}
    assert targets == {
        "muown": "dmuown.automodel.MuownConfig",
        "muon": "dmuown.automodel.MuonConfig",
        "adamw": "torch.optim.AdamW",
    }
    for name, recipe in recipes.items():
        assert recipe["checkpoint"].pop("checkpoint_dir") == f"runs/demo/{name}"
    assert recipes["muown"] == recipes["muon"] == recipes["adamw"]


def test_a_run_that_had_nothing_to_do_says_so() -> None:
    """A finished run's folder, named again: the host resumes, and takes no step."""
    assert RunSummary(checkpoint="runs/x/epoch_0_step_9").nothing_done.startswith(
        "nothing to train: runs/x/epoch_0_step_9 has taken all steps. Raise step_scheduler.max_steps"
    )
    assert RunSummary(losses={1: 2.0}, checkpoint="runs/x").nothing_done == RunSummary().nothing_done == ""


def test_summary_round_trip_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    summary = RunSummary(
        "Muown", 42, 100, 120, 42, 1, 3, {1: 3.0, 2: 2.0, 3: 1.5}, {"default": {3: 2.5}}, "ckpt", None, 9.0, 2
    )
    summary.save(tmp_path)
    assert RunSummary.load(tmp_path) == summary
    text = str(summary)
    for part in ("3 (1 to 3)", "2 processes on cpu", "first 3.0000, last 1.5000", "Muown", "42 matrices", "ckpt"):
        assert part in text
    picture = plot_losses(summary, tmp_path / "losses.png", title="t")
    assert picture.read_bytes().startswith(b"\x89PNG")
