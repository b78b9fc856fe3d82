"""Bytes by rank, and how evenly they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RankBytes:
    """What each rank holds, in bytes; activations, and layers while they are gathered, are not counted.

    Attributes:
        parameters: Parameters, or their shards.
        gradients: Gradients of trainable ones, in the parameters' dtype.
        state: Optimizer state.
        buffers: What a step takes beside them at the peak of one task: exchange and orthogonalization.
        sent: Bytes sent for the optimizer's step.
        work: Floating-point operations of orthogonalization.
        matrices: Matrices orthogonalized.
    """

    parameters: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    state: list[float] = field(default_factory=list)
    buffers: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    matrices: list[float] = field(default_factory=list)

    @classmethod
    def zeros(cls, ranks: int) -> RankBytes:
        """Nothing on every rank."""
        return cls(*([0.0] * ranks for _ in range(7)))

    def extend(self, other: RankBytes) -> None:
        """Append the ranks of another stage."""
        for name in vars(self):
            getattr(self, name).extend(getattr(other, name))

    @property
    def total(self) -> list[float]:
        """Parameters, gradients, state and buffers together, by rank."""
        return [sum(parts) for parts in zip(self.parameters, self.gradients, self.state, self.buffers, strict=True)]

    def columns(self) -> dict[str, list[float]]:
        """All quantities by name, the total of memory among them."""
        return {**{name: list(values) for name, values in vars(self).items()}, "total": self.total}

    def to_dict(self) -> dict[str, Any]:
        """Least, mean and most of every quantity."""
        return {name: spread(values) for name, values in self.columns().items()}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, mean and most, and the rank with the most."""
    most = max(values)
    return {"min": min(values), "mean": sum(values) / len(values), "max": most, "max_rank": list(values).index(most)}
