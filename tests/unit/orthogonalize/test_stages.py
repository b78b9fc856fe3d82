"""The plan of m x m products: what it computes, in how much room, and that rounding does not grow in it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuown.orthogonalize import Orthogonalizer
from dmuown.orthogonalize.backends import TORCH
from dmuown.orthogonalize.coefficients import Triple
from dmuown.orthogonalize.iterations import iterate
from dmuown.orthogonalize.stages import Stage, count_places, plan_runs, plan_stages
from tests.unit.kernels.interpreted.inputs import falling_spectra

TRIPLES: list[Triple] = [(3.4 - 0.2 * i, -4.7 + 0.3 * i, 2.0 + 0.1 * i) for i in range(6)]


def follow(eigenvalues: Tensor, triples: list[Triple]) -> Tensor:
    """Q's eigenvalues by the definition: each step multiplies Q by p(r) and r by p(r)^2."""
    q, r = torch.ones_like(eigenvalues), eigenvalues.clone()
    for a, b, c in triples:
        p = a + b * r + c * r * r
        q, r = q * p, r * p * p
    return q


@pytest.mark.parametrize("steps", range(1, 7))
def test_stages_make_the_composed_polynomial(steps: int) -> None:
    r = torch.rand(8, dtype=torch.float64)
    stages = plan_stages(TRIPLES[:steps])
    places = torch.full((count_places(stages), 8), float("nan"), dtype=torch.float64)
    places[0] = r
    for stage in stages:
        assert stage.out not in (stage.a, stage.b)
        if stage.triple is None:
            places[stage.out] = places[stage.a] * places[stage.b]
        else:
            assert stage.a == stage.b
            a, b, c = stage.triple
            places[stage.out] = a + b * places[stage.a] + c * places[stage.a] ** 2
    torch.testing.assert_close(places[stages[-1].out], follow(r, TRIPLES[:steps]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("steps", "places", "products"), [(1, 2, 1), (2, 4, 5), (3, 4, 9), (5, 4, 17)])
def test_stages_take_no_more_room_or_products_than_counted(steps: int, places: int, products: int) -> None:
    stages = plan_stages(TRIPLES[:1] * steps)
    assert (count_places(stages), len(stages)) == (places, products)


def test_runs_begin_at_restarts() -> None:
    def planned(*runs: list[Triple]) -> tuple[tuple[Stage, ...], ...]:
        return tuple(tuple(plan_stages(run)) for run in runs)

    assert plan_runs(tuple(TRIPLES[:5]), frozenset({0, 2, 9})) == planned(TRIPLES[:2], TRIPLES[2:5])
    assert plan_runs(tuple(TRIPLES[:3]), frozenset(range(3))) == planned(TRIPLES[:1], TRIPLES[1:2], TRIPLES[2:3])
    assert plan_runs(tuple(TRIPLES[:2]), frozenset()) == planned(TRIPLES[:2])


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """What the kernels make of a commuting product."""
    return a @ b.mT


@pytest.mark.parametrize("product", [TORCH.commuting_product, transposed_product], ids=["torch", "kernels"])
def test_a_step_turns_r_into_p_r_p_where_rounding_left_it_unsymmetric(product: object) -> None:
    assert callable(product)
    _, w, r, _, _ = plan_stages(TRIPLES[:2])
    unsymmetric = torch.randn(1, 5, 5, dtype=torch.float64)
    polynomial = torch.randn(1, 5, 5, dtype=torch.float64)
    polynomial = polynomial + polynomial.mT
    places = {0: unsymmetric, 1: polynomial}
    places[w.out] = product(places[w.a], places[w.b])
    result = product(places[r.a], places[r.b])
    exact = polynomial @ unsymmetric @ polynomial
    assert min(float((result - e).abs().max()) for e in (exact, exact.mT)) < 1e-12


@pytest.mark.parametrize("product", [TORCH.commuting_product, transposed_product], ids=["torch", "kernels"])
def test_a_step_takes_p_to_the_left_of_q(product: object) -> None:
    """Rounded, they do not commute: P is made from the Gram matrix of Q x, so that it has to follow Q."""
    assert callable(product)
    stages = plan_stages(TRIPLES[:2])
    (first, second), last = [stage for stage in stages if stage.triple is not None], stages[-1]
    p, q = torch.randn(2, 1, 5, 5, dtype=torch.float64)
    q = q + q.mT
    places = {second.out: p, first.out: q}
    assert torch.equal(product(places[last.a], places[last.b]), p @ q)


@pytest.mark.parametrize(("coefficients", "bound"), [("keller", 0.021), ("polar_express", 0.026)])
def test_falling_spectra_stay_near_float64(coefficients: str, bound: float) -> None:
    """0.018 and 0.022; Q P instead of P Q has 0.029 and 0.043."""
    scheme = "newton_schulz" if coefficients == "keller" else "polar_express"
    common: dict[str, Any] = {"scheme": scheme, "coefficients": coefficients, "form": "gram", "backend": "torch"}
    x = falling_spectra(3, 136, 264)
    exact = Orthogonalizer(**common, dtype=torch.float64)(x)
    error = (Orthogonalizer(**common, dtype=torch.float16)(x).double() - exact).norm() / exact.norm()
    assert error < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_polynomial_is_rounded_from_its_exact_coefficients(dtype: torch.dtype) -> None:
    """torch on CPU rounds a number added in place to bf16: 8.237 would be 8.25, alike on the whole diagonal."""
    r = torch.zeros(1, 64, 64, dtype=dtype)
    r.diagonal(dim1=-2, dim2=-1).copy_(torch.linspace(0, 0.02, 64))
    a, b, c = 8.237312490495558, -23.1577474145582, 16.680568411445915
    out = TORCH.polynomial(r, (a, b, c), out=torch.full_like(r, float("nan")))
    diagonal = r.double().diagonal(dim1=-2, dim2=-1)
    error = out.double().diagonal(dim1=-2, dim2=-1) - (a + b * diagonal + c * diagonal**2)
    assert abs(float(error.mean())) < torch.finfo(dtype).eps / 2
    assert not (out - torch.diag_embed(out.diagonal(dim1=-2, dim2=-1))).any()


@pytest.mark.parametrize("restarts", [range(5), {2}, {2, 3}, set()], ids=["plain", "one", "two", "none"])
@pytest.mark.parametrize("shape", [(3, 12, 20), (2, 16, 16), (1, 1, 9)])
def test_restarts_do_not_change_the_exact_result(shape: tuple[int, ...], restarts: set[int]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    triples = Orthogonalizer(scheme="polar_express").table.for_steps(5)
    u, sigma, v = torch.linalg.svd(x, full_matrices=False)
    sigma = sigma * follow(sigma**2, list(triples))
    result = iterate(x.clone(), triples, TORCH, restarts)
    torch.testing.assert_close(result, u @ torch.diag_embed(sigma) @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(2, 6, 30), (2, 8, 8), (1, 128, 300)], ids=["gram", "plain", "by panels"])
def test_compiled_as_one_graph_without_a_warning(shape: tuple[int, ...], in_place: bool) -> None:
    x = torch.randn(shape)
    orthogonalizer = Orthogonalizer(dtype=torch.float32, backend="torch", in_place=in_place)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(orthogonalizer, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, orthogonalizer(x), rtol=1e-4, atol=1e-5)
