"""Row arithmetic that the oracles of the row-norm algorithms share; tensors [..., m, n] and [..., m, 1]."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def row_norm(x: Tensor) -> Tensor:
    return row_sum(x * x).sqrt()


def guard(x: Tensor, epsilon: float) -> Tensor:
    """sign(x) max(|x|, epsilon), where sign(0) = 1."""
    return torch.where(x < 0, -1.0, 1.0) * x.abs().clamp_min(epsilon)


class RowAdam:
    """Adam without decay on one number per row: bias-corrected, step from 1 (arXiv 1412.6980)."""

    def __init__(self, like: Tensor, betas: tuple[float, float], epsilon: float) -> None:
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)
        self.betas, self.epsilon, self.step_count = betas, epsilon, 0

    def step(self, value: Tensor, grad: Tensor, lr: float) -> Tensor:
        beta1, beta2 = self.betas
        self.step_count += 1
        self.first = beta1 * self.first + (1 - beta1) * grad
        self.second = beta2 * self.second + (1 - beta2) * grad * grad
        first = self.first / (1 - beta1**self.step_count)
        second = self.second / (1 - beta2**self.step_count)
        return value - lr * first / (second.sqrt() + self.epsilon)
