"""Learning-rate scales by matrix shape, each with its source. `m` output rows, `n` input columns."""

from __future__ import annotations

import math
from collections.abc import Callable

from dmuown.errors import OptionError


def spectral_norm(m: int, n: int) -> float:
    """sqrt(m / n): from unit spectral norm to unit RMS operator norm (Dion; Bernstein 2025)."""
    return math.sqrt(m / n)


def rms_norm(m: int, n: int) -> float:
    """0.2 sqrt(max(m, n)): updates of AdamW's root mean square (Moonlight, arXiv 2502.16982)."""
    return 0.2 * math.sqrt(max(m, n))


def keller(m: int, n: int) -> float:
    """sqrt(max(1, m / n)) (Keller Jordan's Muon; torch.optim.Muon's `original`)."""
    return math.sqrt(max(1.0, m / n))


def unscaled(m: int, n: int) -> float:
    """1: the learning rate as it is."""
    return 1.0


def normuon(m: int, n: int) -> float:
    """0.2 sqrt(max(1, m / n)) (NorMuown's `shape_scaling_type="normuon"`)."""
    return 0.2 * math.sqrt(max(1.0, m / n))


SCALES: dict[str | None, Callable[[int, int], float]] = {
    "spectral_norm": spectral_norm,
    "rms_norm": rms_norm,
    "keller": keller,
    "original": keller,
    "match_rms_adamw": rms_norm,
    "none": unscaled,
    None: unscaled,
}


def scale_named(option: str, name: str | None) -> Callable[[int, int], float]:
    """Return the scale of a name in `SCALES`.

    Raises:
        OptionError: No such scale.
    """
    try:
        return SCALES[name]
    except (KeyError, TypeError):
        choices = ", ".join(repr(known) for known in SCALES)
        raise OptionError(option, f"must be one of {choices}, got {name!r}") from None
