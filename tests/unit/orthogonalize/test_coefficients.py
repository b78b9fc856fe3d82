"""Coefficient tables: their source, their derivation and what they make of singular values."""

from __future__ import annotations

import pytest
import torch

from dmuown.errors import OptionError
from dmuown.orthogonalize import KELLER, POLAR_EXPRESS, POLAR_EXPRESS_1_02, POLAR_EXPRESS_1_05, YOU, CoefficientTable
from dmuown.orthogonalize.coefficients import TABLES, custom_table
from tests.reference.orthogonalize import quintic_outputs
from tools.derive_polar_express import derive, minimax_quintic

#: arXiv 2505.16932, the listing of algorithm 1.
PAPER = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)


@pytest.mark.parametrize("table", [POLAR_EXPRESS, POLAR_EXPRESS_1_02], ids=lambda table: table.name)
def test_polar_express_is_what_the_script_derives(table: CoefficientTable) -> None:
    derived = torch.tensor(derive(5, safety_factor=table.safety_factor), dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(table.triples, dtype=torch.float64), derived, rtol=1e-13, atol=0)


def test_the_papers_own_triples_are_what_the_script_derives() -> None:
    derived = derive(5, cushion=0.02407327424182761)  # without safety factor
    printed = torch.tensor(PAPER, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(derived, dtype=torch.float64), printed, rtol=1e-13, atol=0)
    scaled = printed / torch.tensor([1.05, 1.05**3, 1.05**5], dtype=torch.float64)
    torch.testing.assert_close(
        torch.tensor(POLAR_EXPRESS_1_05.triples, dtype=torch.float64), scaled, rtol=1e-13, atol=0
    )


def test_first_coefficients_are_those_the_libraries_use() -> None:
    # Facts about other libraries: 8.2373 in the authors' code and AngularMuown, 8.1566 in Dion, nanochat, muonium.
    assert POLAR_EXPRESS.triples[0][0] == pytest.approx(8.2373, abs=5e-5)
    assert POLAR_EXPRESS_1_02.triples[0][0] == pytest.approx(8.1566, abs=5e-5)


@pytest.mark.parametrize("lower,upper", [(0.02, 1.0), (0.3, 1.7), (0.9, 1.1)])
def test_minimax_quintic_equioscillates(lower: float, upper: float) -> None:
    x = torch.linspace(lower, upper, 20001, dtype=torch.float64)
    a, b, c = minimax_quintic(lower, upper)
    error = 1 - (a * x + b * x**3 + c * x**5)
    largest = error.abs().max()
    # Four alternations prove optimality among odd quintics.
    signs = error[error.abs() > 0.999 * largest].sign()
    assert int((signs[1:] != signs[:-1]).sum()) == 3
    assert error[0] == pytest.approx(float(largest), rel=1e-6)


@pytest.mark.parametrize(
    "table,low,high",
    [
        (KELLER, 0.68, 1.13),
        (YOU, 0.978, 1.032),
        (POLAR_EXPRESS, 0.85, 1.14),
        (POLAR_EXPRESS_1_02, 0.85, 1.14),
        (POLAR_EXPRESS_1_05, 0.84, 1.13),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_output_range_of_five_steps(table: CoefficientTable, low: float, high: float) -> None:
    sigma = torch.logspace(-2, 0, 200_001, dtype=torch.float64)
    out = quintic_outputs(sigma, table.for_steps(5), table.safety_factor)
    # The stated figures have two or three digits.
    digits = 0.0005 if table is YOU else 0.005
    assert low - digits <= out.min() <= low + 6 * digits
    assert high - 6 * digits <= out.max() <= high + digits + (0.1 if table is KELLER else 0)


def test_steps_truncate_or_repeat_the_last_triple() -> None:
    assert YOU.for_steps(2) == YOU.triples[:2]
    assert YOU.for_steps(7) == (*YOU.triples, YOU.triples[-1], YOU.triples[-1])
    assert KELLER.for_steps(5) == (KELLER.triples[0],) * 5


def test_every_table_names_its_source() -> None:
    assert all("http" in table.source or "arXiv" in table.source for table in TABLES.values())
    assert all(table.name == name for name, table in TABLES.items())


@pytest.mark.parametrize(
    "triples", [(), [(1.0, 2.0)], [(1.0, 2.0, float("nan"))], [(1, 2, True)], [(1, 2, "3")], 5, [5], [None]]
)
def test_bad_custom_triples_are_refused(triples: object) -> None:
    with pytest.raises(OptionError, match=r"^coefficients: must be"):
        custom_table(triples)  # type: ignore[arg-type]
