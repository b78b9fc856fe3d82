"""Invariant 4 in one process: stop and resume is bit-identical to going on, whatever carries the state."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import dmuown
from tests.unit.checkpoint.training import ALGORITHMS, assert_same, build, tensors, train

Carry = Callable[[tuple[Any, Any, Any], tuple[Any, Any, Any], Path], None]


def by_torch_save(old: tuple[Any, Any, Any], new: tuple[Any, Any, Any], folder: Path) -> None:
    stream = io.BytesIO()
    torch.save([part.state_dict() for part in old], stream)
    stream.seek(0)
    for part, state in zip(new, torch.load(stream, weights_only=True), strict=True):
        part.load_state_dict(state)


def by_own_files(old: tuple[Any, Any, Any], new: tuple[Any, Any, Any], folder: Path) -> None:
    dmuown.save_checkpoint(folder / "saved", old[0], old[1], extra={"scheduler": old[2].state_dict()})
    new[2].load_state_dict(dmuown.load_checkpoint(folder / "saved", new[0], new[1])["scheduler"])


def by_torch_functions(old: tuple[Any, Any, Any], new: tuple[Any, Any, Any], folder: Path) -> None:
    model_state, state = torch_state_dict.get_state_dict(old[0], old[1])
    save({"model": model_state, "optimizer": state}, checkpoint_id=folder / "saved", no_dist=True)
    model_state, state = torch_state_dict.get_state_dict(new[0], new[1])
    loaded: Any = {"model": model_state, "optimizer": state}
    load(loaded, checkpoint_id=folder / "saved", no_dist=True)
    torch_state_dict.set_state_dict(
        new[0], new[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    new[2].load_state_dict(old[2].state_dict())


def by_flattened_torch_functions(old: tuple[Any, Any, Any], new: tuple[Any, Any, Any], folder: Path) -> None:
    """As AutoModel does it."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = torch_state_dict.get_optimizer_state_dict(old[0], old[1], options=options)
    save({"optim": state}, checkpoint_id=folder / "saved", no_dist=True)
    loaded = {"optim": torch_state_dict.get_optimizer_state_dict(new[0], new[1], options=options)}
    load(loaded, checkpoint_id=folder / "saved", no_dist=True)
    torch_state_dict.set_optimizer_state_dict(new[0], new[1], loaded["optim"], options=options)
    new[0].load_state_dict(old[0].state_dict())
    new[2].load_state_dict(old[2].state_dict())


def by_own_functions(old: tuple[Any, Any, Any], new: tuple[Any, Any, Any], folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    state = dmuown.get_optimizer_state_dict(old[0], old[1], options=options)
    weights = dmuown.get_model_state_dict(old[0], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dmuown.set_model_state_dict(new[0], weights)
    dmuown.set_optimizer_state_dict(new[0], new[1], state)
    new[2].load_state_dict(old[2].state_dict())


WAYS = [by_torch_save, by_own_files, by_torch_functions, by_flattened_torch_functions, by_own_functions]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("carry", WAYS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resume_is_bit_identical(algorithm: str, carry: Carry, tmp_path: Path) -> None:
    old, new = build(algorithm), build(algorithm, seed=1)
    train(*old, range(3))
    carry(old, new, tmp_path)
    assert_same(tensors(*old[:2]), tensors(*new[:2]))
    assert [group["step"] for group in new[1].param_groups] == [3, 3]
    assert [group["initial_lr"] for group in new[1].param_groups] == [1e-2, 3e-3]
    train(*old, range(3, 6))
    train(*new, range(3, 6))
    assert_same(tensors(*old[:2]), tensors(*new[:2]))
    assert [group["lr"] for group in new[1].param_groups] == [group["lr"] for group in old[1].param_groups]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_torch_never_steps_to_make_state(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = build(algorithm)
    before = tensors(model, optimizer)
    monkeypatch.setattr(type(optimizer), "step", lambda *_, **__: pytest.fail("a step was taken to make state"))
    state = torch_state_dict.get_optimizer_state_dict(model, optimizer)
    torch_state_dict.set_optimizer_state_dict(model, optimizer, state)
    assert_same(before, tensors(model, optimizer))
    assert all(param.grad is None for param in model.parameters())


def test_resume_on_weights_of_half_precision_keeps_state_as_it_is() -> None:
    """torch's own loader would cast fp32 row state and counters to bf16: 1e-3 of error, and 257 becoming 256."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(6, 4, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [
        dmuown.NorMuown([{"params": [m.weight]}, {"params": [m.bias], "algorithm": "adamw"}], lr=1e-2) for m in models
    ]
    state = optimizers[0].state[models[0].weight]
    for key in ("magnitude", "magnitude_momentum", "magnitude_variance", "variance_neuron"):
        state[key].copy_(1 + torch.rand(4, 1))
    state["step"].fill_(257)
    optimizers[0].state[models[0].bias]["step"].fill_(259)
    saved = torch_state_dict.get_optimizer_state_dict(models[0], optimizers[0])
    torch_state_dict.set_optimizer_state_dict(models[1], optimizers[1], saved)
    assert_same(tensors(models[0], optimizers[0])[2:], tensors(models[1], optimizers[1])[2:])
    assert optimizers[1].state[models[1].weight]["magnitude"].dtype == torch.float32
    assert float(optimizers[1].state[models[1].weight]["step"]) == 257
    assert float(optimizers[1].state[models[1].bias]["step"]) == 259


def test_a_counter_may_come_back_as_a_number_or_as_a_tensor_of_one_element() -> None:
    model, optimizer, scheduler = build("muown")
    train(model, optimizer, scheduler, range(2))
    saved = optimizer.state_dict()
    saved["state"] = {key: dict(buffers) for key, buffers in saved["state"].items()}
    saved["state"][0]["step"], saved["state"][1]["step"] = 300, torch.tensor([301])
    _, other, _ = build("muown")
    other.load_state_dict(saved)
    steps = [other.state[param]["step"] for param in other.param_groups[0]["params"]]
    assert [float(step) for step in steps] == [300, 301, 2]
    assert all(step.dtype == torch.float32 and step.shape == () for step in steps)
