"""Sizes of all ranks' shards of a DTensor, as pure arithmetic."""

from __future__ import annotations

import itertools
import math

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local_sizes(tensor: Tensor) -> list[int]:
    """Element counts that ranks' shards may have, the whole tensor's for a plain one.

    Every combination of the sizes that each axis is cut into: a superset of what ranks hold.
    """
    if not isinstance(tensor, DTensor):
        return [tensor.numel()]
    lengths: list[set[int]] = [{length} for length in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        parts = tensor.device_mesh.size(mesh_dim)
        if isinstance(placement, (Shard, _StridedShard)):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            axis = placement.dim % tensor.ndim
            lengths[axis] = {part for length in lengths[axis] for part in _cut(length, parts, factor)}
    return sorted({math.prod(shape) for shape in itertools.product(*lengths)})


def _cut(length: int, parts: int, factor: int) -> set[int]:
    pieces = _chunks(length, factor)
    return {sum(_chunks(piece, parts)[rank] for piece in pieces) for rank in range(parts)}


def _chunks(length: int, parts: int) -> list[int]:
    """Sizes as `torch.chunk` makes them, padded with empty chunks."""
    size = -(-length // parts)
    return [max(0, min(size, length - size * index)) for index in range(parts)]
