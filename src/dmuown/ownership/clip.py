"""The true global gradient norm over dedicated, FSDP2 and plain parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dmuown.engine.lent import on_loan
from dmuown.errors import GradientError, OptionError
from dmuown.ownership.record import Record, record_of
from dmuown.ownership.registry import runtime_of


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float | str = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients of a dedicated model so that their global norm is at most `max_norm`.

    Collective. Each element counts once: a dedicated gradient at its owner, a sharded one in its shards,
    a replicated one (plain parameters under DDP, `Replicate` placements) on one rank.

    Args:
        model: The model.
        max_norm: Largest norm; infinity only measures.
        norm_type: Order of the norm: positive, or infinity, as a number or a string that spells one.
        error_if_nonfinite: Whether a norm that is not finite is an error, on every rank alike.
        foreach: Passed on to torch's scaling.

    Returns:
        The norm before clipping, the same fp32 scalar on every rank.

    Raises:
        OptionError: A bad `max_norm` or `norm_type`.
        GradientError: The norm is not finite and `error_if_nonfinite` is set.
        OwnershipError: The model is not dedicated.
    """
    if not max_norm >= 0:
        raise OptionError("max_norm", f"must be 0 or more, got {max_norm!r}")
    norm_type = _order(norm_type)
    runtime = runtime_of(model)
    params = [param for param in model.parameters() if param.grad is not None]
    device = next(iter(runtime.records.values())).device
    total = torch.zeros((), dtype=torch.float32, device=device)
    across = _tensor_parallel(runtime.records.values())
    for param in params:
        total = _combine(total, _share(param, norm_type, runtime.link.rank, across), norm_type)
    groups = [runtime.link.group, *(mesh.get_group(name) for name, mesh in across.items())]
    norm = _over_ranks(total, norm_type, [group for group in groups if group is not None])
    if error_if_nonfinite and not torch.isfinite(norm):
        raise GradientError(
            "clip_grad_norm_", f"the gradients' norm is {float(norm)}", "Look for the loss that overflowed"
        )
    if not math.isinf(max_norm):
        local = [_local(param.grad) for param in params if param.grad is not None]
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # torch's own epsilon
        _scale([grad for grad in local if grad.numel()], factor, foreach)
    return norm


def _order(norm_type: Any) -> float:
    """The order of a norm as torch takes it: a number, or a string that spells one, such as `inf`."""
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise OptionError("norm_type", f"must be positive or infinity, got {norm_type!r}")
    return order


def _over_ranks(total: Tensor, norm_type: float, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The norm, from each rank's part of it to the power of its order."""
    if not math.isinf(norm_type):
        for group in groups:
            on_loan(dist.all_reduce, total, group=group)
        return total.pow(1.0 / norm_type)
    # The maximum over ranks does not keep NaN on every backend: whether there is one travels beside it.
    message = torch.stack([torch.where(total.isnan(), 0.0, total), total.isnan().to(total.dtype)])
    for group in groups:
        on_loan(dist.all_reduce, message, op=dist.ReduceOp.MAX, group=group)
    return torch.where(message[1] > 0, math.nan, message[0])


def _share(param: Tensor, norm_type: float, rank: int, across: Mapping[str, DeviceMesh]) -> Tensor | None:
    """This rank's part of the norm to the power of its order; None where another rank counts it."""
    grad = param.grad
    assert grad is not None
    own: tuple[str, ...] = ()
    if isinstance(grad, DTensor):
        own = grad.device_mesh.mesh_dim_names or ()
        coordinate: Sequence[int] = grad.device_mesh.get_coordinate() or ()
        if any(isinstance(place, Replicate) and at != 0 for place, at in zip(grad.placements, coordinate, strict=True)):
            return None
    elif record_of(param) is None and rank != 0:
        return None
    # What tensor parallelism did not cut, each of its ranks has: the first one counts it.
    if any(name not in own and mesh.get_local_rank(name) != 0 for name, mesh in across.items()):
        return None
    local = _local(grad).float()
    if local.numel() == 0:
        return None
    if math.isinf(norm_type):
        return local.abs().max()
    norm: Tensor = torch.linalg.vector_norm(local, norm_type)
    return norm.pow(norm_type)


def _combine(total: Tensor, share: Tensor | None, norm_type: float) -> Tensor:
    if share is None:
        return total
    # torch.maximum keeps NaN, as the sum does.
    return torch.maximum(total, share) if math.isinf(norm_type) else total + share


def _tensor_parallel(records: Iterable[Record]) -> dict[str, DeviceMesh]:
    """Mesh dimensions over which dedicated parameters are tensor-parallel, by name."""
    found: dict[str, DeviceMesh] = {}
    for record in records:
        if record.tensor_parallel is not None:
            mesh = record.tensor_parallel[0]
            found.update(dict.fromkeys(mesh.mesh_dim_names or (), mesh))
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _scale(grads: list[Tensor], factor: Tensor, foreach: bool | None) -> None:
    if not grads:
        return
    if foreach is False:
        for grad in grads:
            grad.mul_(factor.to(grad.device))
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    for device, group in by_device.items():
        torch._foreach_mul_(group, factor.to(device))
