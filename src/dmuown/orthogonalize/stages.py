"""The m x m products between two passes over the wide side, planned before anything is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from dmuown.orthogonalize.coefficients import Triple


class Stage(NamedTuple):
    """One matrix made from earlier ones, each named by its place.

    Attributes:
        out: Where the result goes; no operand's place.
        a: Left operand.
        b: Right operand; `a` itself for a polynomial.
        triple: None for the product A B^T of two matrices that commute; (a, b, c) for a I + b A + c A A^T.
    """

    out: int
    a: int
    b: int
    triple: Triple | None


def plan_runs(triples: tuple[Triple, ...], restarts: frozenset[int]) -> tuple[tuple[Stage, ...], ...]:
    """The stages from each start to the next restart."""
    starts = [0, *(step for step in range(1, len(triples)) if step in restarts), len(triples)]
    return tuple(tuple(plan_stages(triples[start:stop])) for start, stop in pairwise(starts))


cached_runs = lru_cache(maxsize=256)(plan_runs)


def plan_stages(triples: Sequence[Triple]) -> list[Stage]:
    """The stages of one run: R in place 0 gives Q, which the last stage makes.

    Per step P = a I + b R + c R R, Q <- P Q, R <- P R P, all polynomials of the first R, so that they are symmetric
    and commute, but for rounding. That makes the order matter: R is the Gram matrix of Q x for the rounded Q as long as
    each P is applied from outside, and the next P then corrects what rounding did to Q. Q P instead doubles the error
    on spectra that fall off (`docs/lab-log.md`), and P P R makes R less symmetric in every step.
    The first Q is the first P, and the last R is needed by nobody.
    """
    r, free = 0, [1, 2, 3]
    stages: list[Stage] = []
    q: int | None = None
    for step, triple in enumerate(triples):
        p = free.pop(0)
        stages.append(Stage(p, r, r, triple))
        if q is None:
            q = p
        else:
            product = free.pop(0)
            stages.append(Stage(product, p, q, None))
            free.append(q)
            q = product
        if step < len(triples) - 1:
            work = free.pop(0)
            stages += [Stage(work, p, r, None), Stage(r, work, p, None)]
            free.append(work)
        if p != q:
            free.append(p)
    return stages


def count_places(stages: Sequence[Stage]) -> int:
    """m x m matrices that the stages need at once, R included."""
    return 1 + max(stage.out for stage in stages)
