"""How much of a bucket one task takes at once: what a group's `batch_size`, `batch_bytes` and the like allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dmuown.orthogonalize.blocks import temporary_bytes

if TYPE_CHECKING:
    from dmuown.engine.owners import Owners
    from dmuown.engine.plan import Bucket

#: Matrices at once where state comes from the host and the group sets no `batch_size`.
OFFLOAD_BATCH_SIZE = 16


def is_bounded(bucket: Bucket, group: Mapping[str, Any]) -> bool:
    """Whether a group says how much of a bucket is taken at once."""
    return _most_matrices(group) is not None or bucket.params_within is not None


def params_at_once(bucket: Bucket, owners: Owners, group: Mapping[str, Any], count: int) -> int:
    """How many of `count` parameters of a bucket step in one task; at least 1.

    No more than the group allows, and then in tasks as equal as they can be whose matrices the ranks of the team can
    divide evenly. The number of tasks is alike on all ranks of the bucket's mesh, whatever their teams.
    """
    limit = count
    if (most := _most_matrices(group)) is not None:
        limit = min(limit, most // bucket.most_units_per_param)
    if bucket.params_within is not None:
        limit = min(limit, bucket.params_within)
    limit = max(1, limit)
    even = math.ceil(count / math.ceil(count / limit)) if count else 1
    ranks = _ranks(owners)
    divisible = ranks // math.gcd(ranks, bucket.most_units_per_param)
    return min(limit, math.ceil(even / divisible) * divisible)


def params_within(bucket: Bucket, owners: Owners, budget: int) -> int:
    """Parameters at once, at least 1, for which no rank of this team takes more than `budget` bytes."""
    if not owners.places:
        return len(bucket.params)
    units = owners.most_together(max(1, budget // max(1, _bytes_per_owned(bucket, owners))))
    return max(1, units * len(bucket.params) // len(owners.places))


def _bytes_per_owned(bucket: Bucket, owners: Owners) -> int:
    """Bytes that a rank takes at most for each matrix it owns in a task, if no rank owns more.

    Its parts of all matrices on their way to owners and back, and the most of: what orthogonalization takes; a matrix
    beside the message it came in or leaves by; its replica's results, and a copy for the others to gather.
    """
    layout, ranks = bucket.layout, _ranks(owners)
    taken = temporary_bytes(bucket.orthogonalizer, bucket.blocks, layout.m, layout.n)
    if ranks == 1:
        return taken
    size, whole = bucket.orthogonalizer.dtype.itemsize, layout.m * layout.n
    # The first place of a mesh has the largest shards.
    part = whole if layout.mesh is None else layout.shards_at((0,) * layout.mesh.ndim).numel
    sharing = len(owners.team[0])
    gathered = 2 * sharing * part if len(owners.team) > 1 else 0
    return max(taken, 2 * whole * size, gathered * size) + 2 * ranks * part * size


def agree_on_bounds(
    buckets: Sequence[Bucket], groups: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None
) -> None:
    """Set `params_within` of buckets whose groups set `batch_bytes`: the least that any rank of `group` finds.

    Teams of one mesh can be unlike, where ranks have experts of unlike number. Collective, if any group sets it.
    """
    bounded = [bucket for bucket in buckets if groups[bucket.group_index].get("batch_bytes") is not None]
    if not bounded:
        return
    within = torch.tensor(
        [params_within(bucket, bucket.owners, groups[bucket.group_index]["batch_bytes"]) for bucket in bounded]
    )
    if group is not None:
        dist.all_reduce(within, op=dist.ReduceOp.MIN, group=group)
    for bucket, count in zip(bounded, within.tolist(), strict=True):
        bucket.params_within = count


def _most_matrices(group: Mapping[str, Any]) -> int | None:
    if group.get("foreach") is False:
        return 1
    limit: int | None = group.get("batch_size")
    return OFFLOAD_BATCH_SIZE if limit is None and group.get("offload_state") else limit


def _ranks(owners: Owners) -> int:
    """Ranks that divide a bucket's matrices."""
    return max(1, sum(len(replica) for replica in owners.team))
