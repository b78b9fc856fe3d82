"""Coefficients of the odd quintic iteration x <- a x + b x^3 + c x^5, each table naming its source.

A table longer than the number of steps is truncated; a shorter one repeats its last triple.
Output ranges are those of exact arithmetic for singular values in [0.01, 1] after five steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

from dmuown.errors import OptionError

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class CoefficientTable:
    """One set of quintics, composed in order.

    Attributes:
        name: What the option `coefficients` calls it.
        triples: (a, b, c) of each step.
        safety_factor: The input is divided by this beside its Frobenius norm; the triples assume it.
        source: Where the numbers come from.
    """

    name: str
    triples: tuple[Triple, ...]
    safety_factor: float
    source: str

    def for_steps(self, steps: int) -> tuple[Triple, ...]:
        """The triples of `steps` steps (>= 1): truncated, or with the last one repeated."""
        return self.triples[:steps] + self.triples[-1:] * (steps - len(self.triples))


KELLER = CoefficientTable(
    name="keller",
    triples=((3.4445, -4.7750, 2.0315),),
    safety_factor=1.0,
    source="Keller Jordan, https://kellerjordan.github.io/posts/muon (2024); torch.optim.Muon; output 0.68-1.13",
)

YOU = CoefficientTable(
    name="you",
    triples=(
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    safety_factor=1.0,
    source="Jiacheng You, https://x.com/YouJiacheng/status/1905861218138804534 (2025); output 0.978-1.032",
)

_POLAR_EXPRESS_SOURCE = (
    "derived by tools/derive_polar_express.py: offline stage of Polar Express, arXiv 2505.16932, "
    "5 steps, lower bound 1e-3, cushion 0.02, the safety factor in all steps but the last; output 0.85-1.14"
)

# Factor of the authors' code and of AngularMuown (first a: 8.2373).
POLAR_EXPRESS = CoefficientTable(
    name="polar_express",
    triples=(
        (8.237312490495558, -23.1577474145582, 16.680568411445915),
        (4.0824419990648435, -2.893047735332593, 0.5252849256975659),
        (3.9263479922546565, -2.8547468034765298, 0.5318022422894989),
        (3.2982187133085135, -2.4245419810267053, 0.48632008358844064),
        (2.3200073128898078, -1.6862169729967589, 0.4206802734023507),
    ),
    safety_factor=1.01,
    source=_POLAR_EXPRESS_SOURCE,
)

# Factor of Dion, nanochat and muonium (first a: 8.1566).
POLAR_EXPRESS_1_02 = CoefficientTable(
    name="polar_express_1.02",
    triples=(
        (8.156554524902464, -22.483292925577953, 15.878769915207462),
        (4.0429299351667245, -2.8089174659087037, 0.5000178451051298),
        (3.8916678022926683, -2.772484153217689, 0.5060648178503399),
        (3.2857536577556576, -2.3681294933425385, 0.46449024233003106),
        (2.3465413258596364, -1.7097828382687048, 0.42323551169305207),
    ),
    safety_factor=1.02,
    source=_POLAR_EXPRESS_SOURCE,
)

# The triples that the paper prints, each at x / 1.05; the input is divided by its norm alone. So has it
# gram-newton-schulz 0.1.6, which Dion runs for its use_gram_newton_schulz.
POLAR_EXPRESS_1_05 = CoefficientTable(
    name="polar_express_1.05",
    triples=(
        (7.892582874424405, -20.383013945879554, 13.555306149406917),
        (3.9114848681354335, -2.54646359290609, 0.42689883196730777),
        (3.760657955697418, -2.5128190182165575, 0.4323647349070061),
        (3.160399673686284, -2.1496495188984963, 0.3996366907664386),
        (2.191097161861732, -1.4416620102146642, 0.3281464876231551),
    ),
    safety_factor=1.0,
    source="arXiv 2505.16932: lower bound 1e-3, cushion 0.02407327424182761, / 1.05 in all steps; output 0.84-1.13",
)

TABLES: dict[str, CoefficientTable] = {
    table.name: table for table in (KELLER, YOU, POLAR_EXPRESS, POLAR_EXPRESS_1_02, POLAR_EXPRESS_1_05)
}


def custom_table(triples: Sequence[Sequence[float]]) -> CoefficientTable:
    """A table of the caller's own triples, without safety factor.

    Raises:
        OptionError: Empty, or an entry that is not three finite numbers.
    """
    rule = f"must be a table's name or a non-empty sequence of (a, b, c) finite numbers, got {triples!r}"
    remedy = f"Named tables: {', '.join(TABLES)}"
    try:
        rows = [tuple(row) for row in triples]
    except TypeError as error:
        raise OptionError("coefficients", rule, remedy) from error
    if not rows:
        raise OptionError("coefficients", rule, remedy)
    checked: list[Triple] = []
    for row in rows:
        if len(row) != 3 or not all(isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x) for x in row):
            raise OptionError("coefficients", rule, remedy)
        checked.append((float(row[0]), float(row[1]), float(row[2])))
    return CoefficientTable("custom", tuple(checked), 1.0, "given by the caller")
