"""AngularMuown (arXiv 2606.23637): row directions on the unit sphere, row magnitudes by Adam.

u = W / g;  dg = sum_row(G u);  du = g (G - u dg)
M <- mu M + du;  Q = orthogonalize(du + mu M);  u' = rownorm(u - lr kappa s Q)
g' = Adam(g, dg);  W = g' u'
kappa = (1 + decay_scale max(0, t - warmup_steps))^-decay_degree, t counted per group from 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dmuown.algorithms.base import MuonAlgorithm, register_muon_algorithm
from dmuown.algorithms.batch import MatrixBatch, Work
from dmuown.algorithms.magnitude import MAGNITUDE_STATE, adam_on_magnitude, guard_magnitude, still_directions
from dmuown.algorithms.scales import scale_named
from dmuown.errors import OptionError
from dmuown.state import BufferSpec

#: Rows this short count as zero, and magnitudes are kept this far from it (the authors' EPS).
MAGNITUDE_FLOOR = 1e-7

#: Magnitude that a row of zeros starts from: the default linear initialization's (authors' code).
ZERO_ROW_MAGNITUDE = 0.33**0.5


@register_muon_algorithm
class AngularMuownRow(MuonAlgorithm):
    """Riemannian Muon on the product of row spheres."""

    name: ClassVar[str] = "angular_muown"
    options: ClassVar[Mapping[str, Any]] = {
        "nesterov": True,
        "scheme": "polar_express",
        "adjust_lr_fn": None,
        "warmup_steps": 0,
        "decay_scale": 0.001,
        "decay_degree": 1.0,
    }
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {**MuonAlgorithm.state_spec, **MAGNITUDE_STATE}

    @staticmethod
    def initial_rows(row_norms: Tensor) -> Tensor:
        """Magnitudes to start from, given the weight's row norms."""
        return torch.where(row_norms <= MAGNITUDE_FLOOR, ZERO_ROW_MAGNITUDE, row_norms)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse weight decay, and check `adjust_lr_fn`."""
        super().check_options(options)
        if isinstance(options["weight_decay"], Tensor) or options["weight_decay"] != 0:
            raise OptionError(
                "weight_decay",
                f"angular_muown learns magnitudes and takes no weight decay, got {options['weight_decay']!r}",
                "Set weight_decay=0 in this group",
            )
        if options["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise OptionError(
                "adjust_lr_fn", f"must be None, 'original' or 'match_rms_adamw', got {options['adjust_lr_fn']!r}"
            )

    def prepare_gradient(self, batch: MatrixBatch) -> Work[list[Tensor]]:
        """Project gradients onto the tangent of the row spheres; returns du and keeps dg."""
        for step in batch.state["step"]:
            step.add_(1)
        for magnitude in batch.state["magnitude"]:
            magnitude.copy_(guard_magnitude(magnitude, MAGNITUDE_FLOOR))
        units = [weight / g for weight, g in zip(batch.weights, batch.state["magnitude"], strict=True)]
        partial = [(grad * unit).sum(dim=-1, keepdim=True) for grad, unit in zip(batch.gradients, units, strict=True)]
        dg = yield from batch.sum_rows(partial)
        batch.scratch["magnitude_gradient"] = dg
        tangents = [
            (grad - unit * d).mul_(g)
            for grad, unit, d, g in zip(batch.gradients, units, dg, batch.state["magnitude"], strict=True)
        ]
        if batch.n == 1:
            # The sphere is two points; a row of zeros is neither of them yet.
            still_directions(batch, tangents, [unit.abs() > 0.5 for unit in units])
        return tangents

    def apply(self, batch: MatrixBatch, update: Sequence[Tensor]) -> Work[None]:
        """Step along the sphere, retract, step magnitudes, recompose weights."""
        options = batch.options
        name = "original" if options["adjust_lr_fn"] is None else options["adjust_lr_fn"]
        step_length = options["lr"] * (angular_multiplier(options) * batch.row_scale(scale_named("adjust_lr_fn", name)))
        moved = [
            (weight / g).sub_(direction.float() * step_length)
            for weight, g, direction in zip(batch.weights, batch.state["magnitude"], update, strict=True)
        ]
        squares = yield from batch.sum_rows([unit.square().sum(dim=-1, keepdim=True) for unit in moved])
        for index, (weight, unit) in enumerate(zip(batch.weights, moved, strict=True)):
            magnitude = batch.state["magnitude"][index]
            stepped = adam_on_magnitude(
                magnitude,
                batch.scratch["magnitude_gradient"][index],
                batch.state["magnitude_momentum"][index],
                batch.state["magnitude_variance"][index],
                batch.state["step"][index],
                options,
            )
            magnitude.copy_(guard_magnitude(stepped, MAGNITUDE_FLOOR))
            weight.copy_(unit.mul_(magnitude / squares[index].sqrt().clamp_min(MAGNITUDE_FLOOR)))


def angular_multiplier(options: Mapping[str, Any]) -> float:
    """kappa of this step: the group's `step` counts it already, while kappa's t starts from 0."""
    if options["decay_degree"] == 0:
        return 1.0
    after_warmup = max(0, options["step"] - 1 - options["warmup_steps"])
    return float((1 + options["decay_scale"] * after_warmup) ** -options["decay_degree"])
