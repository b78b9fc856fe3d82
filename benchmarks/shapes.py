"""The shapes everything is measured on."""

from __future__ import annotations

from typing import NamedTuple

# Llama-3.2-1B: hidden 2048, 8 key-value heads of 64, feed-forward 8192.
LLAMA_1B_LAYER: dict[str, tuple[int, int]] = {
    "q": (2048, 2048),
    "k": (512, 2048),
    "v": (512, 2048),
    "o": (2048, 2048),
    "gate": (8192, 2048),
    "up": (8192, 2048),
    "down": (2048, 8192),
}
LLAMA_1B_LAYERS = 6

# Llama-3.1-8B: hidden 4096, 8 key-value heads of 128, feed-forward 14336.
LLAMA_8B_LAYER: dict[str, tuple[int, int]] = {
    "q": (4096, 4096),
    "k": (1024, 4096),
    "v": (1024, 4096),
    "o": (4096, 4096),
    "gate": (14336, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
}
LAYERS = {"1b": LLAMA_1B_LAYER, "8b": LLAMA_8B_LAYER}
NORM_VECTORS_PER_LAYER = 2


class Batch(NamedTuple):
    """A batch of equal matrices."""

    matrices: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.matrices}x{self.rows}x{self.columns}"


ORTHOGONALIZATION = (
    Batch(32, 2048, 2048),
    Batch(32, 512, 2048),
    Batch(16, 8192, 2048),
    Batch(16, 2048, 8192),
    Batch(8, 4096, 4096),
    Batch(4, 14336, 4096),
    Batch(64, 1024, 2048),
)
SMALL = (Batch(4, 64, 64), Batch(4, 48, 192), Batch(2, 192, 48))


def gram_floor_flops(rows: int, columns: int, steps: int = 5, restarts: int = 1) -> float:
    """Operations of one orthogonalization with every symmetric product at half cost.

    Rows m <= columns n. Rectangular: m^2 n per Gram matrix, m^3 per symmetric product, 2 m^2 n per X <- Q X, with
    `restarts` restarts. Square: steps (m^2 n + m^3 + 2 m^2 n).
    """
    m, n = sorted((rows, columns))
    if m == n:
        return float(steps * (3 * m * m * n + m**3))
    starts = restarts + 1
    symmetric = steps + 3 * (
        steps - starts
    )  # Z every step; Q and two products for R in all but the first and last of a run
    return float(starts * 3 * m * m * n + symmetric * m**3)


def dense_flops(rows: int, columns: int, steps: int = 5) -> float:
    """Operations of `steps` quintic steps with every product at full cost."""
    m, n = sorted((rows, columns))
    return float(steps * (4 * m * m * n + 2 * m**3))
