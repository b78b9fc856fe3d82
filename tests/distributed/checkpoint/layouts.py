"""The small model of the unit tests in every layout, trained on given gradients, so that all can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dmuown
from tests.unit.checkpoint.training import Net, optimizer_of

#: Shapes are 10 x 6, 5 x 10 and 3 of 5 x 4: uneven on 2, 3 and 4 ranks, with empty shards on the last of 4.
TENSOR_PARALLEL: dict[str, Placement] = {
    "inner.0.weight": Shard(0),
    "inner.0.bias": Shard(0),
    "outer.weight": Shard(1),
    "experts": Shard(0),
}


def model_in(layout: str, seed: int, world_size: int) -> nn.Module:
    """The model from a seed: `plain`, `fsdp`, `columns`, `hsdp`, `tp`, `fsdp_tp` or `ep_fsdp`."""
    torch.manual_seed(seed)
    model = Net()
    if layout == "plain":
        return model
    if layout in ("fsdp", "columns"):
        mesh = init_device_mesh("cpu", (world_size,))
        return _placed(model, mesh, [Shard(0)] if layout == "fsdp" else [Shard(-1)])
    if layout == "tp":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        return _distributed(model, mesh)
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        return model
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    if layout == "ep_fsdp":
        return _placed(model, mesh, [Shard(1), Shard(0)])
    assert layout == "fsdp_tp"
    _distributed(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def _distributed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for name, param in list(model.named_parameters()):
        _replace(model, name, distribute_tensor(param.detach(), mesh, [TENSOR_PARALLEL.get(name, Replicate())]))
    return model


def _placed(model: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> nn.Module:
    for name, param in list(model.named_parameters()):
        kept = [place if param.ndim > 1 or place == Shard(0) else Replicate() for place in placements]
        _replace(model, name, distribute_tensor(param.detach(), mesh, kept))
    return model


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, nn.Parameter(value))


def build(algorithm: str, layout: str, seed: int, world_size: int) -> tuple[nn.Module, Any]:
    model = model_in(layout, seed, world_size)
    return model, optimizer_of(model, algorithm)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Take steps on gradients that depend on the step and the name alone."""
    for step in steps:
        for index, (_, param) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(100 * step + index)
            grad = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                param.grad = cut_like(grad, param)
            else:
                param.grad = grad
        optimizer.step()


def cut_like(whole: Tensor, param: DTensor) -> DTensor:
    """A DTensor of a whole tensor's values, laid out as `param`; by gathering index tensors, torch's own way."""
    placed = whole.new_zeros(param.shape)
    index = torch.arange(whole.numel(), dtype=torch.float64).reshape(param.shape)
    local = positions(param)
    assert index.numel() == placed.numel()
    return DTensor.from_local(
        whole.reshape(-1)[local].reshape(param.to_local().shape),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def positions(param: DTensor) -> Tensor:
    """Flat global positions of this rank's elements, as DCP sees them: its shard is one contiguous box."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    assert tuple(shape) == tuple(param.to_local().shape)
    index = torch.arange(param.numel()).reshape(param.shape)
    for axis, (size, start) in enumerate(zip(shape, offset, strict=True)):
        index = index.narrow(axis, min(start, param.shape[axis]), size)
    return index.reshape(-1)


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All weights and all state, whole, on every rank."""
    found = dict(model.named_parameters())
    values: dict[str, Tensor] = {}
    for name, param in sorted(found.items()):
        values[name] = gathered(param.detach())
        for key, value in optimizer.state[param].items():
            values[f"{name}.{key}"] = gathered(value)
    return values


def gathered(value: Tensor) -> Tensor:
    """The whole tensor; every rank adds its shard at its place, so that replicas are compared too."""
    if not isinstance(value, DTensor):
        return value.clone()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (positions(value), value.to_local().reshape(-1).clone()))
    total = torch.full((value.numel(),), torch.nan, dtype=value.dtype)
    for place, part in parts:
        seen = total[place]
        assert bool((seen.isnan() | (seen == part)).all()), "replicas differ"
        total[place] = part
    assert not total.isnan().any()
    return total.reshape(value.shape)


def save(
    rank: int, world_size: int, folder: Path, layout: str, algorithms: tuple[str, ...], steps: int
) -> dict[str, dict[str, Tensor]]:
    """Train from scratch and save; returns what was saved."""
    results = {}
    for algorithm in algorithms:
        model, optimizer = build(algorithm, layout, 0, world_size)
        train(model, optimizer, range(steps))
        dmuown.save_checkpoint(folder / algorithm, model, optimizer, extra={"steps": steps})
        results[algorithm] = whole(model, optimizer)
    return results


def move(
    rank: int,
    world_size: int,
    source: Path,
    target: Path,
    layout: str,
    algorithms: tuple[str, ...],
    steps: int,
) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Load, train on and save again; returns what was loaded and what was saved."""
    results = {}
    for algorithm in algorithms:
        model, optimizer = build(algorithm, layout, 1, world_size)
        done = dmuown.load_checkpoint(source / algorithm, model, optimizer)["steps"]
        loaded = whole(model, optimizer)
        train(model, optimizer, range(done, done + steps))
        dmuown.save_checkpoint(target / algorithm, model, optimizer, extra={"steps": done + steps})
        results[algorithm] = (loaded, whole(model, optimizer))
    return results
