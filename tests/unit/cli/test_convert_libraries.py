"""`dmuown convert` of files and folders that muonium's and Dion's optimizers wrote: runs go on as theirs would.

Files are built from the keys that either library documents, with the state of float64 oracles; where DMUOWN_DION_PATHS
names a Dion, also by the real one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

import dmuown
from dmuown.checkpoint import read_checkpoint
from dmuown.cli import app
from tests.reference.muon import Muon as MuonOracle
from tests.reference.normuon import NorMuon as NorMuonOracle
from tests.unit.checkpoint import dion_training
from tests.unit.checkpoint.test_dion import DIONS, run
from tests.unit.checkpoint.test_importers import Net, continued, muonium_state, ours, trained_oracles
from tests.unit.cli.test_convert import _flat, host_folder, is_matrix, write_safetensors


def convert(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["convert", *map(str, arguments), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def through_the_command(folder: Path, model: nn.Module, saved: dict[str, Any], library: str) -> dict[str, Any]:
    """Save as their users do, convert, and load what was written."""
    torch.save(saved, folder / "old.pt")
    write_safetensors(folder / "model.safetensors", {name: p.detach() for name, p in model.named_parameters()})
    (folder / "names.txt").write_text("".join(f"{name}\n" for name, _ in model.named_parameters()))
    arguments = (folder / "old.pt", folder / "new.pt", "--from", library, "--model", folder)
    told = convert(*arguments, "--names", folder / "names.txt")
    assert told["parameters"] == len(list(model.parameters()))
    found: dict[str, Any] = torch.load(folder / "new.pt", weights_only=True)
    return found


@pytest.mark.parametrize(("kind", "algorithm"), [(MuonOracle, "muon"), (NorMuonOracle, "normuon")])
def test_a_file_of_muonium(tmp_path: Path, kind: Any, algorithm: str) -> None:
    model = Net()
    oracles, saved = muonium_state(kind, algorithm, model, cautious=False)
    found = through_the_command(tmp_path, model, saved, "muonium")
    epsilon: dict[str, Any] = {"normalization_epsilon": 1e-8} if algorithm == "normuon" else {}
    new = ours(model, algorithm, ns_dtype="float32", **epsilon)
    new.load_state_dict(found)
    assert [group["algorithm"] for group in new.param_groups] == [algorithm, "adamw"]
    assert float(new.param_groups[0]["lr"]) == pytest.approx(0.02)
    assert (float(new.state[model.c]["step"]), float(new.state[model.c]["variance"][0])) == (9, 2)
    continued(oracles, model, new)


def dion_groups(algorithm: str, **generation: Any) -> list[dict[str, Any]]:
    """The param groups of either generation of Dion."""
    shared = {
        "lr": torch.tensor(0.02),
        "mu": 0.9,
        "beta1": 0.9,
        "beta2": 0.95,
        "weight_decay": 0.1,
        "cautious_wd": False,
        "epsilon": 1e-8,
        "nesterov": True,
        "flatten": False,
        "adjust_lr": "rms_norm",
        **generation,
    }
    matrices = {**shared, "algorithm": algorithm, "params": [0, 1]}
    if algorithm == "normuon":
        matrices["muon_beta2"] = 0.95
    return [matrices, {**shared, "algorithm": "adamw", "lr": 1e-3, "params": [2]}]


@pytest.mark.parametrize("main", [True, False], ids=["main", "7452a58"])
@pytest.mark.parametrize(("kind", "algorithm"), [(MuonOracle, "muon"), (NorMuonOracle, "normuon")])
def test_a_file_of_dion(tmp_path: Path, kind: Any, algorithm: str, main: bool) -> None:
    """Main counts AdamW's steps on the device, the older revision in the group."""
    model = Net()
    oracles = trained_oracles(kind, model, lr=0.02, mu=0.9, weight_decay=0.1, nesterov=True, adjust_lr="rms_norm")
    state: dict[int, Any] = {index: {"momentum": oracle.momentum.float()} for index, oracle in enumerate(oracles)}
    if algorithm == "normuon":
        for index, oracle in enumerate(oracles):
            state[index]["variance_neuron"] = oracle.variance.float()
    state[2] = {"momentum": torch.ones(5), "variance": torch.full((5,), 2.0)}
    if main:
        state[2]["step_dev"] = torch.tensor(9.0)
    groups = dion_groups(algorithm, **({} if main else {"step": 9}))
    found = through_the_command(tmp_path, model, {"state": state, "param_groups": groups}, "dion")
    epsilon: dict[str, Any] = {"normalization_epsilon": 1e-8} if algorithm == "normuon" else {}
    newton_schulz = {"scheme": "newton_schulz", "coefficients": "keller"}
    new = ours(model, algorithm, ns_dtype="float32", **newton_schulz, **epsilon)
    new.load_state_dict(found)
    assert float(new.state[model.c]["step"]) == 9
    assert new.param_groups[0]["adjust_lr"] == "rms_norm"
    continued(oracles, model, new)


def test_a_folder_that_the_host_wrote_with_dion(tmp_path: Path) -> None:
    """The host flattens state and options by name, as for any optimizer, and has a step for each parameter."""
    folder, values = host_folder(tmp_path)
    matrices, others = dion_groups("muon")
    flat: dict[str, Any] = {"sched.num_steps": 7}
    for index, (name, weight) in enumerate(values.items()):
        state = {"momentum": torch.full_like(weight, float(index))}
        if not is_matrix(name):
            state |= {"variance": torch.full_like(weight, 0.5), "step_dev": torch.tensor(7.0)}
        options = {key: value for key, value in (matrices if is_matrix(name) else others).items() if key != "params"}
        options["lr"] = float(options["lr"])
        flat |= {f"optim.state.{name}.{key}": value for key, value in state.items()}
        flat |= {f"optim.param_groups.{name}.{key}": value for key, value in options.items()}
    save(flat, checkpoint_id=str(folder / "optim"), no_dist=True)
    recipe = {"optimizer": {"_target_": "dmuown.automodel.MuonConfig", "lr": 1e-3, "weight_decay": 0.1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(recipe))
    told = convert(folder, tmp_path / "new", "--from", "dion", "--config", tmp_path / "run.yaml")
    assert (told["parameters"], told["algorithms"]) == (11, {"muon": 7, "adamw": 4})
    flat = _flat(read_checkpoint(tmp_path / "new/optim", require_complete=False))
    assert flat["sched.num_steps"] == 7
    for index, name in enumerate(values):
        assert bool((flat[f"optim.state.{name}.momentum"] == index).all())
        assert flat[f"optim.param_groups.{name}.algorithm"] == ("muon" if is_matrix(name) else "adamw")
        if not is_matrix(name):
            assert float(flat[f"optim.state.{name}.step"]) == 7
            assert bool((flat[f"optim.state.{name}.variance"] == 0.5).all())


@pytest.mark.slow
@pytest.mark.skipif(not DIONS, reason="no Dion to test: DMUOWN_DION_PATHS names no folder that holds one")
@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
@pytest.mark.parametrize("dion", DIONS, ids=lambda path: path.name)
def test_a_file_of_the_real_dion(dion: Path, name: str, tmp_path: Path) -> None:
    run("THEIRS", name, tmp_path, dion)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    params = dion_training.model()
    params.load_state_dict(saved["model"])
    found = through_the_command(tmp_path, params, saved["optimizer"], "dion")
    optimizer = dion_training.optimizer_of(dmuown, name, params)
    optimizer.load_state_dict(found)
    dion_training.train(params, optimizer, range(3, 6))
    for key, expected in torch.load(tmp_path / "THEIRS.pt", weights_only=True).items():
        error = (params[key] - expected).norm() / (expected - saved["model"][key]).norm()
        assert error < 1e-5, key
