"""A matrix of one input: rows have a sign and a magnitude, and no direction to turn to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from tests.reference import angular_muown, muown, normuown
from tests.unit.algorithms.oracles import assert_near, gradients, initial, orthogonalize_as

KELLER = orthogonalize_as(epsilon=1e-7)
NORMUOWN: Any = lambda weight, **options: normuown.NorMuown(weight, orthogonalize=KELLER, **options)  # noqa: E731
MUOWN: Any = lambda weight, **options: muown.Muown(weight, orthogonalize=KELLER, **options)  # noqa: E731
CLASSES: dict[str, tuple[Any, Any]] = {
    "muown": (dmuown.Muown, MUOWN),
    "normuown": (dmuown.NorMuown, NORMUOWN),
    "angular_muown": (dmuown.AngularMuown, angular_muown.AngularMuown),
}


def train(name: str, dtype: torch.dtype, decay: float, transposed: bool) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Train rows of which one is zero; returns the momenta of all steps, start, end, and the oracle's end."""
    kind, oracle_of = CLASSES[name]
    start = initial(6, 1)
    start[2] = 0
    options = {"lr": 0.05, **({"weight_decay": decay} if decay else {})}
    oracle = oracle_of(start, **options)
    stored = start.to(dtype)
    param = torch.nn.Parameter((stored.mT if transposed else stored).clone().contiguous())
    optimizer = kind([{"params": [param], "matrix_transposed": transposed}], ns_dtype=torch.float32, **options)
    momenta = []
    for grad in gradients((6, 1)):
        param.grad = (grad.mT if transposed else grad).to(dtype).contiguous()
        optimizer.step()
        oracle.step(grad)
        momentum = optimizer.state[param]["momentum"]
        momenta.append((momentum.mT if transposed else momentum).detach().clone())
    weight = param.detach()
    return momenta, start, (weight.mT if transposed else weight), oracle.weight


@pytest.mark.parametrize(
    "name, decay", [("muown", 0.0), ("muown", 0.3), ("normuown", 0.0), ("normuown", 0.3), ("angular_muown", 0.0)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_it_trains_as_the_oracle(name: str, transposed: bool, decay: float) -> None:
    momenta, start, weight, expected = train(name, torch.float32, decay, transposed)
    assert_near(weight, expected, 1e-5)
    live = torch.arange(6) != 2
    for momentum in momenta:
        assert not momentum[live].any()
    assert [bool(momentum[2].any()) for momentum in momenta] == [True] + [False] * (len(momenta) - 1)  # its sign, once
    assert weight[2].any()
    assert not torch.equal(weight[live].float(), start[live].float())  # magnitudes are trained


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_no_rounding_becomes_a_direction(name: str, dtype: torch.dtype) -> None:
    """In 16 bits W / g is off by 2^-9: orthogonalized, that remainder would be a full step."""
    momenta, _, weight, expected = train(name, dtype, 0.0, transposed=False)
    live = torch.arange(6) != 2
    for momentum in momenta:
        assert not momentum[live].any()
    rounding = {torch.bfloat16: 0.02, torch.float16: 2e-3, torch.float64: 1e-5}[dtype]
    assert_near(weight[live], expected[live], rounding)
