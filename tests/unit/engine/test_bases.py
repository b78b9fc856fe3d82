"""The same engine on the embedded base and on each generation of Dion: same numbers, same keys, Dion's own runtime.

Dion is found where it is installed, and under every folder that DMUOWN_DION_PATHS names (as PATH does). Each base
runs in its own process, because the choice is made when the engine is first imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"

SCRIPT = """
import json, sys
import torch
import dmuown
from dmuown.engine import base

counts = {"tasks": 0, "runs": 0}
begin, run = base.AsyncTask.__init__, base.AsyncRuntime.run
def counted_begin(self, generator):
    counts["tasks"] += 1
    begin(self, generator)
def counted_run(self):
    counts["runs"] += 1
    run(self)
base.AsyncTask.__init__, base.AsyncRuntime.run = counted_begin, counted_run

torch.manual_seed(0)
digest, keys = {}, {}
for name in ("Muon", "NorMuon", "Muown", "NorMuown", "AngularMuown"):
    weight, expert = torch.nn.Parameter(torch.randn(12, 8)), torch.nn.Parameter(torch.randn(2, 6, 8))
    bias, scale = torch.nn.Parameter(torch.randn(12)), torch.nn.Parameter(torch.randn(5))
    optimizer = getattr(dmuown, name)(
        [
            {"params": [weight, expert]},
            {"params": [bias], "algorithm": "adamw", "weight_decay": 0.1},
            {"params": [scale], "algorithm": "lion"},
        ],
        lr=0.02, ns_dtype="float32",
    )
    for _ in range(4):
        for param in (weight, expert, bias, scale):
            param.grad = torch.randn_like(param)
        optimizer.step()
    assert [type(group["lr"]) for group in optimizer.param_groups] == [float] * 3
    digest[name] = [param.double().sum().item() for param in (weight, expert, bias, scale)]
    keys[name] = [sorted(optimizer.state[param]) for param in (weight, bias, scale)]
info = dmuown.engine_info()
print(json.dumps({
    "digest": digest, "keys": keys, "counts": counts, "generation": info.generation,
    "runtime": base.AsyncRuntime.__module__, "bases": [c.__module__ for c in dmuown.Muown.__mro__],
}))
"""


def _run(extra_path: Path | None, code: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    paths = [str(SOURCE), *([str(extra_path)] if extra_path else [])]
    # torch.compile of Dion's own kernels is not under test.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def _report(extra_path: Path | None) -> dict[str, object]:
    done = _run(extra_path)
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return report


def _dions() -> list[Path]:
    return [Path(folder) for folder in os.environ.get("DMUOWN_DION_PATHS", "").split(os.pathsep) if folder]


def test_every_dion_runs_our_tasks_and_changes_no_bit() -> None:
    if not _dions():
        pytest.skip("no Dion to test: DMUOWN_DION_PATHS names no folder that holds one")
    embedded = _report(None)
    for folder in _dions():
        report = _report(folder)
        assert report["generation"] in ("muon_tasks", "ortho_tasks")
        assert report["runtime"] == "dion.opt_utils"
        assert "dion.muon" in report["bases"]  # type: ignore[operator]
        assert report["digest"] == embedded["digest"]
        assert report["keys"] == embedded["keys"]
        # 5 optimizers x 4 steps; per step two matrix buckets, one AdamW and one Lion task.
        assert report["counts"] == {"tasks": 5 * 4 * 4, "runs": 5 * 4}


def test_embedded_base_runs_every_task() -> None:
    report = _report(None)
    assert report["counts"] == {"tasks": 5 * 4 * 4, "runs": 5 * 4}
    assert report["keys"]["Muown"][1] == ["momentum", "step", "variance"]  # type: ignore[index]


@pytest.mark.parametrize("hook", ["_create_batches", None])
def test_a_dion_that_calls_neither_hook_is_refused(tmp_path: Path, hook: str | None) -> None:
    package = tmp_path / "dion"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from torch.optim import Optimizer\n"
        "class Muon(Optimizer):\n"
        "    def step(self, closure=None):\n"
        f"        {'self.' + hook + '()' if hook else 'pass'}\n"
    )
    (package / "opt_utils.py").write_text("class AsyncTask: pass\nclass AsyncRuntime: pass\n")
    done = _run(tmp_path, "import torch, dmuown; dmuown.Muown([torch.nn.Parameter(torch.ones(2, 2))])")
    assert done.returncode != 0
    assert "MissingDependencyError" in done.stderr
    assert "neither _create_muon_tasks nor _create_ortho_tasks" in done.stderr


def test_a_dion_that_defines_a_hook_without_calling_it_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "dion"
    package.mkdir()
    hooks = "_create_muon_tasks", "_create_ortho_tasks", "_create_adamw_tasks", "_get_or_initialize_state"
    body = "".join(f"    def {hook}(self, *args): pass\n" for hook in hooks)
    (package / "__init__.py").write_text(f"from torch.optim import Optimizer\nclass Muon(Optimizer):\n{body}")
    (package / "opt_utils.py").write_text("class AsyncTask: pass\nclass AsyncRuntime: pass\n")
    done = _run(tmp_path, "import torch, dmuown; dmuown.Muon([torch.nn.Parameter(torch.ones(2, 2))])")
    assert "MissingDependencyError" in done.stderr
