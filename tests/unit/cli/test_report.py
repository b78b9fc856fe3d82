"""`dmuown report`: numbers of logs, a page that needs no other file, a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dmuown.cli import app
from dmuown.diagnostics.run_report import thinned
from dmuown.diagnostics.runs import read_run, read_runs
from dmuown.errors import OptionError

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def write_run(folder: Path, steps: int = 6, *, matrices: int | None = 42, offset: float = 0.0) -> Path:
    folder.mkdir(parents=True)
    records = [
        {
            "step": step,
            "epoch": 0,
            "timestamp": f"2026-01-01T00:00:{step:02d}.500Z",
            "loss": 4.0 + offset - 0.5 * step,
            "grad_norm": 2.0,
            "lr": 1e-3,
            "tps": 50.0,
            "num_tokens_per_step": 100,
        }
        for step in range(steps)
    ]
    (folder / "training.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    losses = [{"step": step, "epoch": 0, "val_loss": 5.0 - step} for step in (2, 5)]
    (folder / "validation.jsonl").write_text("".join(json.dumps(record) + "\n" for record in losses))
    if matrices is not None:
        (folder / "summary.json").write_text(json.dumps({"optimizer": "Muown", "matrices": matrices}))
    return folder


def test_numbers(tmp_path: Path) -> None:
    told = read_run(write_run(tmp_path / "run")).to_dict()
    assert (told["steps"], told["first_step"], told["last_step"]) == (6, 1, 6)
    assert (told["first_loss"], told["last_loss"]) == (4.0, 1.5)
    assert told["validation_loss"] == {"validation": 0.0}
    assert told["best_validation_loss"] == {"validation": 0.0}
    assert told["median_step_seconds"] == 2.0  # 100 tokens at 50 a second, not the clock's 1 s
    assert (told["matrices_orthogonalized"], told["optimizer"]) == (42, "Muown")


def test_a_folder_of_runs_stands_for_them(tmp_path: Path) -> None:
    for name in ("muown", "adamw"):
        write_run(tmp_path / "demo" / name)
    (tmp_path / "demo" / "data").mkdir()
    assert [run.name for run in read_runs([tmp_path / "demo"])] == ["adamw", "muown"]
    other = write_run(tmp_path / "other")
    (other / "epoch_0_step_5").mkdir()
    names = [run.name for run in read_runs([tmp_path / "demo", other, other / "training.jsonl"])]
    assert names == ["adamw", "muown", "other", "other"]
    with pytest.raises(OptionError, match=r"data: holds no training\.jsonl"):
        read_runs([tmp_path / "demo" / "data"])


def test_the_clock_tells_step_times_where_tokens_do_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    (folder / "training.jsonl").write_text(
        "".join(json.dumps({key: line[key] for key in ("step", "loss", "timestamp")}) + "\n" for line in lines)
    )
    assert read_run(folder).series("step_time") == dict.fromkeys(range(2, 7), 1.0)


def test_a_resumed_run_counts_the_last_record_of_a_step_and_a_cut_line_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    with (folder / "training.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 1, "loss": 9.0}) + "\n" + '{"step": 2, "lo')
    run = read_run(folder)
    assert run.series("loss") == {1: 4.0, 2: 9.0, 3: 3.0}
    assert run.warnings == ["training.jsonl line 5 is no record and was left out"]


def test_losses_that_are_not_finite_are_counted_and_do_not_break_json(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    with (folder / "training.jsonl").open("a") as stream:
        stream.write('{"step": 2, "loss": NaN}\n')
    shown = CliRunner().invoke(app, ["report", str(folder), "--json"])
    (told,) = json.loads(shown.stdout)["runs"]
    assert (told["nonfinite_steps"], told["last_loss"]) == (1, None)
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0


def test_the_page_stands_alone_and_the_picture_is_one(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a/<muown>")
    second = write_run(tmp_path / "a/adamw", matrices=0, offset=1.0)
    page = tmp_path / "out/compare.html"
    shown = CliRunner().invoke(app, ["report", str(first), str(second), "-o", str(page)])
    assert shown.exit_code == 0, shown.output
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;muown&gt;" in text
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'xlink:href="#', "", text))
    assert text.count("<figure>") == 6  # losses, validation, norm, time, rate, matrices: nothing of health was logged
    assert page.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [line.split()[0] for line in shown.output.splitlines()[2:4]] == ["<muown>", "adamw"]
    before = text
    CliRunner().invoke(app, ["report", str(first), str(second), "-o", str(page)])
    assert page.read_text() == before


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a/run"), write_run(tmp_path / "b/run")]
    assert [run.name for run in read_runs(folders)] == ["a/run", "b/run"]


def test_long_runs_are_thinned_and_keep_their_end() -> None:
    series = {step: float(step) for step in range(1, 100_001)}
    thin = thinned(series, 500)
    assert 400 < len(thin) <= 500
    assert thin[100_000] == 100_000.0
    assert sum(thin.values()) / len(thin) == pytest.approx(50_000, rel=0.02)


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"training\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "training.jsonl").touch()
    with pytest.raises(OptionError, match="no record"):
        read_run(tmp_path)
