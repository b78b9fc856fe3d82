"""The ownership runtime in the host: one process and two, losses of plain FSDP2, save, resume, export, health."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmuown.automodel.conversion import read_weights
from tests.integration.tiny import MATRICES, Run, finetune, write_assets

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def owned(assets: Path) -> Run:
    return finetune(assets, "owned", "DMuonConfig", processes=2)


@pytest.fixture(scope="module")
def sharded(assets: Path) -> Run:
    return finetune(assets, "sharded", "MuownConfig", processes=2)


def assert_all_orthogonalized(run: Run) -> None:
    assert run.summary.orthogonalized == run.summary.matrices == MATRICES
    assert run.column("dmuown/orthogonalized") == [MATRICES] * 6
    assert max(run.column("dmuown/orthogonality_residual_max")) < 1
    assert run.column("dmuown/nonfinite") == [0] * 6


def test_two_owners_orthogonalize_every_matrix_and_the_loss_falls(owned: Run) -> None:
    assert owned.summary.world_size == 2
    assert_all_orthogonalized(owned)
    assert owned.column("loss")[-1] < owned.column("loss")[0] - 1


# What follows compares with further runs of both processes, half a minute each.


@pytest.mark.slow
def test_losses_and_norms_are_those_of_fsdp2(owned: Run, sharded: Run) -> None:
    assert owned.column("loss") == pytest.approx(sharded.column("loss"), rel=2e-4)
    assert owned.column("grad_norm") == pytest.approx(sharded.column("grad_norm"), rel=2e-3)


@pytest.mark.slow
def test_one_process_trains_alike(assets: Path, owned: Run) -> None:
    one = finetune(assets, "one", "DMuonConfig", processes=1)
    assert one.column("loss") == pytest.approx(owned.column("loss"), rel=2e-4)


@pytest.mark.slow
def test_health_is_that_of_fsdp2(owned: Run, sharded: Run) -> None:
    assert_all_orthogonalized(sharded)
    for key in ("update_to_weight_mean", "magnitude_mean"):
        name = f"dmuown/{key}"
        assert owned.column(name) == pytest.approx(sharded.column(name), rel=1e-2)


@pytest.mark.slow
def test_the_export_is_the_trained_model(owned: Run, sharded: Run) -> None:
    ours, theirs = (read_weights(Path(str(run.summary.consolidated))) for run in (owned, sharded))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.slow
def test_resuming_goes_on_exactly(assets: Path, owned: Run) -> None:
    checkpoint = owned.folder / "epoch_0_step_2"
    resumed = finetune(assets, "resumed", "DMuonConfig", "--checkpoint.restore_from", str(checkpoint), processes=2)
    assert resumed.column("loss") == owned.column("loss")[3:]
