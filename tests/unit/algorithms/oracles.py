"""Run an optimizer and its float64 oracle side by side on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import tests.reference.orthogonalize as exact
from dmuown.engine.optimizer import MuonEngine
from tests.reference.orthogonalize import Orthogonalize

STEPS = 24


class Oracle(Protocol):
    """What the classes of `tests.reference` have in common."""

    weight: Tensor

    def step(self, grad: Tensor) -> None: ...


def orthogonalize_as(
    scheme: str = "newton_schulz",
    coefficients: str | None = None,
    *,
    steps: int = 5,
    epsilon: float = 1e-7,
    norm: str = "add",
) -> Orthogonalize:
    """The oracle of an orthogonalizer's options."""
    name = coefficients or {"newton_schulz": "keller"}.get(scheme, "polar_express")
    triples = exact.TABLES[name]()
    factor = {"polar_express": 1.01, "polar_express_1.02": 1.02}.get(name, 1.0)

    def function(x: Tensor) -> Tensor:
        return exact.newton_schulz(x, triples[:steps], epsilon=epsilon, norm=norm, safety_factor=factor)

    return function


def gradients(shape: Sequence[int], seed: int = 1, steps: int = STEPS) -> Iterator[Tensor]:
    """Gradients of changing size with a common part, so that momentum matters; float64."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(*shape, generator=generator, dtype=torch.float64)
    for step in range(steps):
        own = torch.randn(*shape, generator=generator, dtype=torch.float64)
        yield (common + own) * (0.1 + (step % 5))


def initial(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """A weight of unit rows or so."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype)


def run_both(
    build: Callable[[list[Tensor]], MuonEngine],
    oracle: Oracle,
    weight: Tensor,
    grads: Iterator[Tensor],
    *,
    transposed: bool = False,
    flatten: bool = False,
) -> tuple[MuonEngine, Tensor, Tensor]:
    """Step both; returns the optimizer, its weight and the oracle's in the oracle's axis order.

    Args:
        build: Makes the optimizer of one parameter.
        oracle: Starts from the same logical weight.
        weight: `[..., m, n]`, or the shape of a convolution with `flatten`.
        grads: Gradients of the oracle's shape.
        transposed: Whether the parameter is stored `[..., n, m]`.
        flatten: Whether the oracle sees `[first, rest]`.
    """
    param = torch.nn.Parameter((weight.mT if transposed else weight).clone().contiguous())
    optimizer = build([param])
    for grad in grads:
        seen = grad.mT if transposed else grad
        param.grad = seen.reshape(param.shape).to(param.dtype).contiguous()
        before = param.grad.clone()
        optimizer.step()
        assert torch.equal(param.grad, before)
        oracle.step(grad)
    result = param.detach().mT if transposed else param.detach()
    return optimizer, result.flatten(1) if flatten else result, oracle.weight


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest difference below `tolerance` of the largest expected value."""
    assert torch.isfinite(actual).all()
    error = float((actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
    assert error <= tolerance, f"relative error {error:.3g} > {tolerance:.3g}"


def only(optimizer: Any) -> dict[str, Any]:
    """State of an optimizer's one parameter."""
    (state,) = optimizer.state.values()
    return dict(state)
