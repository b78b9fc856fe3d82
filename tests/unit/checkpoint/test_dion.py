"""Checkpoints of Dion's optimizers go on here, and ours move between the embedded base and Dion's, both ways.

Dion is found under every folder that DMUOWN_DION_PATHS names, as PATH does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dmuown
from tests.unit.checkpoint import dion_training

ROOT = Path(__file__).resolve().parents[3]
DIONS = [Path(folder) for folder in os.environ.get("DMUOWN_DION_PATHS", "").split(os.pathsep) if folder]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DIONS, reason="no Dion to test: DMUOWN_DION_PATHS names no folder that holds one"),
]


def run(mode: str, name: str, folder: Path, dion: Path | None) -> list[str]:
    paths = [str(ROOT), str(ROOT / "src"), *([str(dion)] if dion else [])]
    # torch.compile of Dion's own kernels is not under test.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "tests.unit.checkpoint.dion_training", mode, name, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("dion", DIONS, ids=lambda path: path.name)
def test_their_run_goes_on_here(dion: Path, name: str, tmp_path: Path) -> None:
    assert "dion.muon" in run("THEIRS", name, tmp_path, dion) or name == "NorMuon"
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    params = dion_training.model()
    params.load_state_dict(saved["model"])
    optimizer = dion_training.optimizer_of(dmuown, name, params)
    converted = dmuown.convert_optimizer_state(saved["optimizer"], source="dion", model_or_optimizer=optimizer)
    optimizer.load_state_dict(converted)
    assert float(optimizer.state[params["c"]]["step"]) == 3
    dion_training.train(params, optimizer, range(3, 6))
    for key, expected in torch.load(tmp_path / "THEIRS.pt", weights_only=True).items():
        error = (params[key] - expected).norm() / (expected - saved["model"][key]).norm()
        assert error < 1e-5, key


@pytest.mark.parametrize("name", ["Muon", "Muown"])
@pytest.mark.parametrize("forth", [True, False], ids=["embedded to dion", "dion to embedded"])
@pytest.mark.parametrize("dion", DIONS, ids=lambda path: path.name)
def test_our_run_moves_between_bases(dion: Path, forth: bool, name: str, tmp_path: Path) -> None:
    first, second = (None, dion) if forth else (dion, None)
    assert ("dion.muon" in run("SAVE", name, tmp_path, first)) == (first is not None)
    assert ("dion.muon" in run("RESUME", name, tmp_path, second)) == (second is not None)
    one, other = (torch.load(tmp_path / f"{mode}.pt", weights_only=True) for mode in ("SAVE", "RESUME"))
    for key, expected in one.items():
        assert torch.equal(other[key], expected), key
