"""Oracle of NorMuown: Muown (`muown.py`) whose O is normalized per neuron as NorMuon's, eps 1e-10.

shape_scaling_type: `muon` 0.2 sqrt(max(m, n)), `normuon` 0.2 sqrt(max(1, m / n)). Decay as Muown's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference.muown import Muown
from tests.reference.normuon import normalize_neurons


class NorMuown(Muown):
    """One parameter; arguments as `Muown`, and muon_beta2 and shape_scaling_type."""

    def __init__(
        self,
        weight: Tensor,
        *,
        muon_beta2: float = 0.95,
        normalization_epsilon: float = 1e-10,
        shape_scaling_type: str = "normuon",
        **options: Any,
    ) -> None:
        scaling = {"muon": "rms_norm", "normuon": "normuon"}[shape_scaling_type]
        super().__init__(weight, shape_scaling=scaling, **options)
        self.muon_beta2, self.normalization_epsilon = muon_beta2, normalization_epsilon
        self.variance = torch.zeros_like(self.weight[..., :1])

    def shape_update(self, update: Tensor) -> Tensor:
        update, self.variance = normalize_neurons(
            update, self.variance, self.muon_beta2, self.normalization_epsilon, self.blocks
        )
        return update
