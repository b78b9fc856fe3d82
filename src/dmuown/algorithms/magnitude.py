"""Adam on row magnitudes, shared by Muown, NorMuown and AngularMuown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuown.algorithms.batch import MatrixBatch
from dmuown.state.spec import STEP, BufferSpec

#: State of the magnitudes: `g`, Adam's moments on it, and the step that corrects their bias.
MAGNITUDE_STATE: dict[str, BufferSpec] = {
    "magnitude": BufferSpec(like="grad_rows", dtype=torch.float32, fate="weight_rows"),
    "magnitude_momentum": BufferSpec(like="grad_rows", dtype=torch.float32),
    "magnitude_variance": BufferSpec(like="grad_rows", signed=False, dtype=torch.float32),
    "step": STEP,
}


def guard_magnitude(magnitude: Tensor, floor: float) -> Tensor:
    """Keep |g| >= floor with its sign; +0 and -0 count as positive. Returns a new tensor."""
    return torch.where(magnitude < 0, magnitude.clamp_max(-floor), magnitude.clamp_min(floor))


def still_directions(batch: MatrixBatch, directions: Sequence[Tensor], settled: Sequence[Tensor]) -> None:
    """Hold the directions of rows of one element, which are a sign: no gradient and no momentum, in place.

    Their tangent is zero, and computed it is a rounding, of which orthogonalization would make a full step.

    Args:
        batch: The bucket, of one input; its momentum is written.
        directions: Gradients of the directions, `[batch, m_local, 1]` each (`[batch, m_local, 0]` beside the column).
        settled: Which rows have their sign, of the shapes of rows or directions.
    """
    for direction, momentum, rows in zip(directions, batch.state["momentum"], settled, strict=True):
        direction.masked_fill_(rows, 0)
        momentum.masked_fill_(rows, 0)


def adam_on_magnitude(
    magnitude: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    variance: Tensor,
    step: Tensor,
    options: Mapping[str, Any],
) -> Tensor:
    """Return the magnitude after one step of Adam with bias correction (Kingma & Ba 2015).

    Args:
        magnitude: g, `[batch, m_local, 1]` fp32; not written.
        gradient: dL/dg, same shape, any floating dtype.
        momentum: First moment, updated in place.
        variance: Second moment, updated in place.
        step: 0-d fp32, counting this step already.
        options: `lr`, `beta1`, `beta2`, `epsilon`.
    """
    beta1, beta2, epsilon = options["beta1"], options["beta2"], options["epsilon"]
    gradient = gradient.to(momentum.dtype)  # float64 weights have fp32 row state
    momentum.lerp_(gradient, 1 - beta1)
    variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if step.device.type == "cpu":
        count = float(step)
        corrected1, corrected2 = 1 - beta1**count, 1 - beta2**count
        denominator = (variance / corrected2).sqrt_().add_(epsilon)
        return magnitude.sub((momentum / corrected1).div_(denominator).mul_(options["lr"]))
    corrected = 1 - torch.pow(beta1, step), 1 - torch.pow(beta2, step)
    denominator = (variance / corrected[1]).sqrt_().add_(epsilon)
    return magnitude.sub((momentum / corrected[0]).div_(denominator).mul_(options["lr"]))
