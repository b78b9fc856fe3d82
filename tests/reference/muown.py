"""Oracle of Muown (arXiv 2605.10797) with the guards that `README.md` in this folder sets out.

State: momentum M; g (signed row magnitudes) and v_norm (row norms of the direction), both from the
row norms of W; Adam's moments of g; step.

    g = guard(g); v_norm = max(v_norm, eps)
    u = W / g;  dg = row_sum(G u);  dv = (g / v_norm)(G - u dg)
    M <- mu M + dv;  D = dv + mu M (Nesterov) or M;  O = orthogonalize(D)
    v' = u v_norm - lr 0.2 sqrt(max(m, n)) scale O
    g' = guard(Adam(g, dg, lr)), except that a newborn row takes g' = max(lr, eps)
    v_norm <- max(||v'||, eps);  W = g' v' / v_norm
    decay, where wd != 0:  W <- W - lr wd W_old;  g' <- max(||W||, eps)

guard(x) = sign(x) max(|x|, eps), sign(0) = 1. Newborn: |g| <= eps and v_norm <= eps before the step,
and ||v'|| > eps. Zero rows: with a zero gradient (and momentum) v' = 0 and the row stays zero; with a
gradient dv = G, the row takes a direction, and since dg = 0 tells Adam nothing, the magnitude takes
the length that Adam's first step has for any gradient, lr. A row of one element longer than eps: u = 1
or -1 and dv = G - u u G = 0, written out because rounding would leave a remainder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.orthogonalize import Orthogonalize, by_blocks, newton_schulz
from tests.reference.rows import RowAdam, guard, row_norm, row_sum
from tests.reference.scales import row_scales


class Muown:
    """One parameter; weight: [..., m, n]; `blocks`: slices of output rows that are matrices of their own."""

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float = 3e-4,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        epsilon: float = 1e-8,
        nesterov: bool = True,
        muon_update_scale: float = 1.0,
        shape_scaling: str = "rms_norm",
        orthogonalize: Orthogonalize = newton_schulz,
        blocks: Sequence[slice] | None = None,
    ) -> None:
        self.weight = weight.detach().double().clone()
        self.momentum = torch.zeros_like(self.weight)
        self.g = row_norm(self.weight).clamp_min(epsilon)
        self.v_norm = self.g.clone()
        self.adam = RowAdam(self.g, betas, epsilon)
        self.lr, self.mu, self.weight_decay, self.epsilon, self.nesterov = lr, mu, weight_decay, epsilon, nesterov
        self.orthogonalize, self.blocks = orthogonalize, blocks
        self.scale = row_scales(shape_scaling, self.weight, blocks) * muon_update_scale

    def shape_update(self, update: Tensor) -> Tensor:
        """What a variant does to O."""
        return update

    def step(self, grad: Tensor) -> None:
        grad, before, epsilon = grad.double(), self.weight, self.epsilon
        g, v_norm = guard(self.g, epsilon), self.v_norm.clamp_min(epsilon)
        u = before / g
        dg = row_sum(grad * u)
        dv = (g / v_norm) * (grad - u * dg)
        if before.shape[-1] == 1:
            dv = torch.where(v_norm > epsilon, 0, dv)
            self.momentum = torch.where(v_norm > epsilon, 0, self.momentum)
        self.momentum = self.mu * self.momentum + dv
        ahead = dv + self.mu * self.momentum if self.nesterov else self.momentum
        update = self.shape_update(by_blocks(ahead, self.blocks, self.orthogonalize))
        v = u * v_norm - self.lr * self.scale * update
        length = row_norm(v)
        newborn = (g.abs() <= epsilon) & (v_norm <= epsilon) & (length > epsilon)
        by_adam = guard(self.adam.step(g, dg, self.lr), epsilon)
        self.g = torch.where(newborn, max(self.lr, epsilon), by_adam)
        self.v_norm = length.clamp_min(epsilon)
        self.weight = self.g * v / self.v_norm
        if self.weight_decay != 0:
            self.weight = self.weight - self.lr * self.weight_decay * before
            self.g = row_norm(self.weight).clamp_min(epsilon)
