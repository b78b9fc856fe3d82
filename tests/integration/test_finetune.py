"""`dmuown finetune` runs the real host: one process and two, save, resume, export.

Every run is a process of its own of 10 to 30 seconds, mostly imports, so runs are shared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dmuown.automodel.request import read_request
from dmuown.automodel.summary import RunSummary
from dmuown.errors import CheckpointError
from tests.integration.tiny import MATRICES, dmuown, recipe, write_assets, write_recipe

pytestmark = pytest.mark.timeout(400)


class Run(NamedTuple):
    folder: Path
    output: str
    summary: RunSummary
    errors: str

    def log(self, name: str = "training") -> list[dict[str, float]]:
        """The host's own log of the run: one record a step."""
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]

    def parameters(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        assert self.summary.consolidated is not None
        found: dict[str, torch.Tensor] = {}
        for file in sorted(Path(self.summary.consolidated).glob("*.safetensors")):
            found |= load_file(file)
        return found

    def optimizer_state(self) -> dict[str, object]:
        """Every entry of the saved optimizer state, whole, by its flattened name."""
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        assert self.summary.checkpoint is not None
        state: dict[str, object] = {}
        reader = FileSystemReader(Path(self.summary.checkpoint) / "optim")
        _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return _flat(state)


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {key: value for name, child in tree.items() for key, value in _flat(child, f"{prefix}/{name}").items()}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assets(tmp_path_factory.mktemp("assets"))


def finetune(assets: Path, folder: Path, *arguments: str) -> Run:
    file = write_recipe(assets / f"{folder.name}.yaml", recipe(assets, folder))
    done = dmuown("finetune", str(file), *arguments, cwd=assets, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(folder, done.stdout, RunSummary.load(folder), done.stderr)


@pytest.fixture(scope="module")
def one(assets: Path) -> Run:
    return finetune(assets, assets / "one")


@pytest.fixture(scope="module")
def two(assets: Path) -> Run:
    return finetune(assets, assets / "two", "--nproc-per-node", "2")


def test_one_process_trains_exports_and_says_so(one: Run) -> None:
    assert list(one.summary.losses) == [1, 2, 3, 4, 5, 6]
    assert list(one.summary.validation_losses["default"]) == [3, 6]
    assert one.summary.losses[6] < one.summary.losses[1] - 0.5
    assert one.summary.validation_losses["default"][6] < one.summary.validation_losses["default"][3]
    assert (one.summary.optimizer, one.summary.matrices, one.summary.world_size) == ("Muown", MATRICES, 1)
    for line in (
        "without CUDA: torch.cuda.current_device returns 0",
        "step 1/6: loss",
        "step 6/6: loss",
        f"{MATRICES} matrices a step",
        f"first {one.summary.losses[1]:.4f}, last {one.summary.losses[6]:.4f}",
        str(one.summary.checkpoint),
    ):
        assert line in one.output
    # The host's own records say the same.
    assert [record["loss"] for record in one.log()] == list(one.summary.losses.values())


@pytest.mark.parametrize("processes", ["one", "two"])
def test_nothing_is_said_that_no_user_can_act_on(processes: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(processes)
    said = [line for line in run.errors.splitlines() if line.strip() and "Loading weights" not in line]
    # It names the key that changes it.
    assert not [line for line in said if "--checkpoint.v4_compatible=True" not in line]


def test_the_exported_checkpoint_loads_in_transformers_and_differs_from_the_start(one: Run, assets: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert one.summary.consolidated is not None
    trained = AutoModelForCausalLM.from_pretrained(one.summary.consolidated, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(assets / "model", dtype=torch.float32)
    before = dict(start.named_parameters())
    for name, parameter in trained.named_parameters():
        assert torch.isfinite(parameter).all(), name
        assert not torch.equal(parameter, before[name]), name
    tokenizer = AutoTokenizer.from_pretrained(one.summary.consolidated)
    assert tokenizer("What is 1 plus 1?")["input_ids"]


def test_two_processes_train_as_one_does(one: Run, two: Run, assets: Path) -> None:
    """The same samples a step, summed in another order.

    Orthogonalization magnifies rounding in directions with little gradient, of which a tiny model has many: one
    process that accumulates in another order ends as far away, 2% of the way the weights went.
    """
    from safetensors.torch import load_file

    assert two.summary.world_size == 2
    assert two.summary.matrices == MATRICES
    for step, loss in one.summary.losses.items():
        assert two.summary.losses[step] == pytest.approx(loss, rel=1e-6 if step <= 2 else 1e-3), step
    start, reference = load_file(assets / "model" / "model.safetensors"), one.parameters()
    for name, parameter in two.parameters().items():
        apart = torch.linalg.vector_norm(parameter - reference[name])
        moved = torch.linalg.vector_norm(reference[name] - start[name])
        assert apart < 0.06 * moved, name


@pytest.mark.parametrize("processes", [1, 2])
def test_stop_and_resume_is_bit_identical(processes: int, assets: Path, request: pytest.FixtureRequest) -> None:
    whole: Run = request.getfixturevalue("one" if processes == 1 else "two")
    resumed = finetune(
        assets,
        assets / f"resumed{processes}",
        *("--nproc-per-node", str(processes)),
        *("--checkpoint.restore_from", str(whole.folder / "epoch_0_step_2")),
    )
    assert list(resumed.summary.losses) == [4, 5, 6]
    assert resumed.summary.losses == {step: whole.summary.losses[step] for step in (4, 5, 6)}
    assert resumed.summary.validation_losses["default"][6] == whole.summary.validation_losses["default"][6]
    assert [record["lr"] for record in resumed.log()] == [record["lr"] for record in whole.log()[3:]]
    _assert_equal(dict(resumed.parameters()), dict(whole.parameters()))
    state = whole.optimizer_state()
    assert len([name for name in state if name.endswith("momentum")]) >= MATRICES
    _assert_equal(resumed.optimizer_state(), state)


def _assert_equal(found: dict[str, object], expected: dict[str, object]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(torch.as_tensor(found[name]), value), name
        else:
            assert found[name] == value, name


def test_a_checkpoint_of_muown_is_refused_by_muon(one: Run, assets: Path) -> None:
    file = write_recipe(assets / "muon.yaml", recipe(assets, one.folder, _target_="dmuown.automodel.MuonConfig"))
    with pytest.raises(CheckpointError, match="was written by MuownConfig, and this run uses MuonConfig"):
        read_request(file)
