"""Checkpoints of dedicated models: owners write their own entries, any layout reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuown
from dmuown.checkpoint import (
    get_model_state_dict,
    get_optimizer_state_dict,
    load_checkpoint,
    save_checkpoint,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from dmuown.errors import CheckpointError
from dmuown.ownership import dedicated_records, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import batch, build, loss_of
from tests.distributed.ownership.training import (
    OneProcess,
    assert_nothing_but_homes,
    assert_state_of_owned_only,
    build_optimizer,
    compare,
    dedicated,
    mesh_of,
    policy,
    whole_parameters,
)

SAVED_AFTER, STEPS = 3, 6


def _make(layout: str, world_size: int, seed: int, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(seed=seed, **options).double()
    if layout == "dedicated":
        dedicated(model, mesh_of(world_size))
        return model, build_optimizer("muown", model)
    if layout == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh_of(world_size))
        fully_shard(model, mesh=mesh_of(world_size))
    return model, build_optimizer("muown", model, dmuown.param_groups(model, policy()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int, world_size: int) -> None:
    """Four sequences a step, however many ranks share them."""
    share = [batch(step, each, size=1) for each in range(rank, 4, world_size)]
    loss_of(model, torch.cat(share)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _save(rank: int, world_size: int, layout: str, folder: str, options: dict[str, Any]) -> None:
    model, optimizer = _make(layout, world_size, 0, options)
    for step in range(SAVED_AFTER):
        _step(model, optimizer, step, rank, world_size)
    state = _state(model, optimizer)
    if layout == "dedicated":
        # What a rank writes is what it holds.
        names = {name for name, record in dedicated_records(model).items() if record.owned}
        aliases = {alias for record in dedicated_records(model).values() if record.owned for alias in record.aliases}
        assert state["model"].keys() == names | aliases
        assert state["optimizer"]["state"].keys() == names
    save(state, checkpoint_id=folder)
    if layout == "dedicated":
        assert_nothing_but_homes(model)


def _resume(
    rank: int, world_size: int, layout: str, folder: str, options: dict[str, Any], steps: int
) -> dict[str, Tensor]:
    model, optimizer = _make(layout, world_size, 7, options)
    state = _state(model, optimizer)
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in range(SAVED_AFTER, steps):
        _step(model, optimizer, step, rank, world_size)
    if layout == "dedicated":
        assert_nothing_but_homes(model)
        assert_state_of_owned_only(model, optimizer)
        return whole_parameters(model)
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach()
        for name, param in model.named_parameters()
    }


def _expected(options: dict[str, Any], steps: int) -> dict[str, Tensor]:
    model, optimizer = _make("plain", 1, 0, options)
    for step in range(steps):
        _step(model, optimizer, step, 0, 1)
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    "source, target",
    [
        ("dedicated", "dedicated"),
        ("dedicated", "dedicated on four"),
        ("dedicated on four", "dedicated"),
        ("dedicated", "fsdp2"),
        ("fsdp2", "dedicated"),
        ("dedicated", "plain"),
    ],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_loads_anywhere(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path, source: str, target: str, tied: bool
) -> None:
    options = {"tied": tied, "layers": 2}
    folder = str(tmp_path / "checkpoint")
    (ranks4 if source.endswith("four") else ranks2).run(_save, source.split()[0], folder, options)
    if target == "plain":
        with RankPool(1) as one:
            results = one.run(_resume, "plain", folder, options, STEPS, timeout=180)
    else:
        pool = ranks4 if target.endswith("four") else ranks2
        results = pool.run(_resume, target.split()[0], folder, options, STEPS, timeout=180)
    expected = _expected(options, STEPS)
    for result in results:
        compare(result, expected, "resumed parameter")


def test_what_is_loaded_is_what_was_saved(ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    """To the bit, without a step in between."""
    folder = str(tmp_path / "checkpoint")
    ranks2.run(_save, "dedicated", folder, {}, timeout=180)
    here = ranks2.run(_resume, "dedicated", folder, {}, SAVED_AFTER, timeout=180)[0]
    elsewhere = ranks4.run(_resume, "dedicated", folder, {}, SAVED_AFTER, timeout=180)[0]
    compare(elsewhere, here, "parameter", {"rtol": 0, "atol": 0})
    compare(here, _expected({}, SAVED_AFTER), "parameter")


def _save_folder(rank: int, world_size: int, folder: str) -> None:
    model, optimizer = _make("dedicated", world_size, 0, {})
    for step in range(SAVED_AFTER):
        _step(model, optimizer, step, rank, world_size)
    save_checkpoint(folder, model, optimizer)
    assert_nothing_but_homes(model)


def _load_folder(rank: int, world_size: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = _make("dedicated", world_size, 7, {})
    load_checkpoint(folder, model, optimizer)
    for step in range(SAVED_AFTER, STEPS):
        _step(model, optimizer, step, rank, world_size)
    assert_nothing_but_homes(model)
    return whole_parameters(model)


def test_checkpoint_folders(ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks2.run(_save_folder, folder, timeout=180)
    for pool in (ranks2, ranks4):
        compare(pool.run(_load_folder, folder, timeout=180)[0], _expected({}, STEPS), "parameter")


def _whole(rank: int, world_size: int, offload: bool) -> None:
    reference = OneProcess(world_size, "muown", {})
    model = build().double()
    dedicated(model, mesh_of(world_size))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    if offload and rank:
        assert full == {}
    else:
        compare(full, dict(reference.model.state_dict()), "whole", {"rtol": 0, "atol": 0})
    other = build(seed=5).double()
    saved = dict(other.state_dict()) if rank == 0 or not offload else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=offload)
    set_model_state_dict(model, saved, options=options)
    compare(whole_parameters(model), dict(other.named_parameters()), "loaded", {"rtol": 0, "atol": 0})
    assert_nothing_but_homes(model)


@pytest.mark.parametrize("offload", [False, True], ids=["on every rank", "on rank 0"])
def test_whole_state_dicts(ranks2: RankPool, offload: bool) -> None:
    ranks2.run(_whole, offload, timeout=180)


def _refused(rank: int, world_size: int) -> None:
    model = build().double()
    dedicated(model, mesh_of(world_size))
    whole = dict(build(seed=2).double().state_dict())
    before = whole_parameters(model)
    for wrong, match in (
        ({**whole, "lm_head.weight": torch.zeros(2, 2)}, r"lm_head\.weight: has shape \(2, 2\)"),
        ({**whole, "lm_haed.weight": torch.zeros(2, 2)}, r"lm_haed\.weight: is in the checkpoint and not in the model"),
    ):
        with pytest.raises(CheckpointError, match=match):
            set_model_state_dict(model, wrong)
    owned = next(name for name, record in dedicated_records(model).items() if record.owned)
    with pytest.raises(CheckpointError, match=f"{owned}: is not in the checkpoint"):
        set_model_state_dict(model, {name: value for name, value in whole.items() if name != owned})
    compare(whole_parameters(model), before, "unchanged", {"rtol": 0, "atol": 0})
    assert runtime_of(model).busy is False
    assert_nothing_but_homes(model)


def test_bad_checkpoints(ranks2: RankPool) -> None:
    ranks2.run(_refused, timeout=180)
