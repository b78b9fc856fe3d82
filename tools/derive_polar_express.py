"""Derive the Polar Express coefficients; prints the tables of `dmuown.orthogonalize.coefficients`.

Method: Amsel, Persson, Musco, Gower, "The Polar Express: Optimal Matrix Sign Methods and Their
Application to the Muon Algorithm", arXiv 2505.16932, sections 3 and 4 (offline stage).

Each step is the odd quintic p(x) = a x + b x^3 + c x^5 that minimises max |1 - p(x)| on [l, u].
By the equioscillation theorem the optimum has E = 1 - p at four points l < q < r < u with
alternating sign, where q and r are the extrema of p; Remez' exchange alternates between solving the
4x4 linear system for (a, b, c, E) and moving q and r. The interval then maps to [p(l), 2 - p(l)],
and the greedy composition of such optima is itself optimal (theorem 3.1 of the paper).

Two numerical safeguards of section 4.4:
- cushion: the quintic is made for [max(l, cushion u), u], so that singular values far below u are
  not lifted so steeply that rounding errors explode, and recentred so that p(l) + p(u) = 2;
- safety factor s: every polynomial but the last is evaluated at x / s, (a / s, b / s^3, c / s^5),
  so that a singular value slightly above u (rounding) does not leave the interval.

Run: python tools/derive_polar_express.py
"""

from __future__ import annotations

import math
from fractions import Fraction

Triple = tuple[float, float, float]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small linear system exactly (rational Gauss elimination), rounding once at the end."""
    rows = [[Fraction(value) for value in (*row, rhs)] for row, rhs in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [x - factor * y for x, y in zip(rows[index], rows[column], strict=True)]
    return [float(rows[index][size] / rows[index][index]) for index in range(size)]


def minimax_quintic(lower: float, upper: float) -> Triple:
    """The odd quintic closest to 1 on [lower, upper] in the maximum norm, by Remez' exchange."""
    if not 0.0 < lower <= upper:
        raise ValueError(f"need 0 < lower <= upper, got [{lower}, {upper}]")
    if lower / upper >= 1.0 - 5e-6:
        # The four points coincide to rounding; the limit is the Taylor (Newton-Schulz) quintic at x = upper.
        return 15 / 8 / upper, -10 / 8 / upper**3, 3 / 8 / upper**5
    q, r = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    error = math.inf
    for _ in range(200):
        points = ((lower, 1.0), (q, -1.0), (r, 1.0), (upper, -1.0))
        system = [[x, x**3, x**5, sign] for x, sign in points]
        a, b, c, new_error = _solve(system, [1.0] * 4)
        root = math.sqrt(9 * b * b - 20 * a * c)
        q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
        if abs(new_error - error) <= 1e-15:
            break
        error = new_error
    return a, b, c


def derive(steps: int, *, lower: float = 1e-3, cushion: float = 0.02, safety_factor: float = 1.0) -> list[Triple]:
    """Compose `steps` optimal quintics for singular values in [lower, 1].

    Args:
        steps: Number of polynomials, at least 1.
        lower: Smallest singular value that is steered to 1.
        cushion: Smallest ratio of the interval ends that a polynomial is made for.
        safety_factor: Divides the argument of every polynomial but the last.
    """
    upper = 1.0
    triples: list[Triple] = []
    for _ in range(steps):
        a, b, c = minimax_quintic(max(lower, cushion * upper), upper)
        at_lower = a * lower + b * lower**3 + c * lower**5
        at_upper = a * upper + b * upper**3 + c * upper**5
        centre = 2.0 / (at_lower + at_upper)
        s = safety_factor if len(triples) < steps - 1 else 1.0
        a, b, c = a * centre / s, b * centre / s**3, c * centre / s**5
        triples.append((a, b, c))
        # The interval of the polynomial as it will be used, safety factor included.
        lower = a * lower + b * lower**3 + c * lower**5
        upper = 2.0 - lower
    return triples


def main() -> None:
    for steps, safety_factor in ((5, 1.01), (5, 1.02)):
        print(f"# {steps} steps, lower 1e-3, cushion 0.02, safety factor {safety_factor}")
        for triple in derive(steps, safety_factor=safety_factor):
            print(f"    {triple!r},")


if __name__ == "__main__":
    main()
