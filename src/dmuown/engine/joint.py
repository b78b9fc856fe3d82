"""Several small buckets as one task: what they want orthogonalized goes into one batch, whatever its shapes.

A small matrix takes less time than the launches that orthogonalize it. Matrices of unlike shapes are turned wide and
padded with zeros to a common one. Zeros stay zeros under every odd polynomial and add nothing to a norm, so that
each matrix gets what it would get alone, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from dmuown.orthogonalize import orthogonalize_blocks, select_backend

if TYPE_CHECKING:
    from dmuown.engine.exchange import ExchangeCount
    from dmuown.engine.plan import Bucket

T = TypeVar("T")

#: Buckets below so many operations are worth joining, by device. CUDA: 30 us of arithmetic on H200, where the launches
#: take as long. CPU: measured on two cores, see `docs/lab-log.md`.
_SMALL_FLOPS = {"cuda": 2e10, "cpu": 2e8}

#: How many times its own operations a joined matrix may cost with its padding, on average.
_MOST_PADDING = {"cuda": 2.0, "cpu": 1.3}


@dataclass
class Whole:
    """What a task asks its runner for: these matrices orthogonalized.

    Attributes:
        bucket: Where they come from.
        matrices: `[count, m, n]`, or None for nothing, which is asked for as well: tasks of all ranks keep in step.
            None once it is done.
        overwrite: Whether their memory may be used.
        result: What the runner puts here; an empty tensor for nothing.
    """

    bucket: Bucket
    matrices: Tensor | None
    overwrite: bool
    result: Tensor | None = None

    def take(self) -> Tensor:
        """The result, of which nothing is kept here: a value sent to a generator would stay with its sender."""
        result, self.result = self.result, None
        assert result is not None
        return result


#: A task of the step: yields None where a collective is in flight, and what it wants orthogonalized.
Asking = Generator[Whole | None, None, T]


@dataclass(frozen=True)
class Joint:
    """Buckets that are updated together.

    Attributes:
        buckets: One or several.
        rows: Rows of their common shape, the shorter side. On every rank and in every step the same, whoever has a
            matrix or a gradient: what a matrix gets does not depend on its neighbours.
        columns: Columns of it.
    """

    buckets: tuple[Bucket, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Joint:
        """Those buckets, with the smallest shape that holds all of them."""
        sides = [_wide(bucket) for bucket in buckets]
        return cls(tuple(buckets), max(rows for rows, _ in sides), max(columns for _, columns in sides))


def _wide(bucket: Bucket) -> tuple[int, int]:
    shorter, longer = sorted((bucket.layout.m, bucket.layout.n))
    return shorter, longer


def join(buckets: Sequence[Bucket], kinds: Sequence[str | None]) -> list[Joint]:
    """Join small buckets of one audience that ask at the same time. Pure; the same on every rank.

    Args:
        buckets: In the order of their updates.
        kinds: For each, its algorithm, or None where its options forbid joining it.

    Returns:
        All buckets once, in the order of the first of each joint.
    """
    order = {id(bucket): position for position, bucket in enumerate(buckets)}
    joints: list[list[Bucket]] = []
    waiting: dict[Any, list[Bucket]] = {}
    for bucket, kind in zip(buckets, kinds, strict=True):
        small = _flops(bucket, *_wide(bucket)) < _SMALL_FLOPS.get(bucket.device.type, 0.0) and not bucket.is_empty
        if (
            kind is None
            or not small
            or bucket.blocks
            or bucket.orthogonalizer.function is not None
            or _replicas(bucket) > 2
        ):
            joints.append([bucket])
        else:
            # Reductions of an algorithm over a cut axis, and an all-to-all, come before a task asks.
            moment = kind, bucket.input_group is None, bucket.shard_group is None
            waiting.setdefault((bucket.device, bucket.orthogonalizer, moment), []).append(bucket)
    for fitting in waiting.values():
        joints += _group(sorted(fitting, key=_wide))
    found = [Joint.of(sorted(joint, key=lambda bucket: order[id(bucket)])) for joint in joints]
    return sorted(found, key=lambda joint: order[id(joint.buckets[0])])


def _replicas(bucket: Bucket) -> int:
    """Replicas that may be in several teams, each with a batch of its own, in which rounding could part them."""
    mesh = bucket.layout.mesh
    return 1 if mesh is None else math.prod(mesh.size(dim) for dim in bucket.layout.replicate_dims)


def _form(bucket: Bucket, rows: int, columns: int) -> str:
    """Whether matrices of a shape are iterated on themselves or on their Gram matrix, which rounds otherwise."""
    orthogonalizer = bucket.orthogonalizer
    shape = (len(bucket.params), rows, columns)
    ops = select_backend(orthogonalizer.backend, bucket.device, orthogonalizer.dtype, shape)
    return orthogonalizer.chosen_form(rows, columns, ops)


def _flops(bucket: Bucket, rows: int, columns: int) -> float:
    """Operations of orthogonalizing a bucket padded to so many rows and columns."""
    units = len(bucket.params) * bucket.most_units_per_param
    return units * 2.0 * bucket.orthogonalizer.steps * (2.0 * rows * rows * columns + rows**3)


def _group(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Each with the first group that it fits, from small to large."""
    groups: list[list[Bucket]] = []
    for bucket in buckets:
        fitting = next((group for group in groups if _worthwhile([*group, bucket])), None)
        if fitting is None:
            groups.append([bucket])
        else:
            fitting.append(bucket)
    return groups


def _worthwhile(buckets: Sequence[Bucket]) -> bool:
    joint, device = Joint.of(buckets), buckets[0].device.type
    own = sum(_flops(bucket, *_wide(bucket)) for bucket in buckets)
    padded = sum(_flops(bucket, joint.rows, joint.columns) for bucket in buckets)
    if padded > _MOST_PADDING[device] * own or padded > len(buckets) * _SMALL_FLOPS[device]:
        return False
    return (
        len({_form(bucket, *_wide(bucket)) for bucket in buckets} | {_form(buckets[0], joint.rows, joint.columns)}) == 1
    )


def run(joint: Joint, works: Sequence[Asking[None]], count: ExchangeCount) -> Generator[None, None, None]:
    """Run tasks side by side, and do together what they ask for at the same time.

    Args:
        joint: Their buckets.
        works: One a bucket, or part of one. On every rank they yield and ask equally often, so that their
            collectives come in the same order.
        count: Counters to add to.
    """
    live = list(works)
    while live:
        stopped = [(work, asked) for work in live for asked in _advance(work)]
        live = [work for work, _ in stopped]
        _answer(joint, [asked for _, asked in stopped if asked is not None], count)
        if any(asked is None for _, asked in stopped):
            yield


def _advance(work: Asking[None]) -> list[Whole | None]:
    """Run a task until it waits or asks: [None] or [what it asks for]; [] where it ends."""
    try:
        stopped = next(work)
    except StopIteration:
        return []
    # A phase of a third party may yield anything while it waits, such as the handle of its collective.
    return [stopped if isinstance(stopped, Whole) else None]


def _answer(joint: Joint, asked: Sequence[Whole], count: ExchangeCount) -> None:
    given = [one for one in asked if one.matrices is not None]
    results = _padded(joint, given) if given and len(joint.buckets) > 1 else [_alone(one) for one in given]
    for one in asked:
        if one.matrices is None:
            one.result = torch.empty(0)
    for one, result in zip(given, results, strict=True):
        assert one.matrices is not None
        count.matrices += len(one.matrices) * one.bucket.matrices_per_unit
        if count.observe is not None:
            count.observe(one.bucket, result)
        one.matrices, one.result = None, result


def _alone(asked: Whole) -> Tensor:
    bucket = asked.bucket
    assert asked.matrices is not None
    result = orthogonalize_blocks(asked.matrices, bucket.blocks, bucket.orthogonalizer, overwrite=asked.overwrite)
    # A custom function may return another dtype; updates travel in the orthogonalizer's, whatever the layout.
    return result.to(bucket.orthogonalizer.dtype)


def _padded(joint: Joint, asked: Sequence[Whole]) -> list[Tensor]:
    """The same for matrices of unlike shapes: views of one result."""
    given = [one.matrices for one in asked if one.matrices is not None]
    size = sum(len(matrices) for matrices in given), joint.rows, joint.columns
    batch = torch.zeros(size, dtype=given[0].dtype, device=given[0].device)
    counts = [len(matrices) for matrices in given]
    for place, matrices in zip(batch.split(counts), given, strict=True):
        _shaped(place, matrices).copy_(matrices)
    done = asked[0].bucket.orthogonalizer(batch, overwrite=True).split(counts)
    return [_shaped(place, matrices) for place, matrices in zip(done, given, strict=True)]


def _shaped(place: Tensor, like: Tensor) -> Tensor:
    """The part of `[count, rows, columns]` that holds matrices `[count, m, n]`, turned as they are."""
    m, n = like.shape[1:]
    return place[:, :m, :n] if m <= n else place[:, :n, :m].mT


__all__ = ["Asking", "Joint", "Whole", "join", "run"]
