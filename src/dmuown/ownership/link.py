"""What transfers go over: the process group, streams on CUDA, collectives in flight, and counts."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dmuown.engine.groups import control_group
from dmuown.engine.lent import Loan, on_loan
from dmuown.ownership.group import Stages


class Lane:
    """A stream of its own on CUDA; on the CPU, nothing.

    Work in the lane starts after what the caller's stream has been given so far.
    """

    def __init__(self) -> None:
        self._stream: Any = None

    @contextlib.contextmanager
    def enter(self, device: torch.device) -> Iterator[None]:
        """Run the body in the lane."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            # Communication comes first where it competes with compute for the scheduler.
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """Return an event after the lane's work so far; None on the CPU."""
        return self._stream.record_event() if self._stream is not None else None


class Link:
    """The process group, the lanes, and counts of what went over them.

    Attributes:
        group: The runtime's group; None for one rank.
        rank: This rank within it.
        ranks: Global ranks, by rank within it.
        stages: Groups of the replicate and the shard dimension, where there are both.
        control: A group of the same ranks that takes CPU tensors, for messages between hosts.
        counts: By kind of collective, `[collectives, bytes]` so far; messages between hosts are not counted.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, ranks: Sequence[int], stages: Stages | None = None
    ) -> None:
        self.group = group
        self.stages = stages
        self.control = _control_of(group, ranks)
        self.rank = rank
        self.ranks = tuple(ranks)
        self.fetching = Lane()
        self.reducing = Lane()
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def broadcast(self, tensor: Tensor, owner: int) -> Any:
        """Start to send the owner's tensor to all ranks; with two dimensions, to each replica once, and on in it."""
        source = self.ranks[owner]
        if self.stages is None:
            return dist.broadcast(tensor, src=source, group=self.group, async_op=True)
        column, relay = self._relay(owner)
        if column:
            # On NCCL this stream waits and the host goes on; on gloo the host waits, in the order of all ranks.
            first: Any = dist.broadcast(tensor, src=source, group=self.stages.replicate, async_op=True)
            first.wait()
        return dist.broadcast(tensor, src=relay, group=self.stages.shard, async_op=True)

    def reduce(self, tensor: Tensor, owner: int) -> Any:
        """Start to sum all ranks' tensors at the owner; with two dimensions, within each replica and then between."""
        target = self.ranks[owner]
        if self.stages is None:
            return dist.reduce(tensor, dst=target, group=self.group, async_op=True)
        column, relay = self._relay(owner)
        work: Any = dist.reduce(tensor, dst=relay, group=self.stages.shard, async_op=True)
        if column:
            work.wait()
            work = dist.reduce(tensor, dst=target, group=self.stages.replicate, async_op=True)
        return work

    def _relay(self, owner: int) -> tuple[bool, int]:
        """Whether this rank is at the owner's place in its replica, and the global rank that is."""
        assert self.stages is not None
        size = self.stages.size
        place = owner % size
        return self.rank % size == place, self.ranks[self.rank - self.rank % size + place]

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return which flags are set on any rank. All ranks; hosts wait for each other, devices do not."""
        if self.control is None or not flags:
            return list(flags)
        message = torch.tensor(flags, dtype=torch.int32)
        on_loan(dist.all_reduce, message, op=dist.ReduceOp.MAX, group=self.control)
        return [bool(value) for value in message.tolist()]

    def count(self, kind: str, size: int) -> None:
        """Note one collective of `size` bytes."""
        entry = self.counts[kind]
        entry[0] += 1
        entry[1] += size


def _control_of(group: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """The group itself where it takes CPU tensors; else one made for it, which is collective."""
    if group is None:
        return None
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return control_group(tuple(ranks))
    return group


@dataclass
class InFlight:
    """A collective under way.

    Attributes:
        work: What to wait for; None for one rank.
        event: Mark in the lane after it; None on the CPU.
        held: Tensors that it reads or writes: kept until it is waited for.
    """

    work: Any = None
    event: Any = None
    held: list[Tensor] = field(default_factory=list)
    _loan: Loan = field(default_factory=Loan)

    def hold(self, tensor: Tensor) -> Tensor:
        """Keep a tensor that the collective reads or writes, and return what to give to it in its place."""
        self.held.append(tensor)
        return self._loan.lend(tensor)

    def wait(self) -> None:
        """Make the caller wait for it: the host on the CPU, its stream on CUDA."""
        work, self.work = self.work, None
        event, self.event = self.event, None
        if work is not None:
            work.wait()
            del work  # it holds the tensors too
            self._loan.settle()
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
