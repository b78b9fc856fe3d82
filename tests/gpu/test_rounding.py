"""Stochastic rounding on a card: the host's bits, and numbers that replays draw anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown
from dmuown.state import rounding
from dmuown.state.rounding import Rounding, hashed, word_of, words_of_positions

pytestmark = pytest.mark.gpu

STEPS = 7
SHAPES = ((96, 256), (40, 24), (65,), (3, 8, 16))


@pytest.mark.parametrize("kernel", [True, False])
def test_the_card_has_the_hosts_bits(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    monkeypatch.setitem(rounding._AT_ONCE, "cuda", 10000)
    if not kernel:
        monkeypatch.setattr(rounding, "_has_kernel", lambda device: False)
    for shape in ((), (5,), (100_003,), (1000, 333), (3, 5000), (5000, 3), (7, 64, 65), (300, 2, 3), (4, 3, 3, 5)):
        value = torch.randn(shape) * 100
        value.view(-1)[:2] = torch.tensor([float("nan"), float("-inf")])[: value.numel()]
        words = words_of_positions("w", [torch.arange(size) for size in shape])
        key = hashed(torch.tensor(3, dtype=torch.int32) ^ word_of("seed 0"))
        there = Rounding(words.cuda(), key.cuda())
        before = torch.cuda.get_rng_state()
        torch.testing.assert_close(
            there(value.cuda()).cpu(), Rounding(words, key)(value), rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(torch.cuda.get_rng_state(), before)


def build(capturable: bool, device: str = "cuda", **options: Any) -> tuple[list[nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter((torch.randn(shape, generator=generator) * 0.05).bfloat16().to(device)) for shape in SHAPES]
    common = {"stochastic_rounding": True, "capturable": capturable, "lr": 2.0**-8, **options}
    groups = [
        {"params": params[:1], **common},
        {"params": params[1:3], "algorithm": "adamw", **common},
        {"params": params[3:], "algorithm": "lion", **common},
    ]
    for param in params:
        param.grad = torch.zeros_like(param)
    return params, dmuown.Muown(groups, weight_decay=0.0)


def fill(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape, generator=generator).bfloat16())


def steadily() -> list[Tensor]:
    params, optimizer = build(True)
    for step in range(STEPS):
        fill(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


def assert_equal(params: list[nn.Parameter], expected: list[Tensor]) -> None:
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(param.detach(), value)


def test_a_graph_of_ones_own_draws_for_each_replay_and_tells_checkpoints() -> None:
    params, optimizer = build(True)
    graph = torch.cuda.CUDAGraph()
    for step in range(5):
        fill(params, step)
        if step < 2:
            optimizer.step()
            continue
        if step == 2:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                optimizer.step()
        graph.replay()
    saved = copy.deepcopy(optimizer.state_dict())
    assert [group["step"] for group in saved["param_groups"]] == [5, 5, 5]
    twins, resumed = build(True)
    with torch.no_grad():
        for twin, param in zip(twins, params, strict=True):
            twin.copy_(param)
    resumed.load_state_dict(saved)
    expected = steadily()
    for step in range(5, STEPS):
        fill(params, step)
        graph.replay()
        fill(twins, step)
        resumed.step()
    assert_equal(params, expected)
    assert_equal(twins, expected)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_captured_step_draws_for_each_replay(streams: int) -> None:
    params, optimizer = build(False)
    captured = dmuown.capture(optimizer, streams=streams)
    for step in range(STEPS - 1):
        fill(params, step)
        captured.step()
    captured.release()
    fill(params, STEPS - 1)
    optimizer.param_groups[1]["lr"] = torch.tensor(2.0**-8, device="cuda")  # AdamW's other form rounds otherwise
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [STEPS] * 3
    assert_equal(params, steadily())


def test_a_step_is_recorded_although_another_optimizer_copies() -> None:
    """What steps that copy wait for on the host, a step that is recorded must not."""
    params, optimizer = build(False, "cpu", foreach=True)
    fill(params, 0)
    optimizer.step()
    test_a_graph_of_ones_own_draws_for_each_replay_and_tells_checkpoints()


def test_parameters_on_the_host_are_rounded_as_on_the_card() -> None:
    """They take a round trip; elementwise algorithms of exact steps have the same bits wherever they are computed."""
    results = []
    for device in ("cuda", "cpu"):
        params, optimizer = build(False, device, foreach=True)
        for step in range(3):
            fill(params, step)
            optimizer.step()
        results.append(params[3].detach().cpu())
        assert params[3].device.type == device
    assert torch.equal(*results)
