"""How much of a bucket one task takes at once: what a group's `batch_size`, `batch_bytes` and the like allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuown.engine.owners import Owners
    from dmuown.engine.plan import Bucket

#: Matrices at once where state comes from the host and the group sets no `batch_size`.
OFFLOAD_BATCH_SIZE = 16


def is_bounded(group: Mapping[str, Any]) -> bool:
    """Whether a group says how much of its buckets is taken at once."""
    return _most_matrices(group) is not None or group.get("batch_bytes") is not None


def params_at_once(bucket: Bucket, owners: Owners, group: Mapping[str, Any], count: int) -> int:
    """How many of `count` parameters of a bucket step in one task, alike on all ranks of its team; at least 1.

    No more than the group allows, and then in tasks as equal as they can be, of a multiple of the ranks that divide
    them.
    """
    limits = [count * bucket.most_units_per_param]
    if (most := _most_matrices(group)) is not None:
        limits.append(most)
    if (budget := group.get("batch_bytes")) is not None:
        limits.append(_matrices_within(bucket, owners, budget))
    limit = max(1, min(limits) // bucket.most_units_per_param)
    even = math.ceil(count / math.ceil(count / limit)) if count else 1
    ranks = _ranks(owners)
    return min(limit, math.ceil(even / ranks) * ranks)


def _most_matrices(group: Mapping[str, Any]) -> int | None:
    if group.get("foreach") is False:
        return 1
    limit: int | None = group.get("batch_size")
    return OFFLOAD_BATCH_SIZE if limit is None and group.get("offload_state") else limit


def _ranks(owners: Owners) -> int:
    """Ranks that divide a bucket's matrices."""
    return max(1, sum(len(replica) for replica in owners.team))


def _matrices_within(bucket: Bucket, owners: Owners, budget: int) -> int:
    """Matrices for which no rank takes more than `budget` bytes; at least one a rank.

    A rank holds what orthogonalization takes of the matrices it owns, and, where they are sharded, its parts of what
    all owners get and send back.
    """
    m, n, orthogonalizer, ranks = bucket.layout.m, bucket.layout.n, bucket.orthogonalizer, _ranks(owners)
    taken = orthogonalizer.temporary_bytes(m, n)
    if ranks > 1:
        taken += 2 * ranks * math.ceil(m * n / len(owners.team[0])) * orthogonalizer.dtype.itemsize
    return ranks * max(1, budget // max(1, taken))
