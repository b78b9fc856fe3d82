"""Row state that comes from the weights: Muown's magnitudes and direction norms."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuown.algorithms import MuonAlgorithm
from dmuown.engine.agreement import GradientReport, agree
from dmuown.engine.groups import audience_of, control_group
from dmuown.engine.layout import local_tensor
from dmuown.engine.plan import Bucket
from dmuown.engine.planning import Plan
from dmuown.engine.records import ParamRecord
from dmuown.errors import CheckpointError
from dmuown.state.spec import MASTER_WEIGHT

logger = logging.getLogger(__name__)

#: Relative difference between a weight's row norm and its magnitude that rounding can explain.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}

State = MutableMapping[Tensor, MutableMapping[str, Any]]


def _weight_row_buffers(algorithm: MuonAlgorithm) -> list[str]:
    return [key for key, spec in algorithm.state_spec.items() if spec.fate == "weight_rows"]


def _row_norms(bucket: Bucket, index: int) -> Tensor:
    """Global row norms of one parameter, `[batch, m_local, 1]` fp32. Collective over the input axis's ranks."""
    weight = bucket.layout.logical(local_tensor(bucket.params[index]).detach())
    squares = weight.float().square().sum(dim=-1, keepdim=True)
    if bucket.input_group is not None:
        dist.all_reduce(squares, group=bucket.input_group)
    return squares.sqrt()


def _initial(algorithm: MuonAlgorithm, norms: Tensor, group: Mapping[str, Any] | None = None) -> Tensor:
    start = getattr(algorithm, "initial_rows", None)
    return start(norms) if start is not None else norms


@torch.no_grad()
def initialize(plan: Plan, state: Mapping[Tensor, Mapping[str, Any]], only: set[Tensor] | None = None) -> None:
    """Set `"weight_rows"` buffers from the weights, for all parameters or some; no mark is left on the rest."""
    for bucket in plan.buckets:
        algorithm = plan.algorithm_of(bucket)
        buffers = _weight_row_buffers(algorithm)
        for index, param in enumerate(bucket.params):
            if buffers and (only is None or param in only):
                norms = _initial(algorithm, _row_norms(bucket, index))
                for key in buffers:
                    bucket.layout.logical_rows(local_tensor(state[param][key])).copy_(norms)


@torch.no_grad()
def refresh_masters(records: Sequence[ParamRecord], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Take master weights anew where they are not what their parameter was rounded from. Nothing is sent."""
    for record in records:
        if MASTER_WEIGHT in record.state_spec:
            master = local_tensor(state[record.param][MASTER_WEIGHT])
            param = local_tensor(record.param).detach().to(master.device)
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))


@torch.no_grad()
def verify(plan: Plan, state: Mapping[Tensor, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """In the first step after construction or loading, compare magnitudes with the weights.

    Before any step was taken, magnitudes are by definition the weights' row norms: they are taken
    anew, with a warning. Later, a difference means that weights and state belong to different runs.

    Raises:
        CheckpointError: On every rank of the parameter's mesh.
    """
    for bucket in plan.buckets:
        algorithm = plan.algorithm_of(bucket)
        if "magnitude" not in _weight_row_buffers(algorithm):
            continue
        differs = [_differs(bucket, index, algorithm, state) for index in range(len(bucket.params))]
        first = bucket.params[0]
        report = agree(GradientReport(differs, differs, [0] * len(differs)), control_group(audience_of(first)))
        changed = [index for index, mark in enumerate(report.present) if mark]
        if not changed:
            continue
        name = bucket.names[changed[0]]
        taken = any(float(state[bucket.params[index]]["step"]) for index in changed)
        if taken:
            raise CheckpointError(
                name,
                "its weight was changed from outside: row norms and stored magnitudes differ",
                "Load the model that belongs to this optimizer state, or call resync_magnitudes()",
            )
        logger.warning(
            "%s and %d other parameters changed after the optimizer was built, before its first step: "
            "magnitudes are taken anew from the weights",
            name,
            len(changed) - 1,
        )
        initialize(plan, state, {bucket.params[index] for index in changed})


def _differs(bucket: Bucket, index: int, algorithm: MuonAlgorithm, state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    param = bucket.params[index]
    expected = _initial(algorithm, _row_norms(bucket, index))
    stored = bucket.layout.logical_rows(local_tensor(state[param]["magnitude"])).abs()
    slack = _TOLERANCE[param.dtype] * torch.maximum(expected, stored) + 1e-6
    # Written so that a NaN counts as no difference: non-finite weights are reported elsewhere.
    return bool(((expected - stored).abs() > slack).any())
