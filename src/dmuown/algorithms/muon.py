"""Muon (kellerjordan.github.io/posts/muon; Moonlight, arXiv 2502.16982).

M <- mu M + G;  D = G + mu M (Nesterov) or M;  W <- W - lr wd W - lr s O(D)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dmuown.algorithms.base import MuonAlgorithm, register_muon_algorithm
from dmuown.algorithms.batch import MatrixBatch, Work
from dmuown.algorithms.scales import scale_named


def decay_weight(weight: Tensor, update: Tensor, rate: float | Tensor, cautious: bool) -> None:
    """Decay a weight in place: W <- W - rate W, everywhere or only where update * W > 0 (arXiv 2510.12402).

    Args:
        weight: `[batch, m_local, n_local]`.
        update: What will be subtracted, same shape; read for its sign.
        rate: lr x weight_decay, the unscaled learning rate.
        cautious: Whether to decay only where the update moves the weight towards zero.
    """
    if cautious:
        weight.sub_(torch.where(update * weight > 0, weight, 0) * rate)
    else:
        weight.mul_(1 - rate)


@register_muon_algorithm
class MuonRow(MuonAlgorithm):
    """Orthogonalized momentum, subtracted from the decayed weight."""

    name: ClassVar[str] = "muon"
    options: ClassVar[Mapping[str, Any]] = {
        "adjust_lr": "spectral_norm",
        "cautious_wd": False,
        "scheme": "polar_express",
        "coefficients": "polar_express_1.02",  # Dion's
    }

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check that `adjust_lr` names a scale."""
        super().check_options(options)
        scale_named("adjust_lr", options["adjust_lr"])

    def apply(self, batch: MatrixBatch, update: Sequence[Tensor]) -> Work[None]:
        """Decay with the unscaled learning rate, subtract with the scaled one."""
        lr, weight_decay = batch.options["lr"], batch.options["weight_decay"]
        scale = batch.row_scale(scale_named("adjust_lr", batch.options["adjust_lr"]))
        for weight, direction in zip(batch.weights, update, strict=True):
            if _is_nonzero(weight_decay):
                decay_weight(weight, direction, lr * weight_decay, batch.options["cautious_wd"])
            subtract_scaled(weight, direction, lr, scale)
        return
        yield


def subtract_scaled(weight: Tensor, direction: Tensor, lr: float | Tensor, scale: float | Tensor) -> None:
    """W <- W - lr scale O in place, the product in fp32 whatever the dtype of O."""
    if isinstance(lr, Tensor) or isinstance(scale, Tensor):
        weight.sub_(direction.float() * (lr * scale))
    else:
        weight.add_(direction, alpha=-lr * scale)


def _is_nonzero(value: float | Tensor) -> bool:
    """Whether a decay applies; a tensor is live under graph capture and always counts."""
    return isinstance(value, Tensor) or value != 0
