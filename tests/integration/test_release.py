"""The distributions: what `python -m build` makes, installs, and holds. Nothing is downloaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import dmuown
from tests.contracts.test_source import FORBIDDEN, ROOT, tracked_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMOKE = """
import sys, torch, dmuown
assert {site!r} in dmuown.__file__, dmuown.__file__
weight, bias = torch.nn.Parameter(torch.randn(8, 16)), torch.nn.Parameter(torch.zeros(8))
for name in ("Muon", "NorMuon", "Muown", "NorMuown", "AngularMuown"):
    optimizer = getattr(dmuown, name)([{{"params": [weight]}}, {{"params": [bias], "algorithm": "adamw"}}], lr=0.01)
    before = weight.detach().clone()
    weight.grad, bias.grad = torch.randn(8, 16), torch.randn(8)
    optimizer.step()
    assert optimizer.orthogonalized == 1 and not torch.equal(before, weight)
for name in dmuown.__all__:
    getattr(dmuown, name)
print(dmuown.__version__)
"""


def run(*command: str | Path, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=240, env=clean | environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


def members(built: Path) -> tuple[set[str], set[str]]:
    (source,) = built.glob("*.tar.gz")
    (wheel,) = built.glob("*.whl")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return names, set(zipfile.ZipFile(wheel).namelist())


def test_both_hold_what_belongs_there(built: Path) -> None:
    source, wheel = members(built)
    tracked = {path.relative_to(ROOT).as_posix() for path in tracked_files()}
    package = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    assert len(package) > 50
    assert package <= wheel
    outside = {name for name in wheel if not name.startswith(("dmuown/", f"dmuown-{dmuown.__version__}.dist-info/"))}
    assert not outside
    folders = ("src/", "tests/", "docs/", "examples/", "configs/", "benchmarks/", "tools/")
    assert {name for name in tracked if name.startswith(folders)} <= source
    assert {"README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"} <= source
    assert {"Makefile", "constraints.txt", "mkdocs.yml"} <= source
    stray = [name for name in source if re.match(r"(runs|site|dist|\.venv|\.git)/", name)]
    assert not stray


def test_the_metadata_are_true(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    text = zipfile.ZipFile(wheel).read(f"dmuown-{dmuown.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {dmuown.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert not FORBIDDEN.search(text)
    assert " @ git+" not in text  # an index refuses it


def test_the_wheel_installs_and_steps_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    """The wheel comes from the new environment; torch and the other dependencies from the one that runs the tests."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # Behind the environment's own packages. Files named .pth in there, such as an editable install's, do not count.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    printed = run(python, "-I", "-c", SMOKE.format(site=str(site)))
    assert printed.split() == [dmuown.__version__]
    assert run(tmp_path / "venv/bin/dmuown", "--version") == f"dmuown {dmuown.__version__}\n"
    assert "torch" in run(tmp_path / "venv/bin/dmuown", "doctor")
