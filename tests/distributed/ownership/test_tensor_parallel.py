"""Parameters that tensor parallelism cut: a mesh of (shard, tp), and its logical matrices stepped whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dmuown.ownership import clip_grad_norm_, dedicate_params, dedicated_records, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import batch, build, loss_of
from tests.distributed.ownership.training import (
    LOOSE,
    TIGHT,
    OneProcess,
    build_optimizer,
    compare,
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


def test_adamw(ranks4: RankPool) -> None:
    ranks4.run(_parallel, "adamw", timeout=180)


def test_muown_steps_the_logical_matrix(ranks4: RankPool) -> None:
    ranks4.run(_parallel, "muown", timeout=180)
