"""The host's own command with the extended recipe: the ownership runtime and health, without `dmuown finetune`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny import MATRICES, ROOT, dmuown, recipe, write_checkpoint, write_data, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_hosts_command_runs_the_extended_recipe(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    write_data(tmp_path / "train.jsonl", range(200))
    write_data(tmp_path / "validation.jsonl", range(200, 204))
    content = recipe(tmp_path, tmp_path / "run", _target_="dmuown.automodel.DMuonConfig")
    content |= {
        "recipe": "dmuown.automodel.recipe.FinetuneRecipe",
        "plugin_fn": "dmuown.automodel.without_cuda",
        "dmuown": {"health": True},
    }
    content["dist_env"]["backend"] = "gloo"
    content["step_scheduler"]["max_steps"] = 3
    file = write_recipe(tmp_path / "recipe.yaml", content)
    checked = dmuown("check", str(file), cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    done = subprocess.run(
        [sys.executable, "-m", "nemo_automodel.cli.app", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(tmp_path / "hf-cache"),
            # One process in place, without the host's launcher, which asks for CUDA.
            "LOCAL_RANK": "0",
            "TORCHELASTIC_RUN_ID": "none",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        },
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = [json.loads(line) for line in (tmp_path / "run" / "training.jsonl").read_text().splitlines()]
    assert [record["dmuown/orthogonalized"] for record in log] == [MATRICES] * 3
    assert log[2]["loss"] < log[0]["loss"] - 0.2
    # The norm before clipping at 1, which the host's own clipping cannot know under owners.
    assert all(record["grad_norm"] > 1.5 for record in log)
    assert (tmp_path / "run/epoch_0_step_2/model/consolidated/config.json").is_file()
