"""Helpers for algorithms in the whole-tensor form: one `update(param, grad, state, lr_ratio, *, ...)`.

Such an algorithm sees parameters as the model has them, DTensors included, and stays free of any
placement: `orthogonalize_single` and `orthogonalize_batch` make sharded matrices whole, orthogonalize,
and hand back the shards. That gathers whole matrices on every rank, which is logged once; an
algorithm written as the two halves around orthogonalization (`MuonAlgorithm`) gets the engine's
exchange instead.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuown.orthogonalize import (
    Blocks,
    Orthogonalizer,
    blocks_from_split_sizes,
    orthogonalize_blocks,
    resolve_orthogonalizer,
)
from dmuown.orthogonalize.blocks import row_indices

logger = logging.getLogger(__name__)

_group_options: ContextVar[Mapping[str, Any] | None] = ContextVar("group_options", default=None)
_logged: set[str] = set()


@contextlib.contextmanager
def using_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Have the helpers take what their arguments leave out (compute dtype, coefficients, backend) from a group."""
    token = _group_options.set(options)
    try:
        yield
    finally:
        _group_options.reset(token)


def orthogonalize_single(
    g: Tensor,
    *,
    ns_steps: int | None = None,
    strategy: str | None = None,
    split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Orthogonalize one tensor.

    Args:
        g: `[..., m, n]`, a plain tensor or a DTensor of any Shard, Replicate or Partial placements; not changed.
            Leading axes are independent matrices.
        ns_steps: Iterations; None takes the group's.
        strategy: `"polar_express"`, `"newton_schulz"` or `"gram"`; None takes the group's.
        split_sizes: Output rows of the blocks of a fused weight. Each block is orthogonalized on its own and
            scaled by sqrt(max(1, rows/n)) over the whole matrix's sqrt(max(1, m/n)), so that the whole
            matrix's `lr_ratio` gives every block the length that it would have as a parameter of its own.

    Returns:
        A new tensor of g's shape, dtype and placements. Collective where g's matrices are sharded: every rank of
        its mesh must call.

    Raises:
        OptionError: A bad option, or `split_sizes` that do not sum to m.
    """
    return orthogonalize_batch([g], ns_steps=ns_steps, strategy=strategy, split_sizes=split_sizes)[0]


def orthogonalize_batch(
    gs: Sequence[Tensor],
    *,
    ns_steps: int | None = None,
    strategy: str | None = None,
    split_sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    """Orthogonalize tensors of one shape, placement and device at once; see `orthogonalize_single`."""
    if not gs:
        return []
    first = gs[0]
    m, n = first.shape[-2:]
    blocks = blocks_from_split_sizes(split_sizes, m) if split_sizes is not None else ()
    wholes = [_made_whole(g) for g in gs]
    locals_ = [whole.to_local() if isinstance(whole, DTensor) else whole for whole in wholes]
    orthogonalizer = _orthogonalizer(locals_[0].device, ns_steps, strategy)
    stacked = torch.cat([local.reshape(-1, m, n) for local in locals_])
    done = orthogonalize_blocks(stacked, blocks, orthogonalizer).to(first.dtype)
    if blocks:
        done = done * _block_factors(blocks, m, n, done)
    pieces = done.split([local.numel() // max(1, m * n) for local in locals_])
    results = [piece.reshape(local.shape) for piece, local in zip(pieces, locals_, strict=True)]
    return [_laid_out_as(g, whole, result) for g, whole, result in zip(gs, wholes, results, strict=True)]


def lr_ratio(m: int, n: int) -> float:
    """sqrt(max(1, m / n)), the factor that whole-tensor updates get for their learning rate."""
    return math.sqrt(max(1.0, m / n))


def _orthogonalizer(device: torch.device, ns_steps: int | None, strategy: str | None) -> Orthogonalizer:
    options = dict(_group_options.get() or {})
    if ns_steps is not None:
        options["ns_steps"] = ns_steps
    if strategy is not None and strategy != options.get("scheme"):
        options["scheme"], options["coefficients"] = strategy, None
    return resolve_orthogonalizer(options, device)


def _block_factors(blocks: Blocks, m: int, n: int, like: Tensor) -> Tensor:
    factors = like.new_empty(m, 1)
    for block in blocks:
        rows = row_indices(block)
        factors[list(rows)] = lr_ratio(len(rows), n) / lr_ratio(m, n)
    return factors


def _cuts_a_matrix(placement: Placement, ndim: int) -> bool:
    if isinstance(placement, (Shard, _StridedShard)):
        return placement.dim % ndim >= ndim - 2
    return placement.is_partial()


def _made_whole(g: Tensor) -> Tensor:
    """The same tensor with every rank holding whole matrices; leading axes stay sharded."""
    if not isinstance(g, DTensor):
        return g
    wanted = [Replicate() if _cuts_a_matrix(placement, g.ndim) else placement for placement in g.placements]
    if wanted == list(g.placements):
        return g
    if any(isinstance(placement, _StridedShard) for placement in g.placements):
        # Strided shards are undone all together or not at all.
        wanted = [Replicate()] * g.device_mesh.ndim
    log_once(
        f"orthogonalize_single gathers matrices of placements {g.placements} whole on every rank: whole-tensor "
        "updates orthogonalize locally; the two-halves form of MuonAlgorithm exchanges shards with owners instead"
    )
    if wanted == [Replicate()] * g.device_mesh.ndim:
        return DTensor.from_local(full_tensor(g), g.device_mesh, wanted, run_check=False)
    if is_permuted(g):
        # Gather everything, and take back the part along leading axes, which sends nothing.
        replicated = [Replicate()] * g.device_mesh.ndim
        return DTensor.from_local(full_tensor(g), g.device_mesh, replicated, run_check=False).redistribute(
            placements=wanted
        )
    return g.redistribute(placements=wanted)


def full_tensor(g: DTensor) -> Tensor:
    """`g.full_tensor()`, right also on meshes whose ranks do not ascend, where torch's gather mixes up the shards."""
    if not is_permuted(g):
        return g.full_tensor().contiguous()
    mesh = g.device_mesh
    reduced = [Replicate() if placement.is_partial() else placement for placement in g.placements]
    local = g.redistribute(placements=reduced).to_local()
    # Which elements are here: cut their numbers as the tensor is cut.
    numbers = torch.arange(g.numel(), device=local.device).view(g.shape)
    here = DTensor.from_local(numbers, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        placements=reduced
    )
    whole = torch.zeros(g.numel(), dtype=local.dtype, device=local.device)
    whole[here.to_local().reshape(-1)] = local.reshape(-1)
    for dim, placement in enumerate(reduced):
        if not placement.is_replicate():
            dist.all_reduce(whole, group=mesh.get_group(dim))
    return whole.view(g.shape)


def is_permuted(g: DTensor) -> bool:
    """Whether the ranks of a DTensor's mesh descend anywhere."""
    ranks = g.device_mesh.mesh
    return any(bool((ranks.diff(dim=dim) < 0).any()) for dim in range(ranks.ndim))


def _laid_out_as(g: Tensor, whole: Tensor, result: Tensor) -> Tensor:
    if not isinstance(g, DTensor) or not isinstance(whole, DTensor):
        return result
    result = DTensor.from_local(
        result, g.device_mesh, whole.placements, run_check=False, shape=g.shape, stride=g.stride()
    )
    placements = [Replicate() if placement.is_partial() else placement for placement in g.placements]
    return result if list(whole.placements) == placements else result.redistribute(placements=placements)


def log_once(message: str) -> None:
    """Log a warning the first time that it comes up in this process."""
    if message not in _logged:
        _logged.add(message)
        logger.warning(message)
