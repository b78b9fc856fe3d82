"""Oracle of NorMuon (arXiv 2510.05491): Muon with a normalization per output neuron.

    s <- b2 s + (1 - b2) mean_row(O^2);  O' = O / (sqrt(s) + eps);  O' <- O' ||O||_F / ||O'||_F

over each logical matrix (an expert, a split block, a head); zero matrices stay zero. eps 1e-8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.muon import Muon


def normalize_neurons(
    update: Tensor, variance: Tensor, beta2: float, epsilon: float, blocks: Sequence[slice] | None
) -> tuple[Tensor, Tensor]:
    """(O', new s) for update: [..., m, n] and variance: [..., m, 1]."""
    variance = beta2 * variance + (1 - beta2) * (update * update).mean(-1, keepdim=True)
    normalized = update / (variance.sqrt() + epsilon)
    for block in blocks or [slice(None)]:
        before = (update[..., block, :] ** 2).sum((-2, -1), keepdim=True).sqrt()
        after = (normalized[..., block, :] ** 2).sum((-2, -1), keepdim=True).sqrt()
        ratio = torch.where(after > 0, before / torch.where(after > 0, after, 1.0), 0.0)
        normalized[..., block, :] = normalized[..., block, :] * ratio
    return normalized, variance


class NorMuon(Muon):
    """One parameter; arguments as `Muon`, and muon_beta2."""

    def __init__(
        self, weight: Tensor, *, muon_beta2: float = 0.95, normalization_epsilon: float = 1e-8, **options: Any
    ) -> None:
        super().__init__(weight, **options)
        self.muon_beta2, self.normalization_epsilon = muon_beta2, normalization_epsilon
        self.variance = torch.zeros_like(self.weight[..., :1])

    def direction(self, grad: Tensor) -> Tensor:
        update = super().direction(grad)
        update, self.variance = normalize_neurons(
            update, self.variance, self.muon_beta2, self.normalization_epsilon, self.blocks
        )
        return update
