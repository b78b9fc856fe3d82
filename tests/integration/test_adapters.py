"""In the host, with and without owners: LoRA adapters, and gradients accumulated over micro-batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dmuown.automodel.conversion import read_weights
from dmuown.automodel.summary import RunSummary
from tests.integration.tiny import MATRICES, dmuown, recipe, write_checkpoint, write_data, write_recipe

# Runs of 20 s each, mostly imports.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIGS = (("MuownConfig", 1), ("DMuonConfig", 2))
ADAPTED = MATRICES + 1
LORA: dict[str, Any] = {
    "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
    "match_all_linear": True,
    "dim": 4,
    "alpha": 8,
    "use_triton": False,
}


class Run(NamedTuple):
    folder: Path
    summary: RunSummary
    log: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return list(self.summary.losses.values())


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_checkpoint(folder / "model")
    write_data(folder / "train.jsonl", range(200))
    write_data(folder / "validation.jsonl", range(200, 204))
    return folder


def finetune(assets: Path, name: str, config: str, *, micro_batch: int, processes: int = 1, **sections: Any) -> Run:
    folder = assets / name
    content = recipe(assets, folder) | sections
    content["optimizer"]["_target_"] = f"dmuown.automodel.{config}"
    content["step_scheduler"] |= {
        "local_batch_size": micro_batch,
        "max_steps": 3,
        "ckpt_every_steps": 3,
        "val_every_steps": 3,
    }
    file = write_recipe(assets / f"{name}.yaml", content)
    done = dmuown("finetune", str(file), "--nproc-per-node", str(processes), cwd=assets, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    return Run(folder, RunSummary.load(folder), log)


@pytest.mark.parametrize(("config", "processes"), CONFIGS)
def test_adapters_train_and_the_rest_stays(config: str, processes: int, assets: Path) -> None:
    """B starts at zero: Muown's first update gives its rows a direction and a length of `lr`."""
    run = finetune(assets, f"adapters-{config}", config, micro_batch=4, processes=processes, peft=LORA)
    # A and B of every linear layer, the head among them: nothing else is trained.
    assert run.summary.matrices == run.summary.orthogonalized == 2 * ADAPTED
    assert run.summary.trainable_parameters == run.summary.matrix_parameters
    assert run.losses[2] < run.losses[0] - 0.01
    adapter = read_weights(run.folder / "epoch_0_step_2" / "model")
    second = {name: tensor for name, tensor in adapter.items() if "lora_B" in name}
    assert len(second) == ADAPTED
    assert len(adapter) == 2 * ADAPTED
    for name, tensor in second.items():
        lengths = torch.linalg.vector_norm(tensor.float(), dim=-1)
        assert torch.isfinite(tensor).all(), name
        assert lengths.min() > 0, name
        # By then rates of 1.1e-2 and 2e-2 went by; a row's length follows the rate, whatever the gradient's size.
        assert 1e-2 < lengths.median() < 4e-2, name


@pytest.mark.parametrize(("config", "processes"), CONFIGS)
def test_micro_batches_add_up(config: str, processes: int, assets: Path) -> None:
    """Eight samples at once, and in micro-batches of two: one step of the same gradient, wherever it is reduced."""
    whole = finetune(assets, f"whole-{config}", config, micro_batch=8)
    parts = finetune(assets, f"parts-{config}", config, micro_batch=2, processes=processes)
    assert parts.summary.world_size == processes
    assert parts.losses == pytest.approx(whole.losses, rel=1e-3)
    for part, once in zip(parts.log, whole.log, strict=True):
        assert part["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-2)
    assert whole.losses[2] < whole.losses[0] - 0.1
