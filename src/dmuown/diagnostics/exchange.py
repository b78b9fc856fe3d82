"""What a step sends between ranks and computes on each, counted from the plan before it runs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dmuown.engine.owners import Division, Owners, assign_owners, coordinate_of
from dmuown.engine.traffic import Traffic, bucket_traffic

if TYPE_CHECKING:
    from dmuown.engine.optimizer import MuonEngine
    from dmuown.engine.plan import Bucket


@dataclass(frozen=True)
class BucketSummary:
    """One bucket, as this rank sees it.

    Attributes:
        parameters: Names of its parameters.
        algorithm: Its algorithm.
        shape: Global shape of each parameter.
        placements: Placements, as text; empty for plain tensors.
        mesh: Sizes of the mesh dimensions; empty for plain tensors.
        owners: Global rank that orthogonalizes each of this rank's matrices, parameter by parameter.
        traffic: What this rank sends and computes for it.
    """

    parameters: tuple[str, ...]
    algorithm: str
    shape: tuple[int, ...]
    placements: str
    mesh: tuple[int, ...]
    owners: tuple[int, ...]
    traffic: Traffic


@dataclass(frozen=True)
class ExchangeSummary:
    """A step in which every matrix parameter has a gradient. `str()` is a table, `to_dict()` the data.

    Attributes:
        rank: The rank that made it.
        buckets: Its buckets, in the order in which they run.
        ranks: Totals of every rank that shares a parameter with it, by global rank.
        agreements: Small host-side messages a step, on which gradients exist.
    """

    rank: int
    buckets: tuple[BucketSummary, ...]
    ranks: dict[int, Traffic]
    agreements: int

    @property
    def total(self) -> Traffic:
        """This rank's totals."""
        return self.ranks[self.rank]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "rank": self.rank,
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "ranks": {rank: asdict(traffic) for rank, traffic in self.ranks.items()},
            "agreements": self.agreements,
        }

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        columns = ("all-to-all", "all-gather", "all-reduce", "exchanged", "reduced", "matrices", "FLOPs")
        here = Table(title=f"Exchange of a step on rank {self.rank}", title_justify="left")
        for name in ("parameters", "algorithm", "shape", "placements", "mesh"):
            here.add_column(name, overflow="fold")
        everyone = Table(title="By rank", title_justify="left")
        everyone.add_column("rank", justify="right")
        for table in (here, everyone):
            for name in columns:
                table.add_column(name, justify="right")
        for bucket in self.buckets:
            more = len(bucket.parameters) - 1
            here.add_row(
                bucket.parameters[0] + (f" and {more} more" if more else ""),
                bucket.algorithm,
                _sizes(bucket.shape),
                bucket.placements or "none",
                _sizes(bucket.mesh) or "none",
                *_cells(bucket.traffic),
            )
        for rank, traffic in self.ranks.items():
            everyone.add_row(str(rank), *_cells(traffic))
        text = io.StringIO()
        console = Console(file=text, width=160)
        console.print(here)
        console.print(everyone)
        console.print(f"Messages on which gradients exist: {self.agreements} a step, between hosts")
        return text.getvalue().rstrip()


def summarize_exchange(optimizer: MuonEngine) -> ExchangeSummary:
    """Count what a step of an optimizer sends and computes, on every rank that shares a parameter with this one.

    Counted from the plan alone: no communication, nothing changes. The step is one in which every
    parameter has a gradient. Left out: elementwise groups, which send nothing, the agreement on
    gradients (counted in `agreements`), and algorithms in the whole-tensor form, which communicate
    by themselves.

    Args:
        optimizer: Any optimizer of this package.
    """
    plan = optimizer.plan
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    groups = optimizer.param_groups
    known: dict[tuple[object, ...], Traffic] = {}
    reductions: dict[tuple[object, ...], list[int]] = {}
    divisions: dict[object, Division] = {}

    def traffic_of(index: int, bucket: Bucket, at: int | None, owners: Owners) -> Traffic | None:
        coordinate = coordinate_of(bucket, at)
        algorithm = plan.algorithm_of(bucket)
        if coordinate is None:
            return None
        if bucket.is_empty or algorithm.updates_whole_tensors():
            return Traffic()
        key, group = (index, coordinate), groups[bucket.group_index]
        if key not in known:
            known[key] = bucket_traffic(
                bucket,
                algorithm,
                group,
                owners,
                at,
                coordinate,
                plan.splits(bucket, group, range(len(bucket.params)), owners),
                reductions,
            )
        return known[key]

    members = sorted({rank, *(member for audience in plan.audiences for member in audience)})
    totals: dict[int, Traffic] = {}
    for member in members:
        owners = assign_owners(plan.buckets, member, divisions)
        counted = [
            traffic_of(index, bucket, member, owners[index])
            for index, bucket in enumerate(plan.buckets)
            # A plain tensor is this rank's own: what others do with theirs is not known here.
            if bucket.layout.mesh is not None or member == rank
        ]
        totals[member] = sum((one for one in counted if one is not None), Traffic())
    ordered = [bucket for part in plan.parts for joint in part for bucket in joint.buckets]
    # By identity: equality of buckets would compare their parameters.
    position = {id(bucket): index for index, bucket in enumerate(plan.buckets)}
    summaries = [
        _summary(
            bucket,
            rank,
            traffic_of(position[id(bucket)], bucket, rank, bucket.owners),
            plan,
            groups[bucket.group_index],
        )
        for bucket in ordered
    ]
    return ExchangeSummary(rank, tuple(summaries), totals, plan.agreements)


def _summary(bucket: Bucket, rank: int, traffic: Traffic | None, plan: Any, group: Mapping[str, Any]) -> BucketSummary:
    layout = bucket.layout
    team = ((rank,),) if layout.mesh is None else bucket.owners.team
    assert traffic is not None, "a rank is in the mesh of its own parameters"
    tasks = plan.splits(bucket, group, range(len(bucket.params)))
    places = [place for task in tasks for place in bucket.places(task[0], len(task))]
    return BucketSummary(
        parameters=tuple(bucket.names),
        algorithm=plan.algorithm_of(bucket).name,
        shape=layout.shape,
        placements=", ".join(map(str, layout.placements)),
        mesh=() if layout.mesh is None else tuple(layout.mesh.shape),
        owners=tuple(team[place.replica][place.owner] for place in places),
        traffic=traffic,
    )


def _sizes(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _cells(traffic: Traffic) -> list[str]:
    return [
        str(traffic.all_to_alls),
        str(traffic.all_gathers),
        str(traffic.all_reduces),
        _bytes(traffic.bytes_exchanged),
        _bytes(traffic.bytes_reduced),
        str(traffic.matrices),
        f"{traffic.flops:.3g}",
    ]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
