"""`dmuown doctor` tells what is there, what is missing and what is broken."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from dmuown.cli import app


def test_it_reports_what_is_installed() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.stdout)
    assert told["parts"]["torch"]["version"] == str(torch.__version__)
    assert told["abilities"]["optimizers"]["works"]
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


@pytest.mark.parametrize(
    ("distribution", "version", "part", "ability"),
    [
        ("nemo-automodel", "0.6.1", "nemo-automodel", "dmuown finetune"),
        ("triton", "3.9.0", "Triton", "dmuown finetune"),
    ],
)
def test_what_cannot_work_is_broken_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, distribution: str, version: str, part: str, ability: str
) -> None:
    real = importlib.metadata.version
    versions = {"nemo-automodel": "0.7.0", distribution: version}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(shown.stdout)
    assert shown.exit_code == 1
    assert told["parts"][part]["status"] == "broken"
    assert "pip install" in told["parts"][part]["note"]
    assert not told["abilities"][ability]["works"]


def test_help_is_fast_and_imports_no_torch() -> None:
    script = "import sys; from dmuown.cli import app; import typer.main; typer.main.get_command(app)\n"
    script += "assert not {'torch', 'nemo_automodel', 'yaml', 'pydantic'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
