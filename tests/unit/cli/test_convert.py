"""`dmuown convert`: another library's checkpoint becomes one that our optimizer resumes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

from dmuown.automodel.conversion import read_weights
from dmuown.checkpoint import read_checkpoint
from dmuown.cli import app
from dmuown.errors import CheckpointError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weights() -> dict[str, Tensor]:
    from dmuown.automodel.shapes import model_parameters

    generator = torch.Generator().manual_seed(0)
    return {entry.name: torch.randn(entry.parameter.shape, generator=generator) for entry in model_parameters(CONFIG)}


def write_safetensors(file: Path, tensors: dict[str, Tensor]) -> None:
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def is_matrix(name: str) -> bool:
    return any(part in name for part in MATRICES)


def host_state(values: dict[str, Tensor]) -> dict[str, Any]:
    """What AutoModel's Muown saves: flattened, its matrices called `muon`."""
    flat: dict[str, Any] = {"sched.num_steps": 7}
    for index, (name, weight) in enumerate(values.items()):
        rows = weight.norm(dim=1, keepdim=True) if is_matrix(name) else None
        state: dict[str, Any] = {"momentum": torch.full_like(weight, float(index))}
        if rows is None:
            state |= {"variance": torch.full_like(weight, 0.5), "step": torch.tensor(7.0)}
        else:
            state |= {
                "g": rows,
                "v_norm": rows.clone(),
                "m_g": torch.full_like(rows, 0.1),
                "v_g": torch.full_like(rows, 0.2),
                "muown_step": torch.tensor(7.0),
            }
        flat |= {f"optim.state.{name}.{key}": value for key, value in state.items()}
        options = {"lr": 2e-3, "weight_decay": 0.25, "algorithm": "adamw" if rows is None else "muon", "step": 7}
        flat |= {f"optim.param_groups.{name}.{key}": value for key, value in options.items()}
    return flat


def host_folder(parent: Path) -> tuple[Path, dict[str, Tensor]]:
    """A folder of the host's with a consolidated model and no optimizer yet, and the model's weights."""
    folder = parent / "epoch_0_step_6"
    consolidated = folder / "model/consolidated"
    consolidated.mkdir(parents=True)
    (consolidated / "config.json").write_text(json.dumps(CONFIG))
    values = weights()
    write_safetensors(consolidated / "model.safetensors", values)
    return folder, values


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder, values = host_folder(tmp_path)
    (folder / "losses.json").write_text("{}")
    save(host_state(values), checkpoint_id=str(folder / "optim"), no_dist=True)
    recipe = {"optimizer": {"_target_": "dmuown.automodel.MuownConfig", "lr": 1e-3, "weight_decay": 0.1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def convert(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_a_folder_of_the_host_becomes_one_that_resumes(checkpoint: Path, tmp_path: Path) -> None:
    done = convert(checkpoint, tmp_path / "new", "--from", "automodel", "--config", tmp_path / "run.yaml", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["parameters"], told["algorithms"]) == (11, {"muown": 7, "adamw": 4})
    stored = read_checkpoint(tmp_path / "new/optim", require_complete=False)
    flat = _flat(stored)
    values = weights()
    for index, (name, weight) in enumerate(values.items()):
        found = {
            key.removeprefix(f"optim.state.{name}."): value
            for key, value in flat.items()
            if key.startswith(f"optim.state.{name}.")
        }
        assert torch.equal(found["momentum"], torch.full_like(weight, float(index)))
        assert float(found["step"]) == 7
        if is_matrix(name):
            assert torch.equal(found["magnitude"], weight.norm(dim=1, keepdim=True))
            assert torch.equal(found["magnitude_variance"], torch.full((weight.shape[0], 1), 0.2))
        assert flat[f"optim.param_groups.{name}.lr"] == 2e-3
        assert flat[f"optim.param_groups.{name}.algorithm"] == ("muown" if is_matrix(name) else "adamw")
        assert flat[f"optim.param_groups.{name}.lr_mult"] == 1.0
    assert flat["sched.num_steps"] == 7
    assert (tmp_path / "new/losses.json").exists()
    assert torch.equal(
        read_weights(tmp_path / "new/model/consolidated")["model.norm.weight"], values["model.norm.weight"]
    )


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}.{name}".strip(".")).items()
    }


def test_a_file_of_torch_becomes_ours(tmp_path: Path) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    adamw = torch.optim.AdamW(params, lr=3e-3)
    for param in params:
        param.grad = torch.ones_like(param)
    adamw.step()
    torch.save(adamw.state_dict(), tmp_path / "old.pt")
    write_safetensors(tmp_path / "model.safetensors", {"a": params[0].detach(), "b": params[1].detach()})
    (tmp_path / "names.txt").write_text("a\nb\n")
    arguments = (tmp_path / "old.pt", tmp_path / "new.pt", "--from", "torch", "--model", tmp_path)
    done = convert(*arguments, "--names", tmp_path / "names.txt")
    assert done.exit_code == 0, done.output
    assert "state of 2 parameters (2 by adamw)" in done.output
    converted = torch.load(tmp_path / "new.pt", weights_only=True)
    assert torch.allclose(converted["state"]["b"]["variance"], torch.full((2,), 1e-3))
    assert converted["param_groups"][0]["lr"] == 3e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{checkpoint}", "{tmp}/new", "--from", "automodel"), "--config"),
        (("{checkpoint}", "{checkpoint}", "--from", "automodel", "--config", "{tmp}/run.yaml"), "exists already"),
        (("{checkpoint}", "{tmp}/new", "--from", "adam", "--config", "{tmp}/run.yaml"), "--from"),
        (("{tmp}/none", "{tmp}/new", "--from", "torch"), "does not exist"),
        (("{checkpoint}", "{tmp}/new", "--from", "dion", "--config", "{tmp}/run.yaml"), "counterpart"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    filled = [argument.format(checkpoint=checkpoint, tmp=tmp_path) for argument in arguments]
    before = sorted(path.name for path in tmp_path.iterdir())
    done = convert(*filled)
    assert done.exit_code != 0
    assert message in str(done.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="longer than the file"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="no valid safetensors"):
        read_weights(tmp_path)
