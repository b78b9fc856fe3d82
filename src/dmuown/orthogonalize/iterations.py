"""The quintic iteration in its two forms, over an operation table.

Both take wide batches x: [B, m, n] with m <= n whose spectral norm is at most about 1, and give
p_k(...p_1(x)) with p(x) = a x + b (x x^T) x + c (x x^T)^2 x. `x` itself may be used as a buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dmuown.orthogonalize.backends import Operations
from dmuown.orthogonalize.coefficients import Triple


def plain_iteration(x: Tensor, triples: Sequence[Triple], ops: Operations) -> Tensor:
    """Iterate on x: per step A = x x^T, B = b A + c A A, x <- a x + B x (Jordan's Muon)."""
    batch, m, _ = x.shape
    gram = torch.empty((batch, m, m), dtype=x.dtype, device=x.device)
    polynomial = torch.empty_like(gram)
    spare = torch.empty_like(x)
    for a, b, c in triples:
        ops.symmetric_product(x, out=gram)
        ops.symmetric_product_add(gram, gram, gram, alpha=c, beta=b, out=polynomial)
        ops.product_add(polynomial, x, x, beta=a, out=spare)
        x, spare = spare, x
    return x


def gram_iteration(x: Tensor, triples: Sequence[Triple], ops: Operations, restarts: Collection[int]) -> Tensor:
    """Iterate on R = x x^T and accumulate Q, so that the wide side is touched only at the ends and at restarts.

    Per step Z = b R + c R R, Q <- Q (a I + Z), R <- (a I + Z) R (a I + Z). A restart before zero-based
    step i sets x <- Q x, R = x x^T, Q = I: rounding makes small eigenvalues of R negative, each step
    multiplies them by about a^2, and only recomputing R makes them non-negative again.
    Source: Gram Newton-Schulz, Dao-AILab (2026).
    """
    batch, m, _ = x.shape
    r, z, q, work = (torch.empty((batch, m, m), dtype=x.dtype, device=x.device) for _ in range(4))
    spare = torch.empty_like(x)
    ops.symmetric_product(x, out=r)
    steps_in_run = 0
    last = len(triples) - 1
    first_a = 0.0
    for step, (a, b, c) in enumerate(triples):
        if step in restarts and step > 0:
            ops.product(_whole(q, first_a, steps_in_run), x, out=spare)
            x, spare = spare, x
            ops.symmetric_product(x, out=r)
            steps_in_run = 0
        ops.symmetric_product_add(r, r, r, alpha=c, beta=b, out=z)
        # Polynomials of the same R commute, so every product here is symmetric.
        if step < last and step + 1 not in restarts:
            ops.symmetric_product_add(r, z, r, alpha=1.0, beta=a, out=work)
            ops.symmetric_product_add(z, work, work, alpha=1.0, beta=a, out=r)
        if steps_in_run == 0:
            # Q = a I + Z, of which only Z is stored: the identity joins the next factor.
            first_a = a
            q, z = z, q
        elif steps_in_run == 1:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            ops.symmetric_product_add(q, z, z, alpha=1.0, beta=first_a, out=work)
            q, work = work, q
        else:
            ops.symmetric_product_add(q, z, q, alpha=1.0, beta=a, out=work)
            q, work = work, q
        steps_in_run += 1
    return ops.product(_whole(q, first_a, steps_in_run), x, out=spare)


def _whole(q: Tensor, first_a: float, steps_in_run: int) -> Tensor:
    """Q with the identity of a run's only step."""
    if steps_in_run == 1:
        q.diagonal(dim1=-2, dim2=-1).add_(first_a)
    return q


def plain_cost(m: int, n: int, steps: int, symmetric_cost: float) -> float:
    """Multiply-adds of `plain_iteration` for one m x n matrix; symmetric products count `symmetric_cost`."""
    return steps * ((1 + symmetric_cost) * m * m * n + symmetric_cost * m**3)


def gram_cost(m: int, n: int, steps: int, symmetric_cost: float, restarts: Collection[int]) -> float:
    """Multiply-adds of `gram_iteration` for one m x n matrix; symmetric products count `symmetric_cost`."""
    inner = {step for step in restarts if 0 < step < steps}
    starts = 1 + len(inner)
    square = steps + (steps - starts) + 2 * (steps - starts)  # Z; Q unless fresh; R unless dropped
    return starts * (1 + symmetric_cost) * m * m * n + square * symmetric_cost * m**3
