"""Health metrics, computed by hand; off means off."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dmuown
from dmuown.diagnostics.health import HealthMonitor
from dmuown.ownership import dedicated_records
from tests.distributed.harness import RankPool


def build(seed: int = 0) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layers.0.w": (12, 8), "layers.1.w": (6, 10), "layers.2.w": (4, 6), "norm": (8,)}
    params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    return params, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def optimizer_of(params: dict[str, nn.Parameter]) -> dmuown.Muown:
    matrices = [(name, param) for name, param in params.items() if param.ndim == 2]
    others = [(name, param) for name, param in params.items() if param.ndim < 2]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    return dmuown.Muown(groups, lr=1e-2, ns_dtype="float32", scheme="newton_schulz", coefficients="keller")


def measured(layers: bool = False) -> tuple[dict[str, float], dict[str, float], dict[str, nn.Parameter]]:
    params, gradients = build()
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = optimizer_of(params)
    monitor = HealthMonitor([optimizer], layers=layers)
    for name, param in params.items():
        param.grad = gradients[name]
    optimizer.step()
    ratios = {
        name: float((param.detach() - before[name]).norm() / before[name].norm()) for name, param in params.items()
    }
    return monitor.collect(), ratios, params


def test_metrics_by_hand() -> None:
    found, ratios, params = measured(layers=True)
    assert found["dmuown/orthogonalized"] == 3
    assert found["dmuown/nonfinite"] == 0
    assert found["dmuown/update_to_weight_mean"] == pytest.approx(sum(ratios.values()) / 4, rel=1e-5)
    assert found["dmuown/update_to_weight_max"] == pytest.approx(max(ratios.values()), rel=1e-5)
    assert found["dmuown/layer_001/update_to_weight_mean"] == pytest.approx(ratios["layers.1.w"], rel=1e-5)
    # After the step a weight's row norms are its magnitudes.
    rows = torch.cat([params[name].detach().norm(dim=1) for name in params if name != "norm"])
    assert found["dmuown/magnitude_mean"] == pytest.approx(float(rows.mean()), rel=1e-4)
    assert found["dmuown/magnitude_max"] == pytest.approx(float(rows.max()), rel=1e-4)
    assert found["dmuown/magnitude_min"] == pytest.approx(float(rows.min()), rel=1e-4)
    # Keller Jordan's iteration leaves singular values within about [0.68, 1.13].
    assert 0.05 < found["dmuown/orthogonality_residual_max"] < 0.6
    assert found["dmuown/orthogonality_residual_mean"] <= found["dmuown/orthogonality_residual_max"]


def test_an_orthogonalization_that_does_nothing_shows() -> None:
    params, gradients = build()
    matrices = [(name, param) for name, param in params.items() if param.ndim == 2]
    optimizer = dmuown.Muon(matrices, newton_schulz_func=lambda x, epsilon: x * 0 + 7.0)
    monitor = HealthMonitor([optimizer])
    for name, param in matrices:
        param.grad = gradients[name]
    optimizer.step()
    side, long = 8, 12  # all entries 7: U U^T has entries 49 * long
    entries = torch.full((side, side), 49.0 * long) - torch.eye(side)
    assert monitor.collect()["dmuown/orthogonality_residual_max"] == pytest.approx(
        float(entries.norm()) / math.sqrt(side), rel=1e-3
    )


def test_gradients_that_are_not_finite_are_counted() -> None:
    params, gradients = build()
    gradients["norm"][3] = math.nan
    optimizer = optimizer_of(params)
    monitor = HealthMonitor([optimizer])
    for name, param in params.items():
        param.grad = gradients[name]
    optimizer.step()
    assert monitor.collect()["dmuown/nonfinite"] == 1


def test_every_nth_step_is_measured_and_closing_or_dropping_the_monitor_ends_it() -> None:
    params, gradients = build()
    optimizer = optimizer_of(params)
    monitor = HealthMonitor([optimizer], every=2)
    seen = []
    for _ in range(4):
        for name, param in params.items():
            param.grad = gradients[name]
        optimizer.step()
        seen.append(bool(monitor.collect()))
    assert seen == [True, False, True, False]
    monitor.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert optimizer.exchange_count.observe is None
    dropped = HealthMonitor([optimizer])
    del dropped
    gc.collect()
    optimizer.step()
    assert optimizer.exchange_count.observe is None


def test_other_optimizers_are_left_alone() -> None:
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    assert HealthMonitor([adam]).collect() == {}
    assert not adam._optimizer_step_pre_hooks


#: The second is cut on columns, so that every rank has all its magnitudes; the others on no axis.
CUTS: dict[str, tuple[Placement, ...]] = {
    "layers.0.w": (Shard(0),),
    "layers.1.w": (Shard(1),),
    "layers.2.w": (Replicate(),),
    "norm": (Replicate(),),
}


def _sharded(rank: int, world_size: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    params, gradients = build()
    sharded = {
        name: nn.Parameter(distribute_tensor(param.detach(), mesh, CUTS[name])) for name, param in params.items()
    }
    optimizer = optimizer_of(sharded)
    monitor = HealthMonitor([optimizer], layers=True)
    for name, param in sharded.items():
        param.grad = distribute_tensor(gradients[name], mesh, CUTS[name])
    optimizer.step()
    return monitor.collect()


def test_ranks_report_what_one_process_does(ranks2: RankPool, tmp_path: Path) -> None:
    whole, _, _ = measured(layers=True)
    for found in ranks2.run(_sharded):
        assert found == pytest.approx(whole, rel=1e-3)


class Parts(nn.Module):
    """The parameters of `build` as modules, each applied to its own input."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module() for _ in range(3)])
        for index, layer in enumerate(self.layers):
            layer.register_parameter("w", params[f"layers.{index}.w"])
        self.register_parameter("norm", params["norm"])


def _owned(rank: int, world_size: int) -> dict[str, float]:
    """Owners on a mesh (shard, tp): one weight is cut on rows, one on columns, and others on none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    params, gradients = build()
    for name in ("layers.0.w", "layers.1.w"):
        params[name] = nn.Parameter(distribute_tensor(params[name].detach(), mesh["tp"], CUTS[name]))
    model = Parts(params)
    policy = {"defaults": {"route": "muon"}, "overrides": [{"name": "norm", "set": {"route": "adamw"}}]}
    dmuown.dedicate_params(model, mesh["shard"], predicate=lambda *_: True, param_policy=policy)
    options: dict[str, Any] = {"ns_dtype": "float32", "scheme": "newton_schulz", "coefficients": "keller"}
    optimizer = dmuown.Muown(model, lr=1e-2, **options)
    monitor = HealthMonitor([optimizer], layers=True)
    for name, record in dedicated_records(model).items():
        if record.owned:
            gradient = gradients[name]
            if record.tensor_parallel is not None:
                gradient = distribute_tensor(gradient, *record.tensor_parallel)
            record.home.grad = gradient
    optimizer.step()
    return monitor.collect()


def test_tensor_parallel_owners_report_what_one_process_does(ranks4: RankPool) -> None:
    whole, _, _ = measured(layers=True)
    for found in ranks4.run(_owned):
        assert found == pytest.approx(whole, rel=1e-3)


def _replicated(rank: int, world_size: int) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (world_size,))
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    param = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
    optimizer = dmuown.Muown([("w", param)], lr=0.02)
    monitor = HealthMonitor([optimizer])
    param.grad = distribute_tensor(torch.ones_like(weight), mesh, [Replicate()])
    optimizer.step()
    return monitor.collect()


def test_teams_of_replicas_count_a_matrix_once(ranks4: RankPool) -> None:
    """Each team orthogonalizes it."""
    for found in ranks4.run(_replicated):
        assert found["dmuown/orthogonalized"] == 1
