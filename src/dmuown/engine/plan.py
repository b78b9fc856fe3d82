"""The plan of a step: buckets, owners, and what moves; computed once, compared across ranks, printable.

A unit is one logical matrix: parameter i, local leading index b. Units of a bucket are made whole on
their owners (`dmuown.engine.owners`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dmuown.engine.groups import group_of, mesh_coordinates, mesh_group, mesh_ranks, warm_up
from dmuown.engine.layout import MatrixLayout, Shards, local_tensor
from dmuown.engine.owners import Owners, Place
from dmuown.orthogonalize import Blocks, Orthogonalizer
from dmuown.orthogonalize.blocks import block_rows, row_indices


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
        replica_group: Ranks of the team that hold the same shards and divide the work; None without others.
        input_group: Ranks that share rows.
        output_group: Ranks that share columns.
        members: Shards of every rank of `shard_group`, in its order; this rank's alone without one.
        replicas: Number, as in the team, of the replica of every rank of `replica_group`, in its order.
        owners: Who orthogonalizes each unit.
        block_of_row: Per local row, its block; None for one block.
        compute_device: Where they are updated, if that is not where they are.
        params_within: How many of them the group's `batch_bytes` allows at once, alike on all ranks; None without it.
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
    replicas: list[int] = field(default_factory=lambda: [0])
    owners: Owners = field(default_factory=Owners)
    block_of_row: Tensor | None = None
    compute_device: torch.device | None = None
    params_within: int | None = None

    @property
    def device(self) -> torch.device:
        """Where its parameters are updated."""
        return self.compute_device or local_tensor(self.params[0]).device

    @property
    def units_per_param(self) -> int:
        """Logical matrices of one parameter on this rank (experts, or 1)."""
        return self.layout.local_batch if self.layout.m * self.layout.n else 0

    @property
    def most_units_per_param(self) -> int:
        """The same on the rank that has most of them (the first place of the mesh), at least 1; alike on all ranks."""
        first = () if self.layout.mesh is None else (0,) * self.layout.mesh.ndim
        return max(1, self.layout.batch_at(first))

    @property
    def matrices_per_unit(self) -> int:
        """Matrices of a unit that are orthogonalized on their own: the blocks of a fused weight, or 1."""
        return max(1, len(self.blocks))

    def places(self, first: int, count: int) -> list[Place]:
        """Who orthogonalizes each unit (parameter-major) of the `count` parameters that step after the `first` ones.

        Units cost the same, so that any of them may take a place: one owner's lie side by side, and need no packing.
        """
        dealt = self.owners.places[first * self.units_per_param : (first + count) * self.units_per_param]
        return sorted(dealt, key=lambda place: (place.replica, place.owner))

    @property
    def replica_count(self) -> int:
        """Replicas that divide the work."""
        return len(self.replicas)

    @property
    def shard_rank(self) -> int:
        """This rank among those that share a matrix."""
        return 0 if self.shard_group is None else dist.get_rank(self.shard_group)

    @property
    def replica_rank(self) -> int:
        """This rank's replica, numbered as in the team: the same for all ranks that share a matrix."""
        return 0 if self.replica_group is None else self.replicas[dist.get_rank(self.replica_group)]

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
    def exchanges(self) -> bool:
        """Whether orthogonalization enters collectives."""
        return self.shard_group is not None or self.replica_group is not None

    @property
    def is_empty(self) -> bool:
        """Whether its parameters have no elements on any rank, so that nothing is to be done."""
        return math.prod(self.layout.shape) == 0

    def units_at(self, coordinate: tuple[int, ...]) -> int:
        """Units of all its parameters at a mesh coordinate."""
        return 0 if self.is_empty else len(self.params) * self.layout.batch_at(coordinate)


def make_bucket(
    group_index: int,
    params: Sequence[Tensor],
    names: Sequence[str],
    layout: MatrixLayout,
    blocks: Blocks,
    orthogonalizer: Orthogonalizer,
    compute_device: torch.device | None = None,
) -> Bucket:
    """Build one bucket, without owners: find its groups of ranks and every member's shards.

    Collective where a group is used or made for the first time.
    """
    shard_group = input_group = output_group = None
    members = [layout.own]
    device = compute_device or local_tensor(params[0]).device
    if layout.mesh is not None:
        shard_group = mesh_group(layout.mesh, layout.matrix_dims)
        input_group = mesh_group(layout.mesh, layout.col_dims)
        output_group = mesh_group(layout.mesh, layout.row_dims)
        at = mesh_coordinates(layout.mesh)
        if shard_group is not None:
            members = [layout.shards_at(at[rank]).on(device) for rank in dist.get_process_group_ranks(shard_group)]
        for group, kind in (
            (shard_group, "all_to_all"),
            (input_group, "all_reduce"),
            (output_group, "all_reduce"),
        ):
            warm_up(group, device, kind)
    bucket = Bucket(
        group_index,
        list(params),
        list(names),
        layout,
        blocks,
        orthogonalizer,
        shard_group,
        None,
        input_group,
        output_group,
        members,
        compute_device=compute_device,
    )
    if len(blocks) > 1:
        of_row = torch.empty(layout.m, dtype=torch.int64)
        for index, rows in enumerate(blocks):
            of_row[torch.tensor(row_indices(rows))] = index
        bucket.block_of_row = of_row[layout.own.rows].to(device)
    return bucket


def join_team(bucket: Bucket, owners: Owners) -> None:
    """Give a bucket its owners, and the group of the replicas that divide the work. Collective as `make_bucket` is."""
    bucket.owners = owners
    mesh, dims = bucket.layout.mesh, bucket.layout.replicate_dims
    if mesh is None or len(owners.team) == 1:
        return
    number = {rank: replica for replica, ranks in enumerate(owners.team) for rank in ranks}
    counterparts = mesh_ranks(mesh, dims)
    if len(number) < len(counterparts) * len(owners.team[0]):
        bucket.replica_group = group_of(tuple(rank for rank in counterparts if rank in number))
    else:
        bucket.replica_group = mesh_group(mesh, dims)
    assert bucket.replica_group is not None
    bucket.replicas = [number[rank] for rank in dist.get_process_group_ranks(bucket.replica_group)]
    warm_up(bucket.replica_group, bucket.device, "all_gather")
