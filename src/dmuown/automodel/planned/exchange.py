"""The engine's exchange, by rank: who orthogonalizes what, and what is sent. Owners are the engine's own choice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dmuown.engine.bounds import params_at_once, params_within
from dmuown.engine.exchange import wire_dtype
from dmuown.engine.layout import MatrixLayout
from dmuown.engine.owners import Block, Division, Owners, Place, assign_owners
from dmuown.engine.plan import Bucket
from dmuown.orthogonalize.blocks import temporary_bytes


@dataclass
class BucketPlan:
    """One bucket: parameters of equal shape and layout, updated as one task.

    Attributes:
        bucket: The engine's description of it.
        collectives: All-to-alls and all-gathers of a step: of whole buckets the same on every rank; of tasks that a
            group bounds the most, bucket by bucket, since a replica without a matrix in a task sends nothing there.
        bytes_sent: Bytes that each rank of the stage sends.
        work: Floating-point operations of orthogonalization, by rank.
        matrices: Matrices that each rank orthogonalizes.
        buffers: Bytes that exchange and orthogonalization take at the peak of one task, by rank.
    """

    bucket: Bucket
    collectives: dict[str, int] = field(default_factory=dict)
    bytes_sent: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    matrices: list[int] = field(default_factory=list)
    buffers: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The bucket as data that JSON can hold, ranks summed up."""
        layout = self.bucket.layout
        return {
            "shape": list(layout.shape),
            "parameters": len(self.bucket.params),
            "matrices": sum(self.matrices),
            "placements": [str(placement) for placement in layout.placements],
            "collectives": dict(self.collectives),
            "bytes_sent": sum(self.bytes_sent),
            "bytes_sent_largest_rank": max(self.bytes_sent, default=0),
            "ranks_at_work": sum(count > 0 for count in self.matrices),
        }


def plan_exchange(buckets: Sequence[Bucket], ranks: int, settings: Mapping[str, Any] | None = None) -> list[BucketPlan]:
    """Work out the exchange of a stage.

    Args:
        buckets: Its buckets, by falling cost, as the engine orders them.
        ranks: Ranks of the stage.
        settings: Options of the optimizer, of which those that bound a task are read; None takes whole buckets.
    """
    settings = settings or {}
    plans = [BucketPlan(bucket, {}, [0.0] * ranks, [0.0] * ranks, [0] * ranks, [0.0] * ranks) for bucket in buckets]
    teams: list[dict[Block, Owners]] = [{} for _ in plans]
    counted: list[set[int]] = [set() for _ in plans]
    divisions: dict[object, Division] = {}
    for rank in range(ranks):
        if all(rank in ranks_counted for ranks_counted in counted):
            continue
        assigned = assign_owners(buckets, rank, divisions)
        for plan, owners, found, ranks_counted in zip(plans, assigned, teams, counted, strict=True):
            if rank in ranks_counted:
                continue
            one_process = plan.bucket.layout.mesh is None
            found[((0,),) if one_process else owners.team] = owners
            ranks_counted.update(range(ranks) if one_process else (one for part in owners.team for one in part))
    budget = settings.get("batch_bytes")
    for plan, found in zip(plans, teams, strict=True):
        if budget is not None:
            plan.bucket.params_within = min(params_within(plan.bucket, owners, budget) for owners in found.values())
        for team, owners in found.items():
            _count_team(plan, team, owners, settings)
    return plans


def _coordinate(layout: MatrixLayout, rank: int) -> tuple[int, ...]:
    assert layout.mesh is not None
    found = []
    for size in reversed(tuple(layout.mesh.shape)):
        rank, position = divmod(rank, size)
        found.append(position)
    return tuple(reversed(found))


def _count_team(plan: BucketPlan, team: Block, owners: Owners, settings: Mapping[str, Any]) -> None:
    bucket, layout = plan.bucket, plan.bucket.layout
    compute = bucket.orthogonalizer.dtype.itemsize
    wire = wire_dtype(bucket.orthogonalizer.dtype).itemsize
    whole = layout.m * layout.n
    per_block = max(1, len(bucket.blocks))
    tasks = _tasks(bucket, owners, settings)
    by_replica = [Counter(place.replica for place in task.elements()) for task in tasks]
    padded = sum(max(counts.values()) for counts in by_replica)
    if len(team) > 1:
        plan.collectives["all_gather"] = max(len(tasks), plan.collectives.get("all_gather", 0))
    for replica, ranks in enumerate(team):
        if len(ranks) > 1:
            entered = 2 * sum(counts[replica] > 0 for counts in by_replica)
            plan.collectives["all_to_all"] = max(entered, plan.collectives.get("all_to_all", 0))
        for owner, rank in enumerate(ranks):
            mine = [task[Place(replica, owner)] for task in tasks]
            held = layout.shards_at(_coordinate(layout, rank)).numel if layout.mesh is not None else whole
            sent = 0.0
            if len(ranks) > 1:
                shared = sum(counts[replica] for counts in by_replica)
                sent = (shared - sum(mine)) * held * wire + sum(mine) * (whole - held) * compute
            if len(team) > 1:
                sent += padded * held * compute * (len(team) - 1)
            parts = held * wire if len(ranks) > 1 else 0
            beside = 2 * whole * wire if len(ranks) > 1 else 0  # a matrix and the message it came in
            for counts, own in zip(by_replica, mine, strict=True):
                taken = temporary_bytes(bucket.orthogonalizer, bucket.blocks, layout.m, layout.n, own)
                plan.buffers[rank] = max(plan.buffers[rank], counts[replica] * parts + max(taken, own * beside))
            plan.bytes_sent[rank] += sent
            plan.work[rank] += sum(mine) * bucket.flops_per_unit
            plan.matrices[rank] += sum(mine) * per_block


def _tasks(bucket: Bucket, owners: Owners, settings: Mapping[str, Any]) -> list[Counter[Place]]:
    """Matrices by owner, task by task."""
    if not owners.places:
        return []
    count = len(bucket.params)
    size = params_at_once(bucket, owners, settings, count) * len(owners.places) // count
    return [Counter(owners.places[start : start + size]) for start in range(0, len(owners.places), size)]


def state_bytes(
    tensor: Tensor,
    layout: MatrixLayout | None,
    algorithm: str,
    rank: int,
    options: dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
) -> float:
    """Bytes of optimizer state that a rank holds for one parameter, in `dtype` or in the parameter's own."""
    from dmuown.algorithms import get_algorithm

    total = 0.0
    for spec in get_algorithm(algorithm).state_spec.values():
        if spec.like == "scalar":
            total += 4
        elif spec.like == "grad_rows" and layout is not None:
            rows = layout.m if layout.mesh is None else layout.shards_at(_coordinate(layout, rank)).row_count
            batch = layout.local_batch if layout.mesh is None else layout.batch_at(_coordinate(layout, rank))
            total += rows * batch * (spec.dtype or torch.float32).itemsize
        else:
            item = spec.dtype.itemsize if spec.dtype else _ITEM.get(options.get("state_precision") or "", 0)
            total += local_numel(tensor, rank) * (item or (dtype or tensor.dtype).itemsize)
    return total


#: Bytes an element of low-precision state, scales included: one fp32 scale for each block of 256 (int8, fp8) or 128.
_ITEM = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "fp8": 1 + 4 / 256, "int4": 0.5 + 4 / 128}


def local_numel(tensor: Tensor, rank: int) -> int:
    """Elements of a parameter that a rank of the stage holds."""
    from torch.distributed.tensor import DTensor

    from dmuown.automodel.planned.cluster import local_shape

    if not isinstance(tensor, DTensor):
        return tensor.numel()
    sizes = tuple(tensor.device_mesh.shape)
    coordinate = []
    for size in reversed(sizes):
        rank, position = divmod(rank, size)
        coordinate.append(position)
    return math.prod(local_shape(tensor.shape, tensor.device_mesh, tensor.placements, coordinate[::-1]))
