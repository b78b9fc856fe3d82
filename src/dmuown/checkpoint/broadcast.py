"""Optimizer state that rank 0 alone has, sent to all ranks one buffer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dmuown.checkpoint.flat import unflatten
from dmuown.checkpoint.names import parameter_fqns
from dmuown.engine.layout import local_part, local_tensor
from dmuown.engine.matching import resolve_name
from dmuown.engine.optimizer import MuonEngine


def broadcast_optimizer_state(
    model: nn.Module, optimizers: Sequence[Optimizer], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return on every rank what rank 0 passed, cut to this rank's shards as it arrives.

    Collective over the default group. A rank holds one whole buffer at a time, beside the shards.

    Args:
        model: Has all parameters of the optimizers.
        optimizers: Whose buffers say how to cut: DTensor buffers of equal global shape.
        state_dict: Whole state, nested or flattened, on rank 0; ignored on the others.

    Returns:
        The nested state dict.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return unflatten(state_dict)
    rank = dist.get_rank()
    nested = unflatten(state_dict) if rank == 0 else {}
    message: list[Any] = [_outline(nested) if rank == 0 else None]
    dist.broadcast_object_list(message, src=0)
    outline = message[0]
    params = {fqn: param for param, fqn in parameter_fqns(model).items()}
    buffers = {fqn: _buffers_of(optimizers, param) for fqn, param in params.items()}
    state: dict[str, dict[str, Any]] = {}
    for fqn, key, form in outline["state"]:
        name = resolve_name(fqn, params)
        received = state.setdefault(fqn, {})
        if not isinstance(form, _Form):
            received[key] = form
            continue
        like = params.get(name)
        device = local_tensor(like).device if like is not None else torch.device("cpu")
        whole = (
            nested["state"][fqn][key].to(device)
            if rank == 0
            else torch.empty(form.shape, dtype=form.dtype, device=device)
        )
        dist.broadcast(whole, src=0)
        received[key] = _cut(whole, buffers.get(name, {}).get(key))
    return {"state": state, "param_groups": outline["param_groups"]}


class _Form:
    """Shape and dtype of a tensor that will be broadcast."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _outline(nested: dict[str, Any]) -> dict[str, Any]:
    entries = [
        (fqn, key, _Form(value) if isinstance(value, Tensor) else value)
        for fqn, buffers in nested["state"].items()
        for key, value in buffers.items()
    ]
    return {"state": entries, "param_groups": nested["param_groups"]}


def _buffers_of(optimizers: Sequence[Optimizer], param: Tensor) -> dict[str, Any]:
    for optimizer in optimizers:
        if isinstance(optimizer, MuonEngine) and param in optimizer.state:
            return dict(optimizer.state[param])
    return {}


def _cut(whole: Tensor, target: Any) -> Tensor:
    if not isinstance(target, DTensor) or target.shape != whole.shape:
        return whole
    part = local_part(whole, target.device_mesh, target.placements).clone()
    return DTensor.from_local(
        part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )
