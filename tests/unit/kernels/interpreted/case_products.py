"""Products and normalization against float64, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import dmuown
from dmuown.kernels import normalize, products
from dmuown.kernels.triton_operations import operations
from tests.unit.kernels.interpreted.inputs import KINDS, laid_out, matrices, relative_error

LAYOUTS = ("rows", "transposed", "gaps")
# Storage rounding; the interpreter truncates to bf16 instead of rounding.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_symmetric_product_matches_float64_and_is_symmetric(layout: str, dtype: torch.dtype) -> None:
    x = laid_out(matrices("random", 2, 75, 44).to(dtype), layout)
    out = torch.full((2, 75, 75), float("nan"), dtype=dtype)
    result = operations().symmetric_product(x, out=out)
    assert result is out
    assert relative_error(out, x.double() @ x.double().mT) < TOLERANCE[dtype]
    assert torch.equal(out, out.mT)


@pytest.mark.parametrize("kind", KINDS)
def test_products_survive(kind: str) -> None:
    x = matrices(kind, 2, 37, 50)
    gram = operations().symmetric_product(x)
    assert relative_error(gram, x.double() @ x.double().mT) < 1e-6
    moved = operations().product_add(gram, x, x, beta=-0.5)
    assert relative_error(moved, gram.double() @ x.double() - 0.5 * x.double()) < 1e-6


def test_polynomial_adds_and_scales() -> None:
    a = operations().symmetric_product(matrices("random", 3, 41, 60))
    out = operations().symmetric_product_add(a, a, a, alpha=0.25, beta=-3.0)
    assert relative_error(out, -3.0 * a.double() + 0.25 * a.double() @ a.double()) < 1e-6
    assert torch.equal(out, out.mT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_product_keeps_the_layout_of_x(layout: str) -> None:
    a = matrices("random", 2, 33, 33)
    x = laid_out(matrices("random", 2, 33, 90, seed=1), layout)
    result = operations().product(a, x)
    assert relative_error(result, a.double() @ x.double()) < 1e-6
    if layout == "transposed":
        assert result.mT.is_contiguous()


def test_a_non_finite_matrix_leaves_its_neighbours_alone() -> None:
    x = matrices("random", 3, 70, 50)
    clean = operations().symmetric_product(x)
    x[1, 69, 49] = float("nan")
    spoilt = operations().symmetric_product(x)
    assert torch.equal(spoilt[0], clean[0])
    assert torch.equal(spoilt[2], clean[2])
    assert spoilt[1, 69].isnan().all()
    # Rows that do not meet the bad one stay as they were.
    assert torch.equal(spoilt[1, :69, :69], clean[1, :69, :69])


def test_offsets_beyond_32_bits_are_taken_as_64() -> None:
    wide = torch.empty_strided((1, 4, 4), (16, 2**30, 1), device="meta")
    narrow = torch.empty_strided((1, 4, 4), (2**40, 2**20, 1), device="meta")
    assert products._span(wide) > products._INT32_LIMIT
    assert products._span(narrow) < products._INT32_LIMIT  # a matrix's offset in its batch is always 64-bit


def test_empty_operands() -> None:
    assert operations().symmetric_product(torch.zeros(2, 0, 5)).shape == (2, 0, 0)
    assert operations().symmetric_product(torch.zeros(0, 3, 5)).shape == (0, 3, 3)
    assert torch.equal(operations().symmetric_product(torch.zeros(1, 3, 0)), torch.zeros(1, 3, 3))


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_normalize(layout: str, kind: str, clamp: bool) -> None:
    x = laid_out(matrices(kind, 3, 67, 90), layout)
    x[1] = 0
    result = normalize.normalize(x, torch.float32, factor=1.01, epsilon=1e-7, clamp=clamp)
    assert result is not None
    norm = x.double().flatten(1).norm(dim=1)[:, None, None] * 1.01
    reference = x.double() / (norm.clamp_min(1e-7) if clamp else norm + 1e-7)
    assert relative_error(result, reference) < 1e-6
    assert result.stride(2) == x.stride(2)
    assert not result[1].any()


@pytest.mark.parametrize("layout", ["rows", "transposed"])
def test_normalize_may_overwrite(layout: str) -> None:
    """The same numbers, in the input's memory where the result is as wide, and never where it was not allowed."""
    given = laid_out(matrices("random", 3, 64, 96).to(torch.bfloat16), layout)
    kept = given.clone()
    apart = normalize.normalize(given, torch.float16, factor=1.01, epsilon=1e-7, clamp=False)
    assert torch.equal(given, kept)
    within = normalize.normalize(given, torch.float16, factor=1.01, epsilon=1e-7, clamp=False, overwrite=True)
    assert apart is not None
    assert within is not None
    assert within.data_ptr() == given.data_ptr()
    assert within.dtype == torch.float16
    assert within.stride() == apart.stride()
    assert torch.equal(within, apart)
    wider = normalize.normalize(kept, torch.float32, factor=1.01, epsilon=1e-7, clamp=False, overwrite=True)
    assert wider is not None
    assert wider.data_ptr() != kept.data_ptr()


@pytest.mark.parametrize("shapes", [[(64, 96)], [(64, 96)] * 3, [(3, 64, 96)]], ids=["one", "three", "experts"])
def test_a_step_never_overwrites_momentum(shapes: list[tuple[int, ...]]) -> None:
    """Without Nesterov, 16-bit momentum is itself what is orthogonalized; that of experts already lies side by side."""
    params = [torch.nn.Parameter(torch.randn(shape).to(torch.bfloat16)) for shape in shapes]
    optimizer = dmuown.Muon(params, nesterov=False, state_precision="bf16", backend="triton", ns_dtype=torch.bfloat16)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    for param in params:
        assert param.grad is not None
        assert torch.equal(optimizer.state[param]["momentum"], param.grad)


def test_normalize_leaves_gaps_to_torch() -> None:
    assert (
        normalize.normalize(
            laid_out(matrices("random", 2, 5, 6), "gaps"), torch.float32, factor=1.0, epsilon=1e-7, clamp=False
        )
        is None
    )
