"""Equality with torch's own optimizers, and the elementwise algorithms against their oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.orthogonalize import Orthogonalizer
from tests.reference.adam import Adam
from tests.reference.adamw import AdamW
from tests.reference.lion import Lion
from tests.unit.algorithms.oracles import assert_near, gradients, initial, run_both

STEPS = 24


def trees(dtype: torch.dtype) -> list[Tensor]:
    return [initial(5, 7, dtype=dtype), initial(9, dtype=dtype), initial(2, 3, 4, dtype=dtype)]


def train(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, skip: int = -1) -> None:
    """Steps in which parameter `skip` has a gradient every other time only."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
            param.grad = None if index == skip and step % 2 else grad
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_adam_is_bit_equal_to_torchs_fused(name: str, dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.3}
    mine = [torch.nn.Parameter(value.clone()) for value in trees(dtype)]
    theirs = [torch.nn.Parameter(value.clone()) for value in trees(dtype)]
    epsilon = 1e-4 if dtype == torch.float16 else 1e-8
    optimizer = dmuown.Muown([{"params": mine, "algorithm": name}], epsilon=epsilon, **settings)
    torchs = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name](theirs, fused=True, eps=epsilon, **settings)
    train(mine, optimizer, skip=1)
    train(theirs, torchs, skip=1)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
        for key, torchs_key in (("momentum", "exp_avg"), ("variance", "exp_avg_sq"), ("step", "step")):
            assert torch.equal(optimizer.state[one][key], torchs.state[other][torchs_key])
    assert float(optimizer.state[mine[1]]["step"]) == STEPS / 2


def torchs_iteration(x: Tensor, epsilon: float) -> Tensor:
    """torch.optim.Muon's own Newton-Schulz, matrix by matrix."""
    from torch.optim._muon import _zeropower_via_newtonschulz as iterate

    return torch.stack([iterate(one, (3.4445, -4.7750, 2.0315), 5, epsilon) for one in x])


@pytest.mark.parametrize("iteration", ["ours", "torch's"])
@pytest.mark.parametrize("settings", [{"nesterov": True}, {"nesterov": False, "momentum": 0.8}], ids=str)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)], ids=str)
def test_muon_equals_torchs(shape: tuple[int, int], adjust: str, settings: dict[str, Any], iteration: str) -> None:
    """With torch's choices: EMA momentum, a clamped norm, Keller Jordan's coefficients, bf16 iteration.

    The momentum is always bit-equal, and the weights are with torch's iteration plugged in. With ours an update differs
    by what bf16 makes of small singular values, less than 8% in norm: torch takes the Frobenius norm in bf16 and adds
    a x to B x, we take the norm in fp32 and round a I + B before it meets x.
    """
    mine, theirs = (torch.nn.Parameter(initial(*shape, dtype=torch.float32)) for _ in range(2))
    common = {"lr": 0.02, "weight_decay": 0.1, **settings}
    optimizer = dmuown.Muon(
        [mine],
        momentum_form="ema",
        ns_norm="clamp",
        scheme="newton_schulz",
        coefficients="keller",
        ns_dtype="bfloat16",
        ns_form="plain",
        ns_epsilon=1e-7,
        adjust_lr={"original": "keller", "match_rms_adamw": "rms_norm"}[adjust],
        newton_schulz_func=torchs_iteration if iteration == "torch's" else None,
        **common,
    )
    torchs = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **common)
    differences = []
    for grad in gradients(shape):
        mine.grad, theirs.grad = grad.float(), grad.float()
        before = theirs.detach().clone()
        optimizer.step()
        torchs.step()
        assert torch.equal(optimizer.state[mine]["momentum"], torchs.state[theirs]["momentum_buffer"])
        if iteration == "torch's":
            assert torch.equal(mine, theirs)
        else:
            differences.append(float((mine.detach() - theirs.detach()).norm() / (theirs.detach() - before).norm()))
            with torch.no_grad():
                mine.copy_(theirs)
    if iteration == "ours":
        assert sum(differences) / len(differences) <= 0.05
        assert max(differences) <= 0.08


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (64, 96)], ids=str)
def test_the_iteration_is_as_near_to_float64_as_torchs(shape: tuple[int, int]) -> None:
    triple = (3.4445, -4.7750, 2.0315)
    orthogonalizer = Orthogonalizer(dtype=torch.bfloat16, form="plain", norm="clamp")
    ours, torchs = 0.0, 0.0
    for seed in range(40):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        u, sigma, v = torch.linalg.svd(x.double(), full_matrices=False)
        sigma = sigma / sigma.norm()
        for _ in range(5):
            sigma = triple[0] * sigma + triple[1] * sigma**3 + triple[2] * sigma**5
        exact = (u * sigma) @ v
        ours += float((orthogonalizer(x).double() - exact).norm() / exact.norm())
        torchs += float((torchs_iteration(x[None], 1e-7)[0].double() - exact).norm() / exact.norm())
    assert ours <= 1.2 * torchs


@pytest.mark.parametrize("options", [{}, {"lr": 0.05, "betas": (0.7, 0.99), "weight_decay": 0.2}], ids=str)
@pytest.mark.parametrize("name, oracle", [("adamw", AdamW), ("adam", Adam), ("lion", Lion)])
def test_elementwise_algorithms_equal_their_oracles(name: str, oracle: Any, options: dict[str, Any]) -> None:
    weight = initial(6, 5)
    options = {"lr": 3e-4, **options}
    _, actual, expected = run_both(
        lambda params: dmuown.Muon([{"params": params, "algorithm": name}], **{"weight_decay": 0.0, **options}),
        oracle(weight, **options),
        weight,
        gradients((6, 5)),
    )
    assert_near(actual, expected, 1e-10)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_cautious_decay_of_elementwise_algorithms(name: str) -> None:
    """Decay acts where the update and the weight have the same sign, and nowhere else (arXiv 2510.12402)."""
    weight = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0], dtype=torch.float64)
    grad = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.5], dtype=torch.float64)
    results = []
    for cautious, decay in ((True, 0.5), (False, 0.0)):
        param = torch.nn.Parameter(weight.clone())
        optimizer = dmuown.Muon(
            [{"params": [param], "algorithm": name}], lr=0.1, weight_decay=decay, cautious_wd=cautious
        )
        param.grad = grad.clone()
        optimizer.step()
        results.append(param.detach())
    expected = 0.1 * 0.5 * torch.tensor([1.0, 0.0, 0.0, -2.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(results[1] - results[0], expected, rtol=0, atol=1e-12)


def test_adamw_decay_over_zero_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = dmuown.Muon([{"params": [param], "algorithm": "adamw"}], lr=0.1, weight_decay=0.1)
    for _ in range(100):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), 0.99**100), rtol=1e-5, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_torch_buffer_continues_in_the_sum_form(nesterov: bool) -> None:
    """An EMA buffer times 1 / (1 - mu) is the sum form's: from there on, the two orthogonalize the same directions."""
    gradient = list(gradients((6, 10)))
    ema, total = (torch.nn.Parameter(initial(6, 10)) for _ in range(2))
    common: dict[str, Any] = {"lr": 0.02, "mu": 0.9, "nesterov": nesterov, "ns_dtype": torch.float64}
    one = dmuown.Muon([ema], momentum_form="ema", ns_epsilon=1e-30, **common)
    other = dmuown.Muon([total], ns_epsilon=1e-30, **common)
    for grad in gradient[:12]:
        ema.grad = grad
        one.step()
    with torch.no_grad():
        total.copy_(ema)
        other.state[total]["momentum"].copy_(one.state[ema]["momentum"] / (1 - 0.9))
    for grad in gradient[12:]:
        ema.grad, total.grad = grad, grad.clone()
        one.step()
        other.step()
    assert_near(total.detach(), ema.detach(), 1e-10)
