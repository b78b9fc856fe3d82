"""The order of all collectives of a pass: the same on every rank, whatever its own forward did.

A backward pass both fetches and reduces. Ranks finish boundaries at different times (one has no tokens
for an expert), so if each issued what is ready, one could wait for a fetch that another issues only
after a reduction that the first has not issued: a deadlock. Hence one order for both: a boundary's
reduction comes after the fetches that are ahead of it by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dmuown.ownership.plan import OwnershipPlan


@dataclass(frozen=True)
class Operation:
    """One step of a schedule.

    Attributes:
        kind: `fetch` or `reduce`.
        transfer: Index of the transfer.
    """

    kind: Literal["fetch", "reduce"]
    transfer: int


@dataclass(frozen=True)
class Schedule:
    """The collectives of a pass in order.

    Attributes:
        operations: In order.
        entered: By boundary index, how many operations are issued once all its fetches are.
        ahead: Likewise, with the boundaries that are prefetched.
        position: Position by boundary index in the order in which the pass enters boundaries.
    """

    operations: tuple[Operation, ...]
    entered: dict[int, int]
    ahead: dict[int, int]
    position: dict[int, int]


def forward_schedule(plan: OwnershipPlan, prefetch: int) -> Schedule:
    """Return the fetches of a forward pass."""
    order = [boundary.index for boundary in plan.boundaries]
    return _schedule(plan, order, prefetch, fetches=True, reductions=False)


def backward_schedule(plan: OwnershipPlan, prefetch: int) -> Schedule:
    """Return the fetches of a backward pass (none if parameters stayed whole) and its reductions.

    Those of frozen parameters too, which may be unfrozen later; the runtime passes over what takes no gradients.
    """
    order = sorted((boundary.index for boundary in plan.boundaries), key=lambda index: plan.boundaries[index].backward)
    return _schedule(plan, order, prefetch, fetches=plan.reshard_after_forward, reductions=True)


def _schedule(plan: OwnershipPlan, order: Sequence[int], prefetch: int, *, fetches: bool, reductions: bool) -> Schedule:
    position = {index: place for place, index in enumerate(order)}
    fetched: dict[int, list[int]] = {}
    reduced: dict[int, list[int]] = {}
    for transfer in plan.transfers:
        if fetches:
            fetched.setdefault(min(position[use] for use in transfer.boundaries), []).append(transfer.index)
        if reductions:
            last = max(plan.boundaries[use].backward_end for use in transfer.boundaries)
            reduced.setdefault(last, []).append(transfer.index)
    operations: list[Operation] = []
    counts: list[int] = []
    lag = prefetch + 1
    for place in range(len(order) + lag):
        operations += [Operation("fetch", index) for index in fetched.get(place, ())]
        if place < len(order):
            counts.append(len(operations))
        operations += [Operation("reduce", index) for index in reversed(reduced.get(place - lag, []))]
    return Schedule(
        operations=tuple(operations),
        entered={index: counts[place] if fetches else 0 for place, index in enumerate(order)},
        ahead={
            index: counts[min(place + prefetch, len(order) - 1)] if fetches else 0 for place, index in enumerate(order)
        },
        position=position,
    )
