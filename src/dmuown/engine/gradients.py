"""Collect gradients: check them, and agree across ranks which parameters step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.engine.agreement import GradientReport, agree
from dmuown.engine.groups import control_group, mesh_group
from dmuown.engine.layout import local_tensor
from dmuown.engine.records import ParamRecord
from dmuown.errors import GradientError

NonFinite = Literal["raise", "skip", "propagate"]

_SPARSE, _PLACEMENT, _KIND, _NONFINITE = 1, 2, 3, 4

_FAULTS = {
    _SPARSE: ("its gradient is sparse", "Use dense gradients (nn.Embedding(..., sparse=False))"),
    _PLACEMENT: ("its gradient is a DTensor laid out unlike the parameter", "Redistribute the gradient"),
    _KIND: ("it is a DTensor and its gradient a plain tensor, or the reverse", "Do not replace .grad by hand"),
    _NONFINITE: ("its gradient has a NaN or an infinity", 'Lower the learning rate, clip, or set nonfinite="skip"'),
}


def collect_gradients(
    records: Sequence[ParamRecord], nonfinite: NonFinite, maximize: Sequence[bool]
) -> list[Tensor | None]:
    """Return each parameter's local gradient, or None where it does not step.

    A gradient that exists on no rank leaves its parameter alone, as in torch. One that is missing
    here and present elsewhere counts as zero here; a replicated parameter takes it from the ranks
    that have it, so that replicas do not drift apart.

    Args:
        records: All parameters, in the same order on every rank of their mesh.
        nonfinite: What to do about gradients that are not finite.
        maximize: Per parameter, whether to ascend.

    Returns:
        Plain local tensors of the shapes of the local parameters; never the caller's to write.

    Raises:
        GradientError: A gradient that cannot be used; on every rank of the parameter's mesh.
    """
    codes = [_fault(record) for record in records]
    if nonfinite != "propagate":
        _mark_nonfinite(records, codes)
    gradients: list[Tensor | None] = [None] * len(records)
    worst: tuple[str, int] | None = None
    meshes = _by_mesh(records)
    for indices in meshes.values():
        report = _agree_on(records, codes, indices)
        for position, index in enumerate(indices):
            record, code = records[index], report.bad[position]
            if code and not (code == _NONFINITE and nonfinite == "skip"):
                worst = worst or (record.name, code)
            elif report.present[position] and not code:
                gradients[index] = _usable(record, report.absent[position], maximize[index])
    _raise_together(worst, _controls(records, meshes) if len(meshes) > 1 else [])
    return gradients


def _by_mesh(records: Sequence[ParamRecord]) -> dict[object, list[int]]:
    indices: dict[object, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        indices[record.param.device_mesh if isinstance(record.param, DTensor) else None].append(index)
    return indices


def _agree_on(records: Sequence[ParamRecord], codes: list[int], indices: list[int]) -> GradientReport:
    present = [records[index].param.grad is not None for index in indices]
    report = GradientReport(present, [not here for here in present], [codes[index] for index in indices])
    first = records[indices[0]].param
    group = control_group(first.device_mesh) if isinstance(first, DTensor) else None
    return agree(report, group)


def _controls(records: Sequence[ParamRecord], meshes: dict[object, list[int]]) -> list[dist.ProcessGroup]:
    groups = []
    for indices in meshes.values():
        first = records[indices[0]].param
        group = control_group(first.device_mesh) if isinstance(first, DTensor) else None
        if group is not None:
            groups.append(group)
    return groups


def _raise_together(worst: tuple[str, int] | None, groups: list[dist.ProcessGroup]) -> None:
    """Raise on every rank that shares any mesh with a rank that must raise."""
    code = worst[1] if worst else 0
    for group in groups:
        message = torch.tensor([code], dtype=torch.int32)
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
        code = max(code, int(message))
    if code:
        name = worst[0] if worst else "a parameter of another mesh"
        raise GradientError(name, *_FAULTS[code])


def _fault(record: ParamRecord) -> int:
    grad = record.param.grad
    if grad is None:
        return 0
    if grad.layout != torch.strided:
        return _SPARSE
    if isinstance(record.param, DTensor):
        if not isinstance(grad, DTensor):
            return _KIND
        if grad.placements != record.param.placements or grad.device_mesh != record.param.device_mesh:
            return _PLACEMENT
    elif isinstance(grad, DTensor):
        return _KIND
    return 0


def _mark_nonfinite(records: Sequence[ParamRecord], codes: list[int]) -> None:
    """One host sync for all gradients."""
    indices = [i for i, record in enumerate(records) if codes[i] == 0 and record.param.grad is not None]
    if not indices:
        return
    # The sum of magnitudes is finite exactly when every element is, short of overflow, which counts as bad too.
    finite = [torch.isfinite(local_tensor(records[i].param.grad).abs().sum(dtype=torch.float32)) for i in indices]  # type: ignore[arg-type]
    for index, fine in zip(indices, torch.stack(finite).tolist(), strict=True):
        if not fine:
            codes[index] = _NONFINITE


def _usable(record: ParamRecord, absent_somewhere: bool, maximize: bool) -> Tensor:
    grad = record.param.grad
    local = torch.zeros_like(local_tensor(record.param)) if grad is None else local_tensor(grad)
    if absent_somewhere and isinstance(record.param, DTensor):
        local = _mend_replicas(record.param, local, grad is not None)
    return local.neg() if maximize else local


def _mend_replicas(param: DTensor, local: Tensor, present: bool) -> Tensor:
    """Average a gradient over the replicas that have it; all replicas must enter, so this needs agreement first."""
    mesh = param.device_mesh
    dims = tuple(dim for dim, placement in enumerate(param.placements) if placement.is_replicate())
    group = mesh_group(mesh, dims)
    if group is None:
        return local
    message = torch.cat([local.reshape(-1).float(), torch.tensor([float(present)], device=local.device)])
    dist.all_reduce(message, group=group)
    mean = message[:-1] / message[-1].clamp_min(1)
    return mean.to(local.dtype).view(local.shape)
