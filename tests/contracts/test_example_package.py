"""The example package under docs/ installs, is found by name without an import, and trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "docs/examples/damped_muon"

TRAIN = """
    import json, sys, torch, dmuown
    from dmuown.algorithms import registered_algorithms
    torch.manual_seed(0)
    target = torch.randn(8, 6)
    param = torch.nn.Parameter(torch.zeros(8, 6))
    offered = "damped_muon" in registered_algorithms() and "damped_muon" not in sys.modules
    optimizer = dmuown.Muon([{"params": [param], "algorithm": "damped_muon", "damping": 0.01}], lr=0.05, wd=0.0)
    losses = []
    for _ in range(60):
        loss = (param - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    group = optimizer.state_dict()["param_groups"][0]
    kept = {key: group[key] for key in ("algorithm", "algorithm_source", "damping", "row_beta")}
    print(json.dumps([offered, losses[0], losses[-1], kept]))
"""


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built from a copy and installed into a folder of its own, without asking an index."""
    folder = tmp_path_factory.mktemp("example")
    source, site = folder / "source", folder / "site"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return site


def test_the_installed_algorithm_is_found_by_name_and_trains(installed: Path) -> None:
    done = run(TRAIN, installed)
    assert done.returncode == 0, done.stderr
    offered, first, last, kept = json.loads(done.stdout.splitlines()[-1])
    assert offered, "listed before it was imported"
    assert last < 0.3 * first
    assert kept == {
        "algorithm": "damped_muon",
        "algorithm_source": "damped_muon",
        "damping": 0.01,
        "row_beta": 0.9,
    }


def test_without_the_package_the_name_is_unknown(tmp_path: Path) -> None:
    done = run(TRAIN, tmp_path)
    assert done.returncode != 0
    assert "OptionError: algorithm: 'damped_muon' is not one of" in done.stderr
    assert "Import the package that registers it before this" in done.stderr


def test_a_broken_package_is_named(installed: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(["cp", "-r", str(installed), str(site)], check=True)
    (site / "damped_muon/__init__.py").write_text("import no_such_module\n")
    done = run(TRAIN, site)
    assert "entry point 'damped_muon' of dmuown.algorithms: damped_muon:DampedMuon cannot be imported" in done.stderr
