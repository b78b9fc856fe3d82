"""`optim_dtype`: state in it, updates in the wider of it and the parameter's dtype, parameters in their own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown
from dmuown.errors import OptionError

PAIRS = [
    (stored, optim)
    for stored, optim in itertools.product(("float64", "float32", "bfloat16", "float16"), repeat=2)
    if stored != optim
]
ALGORITHMS = ("muon", "normuon", "muown", "adamw", "lion")


def _newton_schulz(x: Tensor, epsilon: float = 1e-7) -> Tensor:
    """In x's own dtype, so that the momentum's precision shows in the result."""
    return x / (x.norm(dim=(-2, -1), keepdim=True) + epsilon)


def _optimizer(param: nn.Parameter, algorithm: str, **options: Any) -> torch.optim.Optimizer:
    group = {"params": [("weight", param)], "algorithm": algorithm, **options}
    return dmuown.Muon([group], lr=0.02, weight_decay=0.1, newton_schulz_func=_newton_schulz)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("stored, optim", PAIRS)
def test_equals_an_optimizer_of_that_dtype_with_rounded_weights(stored: str, optim: str, algorithm: str) -> None:
    """Where it is wider: the same optimizer on a wide parameter that is rounded after every step."""
    narrow, wide = getattr(torch, stored), torch.promote_types(getattr(torch, stored), getattr(torch, optim))
    param = nn.Parameter(torch.randn(6, 4).to(narrow))
    copy = nn.Parameter(param.detach().to(wide))
    optimizer = _optimizer(param, algorithm, optim_dtype=optim)
    # Where it is narrower, the state alone is: state_precision says the same of two dtypes.
    reference = _optimizer(copy, algorithm, optim_dtype=optim if wide != getattr(torch, optim) else None)
    for _ in range(4):
        gradient = torch.randn(6, 4).to(narrow)
        param.grad, copy.grad = gradient, gradient.to(wide)
        optimizer.step()
        reference.step()
        with torch.no_grad():
            copy.copy_(copy.to(narrow))
        assert param.dtype == narrow
        torch.testing.assert_close(param.detach(), copy.detach().to(narrow), rtol=0, atol=0)
    shaped = [value for value in optimizer.state[param].values() if value.shape == param.shape]
    assert shaped
    assert {value.dtype for value in shaped} == {getattr(torch, optim)}
    saved = optimizer.state_dict()["param_groups"][0]["optim_dtype"]
    assert saved == optim


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_narrow_state_is_what_state_precision_makes_of_it(algorithm: str) -> None:
    start = torch.randn(6, 4)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        _optimizer(params[0], algorithm, optim_dtype=torch.bfloat16),
        _optimizer(params[1], algorithm, state_precision="bf16"),
    ]
    for _ in range(3):
        gradient = torch.randn(6, 4)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=0, atol=0)


def test_state_precision_is_the_nearer_word() -> None:
    param = nn.Parameter(torch.randn(6, 4))
    optimizer = _optimizer(param, "muon", optim_dtype="float64", state_precision="bf16")
    assert optimizer.state[param]["momentum"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, match",
    [
        ({"optim_dtype": "flaot32"}, r"optim_dtype: must be None or one of .*, got 'flaot32'\. Did you mean 'float32'"),
        ({"optim_dtype": torch.int8}, "optim_dtype: must be None or one of"),
        ({"optim_dtype": "bfloat16", "master_weights": True}, "master_weights: computes in float32 and excludes"),
        ({"optim_dtype": "float64", "stochastic_rounding": True}, "stochastic_rounding: computes in float32"),
    ],
)
def test_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        _optimizer(nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16)), "muon", **options)


def test_a_checkpoint_does_not_decide_it() -> None:
    params = [nn.Parameter(torch.randn(6, 4)) for _ in range(2)]
    written = _optimizer(params[0], "muon", optim_dtype="float64")
    params[0].grad = torch.randn(6, 4)
    written.step()
    read = _optimizer(params[1], "muon", optim_dtype="bfloat16")
    read.load_state_dict(written.state_dict())
    momentum = read.state[params[1]]["momentum"]
    assert momentum.dtype == torch.bfloat16
    torch.testing.assert_close(momentum, written.state[params[0]]["momentum"].bfloat16())
    assert read.param_groups[0]["optim_dtype"] == "bfloat16"
