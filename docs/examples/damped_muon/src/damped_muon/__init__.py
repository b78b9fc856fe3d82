"""Muon that slows down rows whose gradients are large and noisy, as an example of a third-party algorithm.

    M <- mu M + G;  s <- b s + (1 - b) mean_row(G^2);  W <- W - lr wd W - lr ratio O(M) / (1 + damping sqrt(s))

The whole package is this file and `pyproject.toml`. What it does not contain comes from dmuown: sharding,
batching, low-bit and offloaded state, checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from dmuown import BufferSpec, MuonAlgorithm, register_muon_algorithm
from dmuown.algorithms import orthogonalize_single


@register_muon_algorithm
class DampedMuon(MuonAlgorithm):
    """Muon with a damping per output row."""

    name: ClassVar[str] = "damped_muon"
    options: ClassVar[Mapping[str, Any]] = {"damping": 0.5, "row_beta": 0.9}
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {
        "momentum_buffer": BufferSpec(like="grad", signed=True),
        "row_energy": BufferSpec(like="grad_rows", signed=False),
    }

    def update(
        self,
        param: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        lr_ratio: Tensor,
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        damping: float,
        row_beta: float,
        ns_steps: int,
        orthogonalization_strategy: str,
        split_sizes: tuple[int, ...] | None,
        **_: Any,
    ) -> None:
        """Update one matrix `[..., m, n]` in place; a DTensor where the parameter is sharded."""
        buffer, energy = state["momentum_buffer"], state["row_energy"]
        buffer.mul_(momentum).add_(grad)
        energy.mul_(row_beta).add_(grad.float().square().mean(dim=-1, keepdim=True), alpha=1 - row_beta)
        update = orthogonalize_single(
            buffer, ns_steps=ns_steps, strategy=orthogonalization_strategy, split_sizes=split_sizes
        )
        update = update / (1 + damping * energy.sqrt())
        if weight_decay != 0:
            param.mul_(1 - lr * weight_decay)
        param.sub_(lr * lr_ratio * update)
