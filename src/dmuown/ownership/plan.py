"""What will be communicated: a pure plan, printable and compared across ranks before the first collective.

A transfer is what one collective carries: all parameters of one boundary (or, where tied weights are
used in several, of that set of boundaries) with the same owner and dtypes. It is fetched before the
boundary's forward, fetched again before its backward if it was given up in between, and its gradients
are reduced after the backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dmuown.ownership.boundaries import Boundary

# Members of a buffer start at multiples of this many bytes, so that kernels can read them in vectors.
_ALIGNMENT = 16

Kind = Literal["owner", "shards"]


@dataclass(frozen=True)
class Entry:
    """A parameter as the plan sees it.

    Attributes:
        name: Canonical name.
        shape: Shape that each rank's module computes with (of the local part under tensor parallelism).
        route: `muon`, `adamw` or `sharded_adamw`.
        owner: Rank within the group; None for `sharded_adamw`.
        boundaries: Indices of its boundaries.
        param_dtype: Dtype of the transfer and of forward and backward.
        grad_dtype: Dtype of the gradient's buffer and reduction.
        trainable: Whether it takes gradients.
    """

    name: str
    shape: tuple[int, ...]
    route: str
    owner: int | None
    boundaries: tuple[int, ...]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    trainable: bool = True


@dataclass(frozen=True)
class Member:
    """A parameter's place in a transfer.

    Attributes:
        name: Canonical name.
        shape: Shape to compute with.
        numel: Elements of that shape.
        offset: First element: in the whole buffer (kind `owner`), in each rank's segment (`shards`).
        span: Elements taken there: `numel`, or the padded shard of one rank.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int
    span: int


@dataclass(frozen=True)
class Transfer:
    """One collective to fetch, one to reduce.

    Attributes:
        index: Position in the plan.
        kind: `owner`: broadcast and reduce. `shards`: all-gather and reduce-scatter.
        owner: Rank within the group; -1 for `shards`.
        boundaries: Indices of the boundaries that use it, ascending.
        members: The parameters.
        param_dtype: Dtype when fetched.
        grad_dtype: Dtype when reduced.
        trainable: Whether gradients are reduced.
        segment: Elements of the buffer (kind `owner`), or of one rank's part of it (`shards`).
        world_size: Ranks that take part.
    """

    index: int
    kind: Kind
    owner: int
    boundaries: tuple[int, ...]
    members: tuple[Member, ...]
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    trainable: bool
    segment: int
    world_size: int

    @property
    def fetch_numel(self) -> int:
        """Elements of the whole fetched buffer."""
        return self.segment * (self.world_size if self.kind == "shards" else 1)

    @property
    def reduce_segment(self) -> int:
        """Elements of one reduced segment: the gradients, and one flag per member that says if any rank had one."""
        return self.segment + len(self.members)

    @property
    def reduce_numel(self) -> int:
        """Elements of the whole buffer of gradients."""
        return self.reduce_segment * (self.world_size if self.kind == "shards" else 1)

    @property
    def fetch_bytes(self) -> int:
        """Bytes of the whole fetched buffer."""
        return self.fetch_numel * self.param_dtype.itemsize

    @property
    def reduce_bytes(self) -> int:
        """Bytes of the whole buffer of gradients."""
        return self.reduce_numel * self.grad_dtype.itemsize

    def describe(self) -> str:
        """One line, equal on all ranks that agree: where, from whom, bytes and dtype of each buffer, and what."""
        who = f"from {self.owner}" if self.kind == "owner" else "from shards"
        names = ", ".join(f"{member.name}{list(member.shape)}" for member in self.members)
        fetched = f"fetch {self.fetch_bytes:,} B {_short(self.param_dtype)}"
        # The dtype of gradients also of what is frozen now: it may be unfrozen, and ranks have to agree on it.
        reduced = f"reduce {self.reduce_bytes:,} B" if self.trainable else "frozen, reduce 0 B"
        return (
            f"transfer {self.index} at {list(self.boundaries)} {who}, {fetched}, {reduced} "
            f"{_short(self.grad_dtype)}: {names}"
        )


@dataclass(frozen=True)
class OwnershipPlan:
    """Who owns what, and every transfer of a step.

    Attributes:
        world_size: Ranks of the group.
        boundaries: In forward order.
        transfers: In the order in which forward passes fetch them.
        entries: The parameters by name.
        reshard_after_forward: Whether parameters are given up between forward and backward.
        shard_size: Ranks of a replica, where owners' transfers go in two stages: between replicas, among the ranks at
            the owner's place in each, and within replicas. None: in one stage.
    """

    world_size: int
    boundaries: tuple[Boundary, ...]
    transfers: tuple[Transfer, ...]
    entries: Mapping[str, Entry]
    reshard_after_forward: bool
    shard_size: int | None = None

    @property
    def owners(self) -> dict[str, int | None]:
        """Owner (rank within the group) by parameter name; None for `sharded_adamw`."""
        return {name: entry.owner for name, entry in self.entries.items()}

    def per_step(
        self, *, microbatches: int = 1, deferred: bool = False, rank: int | None = None
    ) -> dict[str, dict[str, int]]:
        """Count collectives and bytes of one optimizer step.

        Args:
            microbatches: Forward and backward passes.
            deferred: Whether all passes but the last run under `no_sync`.
            rank: Count what this rank of the group calls, both stages of a transfer; None counts transfers.

        Returns:
            By kind of collective: `collectives`, and `bytes` of the buffers (which a rank receives but for its own
            part; summed over ranks, a collective moves `bytes` times world size minus one). Kinds that do not
            occur are left out.
        """
        totals: dict[str, dict[str, int]] = {}

        def add(kind: str, times: int, size: int) -> None:
            if times and self.world_size > 1:
                total = totals.setdefault(kind, {"collectives": 0, "bytes": 0})
                total["collectives"] += times
                total["bytes"] += times * size

        fetches = microbatches * (2 if self.reshard_after_forward else 1)
        for transfer in self.transfers:
            owned = transfer.kind == "owner"
            size = self.shard_size
            relays = rank is not None and owned and size is not None and rank % size == transfer.owner % size
            stages = 2 if relays else 1
            add("broadcast" if owned else "all_gather", fetches * stages, transfer.fetch_bytes)
            reductions = (1 if deferred else microbatches) if transfer.trainable else 0
            add("reduce" if owned else "reduce_scatter", reductions * stages, transfer.reduce_bytes)
        return totals

    def lines(self) -> list[str]:
        """The plan as text; ranks that agree have equal lines."""
        head = f"{self.world_size} ranks, reshard_after_forward={self.reshard_after_forward}"
        if self.shard_size is not None:
            head += f", in replicas of {self.shard_size}"
        boundaries = [f"boundary {entry.index} (backward {entry.backward}): {entry.label}" for entry in self.boundaries]
        return [head, *boundaries, *(transfer.describe() for transfer in self.transfers)]

    def __str__(self) -> str:
        totals = self.per_step()
        told = [f"{total['collectives']} {kind} of {total['bytes']:,} B together" for kind, total in totals.items()]
        times = "twice, before forward and before backward," if self.reshard_after_forward else "once"
        return "\n".join(
            [
                *self.lines(),
                f"bytes are those of whole buffers; a micro-batch fetches each {times} and reduces it once",
                f"per step of one micro-batch: {', '.join(told) or 'no communication'}",
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as data that JSON can hold."""
        return {
            "world_size": self.world_size,
            "reshard_after_forward": self.reshard_after_forward,
            "owners": self.owners,
            "boundaries": [entry.name for entry in self.boundaries],
            "transfers": [
                {
                    "kind": transfer.kind,
                    "owner": transfer.owner if transfer.kind == "owner" else None,
                    "boundaries": [self.boundaries[index].name for index in transfer.boundaries],
                    "params": [member.name for member in transfer.members],
                    "param_dtype": _short(transfer.param_dtype),
                    "grad_dtype": _short(transfer.grad_dtype),
                    "fetch_bytes": transfer.fetch_bytes,
                    "reduce_bytes": transfer.reduce_bytes if transfer.trainable else 0,
                }
                for transfer in self.transfers
            ],
            "per_step": self.per_step(),
        }


def build_plan(
    entries: Sequence[Entry],
    boundaries: Sequence[Boundary],
    *,
    world_size: int,
    reshard_after_forward: bool = True,
    shard_size: int | None = None,
) -> OwnershipPlan:
    """Group parameters into transfers; see the module's text."""
    grouped: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        kind: Kind = "shards" if entry.owner is None else "owner"
        key = (entry.boundaries, kind, entry.owner, entry.param_dtype, entry.grad_dtype, entry.trainable)
        grouped.setdefault(key, []).append(entry)
    # Fetching goes by first use; the order of boundaries and owners is the same on every rank, dtypes by name.
    ordered = sorted(
        grouped.items(), key=lambda item: (item[0][0], item[0][1], item[0][2] or 0, *map(str, item[0][3:5]), item[0][5])
    )
    transfers = tuple(_transfer(index, group, world_size) for index, (_, group) in enumerate(ordered))
    return OwnershipPlan(
        world_size,
        tuple(boundaries),
        transfers,
        {entry.name: entry for entry in entries},
        reshard_after_forward,
        shard_size,
    )


def shard_rows(rows: int, world_size: int) -> int:
    """Rows of a full shard, as DTensor's `Shard(0)` cuts them: the last ranks may hold fewer or none."""
    return -(-rows // world_size)


def _transfer(index: int, entries: Sequence[Entry], world_size: int) -> Transfer:
    first = entries[0]
    kind: Kind = "shards" if first.owner is None else "owner"
    align = max(1, _ALIGNMENT // first.param_dtype.itemsize)
    members: list[Member] = []
    offset = 0
    for entry in entries:
        numel = math.prod(entry.shape)
        span = numel
        if kind == "shards":
            span = shard_rows(entry.shape[0], world_size) * math.prod(entry.shape[1:])
        members.append(Member(entry.name, entry.shape, numel, offset, span))
        offset += -(-span // align) * align if len(entries) > 1 else span
    return Transfer(
        index=index,
        kind=kind,
        owner=first.owner if first.owner is not None else -1,
        boundaries=first.boundaries,
        members=tuple(members),
        param_dtype=first.param_dtype,
        grad_dtype=first.grad_dtype,
        trainable=first.trainable,
        segment=offset,
        world_size=world_size,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
