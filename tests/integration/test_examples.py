"""The examples run as their first lines say: on two processes, on a CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny import MATRICES, ROOT, dmuown

EXAMPLES = ROOT / "examples"


def run(*command: str, folder: Path) -> str:
    """Run a Python command as a user does, from an empty folder, and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def torchrun(program: str, *arguments: str, folder: Path) -> str:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run(*command, str(EXAMPLES / program), *arguments, folder=folder)


def falls(output: str) -> tuple[float, float]:
    found = re.search(r"^loss ([\d.]+) -> ([\d.]+)", output, re.MULTILINE)
    assert found, output
    return float(found[1]), float(found[2])


def test_a_plain_fsdp2_loop(tmp_path: Path) -> None:
    output = torchrun("fsdp2_loop.py", "--steps", "30", folder=tmp_path)
    first, last = falls(output)
    assert last < 0.5 * first
    assert "orthogonalized 12\n" in output  # q, k, v, output and two of the MLP, in two layers
    assert "resumed exactly: True" in output
    assert not list(tmp_path.iterdir())


def test_the_ownership_runtime(tmp_path: Path) -> None:
    output = torchrun("ownership.py", "--steps", "20", folder=tmp_path)
    first, last = falls(output)
    assert last < 0.6 * first
    # Seven matrices a block, a block an owner; embeddings and head in shards.
    assert re.search(r"^muon +muown +14 +7 ", output, re.MULTILINE)
    assert re.search(r"^lm_head.weight +sharded_adamw .* shards ", output, re.MULTILINE)
    assert "broadcast" in output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_automodel_from_yaml(tmp_path: Path) -> None:
    """The whole of docs/guides/command-line.md."""
    config = str(EXAMPLES / "automodel/muown.yaml")
    run(str(EXAMPLES / "automodel/prepare.py"), folder=tmp_path)
    for command in ("check", "plan"):
        done = dmuown(command, config, "--world-size", "2", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    done = dmuown("finetune", config, "--nproc-per-node", "2", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(rf"orthogonalized\D+{MATRICES}\b", done.stdout), done.stdout
    checkpoints = tmp_path / "runs/example/checkpoints"
    losses = [json.loads(line)["loss"] for line in (checkpoints / "training.jsonl").read_text().splitlines()]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0], losses
    assert (checkpoints / "LATEST").exists()
    done = dmuown("report", str(checkpoints), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (checkpoints / "report.html").exists()
