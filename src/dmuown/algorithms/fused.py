"""The two halves of a step around orthogonalization as one kernel launch each, where a kernel exists.

`before` stands for prepare_gradient and update_momentum, `after` for shape_update and apply. Both say whether
they did it: what they do not cover (rows sharded along the input axis, other devices, dtypes and layouts,
algorithms of third parties) is left to the phases themselves, which compute the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dmuown import kernels
from dmuown.algorithms.angular_muown import MAGNITUDE_FLOOR, AngularMuownRow, angular_multiplier
from dmuown.algorithms.base import MuonAlgorithm
from dmuown.algorithms.batch import MatrixBatch, Work
from dmuown.algorithms.muon import MuonRow
from dmuown.algorithms.muown import MuownRow, NorMuownRow
from dmuown.algorithms.normuon import NorMuonRow, neuron_multipliers
from dmuown.algorithms.scales import normuon, rms_norm, scale_named
from dmuown.algorithms.whole import log_once

logger = logging.getLogger(__name__)

Scale = float | Tensor


def _muon_scale(batch: MatrixBatch) -> Scale:
    return batch.row_scale(scale_named("adjust_lr", batch.options["adjust_lr"]))


def _muown_scale(batch: MatrixBatch) -> Scale:
    scale = batch.row_scale(rms_norm if batch.options["shape_scaling_type"] == "muon" else normuon)
    return scale * float(batch.options["muon_update_scale"])


def _angular_scale(batch: MatrixBatch) -> Scale:
    name = batch.options["adjust_lr_fn"] or "original"
    return angular_multiplier(batch.options) * batch.row_scale(scale_named("adjust_lr_fn", name))


# Exact classes: a subclass may override any phase. -> kernels' kind, scale of the update.
_COVERED: dict[type[MuonAlgorithm], tuple[str, Callable[[MatrixBatch], Scale]]] = {
    MuonRow: ("muon", _muon_scale),
    NorMuonRow: ("muon", _muon_scale),
    MuownRow: ("muown", _muown_scale),
    NorMuownRow: ("muown", _muown_scale),
    AngularMuownRow: ("angular", _angular_scale),
}

_ROW_STATE = ("magnitude", "direction_norm", "magnitude_momentum", "magnitude_variance", "variance_neuron")


def before(algorithm: MuonAlgorithm, batch: MatrixBatch, dtype: torch.dtype) -> list[Tensor] | None:
    """Do prepare_gradient and update_momentum in one launch.

    Args:
        algorithm: The bucket's algorithm.
        batch: The bucket; momentum, guards of the row state and steps are updated in place.
        dtype: Of the result.

    Returns:
        What is to be orthogonalized, `[batch, m_local, n_local]` each: consecutive slices of one new tensor;
        None, with nothing done, where no kernel covers the bucket. With `use_triton` the reason is logged once.
    """
    if not len(batch) or batch.weights[0].numel() == 0:
        return None
    obstacle = _obstacle(algorithm, batch, dtype)
    if obstacle is not None:
        if batch.options["use_triton"]:
            log_once(f"use_triton: torch does the rows of {batch.names[0]} and those like it, {obstacle}")
        return None
    from dmuown.kernels import rows

    kind, _ = _COVERED[type(algorithm)]
    count = len(batch)
    depth, m, n = batch.weights[0].shape
    first = batch.weights[0]
    if first.stride(2) == 1:
        directions = torch.empty((count * depth, m, n), dtype=dtype, device=first.device)
    else:
        directions = torch.empty((count * depth, n, m), dtype=dtype, device=first.device).mT
    if batch.state.get("step"):
        torch._foreach_add_(batch.state["step"], 1)
    batch.scratch["magnitude_gradient"] = rows.before(
        kind,
        batch.gradients,
        batch.state["momentum"],
        directions,
        weights=batch.weights,
        magnitudes=batch.state.get("magnitude"),
        norms=batch.state.get("direction_norm"),
        mu=float(batch.options["mu"]),
        nesterov=batch.options["nesterov"],
        ema=batch.options["momentum_form"] == "ema",
        floor=_floor(kind, batch.options),
    )
    batch.scratch["fused"] = True
    return list(directions.view(count, depth, m, n) if first.stride(2) == 1 else _stacked(directions, count))


def after(algorithm: MuonAlgorithm, batch: MatrixBatch, update: Sequence[Tensor]) -> Work[bool]:
    """Do shape_update and apply in one launch (two more for NorMuon's normalization).

    Where neurons are normalized over several blocks or ranks, torch does what is left to do with one number a row.

    Args:
        algorithm: The bucket's algorithm, whose `before` did its half.
        batch: The bucket; weights and row state are updated in place.
        update: Orthogonalized updates, `[batch, m_local, n_local]` each.

    Returns:
        Whether it was done; if not, nothing was.
    """
    if not batch.scratch.get("fused"):
        return False
    from dmuown.kernels import rows

    whole = stack_of(update)
    if whole is None:
        whole = torch.cat(list(update))
    kind, scale_of = _COVERED[type(algorithm)]
    options, state = batch.options, batch.state
    scale = scale_of(batch)
    multipliers: Tensor | None = None
    if "variance_neuron" in state and (batch.block_rows is not None or batch.output_group is not None):
        squares = rows.row_squares(whole).view(len(batch), *batch.weights[0].shape[:2], 1)
        multipliers = yield from neuron_multipliers(batch, squares)
    elif "variance_neuron" in state:
        multipliers = rows.neuron(
            whole,
            state["variance_neuron"],
            beta2=float(options["muon_beta2"]),
            epsilon=float(options["normalization_epsilon"]),
        )
    if isinstance(scale, Tensor):
        shape = (len(batch), *batch.weights[0].shape[:2], 1)
        per_row = scale.to(torch.float32).expand(shape)
        multipliers = per_row.contiguous() if multipliers is None else multipliers * per_row
        scale = 1.0
    rows.after(
        kind,
        batch.weights,
        whole,
        lr=options["lr"],
        weight_decay=0.0 if kind == "angular" else options["weight_decay"],
        scale=scale,
        multipliers=multipliers,
        cautious=bool(options.get("cautious_wd", False)) and kind == "muon",
        magnitudes=state.get("magnitude"),
        norms=state.get("direction_norm"),
        first_moments=state.get("magnitude_momentum"),
        second_moments=state.get("magnitude_variance"),
        dg=batch.scratch["magnitude_gradient"],
        steps=state.get("step"),
        betas=(float(options["beta1"]), float(options["beta2"])),
        floor=_floor(kind, options),
        epsilon=float(options["epsilon"]),
    )
    return True


def stack_of(matrices: Sequence[Tensor]) -> Tensor | None:
    """The `[count, m, n]` tensor that these `[batch, m, n]` or `[m, n]` matrices are consecutive slices of, or None."""
    first = matrices[0]
    m, n = first.shape[-2:]
    per = first.shape[0] if first.dim() == 3 else 1
    strides = first.stride()[-2:]
    if per > 1 and first.stride(0) != m * n:
        return None
    if strides not in ((n, 1), (1, m)):
        return None
    step = per * m * n * first.element_size()
    base = first.data_ptr()
    for index, matrix in enumerate(matrices):
        if matrix.data_ptr() != base + index * step or matrix.stride()[-2:] != strides:
            return None
        if matrix.shape != first.shape or matrix.dtype != first.dtype or (per > 1 and matrix.stride(0) != m * n):
            return None
    count = len(matrices) * per
    if first.storage_offset() + count * m * n > first.untyped_storage().nbytes() // first.element_size():
        return None  # Neighbours in memory, but not of one allocation.
    return first.as_strided((count, m, n), (m * n, *strides))


def _stacked(directions: Tensor, count: int) -> Tensor:
    """[count * batch, m, n] with rows contiguous as [count, batch, m, n]."""
    return directions.mT.view(count, -1, directions.shape[2], directions.shape[1]).mT


def _floor(kind: str, options: Mapping[str, Any]) -> float:
    return MAGNITUDE_FLOOR if kind == "angular" else float(options["epsilon"])


def _obstacle(algorithm: MuonAlgorithm, batch: MatrixBatch, dtype: torch.dtype) -> str | None:
    """Why no kernel covers a bucket, or None where one does."""
    if type(algorithm) not in _COVERED:
        return f"{algorithm.name} has none"
    if batch.input_group is not None:
        return "rows are sharded along the input axis"
    if batch.n == 1 and _COVERED[type(algorithm)][0] != "muon":
        return "rows of one element have no direction"
    first = batch.weights[0]
    if not _available(first.device.type):
        return f"there are none for {first.device}"
    if dtype not in _DTYPES:
        return f"there are none in {dtype}"
    for key in ("lr", "weight_decay"):
        if isinstance(batch.options[key], Tensor) and batch.options[key].device != first.device:
            return f"{key} is a tensor on {batch.options[key].device}"
    from dmuown.kernels import rows

    state = [batch.state[key] for key in _ROW_STATE if key in batch.state]
    everything = [batch.weights, batch.gradients, batch.state["momentum"], *state]
    if not all(type(x) in (Tensor, Parameter) for operand in everything for x in operand):
        return "tensors are of a subclass"
    if not all(rows.uniform(operand) for operand in everything):
        return "dtypes or strides differ, or are not supported"
    if any(operand[0].dtype != torch.float32 or operand[0].stride() != state[0][0].stride() for operand in state):
        return "row state is not fp32, or its strides differ"
    steps = batch.state.get("step", [])
    on_host = [step for step in steps if step.device.type == "cpu"]
    # One bias correction for the launch: parameters that skipped steps go the other way.
    if on_host and first.device.type != "cpu" and (len(on_host) < len(steps) or len({float(s) for s in on_host}) > 1):
        return "parameters have taken different numbers of steps"
    return None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _available(device_type: str) -> bool:
    """Whether the kernels run there: on CUDA with Triton."""
    if device_type != "cuda":
        return False
    if not kernels.available():
        logger.info("row kernels: Triton is not installed, torch does their work")
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


__all__ = ["after", "before", "stack_of"]
