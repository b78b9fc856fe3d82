"""NorMuon (arXiv 2510.05491): Muon with every neuron's update normalized by its own second moment.

After orthogonalization: s <- b2 s + (1 - b2) mean_row(O^2);  O' = O / (sqrt(s) + eps), rescaled so
that ||O'||_F = ||O||_F over each logical matrix (expert, block, head), never over a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dmuown.algorithms.base import MuonAlgorithm, register_muon_algorithm
from dmuown.algorithms.batch import MatrixBatch, Work
from dmuown.algorithms.muon import MuonRow
from dmuown.state import BufferSpec


class NeuronNormalization(MuonAlgorithm):
    """The shape phase of NorMuon, shared by every row that normalizes neurons."""

    options: ClassVar[Mapping[str, Any]] = {"muon_beta2": 0.95, "normalization_epsilon": 1e-8}

    def shape_update(self, batch: MatrixBatch, update: Sequence[Tensor]) -> Work[list[Tensor]]:
        """Normalize neurons; returns fp32 updates. Zero matrices stay zero."""
        squares = yield from batch.sum_rows([torch.stack([_row_squares(direction) for direction in update])])
        multipliers = yield from neuron_multipliers(batch, squares[0])
        return [direction.float() * multiplier for direction, multiplier in zip(update, multipliers, strict=True)]


def neuron_multipliers(batch: MatrixBatch, squares: Tensor) -> Work[Tensor]:
    """Take the rows' second moments a step further, and return what each row of the updates is multiplied by.

    Args:
        batch: The bucket; its state `variance_neuron` is updated in place.
        squares: fp32 `[parameters, batch, m_local, 1]`, sums of squares of whole rows of the updates.

    Returns:
        fp32, shaped as `squares`; 0 for the rows of a matrix of zeros.
    """
    beta2, epsilon = batch.options["muon_beta2"], batch.options["normalization_epsilon"]
    variances = batch.state["variance_neuron"]
    torch._foreach_lerp_(variances, list((squares / batch.n).unbind(0)), 1 - beta2)
    factors: Tensor = 1 / (torch.stack(list(variances)).sqrt() + epsilon)
    before, after = yield from batch.sum_blocks([squares, squares * factors.square()])
    return factors * _norm_ratio(before, after)


@register_muon_algorithm
class NorMuonRow(NeuronNormalization, MuonRow):
    """Muon with neuron normalization."""

    name: ClassVar[str] = "normuon"
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {
        **MuonRow.state_spec,
        "variance_neuron": BufferSpec(like="grad_rows", signed=False, dtype=torch.float32),
    }


def _row_squares(direction: Tensor) -> Tensor:
    return direction.float().square().sum(dim=-1, keepdim=True)


def _norm_ratio(before: Tensor, after: Tensor) -> Tensor:
    """sqrt(before / after), and 0 for a matrix of zeros."""
    return torch.where(after > 0, (before / after.clamp_min(torch.finfo(after.dtype).tiny)).sqrt(), 0)
