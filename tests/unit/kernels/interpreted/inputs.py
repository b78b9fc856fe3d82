"""Inputs that kernels have to survive, and the layouts they come in."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("random", "rank_deficient", "badly_scaled", "tiny", "huge")


def matrices(kind: str, batch: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    """fp32 [batch, rows, columns] of a kind."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, rows, columns, generator=generator)
    if kind == "rank_deficient":
        x[:, 1:] = x[:, :1] * torch.arange(1, rows)[None, :, None]
    elif kind == "badly_scaled":
        x *= 10.0 ** torch.linspace(-4, 4, rows)[None, :, None]
    elif kind == "tiny":
        x *= 1e-10  # cubed still a normal fp32 number
    elif kind == "huge":
        x *= 1e10  # cubed still finite
    return x


def falling_spectra(batch: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    """fp32 [batch, rows, columns], rows <= columns, of singular values from 1 down to 1e-4."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (
        torch.linalg.qr(torch.randn(batch, size, rows, generator=generator, dtype=torch.float64))[0]
        for size in (rows, columns)
    )
    return (u * torch.logspace(-4, 0, rows, dtype=torch.float64) @ v.mT).float()


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values as rows, as a transpose, or with gaps."""
    if layout == "transposed":
        return x.mT.contiguous().mT
    if layout == "gaps":
        wide = torch.full((x.size(0) + 1, 2 * x.size(1), 3 * x.size(2)), float("nan"), dtype=x.dtype)
        view = wide[: x.size(0), ::2, ::3]
        view.copy_(x)
        return view
    return x.contiguous()


def relative_error(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference|| in float64."""
    value, reference = value.double(), reference.double()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-300))
