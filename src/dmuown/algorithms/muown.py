"""Muown (arXiv 2605.10797): Muon on directions, Adam on magnitudes, W = g v / ||v|| row-wise.

    u = W / g;  dg = sum_row(G u);  dv = (g / v_norm)(G - u dg)
    M <- mu M + dv;  D = dv + mu M (Nesterov) or M;  O = orthogonalize(D)
    v' = u v_norm - lr s O;  g' = Adam(g, dg);  W = g' v' / ||v'||;  v_norm = ||v'||
    decay: W <- W - lr wd W_old, then g = row norms of W

Only W, M and four numbers a row are stored: v is W's direction times its norm.
Guards: |g| >= epsilon with its sign, v_norm >= epsilon. A row of zeros has no direction: with no
gradient it stays zero; with one it takes the direction of its update and the length lr, the
length of Adam's first step whatever the gradient's size. A row of one element has a sign and no direction
to turn to: where it is longer than epsilon, dv and M are exactly 0, where G - u dg would leave its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial

from dmuown.algorithms.base import MuonAlgorithm, register_muon_algorithm
from dmuown.algorithms.batch import MatrixBatch, Work
from dmuown.algorithms.magnitude import MAGNITUDE_STATE, adam_on_magnitude, guard_magnitude, still_directions
from dmuown.algorithms.muon import _is_nonzero
from dmuown.algorithms.normuon import NeuronNormalization
from dmuown.algorithms.scales import normuon, rms_norm
from dmuown.errors import OptionError
from dmuown.state import BufferSpec


@register_muon_algorithm
class MuownRow(MuonAlgorithm):
    """Directions by Muon, magnitudes by Adam."""

    name: ClassVar[str] = "muown"
    options: ClassVar[Mapping[str, Any]] = {
        "nesterov": True,
        "muon_update_scale": 1.0,
        "scheme": "newton_schulz",
        "shape_scaling_type": "muon",
    }
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {
        **MuonAlgorithm.state_spec,
        **MAGNITUDE_STATE,
        "direction_norm": BufferSpec(like="grad_rows", signed=False, dtype=torch.float32, fate="weight_rows"),
    }

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check `shape_scaling_type`."""
        super().check_options(options)
        if options["shape_scaling_type"] not in ("muon", "normuon"):
            raise OptionError(
                "shape_scaling_type", f"must be 'muon' or 'normuon', got {options['shape_scaling_type']!r}"
            )

    def prepare_gradient(self, batch: MatrixBatch) -> Work[list[Tensor]]:
        """Split gradients into magnitude and direction; returns dv and keeps dg."""
        epsilon = batch.options["epsilon"]
        for step in batch.state["step"]:
            step.add_(1)
        for magnitude, norm in zip(batch.state["magnitude"], batch.state["direction_norm"], strict=True):
            magnitude.copy_(guard_magnitude(magnitude, epsilon))
            norm.clamp_min_(epsilon)
        units = [weight / g for weight, g in zip(batch.weights, batch.state["magnitude"], strict=True)]
        partial = [(grad * unit).sum(dim=-1, keepdim=True) for grad, unit in zip(batch.gradients, units, strict=True)]
        dg = yield from batch.sum_rows(partial)
        batch.scratch["magnitude_gradient"] = dg
        directions = [
            (grad - unit * d).mul_(g / norm)
            for grad, unit, d, g, norm in zip(
                batch.gradients, units, dg, batch.state["magnitude"], batch.state["direction_norm"], strict=True
            )
        ]
        if batch.n == 1:
            still_directions(batch, directions, [norm > epsilon for norm in batch.state["direction_norm"]])
        return directions

    def apply(self, batch: MatrixBatch, update: Sequence[Tensor]) -> Work[None]:
        """Move directions, step magnitudes, recompose weights, decay."""
        lr, epsilon, weight_decay = (batch.options[key] for key in ("lr", "epsilon", "weight_decay"))
        scale = batch.row_scale(rms_norm if batch.options["shape_scaling_type"] == "muon" else normuon)
        step_length = lr * (scale * batch.options["muon_update_scale"])
        directions = []
        for weight, g, norm, direction in zip(
            batch.weights, batch.state["magnitude"], batch.state["direction_norm"], update, strict=True
        ):
            directions.append((weight / g).mul_(norm).sub_(direction.float() * step_length))
        squares = yield from batch.sum_rows([v.square().sum(dim=-1, keepdim=True) for v in directions])
        newborn_length = lr.clamp_min(epsilon) if isinstance(lr, Tensor) else max(lr, epsilon)
        decayed = []
        for index, (weight, v) in enumerate(zip(batch.weights, directions, strict=True)):
            g, norm = batch.state["magnitude"][index], batch.state["direction_norm"][index]
            new_norm = squares[index].sqrt()
            stepped = guard_magnitude(self._step_magnitude(batch, index), epsilon)
            newborn = (g.abs() <= epsilon) & (norm <= epsilon) & (new_norm > epsilon)
            g.copy_(torch.where(newborn, newborn_length, stepped))
            norm.copy_(new_norm.clamp_min(epsilon))
            recomposed = v.mul_(g / norm)
            if _is_nonzero(weight_decay):
                recomposed.sub_(weight * (lr * weight_decay))
                decayed.append(recomposed.square().sum(dim=-1, keepdim=True))
            weight.copy_(recomposed)
        if decayed:
            # Measured before rounding to the weight's dtype, so that decay adds up in bf16 too.
            squares = yield from batch.sum_rows(decayed)
            for g, square in zip(batch.state["magnitude"], squares, strict=True):
                g.copy_(square.sqrt().clamp_min(epsilon))

    def _step_magnitude(self, batch: MatrixBatch, index: int) -> Tensor:
        state = batch.state
        return adam_on_magnitude(
            state["magnitude"][index],
            batch.scratch["magnitude_gradient"][index],
            state["magnitude_momentum"][index],
            state["magnitude_variance"][index],
            state["step"][index],
            batch.options,
        )


@register_muon_algorithm
class NorMuownRow(NeuronNormalization, MuownRow):
    """Muown with NorMuon's normalization of the orthogonalized direction."""

    name: ClassVar[str] = "normuown"
    options: ClassVar[Mapping[str, Any]] = {"normalization_epsilon": 1e-10, "shape_scaling_type": "normuon"}
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {
        **MuownRow.state_spec,
        "variance_neuron": BufferSpec(like="grad_rows", signed=False, dtype=torch.float32),
    }


# ---------------------------------------------------------------------------------------------
# Helpers under the names that AutoModel's Muown documents, for code written against it.
# ---------------------------------------------------------------------------------------------

#: Hooks of Dion's `Muon` that an optimizer built on it overrides.
_DION_MUON_HOOKS = ("_create_muon_tasks", "_create_adamw_tasks", "_get_or_initialize_state")


def _matrix_sharding(param: Tensor) -> tuple[int | None, ProcessGroup | None]:
    """Resolve the communication group for the last two matrix axes.

    Args:
        param: `[..., rows, columns]`; a DTensor may shard leading axes and at most one matrix axis, evenly.

    Returns:
        The matrix axis that is sharded and its group, or `(None, None)` when each rank has whole matrices.

    Raises:
        ValueError: Partial placements, two sharded matrix axes, or uneven shards.
    """
    if not isinstance(param, DTensor):
        return None, None
    found: list[tuple[int, int]] = []
    for mesh_dim, placement in enumerate(param.placements):
        if placement.is_partial():
            raise ValueError(f"{tuple(param.shape)}: Partial placements are not supported. Redistribute the parameter.")
        if not placement.is_replicate() and param.device_mesh.size(mesh_dim) > 1:
            axis = placement.dim % param.ndim  # type: ignore[attr-defined]
            if axis >= param.ndim - 2:
                found.append((axis, mesh_dim))
    if len(found) > 1:
        raise ValueError(f"{tuple(param.shape)}: at most one matrix axis may be sharded, got {param.placements}.")
    if not found:
        return None, None
    axis, mesh_dim = found[0]
    if param.shape[axis] % param.device_mesh.size(mesh_dim):
        raise ValueError(f"{tuple(param.shape)}: axis {axis} does not divide over {param.device_mesh.size(mesh_dim)}.")
    return axis, param.device_mesh.get_group(mesh_dim)


def _newton_schulz(update: Tensor, epsilon: float | Tensor, matrix_transposed: bool, steps: int) -> Tensor:
    """Orthogonalize complete local matrices with the reference quintic polynomial.

    Args:
        update: `[..., output, input]`, or `[..., input, output]` when `matrix_transposed`.
        epsilon: Stabilizer of the Frobenius norm; a float or 0-d CPU tensor.
        matrix_transposed: Whether the last axis contains output neurons.
        steps: Number of iterations.

    Returns:
        An independent contiguous bf16 tensor of `update`'s shape and axis order.
    """
    from dmuown.orthogonalize import Orthogonalizer

    matrices = update.mT if matrix_transposed else update
    orthogonalizer = Orthogonalizer(
        scheme="newton_schulz", coefficients="keller", steps=steps, epsilon=float(epsilon), dtype=torch.bfloat16
    )
    result = orthogonalizer(matrices.reshape(-1, *matrices.shape[-2:])).reshape(matrices.shape)
    return (result.mT if matrix_transposed else result).contiguous()


def _nonzero_magnitude(value: Tensor, epsilon: float) -> Tensor:
    """Preserve signed neuron magnitudes while guarding division by zero.

    Args:
        value: `[..., output, 1]` or `[..., 1, output]`; DTensor placements are preserved.
        epsilon: Minimum absolute magnitude.

    Returns:
        An independent tensor of the same shape, dtype, device and placements.
    """
    return guard_magnitude(value, epsilon)


def _row_sum(value: Tensor, axis: int) -> Tensor:
    """Sum over the input axis (-1 or -2), resolving a DTensor's partial sums; that axis becomes size 1."""
    total = value.sum(dim=axis, keepdim=True)
    if isinstance(total, DTensor) and any(placement.is_partial() for placement in total.placements):
        from torch.distributed.tensor import Replicate

        total = total.redistribute(
            placements=[Replicate() if isinstance(placement, Partial) else placement for placement in total.placements]
        )
    return total


def _row_norm(value: Tensor, axis: int, epsilon: float) -> Tensor:
    """Per-neuron norms in `value`'s dtype, at least `epsilon`, without gathering the matrix; `axis` becomes size 1."""
    return _row_sum(value.float().square(), axis).sqrt().clamp_min(epsilon).to(value.dtype)


def _prepare_direction(
    weight: Tensor, magnitude: Tensor, norm: Tensor, gradient: Tensor, axis: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reconstruct a direction and apply the weight-normalization Jacobian.

    Args:
        weight: `[..., output, input]`, or `[..., input, output]` when `axis` is -2.
        magnitude: Signed magnitudes, `axis` reduced to size 1.
        norm: Direction norms, like `magnitude`.
        gradient: dL/dW, like `weight`.
        axis: Physical input axis; partial row sums are resolved.

    Returns:
        `(direction, magnitude_gradient, direction_gradient)`, shaped as `weight`, `magnitude` and `weight`.
    """
    unit = weight / magnitude
    magnitude_gradient = _row_sum(gradient * unit, axis)
    return unit * norm, magnitude_gradient, (magnitude / norm) * (gradient - unit * magnitude_gradient)


def _recompose(weight: Tensor, magnitude: Tensor, direction: Tensor, axis: int) -> Tensor:
    """Write W = g v / ||v|| into `weight` in place and return the row norms of `direction`, `axis` of size 1."""
    norm = _row_sum(direction.square(), axis).sqrt()
    floor = torch.finfo(norm.dtype).tiny
    weight.copy_(magnitude * (direction / norm.clamp_min(floor)))
    return norm
