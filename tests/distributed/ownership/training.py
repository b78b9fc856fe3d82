"""Train one model in three ways that must agree: dedicated, under plain FSDP2, and in one process.

Everything is in float64, so that only a wrong value, not the order of a sum, can make them differ.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dmuown
from dmuown.ownership import (
    OwnershipPlan,
    dedicate_params,
    dedicated_parameters,
    dedicated_records,
    gathered,
    no_sync,
    runtime_of,
)
from dmuown.ownership.record import GradState, State
from dmuown.policy.names import canonical_name
from tests.distributed.ownership.models import POLICY, Block, batch, build, loss_of

STEPS = 20
OPTIONS: dict[str, Any] = {"lr": 0.003, "weight_decay": 0.1}


def policy(**defaults: Any) -> dict[str, Any]:
    """The models' policy with float64 masters and arithmetic, unless `defaults` say otherwise."""
    wide = {"param_dtype": "float64", "master_dtype": "float64", "optim_dtype": "float64"}
    return {**POLICY, "defaults": {**POLICY["defaults"], **wide, **defaults}}


def mesh_of(world_size: int, *, replicate: int = 1) -> DeviceMesh:
    if replicate == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard"))


def trainable(name: str, param: nn.Parameter) -> bool:
    return param.requires_grad


def matrices_in_layers(name: str, param: nn.Parameter) -> bool:
    return "layers" in name and param.ndim == 2


def dedicated(model: nn.Module, mesh: DeviceMesh, **options: Any) -> OwnershipPlan:
    options.setdefault("predicate", trainable)
    options.setdefault("param_policy", policy())
    return dedicate_params(model, mesh, **options)


def assert_nothing_but_homes(model: nn.Module) -> None:
    """Between boundaries a rank holds what it owns, and zero bytes of everything else."""
    runtime = runtime_of(model)
    for record in runtime.records.values():
        for module, attribute in record.places:
            assert module._parameters[attribute] is record.home, record.name
        if not record.owned:
            assert record.home.untyped_storage().nbytes() == 0, record.name
            assert record.home.grad is None, record.name
        elif record.owner is not None:
            assert (
                record.local_home().untyped_storage().nbytes() == math.prod(record.local_shape) * record.home.itemsize
            )
        else:
            rows = -(-record.local_shape[0] // runtime.plan.world_size)
            bound = rows * math.prod(record.local_shape[1:]) * record.home.itemsize
            assert record.local_home().untyped_storage().nbytes() <= bound, record.name
        if record.compute is not None:
            local = record.compute.to_local() if isinstance(record.compute, DTensor) else record.compute
            assert local.untyped_storage().nbytes() == 0, record.name
            assert record.compute.grad is None, record.name
    for buffer in runtime.buffers:
        assert buffer.state is State.HOME, buffer.label
        assert buffer.grad_state is GradState.NONE, buffer.label
        assert buffer._grads is None, buffer.label
        assert not buffer._fetching.held, buffer.label
        assert not buffer._reducing.held, buffer.label


def assert_state_of_owned_only(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for record in dedicated_records(model).values():
        state = optimizer.state.get(record.home, {})
        assert bool(state) == record.owned, record.name


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, whole, on every rank."""
    with gathered(model):
        return {
            canonical_name(name): (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
            for name, param in model.named_parameters()
        }


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every averaged gradient, whole, on every rank; None where there is none."""
    runtime = runtime_of(model)
    result: dict[str, Tensor | None] = {}
    for raw, param in model.named_parameters():
        name = canonical_name(raw)
        record = runtime.records.get(name)
        if record is None:
            grad = param.grad
            result[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
            continue
        here = torch.tensor(float(param.grad is not None))
        dist.all_reduce(here)
        if not here:
            result[name] = None
        elif isinstance(param.grad, DTensor) and record.tensor_parallel is None:
            result[name] = param.grad.full_tensor()
        else:
            grad = torch.zeros(record.local_shape, dtype=param.dtype)
            if param.grad is not None:
                grad = param.grad.to_local().clone() if isinstance(param.grad, DTensor) else param.grad.clone()
            assert record.owner is not None
            dist.broadcast(grad, src=runtime.link.ranks[record.owner], group=runtime.link.group)
            result[name] = grad
    return result


class OneProcess:
    """The same training without any distribution: every rank computes the mean over all ranks' batches."""

    def __init__(self, world_size: int, algorithm: str, model_options: dict[str, Any], microbatches: int = 1) -> None:
        self.model = build(**model_options).double()
        self.optimizer = build_optimizer(algorithm, self.model, dmuown.param_groups(self.model, policy()))
        self.world_size = world_size
        self.microbatches = microbatches

    def backward(self, step: int) -> Tensor:
        losses = [
            loss_of(self.model, batch(step * self.microbatches + micro, rank))
            for micro in range(self.microbatches)
            for rank in range(self.world_size)
        ]
        total = torch.stack(losses).sum() / self.world_size
        total.backward()
        return total.detach() / self.microbatches

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_optimizer(
    algorithm: str, model: nn.Module, groups: list[dict[str, Any]] | None = None
) -> torch.optim.Optimizer:
    """An optimizer of the model, from `groups` where it is not dedicated; `adamw` is torch's, for all parameters."""
    if algorithm == "adamw":
        return torch.optim.AdamW(model.parameters(), **OPTIONS)
    made = {"muon": dmuown.Muon, "normuon": dmuown.NorMuon, "muown": dmuown.Muown}[algorithm]
    optimizer: torch.optim.Optimizer
    if groups is None:
        optimizer = made(model, newton_schulz_func=newton_schulz, **OPTIONS)
    else:
        for group in groups:
            if group["dmuon_route"] == "muon":
                group["algorithm"] = algorithm
        optimizer = made(groups, newton_schulz_func=newton_schulz, **OPTIONS)
    return optimizer


def mean_over_ranks(value: Tensor) -> Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# Muown's state is float32; without it, sums differ in their order alone.
LOOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
TIGHT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-11}


def newton_schulz(x: Tensor, epsilon: float = 1e-7) -> Tensor:
    """Jordan's quintic iteration in x's own dtype: in float32 it would amplify rounding in small singular values."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    wide = wide / (wide.norm(dim=(-2, -1), keepdim=True) + epsilon)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if x.shape[-2] > x.shape[-1] else wide


def tolerance_of(algorithm: str) -> dict[str, Any]:
    return TIGHT if algorithm == "adamw" else LOOSE


def compare(actual: dict[str, Any], expected: dict[str, Any], what: str, tolerance: dict[str, Any] = LOOSE) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or actual[name] is None:
            assert value is None and actual[name] is None, (what, name)  # noqa: PT018
        else:
            torch.testing.assert_close(actual[name], value, **tolerance, msg=_message(f"{what} {name}"))


def _message(subject: str) -> Callable[[str], str]:
    return lambda text: f"{subject}: {text}"


def use_checkpointing(model: nn.Module, *, reentrant: bool) -> None:
    """Recompute each block in backward, its hooks included, as Hugging Face's layers do."""
    for block in model.model.layers:  # type: ignore[union-attr]
        block.__class__ = _REENTRANT[type(block)] if reentrant else _CHECKPOINTED[type(block)]


def _checkpointed(kind: type[nn.Module], reentrant: bool) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # As GradientCheckpointingLayer of transformers: the recomputed part is the call with its hooks.
        return checkpoint(functools.partial(kind.__call__, self), *args, use_reentrant=reentrant, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


_CHECKPOINTED = {Block: _checkpointed(Block, False)}
_REENTRANT = {Block: _checkpointed(Block, True)}


@contextlib.contextmanager
def deferred(model: nn.Module, defer: bool) -> Iterator[None]:
    if defer:
        with no_sync(model):
            yield
    else:
        yield


def shard_rest(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 for what is not dedicated, block by block and then the root, as users call it."""
    ignored = dedicated_parameters(model)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
