"""A step in a CUDA graph of the user's own: replays see what schedulers fill, and count steps on the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown
from dmuown.errors import OptionError

pytestmark = pytest.mark.gpu

STEPS = 7


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator(device="cuda").manual_seed(1)
    shapes = ((256, 640), (192, 64), (64,), (33,))
    return [nn.Parameter(torch.randn(shape, device="cuda", generator=generator) * 0.05) for shape in shapes]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, *, graph: bool) -> list[Tensor]:
    """Three steps as usual, the rest replayed from a graph, on a falling rate."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    generator = torch.Generator(device="cuda").manual_seed(2)
    recorded = None
    for param in params:
        param.grad = torch.zeros_like(param)
    for step in range(STEPS):
        for param in params:
            assert param.grad is not None
            param.grad.copy_(torch.randn(param.shape, device="cuda", generator=generator))
        if not graph or step < 3:
            optimizer.step()
        else:
            if recorded is None:
                recorded = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(recorded):
                    optimizer.step()
            recorded.replay()
        scheduler.step()
    return [param.detach().clone() for param in params]


def build(kind: str, params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": params[:2]},
        {"params": params[2:3], "algorithm": "adamw", "weight_decay": 0.1},
        {"params": params[3:], "algorithm": "lion"},
    ]
    built: torch.optim.Optimizer = getattr(dmuown, kind)(groups, lr=0.02, **options)
    return built


@pytest.mark.parametrize("kind", ["Muown", "Muon", "NorMuon", "NorMuown", "AngularMuown"])
def test_replays_follow_the_schedule_and_count_steps(kind: str) -> None:
    options: dict[str, Any] = {"decay_degree": 0} if kind == "AngularMuown" else {}
    results = []
    for graph in (False, True):
        params = parameters()
        optimizer = build(kind, params, capturable=True, **options)
        results.append(train(params, optimizer, graph=graph))
        counts = [state["step"] for state in optimizer.state.values() if "step" in state]
        assert all(count.device.type == "cuda" and float(count) == STEPS for count in counts)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.02 * 0.7**STEPS)
    for plain, replayed in zip(*results, strict=True):
        assert torch.equal(plain, replayed)


@pytest.mark.parametrize("graph", [False, True])
def test_adamw_has_the_bits_of_torch(graph: bool) -> None:
    mine, theirs = parameters(), parameters()
    group = {"params": mine, "algorithm": "adamw", "weight_decay": 0.1}
    own = train(mine, dmuown.Muown([group], lr=3e-4, betas=(0.9, 0.95), capturable=True), graph=graph)
    reference = torch.optim.AdamW(
        theirs, lr=torch.tensor(3e-4, device="cuda"), betas=(0.9, 0.95), weight_decay=0.1, capturable=True, fused=True
    )
    for one, other in zip(own, train(theirs, reference, graph=graph), strict=True):
        assert torch.equal(one, other)


def test_a_number_is_not_recorded() -> None:
    params = parameters()
    with pytest.raises(OptionError, match="capturable=True"):
        train(params, build("Muown", params), graph=True)
