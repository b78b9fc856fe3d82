"""Oracle of the learning-rate scales by the shape of the logical matrix: m output rows, n input columns.

spectral_norm sqrt(m / n) (Dion); rms_norm 0.2 sqrt(max(m, n)) (Moonlight, arXiv 2502.16982);
keller sqrt(max(1, m / n)) (Jordan's Muon); normuon 0.2 sqrt(max(1, m / n)); none 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def shape_scale(name: str | None, m: int, n: int) -> float:
    """The factor on the learning rate of an m x n matrix."""
    return {
        None: 1.0,
        "none": 1.0,
        "spectral_norm": math.sqrt(m / n),
        "rms_norm": 0.2 * math.sqrt(max(m, n)),
        "keller": math.sqrt(max(1.0, m / n)),
        "normuon": 0.2 * math.sqrt(max(1.0, m / n)),
    }[name]


def row_scales(name: str | None, weight: Tensor, blocks: Sequence[slice] | None) -> Tensor:
    """[m, 1] factors: each row has that of its block."""
    m, n = weight.shape[-2:]
    scales = torch.full((m, 1), float("nan"), dtype=torch.float64)
    for block in blocks or [slice(0, m, 1)]:
        scales[block] = shape_scale(name, len(range(m)[block]), n)
    return scales
