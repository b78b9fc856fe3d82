"""State that rank 0 alone has, sent to all ranks one tensor at a time and cut to their shards."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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


class _Form:
    """Shape and dtype of a tensor that will be broadcast."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def cut(whole: Tensor, target: Any) -> Tensor:
    """Return this rank's shard of a whole plain tensor as a DTensor like `target`; anything else as it is."""
    if isinstance(whole, DTensor) or not isinstance(target, DTensor) or target.shape != whole.shape:
        return whole
    part = local_part(whole, target.device_mesh, target.placements).clone()
    return DTensor.from_local(
        part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def broadcast_values(values: Mapping[Any, Any], targets: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return rank 0's values on every rank, tensors cut to this rank's shards as they arrive.

    Collective over the default group. A rank holds one whole tensor at a time, beside the shards.

    Args:
        values: Whole tensors and plain values on rank 0; ignored on the others.
        targets: Tensors that say how to cut, by the same keys where there are any.
    """
    rank = dist.get_rank()
    forms = [(key, _Form(value) if isinstance(value, Tensor) else value) for key, value in values.items()]
    message: list[Any] = [forms if rank == 0 else None]
    dist.broadcast_object_list(message, src=0)
    received: dict[Any, Any] = {}
    for key, form in message[0]:
        if not isinstance(form, _Form):
            received[key] = form
            continue
        target = targets.get(key)
        device = _device_for(target)
        whole = values[key].to(device) if rank == 0 else torch.empty(form.shape, dtype=form.dtype, device=device)
        dist.broadcast(whole.contiguous(), src=0)
        received[key] = cut(whole, target)
    return received


def _device_for(target: Any) -> torch.device:
    """Where to broadcast: on the target's device if the default group can, else where it can."""
    group = dist.distributed_c10d._get_default_group()
    able = group._device_types
    if isinstance(target, Tensor) and local_tensor(target).device.type in {device.type for device in able}:
        return local_tensor(target).device
    return able[0]


def broadcast_optimizer_state(
    model: nn.Module, optimizers: Sequence[Optimizer], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return on every rank the nested state dict that rank 0 passed, cut to this rank's shards.

    Args:
        model: Has all parameters of the optimizers.
        optimizers: Whose buffers say how to cut.
        state_dict: Whole state, nested or flattened, on rank 0; ignored on the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return unflatten(state_dict)
    nested = unflatten(state_dict) if dist.get_rank() == 0 else {"state": {}, "param_groups": []}
    values: dict[Hashable, Any] = {"param_groups": nested["param_groups"]}
    fqns = {fqn: param for param, fqn in parameter_fqns(model).items()}
    for name, buffers in nested["state"].items():
        values.update({(resolve_name(name, fqns), key): value for key, value in buffers.items()})
    targets = {
        (fqn, key): buffer
        for fqn, param in fqns.items()
        for optimizer in optimizers
        if isinstance(optimizer, MuonEngine) and param in optimizer.state
        for key, buffer in optimizer.state[param].items()
    }
    received = broadcast_values(values, targets)
    groups = received.pop("param_groups")
    state: dict[str, dict[str, Any]] = {}
    for (fqn, key), value in received.items():
        state.setdefault(fqn, {})[key] = value
    return {"state": state, "param_groups": groups}
