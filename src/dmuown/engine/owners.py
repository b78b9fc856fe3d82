"""Who orthogonalizes what: the ranks that hold the same matrices divide them, by cost. Pure and deterministic.

A unit is one logical matrix: parameter i, local leading index b. It is made whole on its owner, one rank of those
that share it. Where replicas of these ranks exist (HSDP, replicated parameters), they form teams: the replicas of a
team divide the units and gather each other's results; teams know nothing of each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from dmuown.engine.groups import mesh_coordinates

if TYPE_CHECKING:
    from dmuown.engine.plan import Bucket

#: How many times what is useful a gather among replicas may carry. It is padded to the replica that has most of a
#: bucket, so that many replicas with few matrices would mostly send padding: 512 replicas of a 1B model would gather
#: 12 times all updates.
MOST_PADDING = 2.0

#: Global ranks that hold the same matrices: one tuple a replica, the ranks that share a matrix.
Block = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Place:
    """Who orthogonalizes a unit: a rank of the shard group, in one of the team's replicas (numbered as in the team)."""

    replica: int
    owner: int


@dataclass(frozen=True)
class Owners:
    """The owners of a bucket's units, as a rank that holds parts of them sees it.

    Attributes:
        team: Global ranks of its team, one tuple a replica, in the order of the mesh: the ranks that share a matrix,
            ascending. ((-1,),) for plain tensors; () for a rank outside of the bucket's mesh.
        places: One a unit, parameter-major.
    """

    team: Block = ()
    places: tuple[Place, ...] = ()

    def most_together(self, most: int) -> int:
        """How many places in a row, wherever they begin, hold no owner more than `most` times."""
        seen: dict[Place, list[int]] = {}
        length = len(self.places)
        for index, place in enumerate(self.places):
            before = seen.setdefault(place, [])
            before.append(index)
            if len(before) > most:
                length = min(length, index - before[-1 - most])
        return length


#: Replicas of a team, and the places of each bucket's units in it.
Division = tuple[int, list[tuple[Place, ...]]]


def assign_owners(
    buckets: Sequence[Bucket], rank: int | None = None, known: dict[object, Division] | None = None
) -> list[Owners]:
    """Choose an owner for every unit of every bucket, as one rank sees them.

    Longest processing time first: units by falling cost, each to the least loaded replica and there to the least
    loaded rank (the first of equals). Loads add up over all buckets that are shared by the same ranks. Teams are as
    large as `MOST_PADDING` allows.

    Args:
        buckets: In the same order on every rank.
        rank: Global rank whose units are meant; None for this one.
        known: Divisions made before, by what decides them; for callers who ask for many ranks.

    Returns:
        One a bucket.
    """
    known = {} if known is None else known
    sharing: dict[Block, list[int]] = {}
    counts = [0] * len(buckets)
    for index in sorted(range(len(buckets)), key=lambda index: -buckets[index].flops_per_unit):
        coordinate = coordinate_of(buckets[index], rank)
        if coordinate is not None:
            mesh = buckets[index].layout.mesh
            block = ((-1,),) if mesh is None else buckets[index].layout.block_at(coordinate)
            sharing.setdefault(block, []).append(index)
            counts[index] = buckets[index].units_at(coordinate)
    owners = [Owners() for _ in buckets]
    for block, indices in sharing.items():
        key = (block, tuple(indices), tuple(counts[index] for index in indices))
        if key not in known:
            known[key] = _divide([(buckets[index], counts[index]) for index in indices], len(block), len(block[0]))
        size, places = known[key]
        here = (dist.get_rank() if rank is None else rank) if len(block) > 1 else block[0][0]
        first = next(number for number, ranks in enumerate(block) if here in ranks) // size * size
        for index, chosen in zip(indices, places, strict=True):
            owners[index] = Owners(block[first : first + size], chosen)
    return owners


def coordinate_of(bucket: Bucket, rank: int | None) -> tuple[int, ...] | None:
    """Mesh coordinate of a global rank (None: this one); None outside the mesh, () for plain tensors."""
    layout = bucket.layout
    if rank is None or layout.mesh is None:
        return layout.coordinate
    return mesh_coordinates(layout.mesh).get(rank)


def _divide(shared: Sequence[tuple[Bucket, int]], replicas: int, ranks: int) -> Division:
    """The largest teams whose gathers are not mostly padding, and the places in each."""
    for size in range(replicas, 0, -1):
        if replicas % size == 0:
            places = _balance(shared, size, ranks)
            if size == 1 or _padding([bucket for bucket, _ in shared], places, size) <= MOST_PADDING:
                break
    return size, [tuple(chosen) for chosen in places]


def _balance(shared: Sequence[tuple[Bucket, int]], replicas: int, ranks: int) -> list[list[Place]]:
    """Places for so many units of each bucket, the most expensive buckets first."""
    loads, totals = [[0.0] * ranks for _ in range(replicas)], [0.0] * replicas
    places: list[list[Place]] = []
    for bucket, count in shared:
        places.append([])
        for _ in range(count):
            replica = totals.index(min(totals))
            owner = loads[replica].index(min(loads[replica]))
            loads[replica][owner] += bucket.flops_per_unit
            totals[replica] += bucket.flops_per_unit
            places[-1].append(Place(replica, owner))
        places[-1] = _spread(places[-1])
    return places


def _spread(places: Sequence[Place]) -> list[Place]:
    """The same places, each owner's as far apart as they can be, so that tasks with a part of them employ all.

    Replicas alternate, since what they gather is padded to the one that has most of a task.
    """
    counts, seen = Counter(places), Counter[Place]()
    positions: list[tuple[float, int, int]] = []
    for place in places:
        positions.append(((seen[place] + 0.5) / counts[place], place.owner, place.replica))
        seen[place] += 1
    return [Place(replica, owner) for _, owner, replica in sorted(positions)]


def _padding(buckets: Sequence[Bucket], places: Sequence[Sequence[Place]], replicas: int) -> float:
    """Elements that a team gathers, over those that it needs."""
    gathered = needed = 0
    for bucket, chosen in zip(buckets, places, strict=True):
        each = [0] * replicas
        for place in chosen:
            each[place.replica] += 1
        size = bucket.layout.m * bucket.layout.n
        gathered += replicas * max(each) * size
        needed += len(chosen) * size
    return gathered / needed if needed else 1.0
