"""Oracle of Lion (arXiv 2302.06675).

u = sign(b1 M + (1 - b1) G);  M <- b2 M + (1 - b2) G;  W <- (1 - lr wd) W - lr u
"""

from __future__ import annotations

import torch
from torch import Tensor


class Lion:
    """One parameter of any shape."""

    def __init__(
        self, weight: Tensor, *, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0
    ) -> None:
        self.weight = weight.detach().double().clone()
        self.momentum = torch.zeros_like(self.weight)
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay

    def step(self, grad: Tensor) -> None:
        grad, (beta1, beta2) = grad.double(), self.betas
        update = torch.sign(beta1 * self.momentum + (1 - beta1) * grad)
        self.momentum = beta2 * self.momentum + (1 - beta2) * grad
        self.weight = (1 - self.lr * self.weight_decay) * self.weight - self.lr * update
