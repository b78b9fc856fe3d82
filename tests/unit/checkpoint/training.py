"""A small model with every kind of parameter, and training whose steps can be compared bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dmuown

MATRIX_ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown")
ALGORITHMS = (*MATRIX_ALGORITHMS, "adamw", "adam", "lion")


class Net(nn.Module):
    """Two linear layers, a norm, three experts and a convolution's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10))
        self.outer = nn.Linear(10, 5, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 5, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.outer(torch.tanh(self.inner(x)))
        return hidden @ self.experts


def optimizer_of(model: nn.Module, algorithm: str, *, named: bool = True, **options: Any) -> Any:
    """An optimizer with matrices in a group of `algorithm` and the rest in AdamW, or all in `algorithm`."""
    matrices = [(name, param) for name, param in model.named_parameters() if param.ndim > 1]
    rest = [(name, param) for name, param in model.named_parameters() if param.ndim < 2]
    if not named:
        matrices, rest = [param for _, param in matrices], [param for _, param in rest]  # type: ignore[misc]
    decay = 0.0 if algorithm == "angular_muown" else 0.1
    other = algorithm if algorithm in ("adam", "lion") else "adamw"
    groups = [
        {"params": matrices, "algorithm": algorithm, "weight_decay": decay, **options},
        {"params": rest, "algorithm": other, "lr": 3e-3},
    ]
    return dmuown.Muown(groups, lr=1e-2)


def build(algorithm: str, seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer and a scheduler, all from one seed."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = optimizer_of(model, algorithm, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))
    return model, optimizer, scheduler


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    """Train on data that depends on the step alone."""
    for step in steps:
        data = torch.randn(7, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        scheduler.step()


def tensors(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """All weights and all state, copied."""
    state = [value for param in optimizer.state for value in optimizer.state[param].values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    """Equal bit by bit."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
