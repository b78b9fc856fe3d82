"""Oracle of orthogonalization.

    A = X X^T;  X <- a X + (b A + c A^2) X      on the wide orientation, after X / (||X||_F + eps)

Tables from Jordan's and You's posts as typed in the project's equations; Polar Express by its
derivation (arXiv 2505.16932). The exact answer is the polar factor U V^T of X = U S V^T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tools.derive_polar_express import derive

Triple = tuple[float, float, float]
Orthogonalize = Callable[[Tensor], Tensor]

KELLER: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),) * 5
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


@lru_cache
def polar_express_triples(safety_factor: float = 1.01) -> tuple[Triple, ...]:
    """Five composed minimax quintics for [1e-3, 1], cushion 0.02; the input must also be divided by the factor."""
    return tuple(derive(5, lower=1e-3, cushion=0.02, safety_factor=safety_factor))


def paper_triples() -> tuple[Triple, ...]:
    """The triples that the paper prints (cushion 0.02407), each p(x / 1.05); the input is divided by its norm alone."""
    return tuple((a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in derive(5, cushion=0.02407327424182761))


TABLES: dict[str, Callable[[], tuple[Triple, ...]]] = {
    "keller": lambda: KELLER,
    "you": lambda: YOU,
    "polar_express": polar_express_triples,
    "polar_express_1.02": lambda: polar_express_triples(1.02),
    "polar_express_1.05": paper_triples,
}


def newton_schulz(
    x: Tensor,
    triples: Sequence[Triple] = KELLER,
    *,
    epsilon: float = 1e-7,
    norm: str = "add",
    safety_factor: float = 1.0,
) -> Tensor:
    """The iteration on each matrix of x: [..., m, n]; returns float64 of the same shape."""
    x = x.double()
    if x.dim() > 2:
        each = [
            newton_schulz(one, triples, epsilon=epsilon, norm=norm, safety_factor=safety_factor)
            for one in x.flatten(0, -3)
        ]
        return torch.stack(each).reshape(x.shape) if each else x.clone()
    if x.size(0) > x.size(1):
        return newton_schulz(x.T, triples, epsilon=epsilon, norm=norm, safety_factor=safety_factor).T
    size = float((x * x).sum().sqrt()) * safety_factor
    x = x / (size + epsilon if norm == "add" else max(size, epsilon))
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def polar_express(x: Tensor, *, epsilon: float = 1e-7, safety_factor: float = 1.01) -> Tensor:
    """Five steps of Polar Express on each matrix of x: [..., m, n]."""
    triples = polar_express_triples(safety_factor)
    return newton_schulz(x, triples, epsilon=epsilon, safety_factor=safety_factor)


def polar_factor(x: Tensor) -> Tensor:
    """U V^T of the singular value decomposition; directions of (numerically) zero singular value give zero."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    keep = s > s.amax(-1, keepdim=True) * max(x.shape[-2:]) * 1e-15
    return (u * keep.unsqueeze(-2)) @ vh


def quintic_outputs(sigma: Tensor, triples: Sequence[Triple], safety_factor: float = 1.0) -> Tensor:
    """What the composed polynomials make of singular values."""
    value = sigma.double() / safety_factor
    for a, b, c in triples:
        value = a * value + b * value**3 + c * value**5
    return value


def by_blocks(x: Tensor, blocks: Sequence[Any] | None, function: Orthogonalize) -> Tensor:
    """Apply `function` to each block of rows of x: [..., m, n] on its own."""
    if not blocks:
        return function(x)
    result = torch.full_like(x, float("nan"))
    for block in blocks:
        result[..., block, :] = function(x[..., block, :])
    return result
