"""Collect gradients: check them, and agree across ranks which parameters step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.engine.agreement import GradientReport, agree
from dmuown.engine.capturable import is_recording
from dmuown.engine.groups import control_group, mesh_group
from dmuown.engine.layout import local_tensor
from dmuown.engine.records import ParamRecord
from dmuown.errors import GradientError

NonFinite = Literal["raise", "skip", "propagate"]

#: What ranks tell each other, the gravest last: a recorded step is to be recorded anew, or a gradient cannot be used.
RESTART, _SPARSE, _PLACEMENT, _KIND, _NONFINITE, _ABSENT = range(1, 7)

_FAULTS = {
    _SPARSE: ("its gradient is sparse", "Use dense gradients (nn.Embedding(..., sparse=False))"),
    _PLACEMENT: ("its gradient is a DTensor laid out unlike the parameter", "Redistribute the gradient"),
    _KIND: ("it is a DTensor and its gradient a plain tensor, or the reverse", "Do not replace .grad by hand"),
    _NONFINITE: ("its gradient has a NaN or an infinity", 'Lower the learning rate, clip, or set nonfinite="skip"'),
    _ABSENT: (
        "it has no gradient on some rank, and a recorded step would never update it",
        "Freeze it out of the optimizer, or record after a backward that reaches it",
    ),
}


def collect_gradients(
    records: Sequence[ParamRecord],
    audiences: Mapping[tuple[int, ...], Sequence[int]],
    nonfinite: NonFinite,
    maximize: Sequence[bool],
    told_back: Sequence[tuple[int, ...]] = (),
    *,
    agreed: bool = False,
) -> list[Tensor | None]:
    """Return each parameter's local gradient, or None where it does not step.

    A gradient that exists on no rank leaves its parameter alone, as in torch. One that is missing
    here and present elsewhere counts as zero here; a replicated parameter takes it from the ranks
    that have it, so that replicas do not drift apart.

    Args:
        records: All parameters, in the same order on every rank that holds parts of them.
        audiences: Their indices by the ranks that hold parts of them (`groups.audiences`).
        nonfinite: What to do about gradients that are not finite.
        maximize: Per parameter, whether to ascend.
        told_back: Audiences that are told again what others had to tell (`Plan.told_back`).
        agreed: Ranks have just agreed that all gradients are there: nothing is sent.

    Returns:
        Plain local tensors of the shapes of the local parameters; never the caller's to write.

    Raises:
        GradientError: A gradient that cannot be used, or, while a CUDA graph records, one that is missing; on
            every rank that shares a parameter with a rank that must raise.
    """
    reports, _ = agree_on_gradients(records, audiences, nonfinite, needed=is_recording(), told_back=told_back)
    gradients: list[Tensor | None] = [None] * len(records)
    for audience, indices in audiences.items():
        report = reports[audience]
        for position, index in enumerate(indices):
            if report.present[position] and not report.bad[position]:
                gradients[index] = _usable(records[index], report.absent[position], maximize[index])
    return gradients


def agree_on_gradients(
    records: Sequence[ParamRecord],
    audiences: Mapping[tuple[int, ...], Sequence[int]],
    nonfinite: NonFinite,
    *,
    needed: bool,
    told: int = 0,
    told_back: Sequence[tuple[int, ...]] = (),
) -> tuple[dict[tuple[int, ...], GradientReport], int]:
    """Tell all ranks that share parameters which gradients are there, and whether they can be used.

    Args:
        records: As for `collect_gradients`.
        audiences: As for `collect_gradients`.
        nonfinite: As for `collect_gradients`.
        needed: Whether every parameter must have a gradient, on every rank.
        told: `RESTART` where this rank is about to record its step anew.
        told_back: As for `collect_gradients`.

    Returns:
        The reports by audience, and the gravest that any rank told.

    Raises:
        GradientError: As `collect_gradients`.
    """
    codes = [_fault(record, needed=needed) for record in records]
    if nonfinite != "propagate":
        _mark_nonfinite(records, codes)
    reports: dict[tuple[int, ...], GradientReport] = {}
    worst: tuple[str, int] | None = None
    fault = told
    for audience, indices in audiences.items():
        present = [records[index].param.grad is not None for index in indices]
        report = GradientReport(present, [not here for here in present], [codes[i] for i in indices], fault)
        reports[audience] = report = agree(report, control_group(audience))
        for index, code in zip(indices, report.bad, strict=True):
            if code and not (code == _NONFINITE and nonfinite == "skip"):
                worst = worst or (records[index].name, code)
        fault = max(report.fault, worst[1] if worst else 0)
    for audience in told_back:
        fault = agree(GradientReport([], [], [], fault), control_group(audience)).fault
    if fault > RESTART:
        name = worst[0] if worst else "a parameter that this rank has no part of"
        raise GradientError(name, *_FAULTS[worst[1] if worst else fault])
    return reports, fault


def _fault(record: ParamRecord, *, needed: bool) -> int:
    grad = record.param.grad
    if grad is None:
        return _ABSENT if needed else 0
    if grad.layout != torch.strided:
        return _SPARSE
    if isinstance(record.param, DTensor):
        if not isinstance(grad, DTensor):
            return _KIND
        if grad.placements != record.param.placements or not _same_ranks(grad, record.param):
            return _PLACEMENT
    elif isinstance(grad, DTensor):
        return _KIND
    return 0


def _same_ranks(one: DTensor, other: DTensor) -> bool:
    """Whether two meshes have the same ranks in the same places, whatever they call their dimensions."""
    return one.device_mesh == other.device_mesh or torch.equal(one.device_mesh.mesh, other.device_mesh.mesh)


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
    dims = tuple(dim for dim, placement in enumerate(param.placements) if placement.is_replicate())
    group = mesh_group(param.device_mesh, dims)
    if group is None:
        return local
    dtype = torch.promote_types(param.dtype, torch.float32)  # ranks without a gradient know no other dtype
    message = torch.cat([local.reshape(-1).to(dtype), torch.tensor([float(present)], dtype=dtype, device=local.device)])
    dist.all_reduce(message, group=group)
    mean = message[:-1] / message[-1].clamp_min(1)
    return mean.to(param.dtype).view(local.shape)
