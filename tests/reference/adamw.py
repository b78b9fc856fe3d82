"""Oracle of AdamW (arXiv 1711.05101), torch's arithmetic order.

W <- (1 - lr wd) W;  m <- b1 m + (1 - b1) G;  v <- b2 v + (1 - b2) G^2
W <- W - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps),   t = 1, 2, ...
"""

from __future__ import annotations

from torch import Tensor

from tests.reference.rows import RowAdam


class AdamW:
    """One parameter of any shape."""

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.weight = weight.detach().double().clone()
        self.adam = RowAdam(self.weight, betas, epsilon)
        self.lr, self.weight_decay = lr, weight_decay

    def step(self, grad: Tensor) -> None:
        self.weight = self.adam.step(self.weight * (1 - self.lr * self.weight_decay), grad.double(), self.lr)
