"""Who owns what: a pure, deterministic assignment of parameters to owners.

Longest processing time first: the costliest parameters are placed first, each with the owner that has
the least to do. Two rules come before balance: parameters of one boundary go to different owners as
long as there are unused ones, so that their broadcasts run at once, and small parameters of a boundary
stay together with an owner that sends something there anyway, so that they cost no collective of
their own.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

# An element of optimizer state traffic in floating-point operations: AdamW reads and writes about 28 bytes
# per element, in which time an H200 (4.8 TB/s, about 1e15 bf16 operations per second) does 6000 operations.
_OPERATIONS_PER_ELEMENT = 6000
_ORTHOGONALIZATION_STEPS = 5
# A parameter below this, or below half of its owner's fair share of the boundary, is packed with others.
_SMALL_NUMEL = 5_000_000


@dataclass(frozen=True)
class Item:
    """A parameter to be placed.

    Attributes:
        name: Canonical name.
        shape: Logical shape, `[..., output, input]`.
        boundary: Index of the boundary that it belongs to.
        matrix: Whether it is orthogonalized (route `muon`).
    """

    name: str
    shape: tuple[int, ...]
    boundary: int
    matrix: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def step_cost(shape: Sequence[int], matrix: bool) -> int:
    """Return the cost of one optimizer step of a parameter, in floating-point operations.

    For an m x n matrix, m <= n, one quintic Newton-Schulz step is two products of m x m by m x n
    (2 m^2 n operations each) and one of m x m by m x m.
    """
    numel = math.prod(shape)
    cost = _OPERATIONS_PER_ELEMENT * numel
    if matrix and len(shape) >= 2 and numel:
        small, large = sorted(shape[-2:])
        count = math.prod(shape[:-2])
        cost += _ORTHOGONALIZATION_STEPS * count * (4 * small * small * large + 2 * small**3)
    return cost


def assign_owners(items: Sequence[Item], slots: int) -> dict[str, int]:
    """Assign every item to an owner.

    Args:
        items: Parameters, in an order that is the same on every rank.
        slots: Number of owners: the ranks of the (replicate x) shard mesh.

    Returns:
        Owner in `range(slots)` by name. It depends on names, shapes and boundaries only.
    """
    load = [0] * slots
    used: dict[int, Counter[int]] = defaultdict(Counter)  # by boundary: units by owner; asking adds no entry
    owners: dict[str, int] = {}

    def place(unit: Sequence[Item], candidates: Sequence[int]) -> None:
        in_boundary = used[unit[0].boundary]
        slot = min(candidates, key=lambda index: (in_boundary[index], load[index], index))
        in_boundary[slot] += 1
        load[slot] += sum(step_cost(item.shape, item.matrix) for item in unit)
        owners.update((item.name, slot) for item in unit)

    small = _small_names(items, slots)
    large = [item for item in items if item.name not in small]
    for item in sorted(large, key=lambda entry: -step_cost(entry.shape, entry.matrix)):
        place([item], range(slots))
    packed: dict[int, list[Item]] = defaultdict(list)
    for item in items:
        if item.name in small:
            packed[item.boundary].append(item)
    for boundary, unit in packed.items():
        senders = sorted(used[boundary])
        if senders:
            slot = min(senders, key=lambda index: (load[index], index))
            place(unit, [slot])
        else:
            place(unit, range(slots))
    return {item.name: owners[item.name] for item in items}


def _small_names(items: Sequence[Item], slots: int) -> set[str]:
    totals: dict[int, int] = defaultdict(int)
    for item in items:
        totals[item.boundary] += item.numel
    return {item.name for item in items if item.numel < min(_SMALL_NUMEL, totals[item.boundary] // (2 * slots))}
