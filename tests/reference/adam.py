"""Oracle of Adam (arXiv 1412.6980): as AdamW, but the decay is added to the gradient (G + wd W), as torch does."""

from __future__ import annotations

from torch import Tensor

from tests.reference.adamw import AdamW


class Adam(AdamW):
    """One parameter of any shape."""

    def step(self, grad: Tensor) -> None:
        self.weight = self.adam.step(self.weight, grad.double() + self.weight_decay * self.weight, self.lr)
