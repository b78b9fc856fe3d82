"""Products and normalization against float64, through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import dmuown
from dmuown.kernels import chain, normalize, products, table
from dmuown.kernels.launch import INT32_LIMIT
from dmuown.kernels.triton_operations import operations
from dmuown.orthogonalize import Orthogonalizer
from dmuown.orthogonalize.backends import run_one_by_one
from dmuown.orthogonalize.stages import count_places, plan_stages
from tests.unit.kernels.interpreted.inputs import KINDS, falling_spectra, laid_out, matrices, relative_error

LAYOUTS = ("rows", "transposed", "gaps")
# Storage rounding; the interpreter truncates to bf16 instead of rounding.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def assert_mirrored(out: torch.Tensor) -> None:
    """Bit for bit symmetric beside the diagonal tiles, which are computed whole, by a BLAS in the interpreter."""
    m = out.shape[1]
    tile = torch.arange(m) // table.pointer_shape(m, m, m, out.element_size(), True).block_m
    beside = tile[:, None] != tile[None, :]
    assert torch.equal(out[:, beside], out.mT[:, beside])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_symmetric_product_matches_float64_and_is_symmetric(layout: str, dtype: torch.dtype) -> None:
    x = laid_out(matrices("random", 2, 75, 44).to(dtype), layout)
    out = torch.full((2, 75, 75), float("nan"), dtype=dtype)
    result = operations().symmetric_product(x, out=out)
    assert result is out
    assert relative_error(out, x.double() @ x.double().mT) < TOLERANCE[dtype]
    assert_mirrored(out)


@pytest.mark.parametrize("kind", KINDS)
def test_products_survive(kind: str) -> None:
    x = matrices(kind, 2, 37, 50)
    gram = operations().symmetric_product(x)
    assert relative_error(gram, x.double() @ x.double().mT) < 1e-6
    moved = products.multiply(gram, x, c=x, beta=-0.5)
    assert relative_error(moved, gram.double() @ x.double() - 0.5 * x.double()) < 1e-6


@pytest.mark.parametrize("rows", [41, 64, 150])
def test_polynomial_adds_scales_and_shifts(rows: int) -> None:
    r = operations().symmetric_product(matrices("random", 3, rows, 60))
    out = operations().polynomial(r, (7.5, -3.0, 0.25), out=torch.full_like(r, float("nan")))
    exact = 7.5 * torch.eye(rows).double() - 3.0 * r.double() + 0.25 * r.double() @ r.double()
    assert relative_error(out, exact) < 1e-6
    assert_mirrored(out)


def test_shift_without_columns_to_add_up() -> None:
    out = products.multiply(torch.zeros(2, 3, 0), torch.zeros(2, 0, 3), shift=1.5, symmetric=True)
    assert torch.equal(out, 1.5 * torch.eye(3).expand(2, 3, 3))


def test_commuting_product() -> None:
    r = operations().symmetric_product(matrices("random", 2, 70, 90))
    p = operations().polynomial(r, (2.0, -1.0, 0.0))
    out = operations().commuting_product(p, r)
    assert relative_error(out, p.double() @ r.double()) < 1e-5
    assert_mirrored(out)


def test_a_commuting_product_takes_the_second_operand_transposed() -> None:
    """Which keeps (P R^T) P^T a congruence of an R that rounding left unsymmetric; compared below the diagonal."""
    p, r = matrices("random", 2, 40, 40), matrices("random", 2, 40, 40, seed=1)
    below = torch.ones(40, 40, dtype=torch.bool).tril(-1)
    out = operations().commuting_product(p, r)
    assert relative_error(out[:, below], (p.double() @ r.double().mT)[:, below]) < 1e-5


def test_stages_on_the_kernels_equal_the_definition() -> None:
    x = matrices("random", 2, 70, 90)
    x = x / x.flatten(1).norm(dim=1)[:, None, None]
    triples = ((3.4445, -4.775, 2.0315), (3.0, -4.0, 1.5))
    stages = plan_stages(triples)
    places = torch.full((count_places(stages), 2, 70, 70), float("nan"))
    assert not operations().run_stages(x, places, stages)  # the chain kernel is Hopper's own
    run_one_by_one(operations(), x, places, stages)
    r = x.double() @ x.double().mT
    q = torch.eye(70).double().expand_as(r)
    for a, b, c in triples:
        p = a * torch.eye(70).double() + b * r + c * r @ r
        q, r = q @ p, p @ r @ p
    assert relative_error(places[stages[-1].out], q) < 1e-5


@pytest.mark.parametrize("scheme", ["newton_schulz", "polar_express"])
@pytest.mark.parametrize("kind", ["falling", *KINDS])
def test_the_gram_form_stays_as_near_to_float64_as_with_torch(kind: str, scheme: str) -> None:
    """Q P instead of P Q is 1.9 and 2.9 times as far off on falling spectra, 1.5 times on deficient ranks."""
    x = falling_spectra(2, 136, 200) if kind == "falling" else matrices(kind, 2, 136, 200)
    exact = Orthogonalizer(scheme=scheme, form="gram", backend="torch", dtype=torch.float64)(x)
    ours, theirs = (
        relative_error(Orthogonalizer(scheme=scheme, form="gram", backend=name, dtype=torch.float16)(x), exact)
        for name in ("triton", "torch")
    )
    assert ours < (1.5 * theirs if kind == "falling" else 1.3 * theirs + 2e-3)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_codes_tell_the_chain_kernel_the_stages(steps: int, within: bool) -> None:
    triples = [(1.0 + i, 2.0 + i, 3.0 + i) for i in range(steps)]
    stages = plan_stages(triples)
    codes = chain._codes(tuple(stages), within)
    assert codes is not None
    a, b, out, kinds = (int(code) for code in codes[:4])
    numbers = list(codes[4:])
    assert numbers == [*(number for triple in triples for number in triple), *[0.0] * (9 - 3 * steps)]
    if within:
        assert not (a | b | out | kinds) & 3  # x x^T goes to place 0
        a, b, out, kinds = a >> 2, b >> 2, out >> 2, kinds >> 2
    for index, stage in enumerate(stages):
        at = 2 * index
        assert (a >> at & 3, b >> at & 3, out >> at & 3) == (stage.a, stage.b, stage.out)
        kind = kinds >> at & 3
        assert stage.triple == (triples[kind - 1] if kind else None)
    assert max(a, b, out, kinds) < 2**31


def test_more_stages_than_codes_hold_are_refused() -> None:
    assert chain._codes(tuple(plan_stages([(1.0, 2.0, 3.0)] * 4)), False) is None


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
    assert products._span(wide) > INT32_LIMIT
    assert products._span(narrow) < INT32_LIMIT  # a matrix's offset in its batch is always 64-bit


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


def test_what_runs_in_a_chain() -> None:
    assert table.chain_shape(400, 320, 9) == table.chain_shape(24, 64, 5) == table._CHAIN_TURNS
    assert table.chain_shape(4, 2048, 1) is None  # nothing to chain
    narrow, wide = table.chain_shape(2, 2048, 9), table.chain_shape(12, 2048, 9)
    assert narrow is not None
    assert wide is not None
    assert (narrow.ratio, wide.ratio) == (1, 2)
