"""Oracle of Muon (kellerjordan.github.io/posts/muon; Moonlight, arXiv 2502.16982).

    sum:  M <- mu M + G          U = G + mu M if Nesterov else M
    ema:  M <- M + (1 - mu)(G - M)   U = (1 - mu) G + mu M if Nesterov else M    (torch.optim.Muon)
    W <- W - lr wd W - lr s O(U)

The decay uses the unscaled lr. Cautious decay (arXiv 2510.12402) decays only entries where
O * W > 0 (Dion: >= 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference.orthogonalize import Orthogonalize, by_blocks, newton_schulz
from tests.reference.scales import row_scales


class Muon:
    """One parameter; weight: [..., m, n]; `blocks`: slices of output rows that are matrices of their own."""

    def __init__(
        self,
        weight: Tensor,
        *,
        lr: float = 0.01,
        mu: float = 0.95,
        weight_decay: float = 0.01,
        cautious_wd: bool | str = False,
        nesterov: bool = False,
        adjust_lr: str | None = "spectral_norm",
        momentum_form: str = "sum",
        orthogonalize: Orthogonalize = newton_schulz,
        blocks: Sequence[slice] | None = None,
    ) -> None:
        self.weight = weight.detach().double().clone()
        self.momentum = torch.zeros_like(self.weight)
        self.lr, self.mu, self.weight_decay, self.cautious_wd = lr, mu, weight_decay, cautious_wd
        self.nesterov, self.momentum_form = nesterov, momentum_form
        self.orthogonalize, self.blocks = orthogonalize, blocks
        self.scale = row_scales(adjust_lr, self.weight, blocks)

    def direction(self, grad: Tensor) -> Tensor:
        """Momentum, Nesterov and orthogonalization."""
        grad = grad.double()
        if self.momentum_form == "ema":
            self.momentum = self.momentum + (1 - self.mu) * (grad - self.momentum)
            ahead = (1 - self.mu) * grad + self.mu * self.momentum
        else:
            self.momentum = self.mu * self.momentum + grad
            ahead = grad + self.mu * self.momentum
        return by_blocks(ahead if self.nesterov else self.momentum, self.blocks, self.orthogonalize)

    def step(self, grad: Tensor) -> None:
        update = self.direction(grad)
        decayed = self.weight
        if self.cautious_wd:
            product = update * self.weight
            agree = product >= 0 if self.cautious_wd == "inclusive" else product > 0
            decayed = self.weight * agree
        self.weight = self.weight - self.lr * self.weight_decay * decayed - self.lr * self.scale * update
