"""The oracles against torch's own optimizers and against known figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference.adam import Adam
from tests.reference.adamw import AdamW
from tests.reference.angular_muown import AngularMuown
from tests.reference.lion import Lion
from tests.reference.muon import Muon
from tests.reference.muown import Muown
from tests.reference.normuon import NorMuon
from tests.reference.normuown import NorMuown
from tests.reference.orthogonalize import YOU, newton_schulz, polar_express, polar_factor


def gradients(steps: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (12, 12)])
def test_iterations_approach_the_polar_factor(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, dtype=torch.float64)
    exact = polar_factor(x)
    assert float((newton_schulz(x, YOU) - exact).abs().max()) < 0.033
    assert float((polar_express(x) - exact).abs().max()) < 0.15
    # The cubic Newton-Schulz step (1.5, -0.5, 0) converges to the polar factor itself.
    torch.testing.assert_close(newton_schulz(x, ((1.5, -0.5, 0.0),) * 60), exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("oracle,peer", [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
def test_adam_and_adamw_equal_torch(oracle: Any, peer: Any) -> None:
    weight = torch.randn(5, 7, dtype=torch.float64)
    ours = oracle(weight, lr=1e-2, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1)
    param = torch.nn.Parameter(weight.clone())
    theirs = peer([param], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for grad in gradients(20, 5, 7):
        param.grad = grad
        ours.step(grad)
        theirs.step()
    torch.testing.assert_close(ours.weight, param.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust,name", [("original", "keller"), ("match_rms_adamw", "rms_norm")])
def test_ema_muon_equals_torch(nesterov: bool, adjust: Any, name: str) -> None:
    weight = torch.randn(12, 7, dtype=torch.float64)
    ours = Muon(
        weight, lr=0.02, mu=0.9, weight_decay=0.1, nesterov=nesterov, adjust_lr=name, momentum_form="ema",
        orthogonalize=lambda x: newton_schulz(x, norm="clamp"),
    )  # fmt: skip
    param = torch.nn.Parameter(weight.float())
    theirs = torch.optim.Muon([param], lr=0.02, momentum=0.9, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    for grad in gradients(10, 12, 7):
        param.grad = grad.float()
        ours.step(grad)
        theirs.step()
    # torch iterates in bf16, so equality is to its precision; the step itself moves weights by about 0.2.
    scale = float((ours.weight - weight).norm())
    assert float((ours.weight - param.detach().double()).norm()) < 0.03 * scale


def test_lion_by_hand() -> None:
    ours = Lion(torch.tensor([1.0, -2.0]), lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    ours.step(torch.tensor([3.0, -4.0]))
    torch.testing.assert_close(ours.weight, torch.tensor([0.85, -1.8], dtype=torch.float64))
    torch.testing.assert_close(ours.momentum, torch.tensor([0.03, -0.04], dtype=torch.float64))
    ours.step(torch.tensor([-0.1, 0.0]))
    # b1 M = 0.027 outweighs 0.1 x 0.1, so the first entry still moves by the old sign.
    torch.testing.assert_close(ours.weight, torch.tensor([0.85 * 0.95 - 0.1, -1.8 * 0.95 + 0.1], dtype=torch.float64))


def test_cautious_decay_takes_agreeing_entries() -> None:
    weight = torch.randn(6, 9, dtype=torch.float64)
    (grad,) = gradients(1, 6, 9)
    plain = Muon(weight, lr=0.1, weight_decay=0.0)
    cautious = Muon(weight, lr=0.1, weight_decay=0.5, cautious_wd=True)
    plain.step(grad)
    cautious.step(grad)
    agree = newton_schulz(grad) * weight > 0
    torch.testing.assert_close(plain.weight - cautious.weight, 0.05 * weight * agree)


@pytest.mark.parametrize("cls", [Muown, NorMuown, Muon, NorMuon])
def test_decay_over_a_hundred_zero_gradients(cls: Any) -> None:
    weight = torch.randn(6, 9, dtype=torch.float64)
    ours = cls(weight, lr=0.1, weight_decay=0.1)
    for _ in range(100):
        ours.step(torch.zeros(6, 9))
    # The published variants reach 0.133 and 0.990 of the weight here.
    torch.testing.assert_close(ours.weight, weight * 0.99**100, rtol=1e-10, atol=0)


@pytest.mark.parametrize("cls", [Muown, NorMuown])
def test_zero_rows_of_the_row_norm_family(cls: Any) -> None:
    weight = torch.randn(6, 9, dtype=torch.float64)
    weight[:3] = 0
    ours = cls(weight, lr=1e-3)
    grads = gradients(30, 6, 9)
    for grad in grads:
        grad[0] = 0
    ours.step(grads[0])
    norms = ours.weight.norm(dim=1)
    assert float(norms[0]) == 0
    torch.testing.assert_close(norms[1:3], torch.full((2,), 1e-3, dtype=torch.float64))
    assert bool(((ours.weight * grads[0]).sum(1)[1:3] < 0).all()), "a first step goes downhill"
    for grad in grads[1:]:
        ours.step(grad)
    assert bool(ours.weight.isfinite().all())
    assert float(ours.weight[0].norm()) == 0
    late = torch.randn(6, 9, dtype=torch.float64)
    ours.step(late)
    assert float(ours.weight[0].norm()) == pytest.approx(1e-3)


@pytest.mark.parametrize("cls", [Muown, NorMuown, AngularMuown])
def test_a_weight_of_zeros_learns(cls: Any) -> None:
    target = 0.1 * torch.randn(16, 4, dtype=torch.float64)
    ours = cls(torch.zeros(16, 4), lr=2e-3)
    for _ in range(300):
        ours.step(ours.weight - target)
        assert bool(ours.weight.isfinite().all())
    assert float((ours.weight - target).norm() / target.norm()) < 0.3


def test_muown_rows_keep_their_invariants() -> None:
    weight = torch.randn(6, 9, dtype=torch.float64)
    ours = Muown(weight, lr=0.05)
    for grad in gradients(40, 6, 9):
        ours.step(grad)
        torch.testing.assert_close(ours.weight.norm(dim=1, keepdim=True), ours.g.abs())


def test_the_split_gradient_is_that_of_autograd() -> None:
    weight, grad = gradients(2, 6, 9)
    ours = Muown(weight, lr=1e-9, mu=0.0)
    g = ours.g.clone().requires_grad_()
    v = weight.clone().requires_grad_()
    (grad * (g * v / v.norm(dim=1, keepdim=True))).sum().backward()
    ours.step(grad)
    assert v.grad is not None
    assert g.grad is not None
    torch.testing.assert_close(ours.momentum, v.grad)
    torch.testing.assert_close(ours.adam.first, 0.1 * g.grad)


def test_angular_schedule_counts_from_zero() -> None:
    weight, grad = gradients(2, 6, 6)
    moved = []
    for t in (0, 10, 1010):
        ours = AngularMuown(weight, lr=1e-4, warmup_steps=10, decay_scale=0.001, decay_degree=1.0)
        ours.t = t
        ours.step(grad)
        before = weight / weight.norm(dim=1, keepdim=True)
        moved.append(float((ours.weight / ours.weight.norm(dim=1, keepdim=True) - before).norm()))
    assert moved[0] == pytest.approx(moved[1], rel=1e-9)
    assert moved[2] == pytest.approx(moved[0] / 2, rel=1e-2)


def test_neuron_normalization_keeps_the_norm_of_each_block() -> None:
    weight, grad = gradients(2, 8, 5)
    blocks = [slice(0, 6, 1), slice(6, 8, 1)]
    ours = NorMuon(weight, lr=1.0, weight_decay=0.0, adjust_lr="none", blocks=blocks)
    ours.step(grad)
    update = weight - ours.weight
    for block in blocks:
        torch.testing.assert_close(update[block].norm(), newton_schulz(grad[block]).norm())
        # After one step every row has the same length within a block.
        rows = update[block].norm(dim=1)
        torch.testing.assert_close(rows, rows[:1].expand_as(rows), rtol=1e-6, atol=0)
