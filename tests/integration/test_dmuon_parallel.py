"""The ownership runtime beside tensor parallelism and replicas of the host, on four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dmuown.automodel.conversion import read_weights
from tests.integration.tiny import MATRICES, Run, finetune, write_assets

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

TENSOR_PARALLEL = ("--distributed.tp_size", "2")
SEQUENCE_PARALLEL = (*TENSOR_PARALLEL, "--distributed.sequence_parallel", "true")
# Four data-parallel ranks for eight samples.
REPLICAS = ("--distributed.dp_replicate_size", "2", "--step_scheduler.local_batch_size", "2")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def sharded(assets: Path) -> Run:
    """FSDP2 and tensor parallelism of the host, without the runtime."""
    return finetune(assets, "sharded", "MuownConfig", *TENSOR_PARALLEL, processes=4)


@pytest.fixture(scope="module")
def owned(assets: Path) -> Run:
    return finetune(assets, "owned", "DMuonConfig", *TENSOR_PARALLEL, processes=4)


def assert_alike(run: Run, other: Run, matrices: int = MATRICES, norm: float = 2e-3) -> None:
    assert run.column("loss") == pytest.approx(other.column("loss"), rel=2e-4)
    assert run.column("grad_norm") == pytest.approx(other.column("grad_norm"), rel=norm)
    for key in ("update_to_weight_mean", "magnitude_mean"):
        assert run.column(f"dmuown/{key}") == pytest.approx(other.column(f"dmuown/{key}"), rel=1e-2)
    assert run.summary.orthogonalized == run.summary.matrices == matrices
    assert run.column("dmuown/orthogonalized") == [matrices] * 6


def test_tensor_parallel_owners_train_as_fsdp2_does(owned: Run, sharded: Run) -> None:
    assert owned.column("loss")[-1] < owned.column("loss")[0] - 1
    assert_alike(owned, sharded)
    ours, theirs = (read_weights(Path(str(run.summary.consolidated))) for run in (owned, sharded))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=2e-2, atol=2e-3)


def test_tensor_parallel_runs_resume_exactly(assets: Path, owned: Run) -> None:
    checkpoint = owned.folder / "epoch_0_step_2"
    restore = ("--checkpoint.restore_from", str(checkpoint))
    resumed = finetune(assets, "resumed", "DMuonConfig", *TENSOR_PARALLEL, *restore, processes=4)
    assert resumed.column("loss") == owned.column("loss")[3:]


def test_sequence_parallel_norms_have_owners_too(assets: Path, sharded: Run) -> None:
    assert_alike(finetune(assets, "sequence", "DMuonConfig", *SEQUENCE_PARALLEL, processes=4), sharded)


def test_replicas_are_owners(assets: Path, sharded: Run) -> None:
    assert_alike(finetune(assets, "replicas", "DMuonConfig", *REPLICAS, processes=4), sharded)


def test_adapters_have_tensor_parallel_owners(assets: Path) -> None:
    """Two processes, on which the host draws the same adapters with and without FSDP2."""
    target = "nemo_automodel.components._peft.lora.PeftConfig"
    peft = {"_target_": target, "target_modules": ["*_proj"], "dim": 4, "alpha": 8, "use_triton": False}
    owned, sharded = (
        finetune(assets, f"lora_{config}", config, *TENSOR_PARALLEL, processes=2, peft=peft)
        for config in ("DMuonConfig", "MuownConfig")
    )
    # Roundings grow in matrices of rank 4; the first steps have none.
    assert_alike(owned, sharded, matrices=2 * MATRICES, norm=1e-2)
    assert owned.column("grad_norm")[:3] == pytest.approx(sharded.column("grad_norm")[:3], rel=1e-5)
    assert sharded.column("loss")[-1] < sharded.column("loss")[0] - 0.1
