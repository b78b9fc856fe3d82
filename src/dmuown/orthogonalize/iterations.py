"""The quintic iteration in its two forms, over an operation table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from dmuown.orthogonalize.backends import Operations, run_one_by_one
from dmuown.orthogonalize.coefficients import Triple
from dmuown.orthogonalize.panels import multiply_by_panels, turns, works_in_place
from dmuown.orthogonalize.stages import cached_runs, count_places, plan_runs


def iterate(
    x: Tensor, triples: Sequence[Triple], ops: Operations, restarts: Collection[int], *, in_place: bool = False
) -> Tensor:
    """p_k(...p_1(x)) with p(x) = (a I + b x x^T + c (x x^T)^2) x.

    Between restarts R = x x^T is iterated on and Q accumulated, so that the wide side is touched only at the ends:
    per step P = a I + b R + c R R, Q <- P Q, R <- P R P. A restart before zero-based step i sets x <- Q x, R = x x^T,
    Q = I: rounding makes small eigenvalues of R negative, each step multiplies them by about a^2, and only
    recomputing R makes them non-negative again. Restarting before every step is Jordan's Muon: P = a I + b R + c R R,
    x <- P x. Source: Gram Newton-Schulz, Dao-AILab (2026).

    P is rounded with its identity: that spares every other product its addend. On 256 x 1024 normal entries it measured
    no less exact than adding a x in fp32 (fp16 1.2e-3 against 1.6e-3; bf16 without Gram 1.0e-2 against 1.1e-2). On
    singular values from 1e-4 to 1 the Gram form gains several times in fp16, and bf16 without it loses a quarter
    (0.029 against 0.023): `docs/lab-log.md`.

    Args:
        x: [B, m, n] with m <= n whose spectral norm is at most about 1; may be used as a buffer.
        triples: (a, b, c) of each step.
        ops: Who multiplies.
        restarts: Zero-based steps; see `Orthogonalizer.restarts`.
        in_place: x <- Q x by panels in x's own memory where that pays: see `panels`.

    Returns:
        [B, m, n], a new tensor or x's memory.
    """
    batch, m, n = x.shape
    plan = plan_runs if torch.compiler.is_compiling() else cached_runs
    runs = plan(tuple(triples), frozenset(restarts))
    places = torch.empty((max(map(count_places, runs)), batch, m, m), dtype=x.dtype, device=x.device)
    # A compiler takes no results that are parts of a tensor.
    by_panels = in_place and works_in_place(m, n) and not torch.compiler.is_compiling()
    spare = None if by_panels else torch.empty_like(x)
    for stages, turn in zip(runs, turns(len(runs)), strict=True):
        if not ops.run_stages(x, places, stages):
            run_one_by_one(ops, x, places, stages)
        made = stages[-1].out
        if spare is None:
            # Of the places only Q's is needed any more, which is never the first.
            multiply_by_panels(places[made], x, places[made - 1], ops, turn)
        else:
            ops.product(places[made], x, out=spare)
            x, spare = spare, x
    return x


def plain_cost(m: int, n: int, steps: int, symmetric_cost: float) -> float:
    """Multiply-adds of `iterate` for one m x n matrix, restarting in every step; symmetric products count less."""
    return steps * ((1 + symmetric_cost) * m * m * n + symmetric_cost * m**3)


def gram_cost(m: int, n: int, steps: int, symmetric_cost: float, restarts: Collection[int]) -> float:
    """Multiply-adds of `iterate` for one m x n matrix; symmetric products count `symmetric_cost`."""
    inner = {step for step in restarts if 0 < step < steps}
    starts = 1 + len(inner)
    square = steps + (steps - starts) + 2 * (steps - starts)  # P; Q unless fresh; R unless dropped
    return starts * (1 + symmetric_cost) * m * m * n + square * symmetric_cost * m**3
