"""Parameters that tensor parallelism cut: a mesh of (shard, tp), and its logical matrices stepped whole."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuown
from dmuown.checkpoint import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from dmuown.ownership import clip_grad_norm_, dedicate_params, dedicated_records, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import VOCABULARY, WIDTH, batch, build, loss_of
from tests.distributed.ownership.training import (
    LOOSE,
    OPTIONS,
    TIGHT,
    OneProcess,
    assert_nothing_but_homes,
    assert_state_of_owned_only,
    build_optimizer,
    compare,
    mean_over_ranks,
    mesh_of,
    policy,
    trainable,
    whole_parameters,
)


def _parallel(rank: int, world_size: int, algorithm: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    model = build(layers=2).double()
    reference = OneProcess(2, algorithm, {"layers": 2})
    plan: dict[str, Any] = {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    dedicate_params(model, mesh["shard"], predicate=trainable, param_policy=policy())
    optimizer = build_optimizer(algorithm, model)
    data_rank = mesh.get_local_rank("shard")
    tolerance = TIGHT if algorithm == "adamw" else LOOSE
    for step in range(5):
        loss = loss_of(model, batch(step, data_rank))
        loss.backward()
        reference.backward(step)
        for name, record in dedicated_records(model).items():
            assert record.owned == (record.owner in (None, runtime_of(model).link.rank))
            if not record.owned:
                assert record.home.untyped_storage().nbytes() == 0
                assert record.home.grad is None
            elif record.tensor_parallel is not None:
                assert isinstance(record.home, DTensor)
                grad = record.home.grad
                assert isinstance(grad, DTensor)
                torch.testing.assert_close(grad.full_tensor(), reference.model.get_parameter(name).grad, **tolerance)
        norm = clip_grad_norm_(model, 1.0)
        expected_norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 1.0)
        torch.testing.assert_close(norm, expected_norm.float(), rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    expected = {name: param.detach() for name, param in reference.model.named_parameters()}
    # Clipping's factor is float32.
    compare(whole_parameters(model), expected, "parameter", LOOSE)
    assert_nothing_but_homes(model)


def test_adamw(ranks4: RankPool) -> None:
    ranks4.run(_parallel, "adamw", timeout=180)


def test_muown_steps_the_logical_matrix(ranks4: RankPool) -> None:
    ranks4.run(_parallel, "muown", timeout=180)


def _head_and_embedding(model: nn.Module, mesh: DeviceMesh) -> None:
    """The usual plan of a language model: everything that is large is cut, the ends too."""
    layers: dict[str, Any] = {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(),
    }
    for layer in model.get_submodule("model.layers").children():
        parallelize_module(layer, mesh, layers)
    ends: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def _sharded(rank: int, world_size: int, algorithm: str, replicate: bool, everything: bool, folder: str) -> None:
    """`sharded_adamw` cuts what tensor parallelism has cut: shards of its parts, on every data-parallel rank."""
    shape, names = ((1, 2, 2), ("replicate", "shard", "tp")) if replicate else ((2, 2), ("shard", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = build(layers=2).double()
    reference = OneProcess(2, algorithm, {"layers": 2})
    _head_and_embedding(model, mesh["tp"])
    routes = policy()
    if everything:
        routes = {"defaults": {**routes["defaults"], "route": "sharded_adamw"}}
        reference.optimizer = torch.optim.AdamW(reference.model.parameters(), betas=(0.9, 0.95), **OPTIONS)
    dedicate_params(
        model,
        mesh["replicate", "shard"] if replicate else mesh["shard"],
        predicate=trainable,
        param_policy=routes,
    )
    assert_nothing_but_homes(model)
    optimizer = build_optimizer(algorithm, model)
    records = dedicated_records(model)
    head, embedding = records["lm_head.weight"], records["model.embed_tokens.weight"]
    for record in (head, embedding):
        assert record.route.route == "sharded_adamw"
        assert isinstance(record.home, DTensor)
        assert record.home.shape == (VOCABULARY, WIDTH)
        assert record.home.device_mesh.mesh_dim_names is not None
        assert record.home.device_mesh.mesh_dim_names[-1] == "tp"
    data_rank = mesh.get_local_rank("shard")
    expected_state = {name: param.detach().clone() for name, param in reference.model.named_parameters()}
    compare(whole_parameters(model), expected_state, "dedicated", TIGHT)
    # DTensor itself reads the shards as what they are.
    assert isinstance(head.home, DTensor)
    torch.testing.assert_close(head.home.full_tensor(), expected_state["lm_head.weight"], **TIGHT)
    for step in range(5):
        tolerance = LOOSE if step else TIGHT  # clipping's factor is float32
        loss = loss_of(model, batch(step, data_rank))
        loss.backward()
        expected = reference.backward(step)
        torch.testing.assert_close(mean_over_ranks(loss), expected, **tolerance)
        assert_nothing_but_homes(model)
        for record in (head, embedding):
            grad = record.home.grad
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(grad.full_tensor(), reference.model.get_parameter(record.name).grad, **tolerance)
        norm = clip_grad_norm_(model, 0.1)
        expected_norm = nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
        torch.testing.assert_close(norm, expected_norm.float(), rtol=1e-5, atol=0)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    trained = {name: param.detach() for name, param in reference.model.named_parameters()}
    compare(whole_parameters(model), trained, "parameter", LOOSE)
    if algorithm != "adamw":
        assert_state_of_owned_only(model, optimizer)
    # Round trips: through DCP into the same layout, and from whole tensors.
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save(state, checkpoint_id=folder)
    model.load_state_dict({name: value.detach() for name, value in expected_state.items()})
    compare(whole_parameters(model), expected_state, "loaded", TIGHT)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    compare(whole_parameters(model), trained, "resumed", LOOSE)
    set_model_state_dict(model, expected_state)
    compare(whole_parameters(model), expected_state, "set", TIGHT)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    compare(full, expected_state, "whole", TIGHT)
    assert_nothing_but_homes(model)


def _read_elsewhere(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """The checkpoint of a 2 x 2 run in a model of another layout."""
    model = build(seed=9, layers=2).double()
    if world_size > 1:
        dedicate_params(model, mesh_of(world_size), predicate=trainable, param_policy=policy())
    if world_size > 1:
        assert_nothing_but_homes(model)
    state = {"model": get_model_state_dict(model)}
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    return whole_parameters(model) if world_size > 1 else {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("replicate", [False, True], ids=["shard", "replicate x shard"])
@pytest.mark.parametrize("algorithm, everything", [("muown", False), ("muon", True)], ids=["the ends", "everything"])
def test_shards_of_tensor_parallel_parts(
    ranks4: RankPool, ranks2: RankPool, tmp_path: Path, algorithm: str, everything: bool, replicate: bool
) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks4.run(_sharded, algorithm, replicate, everything, folder, timeout=180)
    with RankPool(1) as one:
        alone = one.run(_read_elsewhere, folder, timeout=60)[0]
    for result in ranks2.run(_read_elsewhere, folder, timeout=60):
        compare(result, alone, "read on two ranks", {"rtol": 0, "atol": 0})
    before = dict(build(layers=2).double().named_parameters())
    assert all((alone[name] - before[name]).abs().max() > 0 for name in alone)


def _placements(rank: int, world_size: int, folder: str) -> None:
    """Every placement and uneven size of a tensor-parallel part, against plain tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    for rows, placement in itertools.product((1, 2, 3, 5, 7, 8), (Shard(0), Shard(1), Replicate())):
        torch.manual_seed(rows)
        model, plain = Scaled(rows), Scaled(rows)
        plain.load_state_dict(model.state_dict())
        whole = model.weight.detach()
        model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement]))
        defaults = {**policy()["defaults"], "route": "sharded_adamw"}
        dedicate_params(model, mesh["shard"], predicate=trainable, param_policy={"defaults": defaults})
        optimizer = dmuown.Muon(model, lr=0.1)
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
        scales = [torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
        for _ in range(3):
            model(scales[mesh.get_local_rank("shard")]).backward()
            (sum(plain(scale) for scale in scales) / 2).backward()
            assert_nothing_but_homes(model)
            norm = clip_grad_norm_(model, 1.0)
            torch.testing.assert_close(
                norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0).float(), rtol=1e-6, atol=0
            )
            for stepped in (optimizer, reference):
                stepped.step()
                stepped.zero_grad()
        what = f"{rows} rows, {placement}"
        compare(whole_parameters(model), {"weight": plain.weight.detach()}, what, LOOSE)
        home = dedicated_records(model)["weight"].home
        assert isinstance(home, DTensor)
        torch.testing.assert_close(home.full_tensor(), plain.weight.detach(), **LOOSE, msg=what)
        place = f"{folder}/{rows}{placement}"
        save({"weight": home.detach()}, checkpoint_id=place)
        read = {"weight": torch.zeros(rows, 6, dtype=torch.float64)}
        load(read, checkpoint_id=place)
        torch.testing.assert_close(read["weight"], plain.weight.detach(), **LOOSE, msg=f"read {what}")
        model.load_state_dict({"weight": whole})
        compare(whole_parameters(model), {"weight": whole}, f"loaded {what}", TIGHT)


class Scaled(nn.Module):
    """A loss of one matrix, the same whole or cut."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 6, dtype=torch.float64))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, DTensor):
            scale = distribute_tensor(scale, self.weight.device_mesh, [Replicate()], src_data_rank=None)
        loss: torch.Tensor = ((self.weight * scale) ** 2).sum()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss


def test_every_placement_of_the_parts(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(_placements, str(tmp_path), timeout=180)
