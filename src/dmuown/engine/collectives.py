"""Collectives under the names that this torch has for them: 2.13 renamed two, and warns of the old names."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# Looked up at each call, as `dist.all_reduce` is: what replaces them in `dist`, to count or to trace, is used.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather(gathered: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Gather one tensor a rank into one tensor; returns what to wait for, or None."""
    return getattr(dist, ALL_GATHER)(gathered, own, group=group, async_op=async_op)


def reduce_scatter(reduced: Tensor, source: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Sum one tensor a rank, and leave each rank its part of the sum; returns what to wait for, or None."""
    return getattr(dist, REDUCE_SCATTER)(reduced, source, group=group, async_op=async_op)
