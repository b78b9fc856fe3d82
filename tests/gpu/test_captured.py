"""Recorded steps on several streams, under one rank's process group, and through Dion's own graph wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown
from tests.gpu.test_kernels import build, options_of

pytestmark = pytest.mark.gpu

KINDS = ["Muown", "Muon", "NorMuon", "NorMuown", "AngularMuown"]
STEPS = 6


def train(kind: str, streams: int | None, **options: Any) -> list[Tensor]:
    """Weights after some steps, replayed where a number of streams is given."""
    optimizer, parameters, generator = build(kind, False, **options_of(kind), **options)
    stepper = optimizer if streams is None else dmuown.capture(optimizer, streams=streams)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    for _ in range(STEPS):
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(torch.randn(parameter.shape, device="cuda", generator=generator))
        stepper.step()
    if streams is not None:
        stepper.release()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("batch_size", [None, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_streams_change_no_bit(kind: str, batch_size: int | None) -> None:
    one, two, three = (train(kind, streams, batch_size=batch_size) for streams in (1, 2, 3))
    for first, second, third in zip(one, two, three, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_a_replay_repeats_itself_on_streams() -> None:
    """A race between streams would show as a moving result."""
    runs = [train("Muown", 3, batch_size=1) for _ in range(4)]
    for other in runs[1:]:
        assert all(torch.equal(one, two) for one, two in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_dions_graph_wrapper_replays_our_step(kind: str) -> None:
    wrapper = pytest.importorskip("dion.cuda_graph", reason="Dion is not installed, or has no graph wrapper")
    results = []
    for graph in (False, True):
        generator = torch.Generator(device="cuda").manual_seed(1)
        params = [nn.Parameter(torch.randn(shape, device="cuda", generator=generator)) for shape in ((96, 256), (64,))]
        groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
        optimizer: Any = getattr(dmuown, kind)(groups, lr=0.02, capturable=True, **options_of(kind))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        stepper = wrapper.CudaGraphOptimizer(optimizer, warmup_steps=2) if graph else optimizer
        for param in params:
            param.grad = torch.empty_like(param)
        for _ in range(STEPS):
            for param in params:
                assert param.grad is not None
                param.grad.copy_(torch.randn(param.shape, device="cuda", generator=generator))
            stepper.step()
            scheduler.step()
        assert [group["step"] for group in optimizer.param_groups] == [STEPS, STEPS]
        results.append([param.detach().clone() for param in params])
    for plain, replayed in zip(*results, strict=True):
        assert torch.equal(plain, replayed)
