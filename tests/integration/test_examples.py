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
    return done(*command, folder=folder).stdout


def done(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=folder, env=environment
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return found


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


def test_preparing_a_model_says_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the host is not installed")
    told = done(str(EXAMPLES / "automodel/prepare.py"), folder=tmp_path)
    assert told.stdout == "wrote runs/example\n"
    # What is left are bars of progress, which begin anew on their line.
    assert [line for line in told.stderr.splitlines() if line and not re.match(r"[\w ]+: +\d+%\|", line)] == []
    assert (tmp_path / "runs/example/model/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_automodel_from_yaml(tmp_path: Path) -> None:
    """The whole of docs/guides/command-line.md."""
    config = str(EXAMPLES / "automodel/muown.yaml")
    run(str(EXAMPLES / "automodel/prepare.py"), folder=tmp_path)
    for command in ("check", "plan"):
        ran = dmuown(command, config, "--world-size", "2", cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    ran = dmuown("finetune", config, "--nproc-per-node", "2", cwd=tmp_path, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert re.search(rf"orthogonalized\D+{MATRICES}\b", ran.stdout), ran.stdout
    checkpoints = tmp_path / "runs/example/checkpoints"
    losses = [json.loads(line)["loss"] for line in (checkpoints / "training.jsonl").read_text().splitlines()]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0], losses
    assert (checkpoints / "LATEST").exists()
    ran = dmuown("report", str(checkpoints), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert (checkpoints / "report.html").exists()
