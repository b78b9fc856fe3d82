"""The ownership runtime in the host: one process and two, losses of plain FSDP2, save, resume, export, health."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dmuown.automodel.conversion import read_weights
from dmuown.automodel.summary import RunSummary
from tests.integration.tiny import MATRICES, dmuown, recipe, write_checkpoint, write_data, write_recipe

pytestmark = pytest.mark.timeout(600)


class Run(NamedTuple):
    folder: Path
    summary: RunSummary
    log: list[dict[str, Any]]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    write_checkpoint(folder / "model")
    write_data(folder / "train.jsonl", range(200))
    write_data(folder / "validation.jsonl", range(200, 216))
    return folder


def finetune(assets: Path, name: str, config: str, processes: int, *arguments: str) -> Run:
    folder = assets / name
    content = recipe(assets, folder)
    content["optimizer"]["_target_"] = f"dmuown.automodel.{config}"
    content["dmuown"] = {"health": True}
    file = write_recipe(assets / f"{name}.yaml", content)
    done = dmuown("finetune", str(file), "--nproc-per-node", str(processes), *arguments, cwd=assets, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    return Run(folder, RunSummary.load(folder), log)


@pytest.fixture(scope="module")
def owned(assets: Path) -> Run:
    return finetune(assets, "owned", "DMuonConfig", 2)


@pytest.fixture(scope="module")
def sharded(assets: Path) -> Run:
    return finetune(assets, "sharded", "MuownConfig", 2)


def column(run: Run, key: str) -> list[float]:
    return [record[key] for record in run.log]


def assert_all_orthogonalized(run: Run) -> None:
    assert run.summary.orthogonalized == run.summary.matrices == MATRICES
    assert column(run, "dmuown/orthogonalized") == [MATRICES] * 6
    assert max(column(run, "dmuown/orthogonality_residual_max")) < 1
    assert column(run, "dmuown/nonfinite") == [0] * 6


def test_two_owners_orthogonalize_every_matrix_and_the_loss_falls(owned: Run) -> None:
    assert owned.summary.world_size == 2
    assert_all_orthogonalized(owned)
    assert column(owned, "loss")[-1] < column(owned, "loss")[0] - 1


# What follows compares with further runs of both processes, half a minute each.


@pytest.mark.slow
def test_losses_and_norms_are_those_of_fsdp2(owned: Run, sharded: Run) -> None:
    assert column(owned, "loss") == pytest.approx(column(sharded, "loss"), rel=2e-4)
    assert column(owned, "grad_norm") == pytest.approx(column(sharded, "grad_norm"), rel=2e-3)


@pytest.mark.slow
def test_one_process_trains_alike(assets: Path, owned: Run) -> None:
    one = finetune(assets, "one", "DMuonConfig", 1)
    assert column(one, "loss") == pytest.approx(column(owned, "loss"), rel=2e-4)


@pytest.mark.slow
def test_health_is_that_of_fsdp2(owned: Run, sharded: Run) -> None:
    assert_all_orthogonalized(sharded)
    for key in ("update_to_weight_mean", "magnitude_mean"):
        name = f"dmuown/{key}"
        assert column(owned, name) == pytest.approx(column(sharded, name), rel=1e-2)


@pytest.mark.slow
def test_the_export_is_the_trained_model(owned: Run, sharded: Run) -> None:
    ours, theirs = (read_weights(Path(str(run.summary.consolidated))) for run in (owned, sharded))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.slow
def test_resuming_goes_on_exactly(assets: Path, owned: Run) -> None:
    checkpoint = owned.folder / "epoch_0_step_2"
    resumed = finetune(assets, "resumed", "DMuonConfig", 2, "--checkpoint.restore_from", str(checkpoint))
    assert column(resumed, "loss") == column(owned, "loss")[3:]
