"""The plan of a step: buckets, owners, and what moves; computed once, compared across ranks, printable.

Nothing here communicates. A unit is one logical matrix stack entry: parameter i, local leading
index b. Units of a bucket are made whole on their owners; owners are balanced by cost over all
buckets that share a group of ranks (longest processing time first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dmuown.engine.groups import coordinates_in_group, mesh_group
from dmuown.engine.layout import MatrixLayout, Shards
from dmuown.orthogonalize import Blocks, Orthogonalizer
from dmuown.orthogonalize.blocks import block_rows


@dataclass(frozen=True)
class Place:
    """Who orthogonalizes a unit: a rank of the shard group, in one of the replicas."""

    replica: int
    owner: int


@dataclass
class Bucket:
    """Parameters updated as one task.

    Attributes:
        group_index: Their param group.
        params: The parameters, Tensor or DTensor.
        names: Their names.
        layout: Their common layout (of the first one; the others' are equal).
        blocks: Row blocks of a fused weight; () for one block.
        orthogonalizer: What orthogonalizes them.
        shard_group: Ranks that share a matrix; None where every rank has whole matrices.
        replica_group: Ranks that hold the same shards and divide the work; None without replicas.
        input_group: Ranks that share rows.
        output_group: Ranks that share columns.
        members: Shards of every rank of `shard_group`, in its order; this rank's alone without one.
        places: Per unit (parameter-major), who orthogonalizes it.
        block_of_row: Per local row, its block; None for one block.
    """

    group_index: int
    params: list[Tensor]
    names: list[str]
    layout: MatrixLayout
    blocks: Blocks
    orthogonalizer: Orthogonalizer
    shard_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None
    input_group: dist.ProcessGroup | None
    output_group: dist.ProcessGroup | None
    members: list[Shards]
    places: list[Place] = field(default_factory=list)
    block_of_row: Tensor | None = None

    @property
    def units_per_param(self) -> int:
        """Logical matrices of one parameter on this rank (experts, or 1)."""
        return self.layout.local_batch if self.layout.m * self.layout.n else 0

    @property
    def shard_count(self) -> int:
        """Ranks that share a matrix."""
        return len(self.members)

    @property
    def replica_count(self) -> int:
        """Replicas that divide the work."""
        return 1 if self.replica_group is None else dist.get_world_size(self.replica_group)

    @property
    def shard_rank(self) -> int:
        """This rank among those that share a matrix."""
        return 0 if self.shard_group is None else dist.get_rank(self.shard_group)

    @property
    def replica_rank(self) -> int:
        """This rank among the replicas."""
        return 0 if self.replica_group is None else dist.get_rank(self.replica_group)

    @property
    def block_row_counts(self) -> tuple[int, ...] | None:
        """Rows of each block of the whole matrix; None for one block."""
        return tuple(block_rows(block) for block in self.blocks) if len(self.blocks) > 1 else None

    @property
    def flops_per_unit(self) -> float:
        """Multiply-adds x 2 of the plain iteration on one unit: 2 steps (2 s^2 l + s^3), s the shorter side."""
        rows = self.block_row_counts or (self.layout.m,)
        total = 0.0
        for m in rows:
            short, long = sorted((m, self.layout.n))
            total += 2.0 * self.orthogonalizer.steps * (2.0 * short * short * long + short**3)
        return total

    @property
    def communicates(self) -> bool:
        """Whether updating it enters collectives."""
        return self.shard_group is not None or self.replica_group is not None

    def describe(self) -> list[str]:
        """One line per parameter that must read the same on every rank of its mesh."""
        layout = self.layout
        return [
            f"{name}: shape {layout.shape}, {param.dtype}, placements {layout.placements}, "
            f"transposed={layout.transposed}, flatten={layout.flatten}, blocks {self.blocks}, "
            f"group {self.group_index}, {self.orthogonalizer}"
            for name, param in zip(self.names, self.params, strict=True)
        ]


def make_bucket(
    group_index: int,
    params: Sequence[Tensor],
    names: Sequence[str],
    layout: MatrixLayout,
    blocks: Blocks,
    orthogonalizer: Orthogonalizer,
) -> Bucket:
    """Build one bucket: find its groups of ranks and every member's shards.

    Collective where a group of several mesh dimensions is made for the first time.
    """
    shard_group = replica_group = input_group = output_group = None
    members = [layout.own]
    if layout.mesh is not None:
        shard_group = mesh_group(layout.mesh, layout.matrix_dims)
        replica_group = mesh_group(layout.mesh, layout.replicate_dims)
        input_group = mesh_group(layout.mesh, layout.col_dims)
        output_group = mesh_group(layout.mesh, layout.row_dims)
        if shard_group is not None:
            members = [layout.shards_at(at) for at in coordinates_in_group(layout.mesh, shard_group)]
    bucket = Bucket(
        group_index,
        list(params),
        list(names),
        layout,
        blocks,
        orthogonalizer,
        shard_group,
        replica_group,
        input_group,
        output_group,
        members,
    )
    if len(blocks) > 1:
        of_row = torch.empty(layout.m, dtype=torch.int64)
        for index, block in enumerate(blocks):
            of_row[block] = index
        device = params[0].device
        bucket.block_of_row = of_row[layout.own.rows].to(device)
    return bucket


def assign_owners(buckets: Sequence[Bucket]) -> None:
    """Give every unit an owner, balancing cost over all buckets that share ranks; deterministic.

    Longest processing time first: units by falling cost, each to the least loaded rank (the lowest
    of equals). Within a bucket all units cost the same, so the order of buckets decides.
    """
    loads: dict[tuple[int, int], list[list[float]]] = {}
    for bucket in sorted(buckets, key=lambda bucket: -bucket.flops_per_unit):
        key = (id(bucket.shard_group), id(bucket.replica_group))
        load = loads.setdefault(key, [[0.0] * bucket.shard_count for _ in range(bucket.replica_count)])
        bucket.places = []
        for _ in range(len(bucket.params) * bucket.units_per_param):
            replica = min(range(len(load)), key=lambda r: (sum(load[r]), r))
            owner = min(range(bucket.shard_count), key=lambda o: (load[replica][o], o))
            load[replica][owner] += bucket.flops_per_unit
            bucket.places.append(Place(replica, owner))
