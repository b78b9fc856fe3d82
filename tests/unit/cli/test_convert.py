"""`dmuown convert`: another library's checkpoint becomes one that our optimizer resumes from."""

from __future__ import annotations

import json
import re
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
from dmuown.errors import CheckpointError, DmuownError

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


@pytest.fixture
def adamw(tmp_path: Path) -> Path:
    """A folder with weights `a` and `b`, and their AdamW's state by position in `old.pt`."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(params, lr=3e-3)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "old.pt")
    write_safetensors(tmp_path / "model.safetensors", {"a": params[0].detach(), "b": params[1].detach()})
    return tmp_path


def test_a_file_of_torch_becomes_ours(adamw: Path) -> None:
    (adamw / "names.txt").write_text("a\nb\n")
    arguments = (adamw / "old.pt", adamw / "new.pt", "--from", "torch", "--model", adamw)
    done = convert(*arguments, "--names", adamw / "names.txt")
    assert done.exit_code == 0, done.output
    assert "state of 2 parameters (2 by adamw)" in done.output
    converted = torch.load(adamw / "new.pt", weights_only=True)
    assert torch.allclose(converted["state"]["b"]["variance"], torch.full((2,), 1e-3))
    assert converted["param_groups"][0]["lr"] == 3e-3


#: A file of names, or None; and what is said about it.
NAMES = {
    None: r"^--names: is missing: the parameters in '.*old\.pt' have positions, no names\. Give a file",
    "a": r"^--names: lists 1 names, the state has 2 parameters",
    "a a": r"^--names: lists 'a' twice",
    "a c": r"^--names: lists 'c', which is not among the weights in .* Use one of 'a', 'b'",
    "b a": r"^--names: gives 'b' of shape \(2,\) the state of a parameter of \(3,\)\. List the names in the order",
    "/": r"^--names: '.*' is no file",
}


@pytest.mark.parametrize("names", NAMES)
def test_files_without_names_speak_of_the_commands_options(adamw: Path, names: str | None) -> None:
    listed = adamw / "names.txt"
    listed.mkdir() if names == "/" else listed.write_text((names or "").replace(" ", "\n"))
    given = [] if names is None else ["--names", listed]
    done = convert(adamw / "old.pt", adamw / "new.pt", "--from", "torch", "--model", adamw, *given)
    assert isinstance(done.exception, DmuownError), done.output
    assert re.search(NAMES[names], str(done.exception)), str(done.exception)
    assert not (adamw / "new.pt").exists()


@pytest.mark.parametrize("library", ["automodel", "dion", "muonium", "muown"])
def test_another_librarys_file_speaks_of_from(adamw: Path, library: str) -> None:
    (adamw / "names.txt").write_text("a\nb\n")
    given = ("--model", adamw, "--names", adamw / "names.txt")
    done = convert(adamw / "old.pt", adamw / "new.pt", "--from", library, *given)
    assert isinstance(done.exception, DmuownError), done.output
    assert "--from" in str(done.exception)
    assert "source" not in str(done.exception)


@pytest.mark.parametrize("content", [[1], {"x": 1}, {"state": {}}, {"state": {}, "param_groups": [1]}], ids=str)
@pytest.mark.parametrize("named", [False, True])
def test_a_file_that_is_no_state_says_so(adamw: Path, content: Any, named: bool) -> None:
    torch.save(content, adamw / "odd.pt")
    (adamw / "names.txt").write_text("a\nb\n")
    names = ("--names", adamw / "names.txt") if named else ()
    done = convert(adamw / "odd.pt", adamw / "new.pt", "--from", "torch", "--model", adamw, *names)
    assert isinstance(done.exception, CheckpointError), done.output
    assert re.search(r"odd\.pt: holds .* Give what torch\.save", str(done.exception))


def test_names_are_for_state_without_them(adamw: Path) -> None:
    state = torch.load(adamw / "old.pt", weights_only=True)
    (group,) = state["param_groups"]
    by_name = {"state": {"ab"[index]: entry for index, entry in state["state"].items()}}
    torch.save(by_name | {"param_groups": [group | {"params": ["a", "b"]}]}, adamw / "named.pt")
    arguments = (adamw / "named.pt", adamw / "new.pt", "--from", "torch", "--model", adamw)
    (adamw / "names.txt").write_text("a\nb\n")
    done = convert(*arguments, "--names", adamw / "names.txt")
    assert str(done.exception).startswith("--names: is for state by position, and this state has names")
    assert convert(*arguments).exit_code == 0
    assert torch.load(adamw / "new.pt", weights_only=True)["state"].keys() == {"a", "b"}


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
