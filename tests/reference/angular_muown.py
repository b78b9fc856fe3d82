"""Oracle of AngularMuown (arXiv 2606.23637).

    g = guard(g);  u = W / g;  dg = row_sum(G u);  du = g (G - u dg)
    M <- mu M + du;  Q = orthogonalize(du + mu M if Nesterov else M)
    u' = rownorm(u - lr kappa(t) s Q);  s = sqrt(max(1, m/n)) or, match_rms_adamw, 0.2 sqrt(max(m, n))
    g' = guard(Adam(g, dg, lr));  W = g' u'
    kappa(t) = (1 + decay_scale max(0, t - warmup_steps)) ^ -decay_degree,   t = 0, 1, ...

guard at 1e-7, keeping the sign; rownorm divides by max(norm, 1e-7); rows whose norm is <= 1e-7 at the
start have g = sqrt(0.33). No weight decay. Adam's step counts from 1. Polar Express, factor 1.01.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.orthogonalize import Orthogonalize, by_blocks, polar_express
from tests.reference.rows import RowAdam, guard, row_norm, row_sum
from tests.reference.scales import row_scales

FLOOR = 1e-7


class AngularMuown:
    """One parameter; weight: [..., m, n]; `blocks`: slices of output rows that are matrices of their own."""

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float = 1e-2,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        nesterov: bool = True,
        warmup_steps: int = 0,
        decay_scale: float = 0.001,
        decay_degree: float = 1.0,
        adjust_lr_fn: str | None = None,
        orthogonalize: Orthogonalize = polar_express,
        blocks: Sequence[slice] | None = None,
    ) -> None:
        self.weight = weight.detach().double().clone()
        norm = row_norm(self.weight)
        self.g = torch.where(norm <= FLOOR, math.sqrt(0.33), norm)
        self.momentum = torch.zeros_like(self.weight)
        self.adam = RowAdam(self.g, betas, epsilon)
        self.lr, self.mu, self.nesterov = lr, mu, nesterov
        self.warmup_steps, self.decay_scale, self.decay_degree, self.t = warmup_steps, decay_scale, decay_degree, 0
        self.orthogonalize, self.blocks = orthogonalize, blocks
        names = {None: "keller", "original": "keller", "match_rms_adamw": "rms_norm"}
        self.scale = row_scales(names[adjust_lr_fn], self.weight, blocks)

    def step(self, grad: Tensor) -> None:
        grad, g = grad.double(), guard(self.g, FLOOR)
        u = self.weight / g
        dg = row_sum(grad * u)
        du = g * (grad - u * dg)
        if self.weight.shape[-1] == 1:
            # u is 1 or -1 (0 in a row of zeros), so that G - u u G = 0
            du = torch.where(u.abs() > 0.5, 0, du)
            self.momentum = torch.where(u.abs() > 0.5, 0, self.momentum)
        self.momentum = self.mu * self.momentum + du
        ahead = du + self.mu * self.momentum if self.nesterov else self.momentum
        kappa = (1 + self.decay_scale * max(0, self.t - self.warmup_steps)) ** -self.decay_degree
        self.t += 1
        u = u - self.lr * kappa * self.scale * by_blocks(ahead, self.blocks, self.orthogonalize)
        self.g = guard(self.adam.step(g, dg, self.lr), FLOOR)
        self.weight = self.g * u / row_norm(u).clamp_min(FLOOR)
