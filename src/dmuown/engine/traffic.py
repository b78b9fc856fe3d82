"""What a step sends and computes, counted from the plan; nothing here communicates or touches data.

The exchange follows from the layouts. The reductions of an algorithm (row sums, neuron norms) are
counted by running its phases on tensors without data.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dmuown.algorithms import MatrixBatch, MuonAlgorithm
from dmuown.algorithms.batch import Work
from dmuown.engine.exchange import wire_dtype
from dmuown.engine.layout import Shards
from dmuown.engine.owners import Block, Owners, Place
from dmuown.engine.plan import Bucket

T = TypeVar("T")


@dataclass
class Traffic:
    """Collectives that one rank enters, what it hands to them, and what it computes.

    Attributes:
        all_to_alls: Calls of all-to-all.
        all_gathers: Calls of all-gather, among replicas.
        all_reduces: Calls of all-reduce, for sums over a sharded axis.
        bytes_exchanged: Bytes sent to other ranks by all-to-alls and all-gathers (to each of them).
        bytes_reduced: Bytes handed to all-reduces.
        matrices: Logical matrices orthogonalized, a fused weight's blocks counted singly.
        flops: Floating-point operations of orthogonalizing them, plain iteration counted.
    """

    all_to_alls: int = 0
    all_gathers: int = 0
    all_reduces: int = 0
    bytes_exchanged: int = 0
    bytes_reduced: int = 0
    matrices: int = 0
    flops: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def bucket_traffic(
    bucket: Bucket,
    algorithm: MuonAlgorithm,
    options: Mapping[str, Any],
    owners: Owners,
    rank: int | None,
    coordinate: tuple[int, ...],
    chunks: Sequence[Sequence[int]],
    known: dict[tuple[object, ...], list[int]],
) -> Traffic:
    """Count one bucket's traffic on one rank, when all its parameters step.

    Args:
        bucket: The bucket.
        algorithm: Its algorithm.
        options: Its group.
        owners: Owners of the units that this rank shares (`owners.assign_owners`).
        rank: Global rank; None for plain tensors.
        coordinate: Its coordinate in the bucket's mesh.
        chunks: Indices of the bucket's parameters that are updated together.
        known: Reductions counted before; most ranks have the same.
    """
    layout = bucket.layout
    here = -1 if layout.mesh is None or rank is None else rank
    replica = next(number for number, ranks in enumerate(owners.team) if here in ranks)
    position = owners.team[replica].index(here)
    per_param = bucket.units_at(coordinate) // len(bucket.params)
    total = Traffic()
    for chunk in chunks:
        units = [owners.places[index * per_param + unit] for index in chunk for unit in range(per_param)]
        total += _exchange(bucket, owners.team, units, replica, position, coordinate)
        held = layout.shards_at(coordinate)
        key = (id(bucket), len(chunk), per_param, held.row_count, held.col_count)
        if key not in known:
            known[key] = _reductions(bucket, algorithm, options, len(chunk), per_param, held)
        for size in known[key]:
            total += Traffic(all_reduces=1, bytes_reduced=size)
    return total


def _exchange(
    bucket: Bucket,
    team: Block,
    units: Sequence[Place],
    replica: int,
    position: int,
    coordinate: tuple[int, ...],
) -> Traffic:
    layout, orthogonalizer = bucket.layout, bucket.orthogonalizer
    held = layout.shards_at(coordinate).numel
    mine = [place.owner for place in units if place.replica == replica]
    owned = mine.count(position)
    done = Traffic(
        matrices=owned * bucket.matrices_per_unit,
        flops=owned * bucket.flops_per_unit,
    )
    if len(team[replica]) > 1 and mine:
        sent = (len(mine) - owned) * held * wire_dtype(orthogonalizer.dtype).itemsize
        returned = owned * (layout.m * layout.n - held) * orthogonalizer.dtype.itemsize
        done += Traffic(all_to_alls=2, bytes_exchanged=sent + returned)
    longest = max(sum(place.replica == number for place in units) for number in range(len(team))) if units else 0
    if len(team) > 1 and longest * held:
        size = longest * held * orthogonalizer.dtype.itemsize
        done += Traffic(all_gathers=1, bytes_exchanged=size * (len(team) - 1))
    return done


# ---------------------------------------------------------------------- reductions


@dataclass
class _RecordingBatch(MatrixBatch):
    """Runs no reduction, and notes how many bytes each would take."""

    sums_rows: bool = False
    sums_columns: bool = False
    sizes: list[int] = field(default_factory=list)

    def sum_rows(self, partial: Sequence[Tensor]) -> Work[list[Tensor]]:
        self._note(self.sums_rows, partial)
        return list(partial)
        yield

    def sum_blocks(self, rows: Sequence[Tensor]) -> Work[list[Tensor]]:
        blocks = 1 if self.block_rows is None else len(self.block_rows)
        self._note(self.sums_columns, [row.new_empty(*row.shape[:-2], blocks) for row in rows])
        return (yield from super().sum_blocks(rows))

    def _note(self, reduces: bool, tensors: Sequence[Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if reduces and size:
            self.sizes.append(size)


def _reductions(
    bucket: Bucket,
    algorithm: MuonAlgorithm,
    options: Mapping[str, Any],
    count: int,
    batch: int,
    held: Shards,
) -> list[int]:
    """Bytes of every all-reduce of one chunk, in order."""
    layout = bucket.layout
    if not (layout.row_dims or layout.col_dims):
        return []
    dtype = bucket.params[0].dtype

    def meta(*shape: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device="meta") for _ in range(count)]

    state: dict[str, list[Tensor]] = {}
    for key, spec in algorithm.state_spec.items():
        if spec.like == "scalar":
            state[key] = [torch.zeros(()) for _ in range(count)]
        elif spec.like == "grad_rows":
            state[key] = meta(batch, held.row_count, 1, dtype=spec.dtype or torch.float32)
        else:
            state[key] = meta(batch, held.row_count, held.col_count, dtype=spec.dtype or dtype)
    block_of_row = None
    if bucket.block_row_counts is not None:
        block_of_row = torch.zeros(held.row_count, dtype=torch.int64, device="meta")
    recording = _RecordingBatch(
        names=[""] * count,
        weights=meta(batch, held.row_count, held.col_count, dtype=dtype),
        gradients=meta(batch, held.row_count, held.col_count, dtype=dtype),
        state=state,
        options=dict(options),
        m=layout.m,
        n=layout.n,
        block_rows=bucket.block_row_counts,
        block_of_row=block_of_row,
        sums_rows=bool(layout.col_dims),
        sums_columns=bool(layout.row_dims),
    )
    with torch.no_grad():
        momentum = algorithm.update_momentum(recording, _result(algorithm.prepare_gradient(recording)))
        update = [torch.empty_like(matrix, dtype=bucket.orthogonalizer.dtype) for matrix in momentum]
        _result(algorithm.apply(recording, _result(algorithm.shape_update(recording, update))))
    return recording.sizes


def _result(work: Generator[None, None, T]) -> T:
    """Run a phase to its end."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            value: T = stop.value
            return value
