"""The code of the runtime that communicates in passes: one buffer per transfer of the plan.

Buffers keep their tensors and resize the storage under them: zero bytes between boundaries, and the
same memory object whenever they are whole, so that what autograd saved in forward is valid again once
the buffer is refetched in backward. Autograd sees the compute parameters; the data arrive through
other tensors on the same storage, which leave the version counters that autograd checks alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuown.engine.collectives import all_gather, reduce_scatter
from dmuown.errors import OwnershipError
from dmuown.ownership.link import InFlight, Link
from dmuown.ownership.plan import Member, Transfer
from dmuown.ownership.record import GradState, Record, State, check_transition


class Buffer:
    """A transfer of the plan on this rank: parameters to compute with, and gradients on their way home.

    Attributes:
        transfer: The plan's entry.
        records: Its parameters, in the order of `transfer.members`.
        state: Where the data are.
        grad_state: What has become of the gradients.
        label: Names of its boundaries, for messages.
        on_gradient: Called after a gradient was collected.
    """

    def __init__(self, transfer: Transfer, records: Sequence[Record], link: Link, label: str) -> None:
        self.transfer = transfer
        self.records = tuple(records)
        self.link = link
        self.label = label
        self.on_gradient: Callable[[Buffer], None] = lambda buffer: None
        self.state = State.HOME
        self.grad_state = GradState.NONE
        self._flat: Tensor | None = None
        self._grads: Tensor | None = None
        self._arrived = [False] * len(self.records)
        self._arrived_now: set[int] = set()
        self._fetching = InFlight()
        self._reducing = InFlight()
        self._reduced: Tensor | None = None
        self._kept = False

    # ---- parameters ----

    def fetch(self) -> None:
        """Start to make the parameters whole. All ranks, in the same order of buffers."""
        check_transition(self.state, State.FETCHING, self.label)
        device = self.records[0].device
        # Buffers outlive an inference-mode pass and serve training passes after it: they are no inference tensors.
        with self._named("fetch"), torch.inference_mode(False), torch.no_grad():
            self._start_fetch(self._allocate(device))
        self.state = State.FETCHING

    def _start_fetch(self, flat: Tensor) -> None:
        with self.link.fetching.enter(flat.device):
            if self.transfer.kind == "owner":
                self._fetch_from_owner(flat)
            else:
                self._fetch_from_shards(flat)
            self._fetching.event = self.link.fetching.mark()

    def wait(self) -> None:
        """Finish what `fetch` started and put the compute parameters in place."""
        if self.state is State.WHOLE:
            return
        check_transition(self.state, State.WHOLE, self.label)
        with self._named("fetch"), torch.inference_mode(False), torch.no_grad():
            self._fetching.wait()
            if self.transfer.kind == "shards":
                self._copy_out()
        self._fetching = InFlight()
        self.state = State.WHOLE
        for record in self.records:
            assert record.compute is not None
            record.compute.requires_grad_(record.home.requires_grad)
            record.install(record.compute)

    def release(self) -> None:
        """Put the homes back in place and free the memory of the whole parameters."""
        if self.state is State.HOME:
            return
        if self.state is State.FETCHING:
            self.wait()
        check_transition(self.state, State.HOME, self.label)
        for record in self.records:
            record.install(record.home)
        assert self._flat is not None
        self._flat.untyped_storage().resize_(0)
        self.state = State.HOME

    def _allocate(self, device: torch.device) -> Tensor:
        flat = self._flat
        dtype = self.transfer.param_dtype
        if flat is None or flat.device != device or any(record.compute is None for record in self.records):
            flat = self._flat = torch.empty(self.transfer.fetch_numel, dtype=dtype, device=device)
            for member, record in zip(self.transfer.members, self.records, strict=True):
                record.compute = self._compute_parameter(flat, member, record)
        else:
            flat.untyped_storage().resize_(self.transfer.fetch_bytes)
        return flat

    def _compute_parameter(self, flat: Tensor, member: Member, record: Record) -> nn.Parameter:
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        # A tensor of its own on the buffer's storage: writes through `flat` do not touch its version counter.
        view.set_(flat.untyped_storage(), self._start(member), member.shape, _contiguous_strides(member.shape))
        data: Tensor = view
        if record.tensor_parallel is not None:
            mesh, placements = record.tensor_parallel
            data = DTensor.from_local(
                view,
                mesh,
                placements,
                run_check=False,
                shape=torch.Size(record.shape),
                stride=_contiguous_strides(record.shape),
            )
        param = nn.Parameter(data)  # whether it takes gradients now is set whenever it is whole
        for key, value in vars(record.home).items():
            if not key.startswith(("_dmuown", "away_")):
                setattr(param, key, value)
        index = self.records.index(record)
        param.register_post_accumulate_grad_hook(lambda arrived: self.collect(index, arrived))
        return param

    def _start(self, member: Member) -> int:
        """First element of a member in the whole buffer."""
        if self.transfer.kind == "owner":
            return member.offset
        # Whole members follow one another, each padded to equal shards.
        return member.offset * self.transfer.world_size

    def _fetch_from_owner(self, flat: Tensor) -> None:
        link, transfer = self.link, self.transfer
        if link.rank == transfer.owner:
            parts = [flat.narrow(0, member.offset, member.numel).view(member.shape) for member in transfer.members]
            torch._foreach_copy_(parts, [record.local_home() for record in self.records])
        if link.group is not None:
            link.count("broadcast", transfer.fetch_bytes)
            self._fetching.work = link.broadcast(self._fetching.hold(flat), transfer.owner)

    def _fetch_from_shards(self, flat: Tensor) -> None:
        link, transfer = self.link, self.transfer
        segment = torch.empty(transfer.segment, dtype=transfer.param_dtype, device=flat.device)
        for member, record in zip(transfer.members, self.records, strict=True):
            shard = record.local_home()
            segment.narrow(0, member.offset, shard.numel()).copy_(shard.reshape(-1))
        # A single member arrives in place: its shards, one after the other, are the whole.
        gathered = flat if len(transfer.members) == 1 else torch.empty_like(flat)
        hold = self._fetching.hold
        if link.group is None:
            hold(gathered).copy_(segment)
        else:
            link.count("all_gather", transfer.fetch_bytes)
            self._fetching.work = all_gather(hold(gathered), hold(segment), group=link.group, async_op=True)

    def _copy_out(self) -> None:
        flat, gathered = self._flat, self._fetching.held[0]
        assert flat is not None
        if gathered is flat:
            return
        shards = gathered.view(self.transfer.world_size, self.transfer.segment)
        for member in self.transfer.members:
            size = member.span * self.transfer.world_size
            whole = flat.narrow(0, self._start(member), size).view(self.transfer.world_size, member.span)
            whole.copy_(shards.narrow(1, member.offset, member.span))

    # ---- gradients ----

    @property
    def takes_gradients(self) -> bool:
        """Whether any member takes gradients now."""
        return any(record.home.requires_grad for record in self.records)

    @property
    def complete(self) -> bool:
        """Whether every member that takes gradients got one in this backward pass."""
        return all(
            index in self._arrived_now or not record.home.requires_grad for index, record in enumerate(self.records)
        )

    def collect(self, index: int, param: Tensor) -> None:
        """Move a gradient that autograd accumulated into the buffer of gradients."""
        grad, param.grad = param.grad, None
        if grad is None:
            return
        record, member = self.records[index], self.transfer.members[index]
        if isinstance(grad, DTensor):
            assert record.tensor_parallel is not None
            grad = grad.redistribute(placements=record.tensor_parallel[1]).to_local()
        if self.grad_state is GradState.REDUCING:
            # A use of the parameter that the boundary's inputs and outputs do not show: reduce once more.
            self.finish()
        with torch.no_grad():
            buffer = self._gradient_buffer(grad.device)
            for target, source in self._gradient_parts(buffer, member, grad):
                if self._arrived[index]:
                    target.add_(source)
                else:
                    target.copy_(source)
        self._arrived[index] = True
        self._arrived_now.add(index)
        self.on_gradient(self)

    def _gradient_buffer(self, device: torch.device) -> Tensor:
        if self._grads is None:
            check_transition(self.grad_state, GradState.COLLECTING, self.label)
            self._grads = torch.empty(self.transfer.reduce_numel, dtype=self.transfer.grad_dtype, device=device)
            self.grad_state = GradState.COLLECTING
        return self._grads

    def _gradient_parts(self, buffer: Tensor, member: Member, grad: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of a part of the buffer and what goes there; zeros if `grad` is None."""
        if self.transfer.kind == "owner":
            part = buffer.narrow(0, member.offset, member.numel).view(member.shape)
            yield part, grad if grad is not None else part.new_zeros(()).expand_as(part)
            return
        world_size = self.transfer.world_size
        segments = buffer.view(world_size, self.transfer.reduce_segment).narrow(1, member.offset, member.span)
        if grad is None:
            yield segments, segments.new_zeros(()).expand_as(segments)
            return
        flat = grad.reshape(-1)
        if flat.numel() == segments.numel():
            yield segments, flat.view(world_size, member.span)
            return
        for rank in range(world_size):
            start = min(rank * member.span, flat.numel())
            size = min(member.span, flat.numel() - start)
            if size:
                yield segments[rank].narrow(0, 0, size), flat.narrow(0, start, size)

    def reduce(self) -> None:
        """Start to reduce the gradients to their owner or shards. All ranks, in the same order of buffers.

        A member without a gradient on this rank takes part with zeros.
        """
        device = self.records[0].device
        buffer = self._gradient_buffer(device)
        check_transition(self.grad_state, GradState.REDUCING, self.label)
        link, transfer = self.link, self.transfer
        with self._named("reduction of gradients"), torch.no_grad():
            for index, member in enumerate(transfer.members):
                if not self._arrived[index]:
                    for target, source in self._gradient_parts(buffer, member, None):
                        target.copy_(source)
            flags = buffer.view(-1, transfer.reduce_segment).narrow(1, transfer.segment, len(transfer.members))
            flags.copy_(torch.tensor(self._arrived, dtype=flags.dtype).to(device, non_blocking=True).expand_as(flags))
            if transfer.grad_dtype == torch.float16:
                buffer.div_(link.world_size)  # before the sum, which could overflow
            with link.reducing.enter(device):
                self._reduced = buffer
                if link.group is not None:
                    self._start_reduction(buffer)
                self._reducing.event = link.reducing.mark()
        self.grad_state = GradState.REDUCING

    def _start_reduction(self, buffer: Tensor) -> None:
        link, transfer = self.link, self.transfer
        hold = self._reducing.hold
        if transfer.kind == "owner":
            link.count("reduce", transfer.reduce_bytes)
            self._reducing.work = link.reduce(hold(buffer), transfer.owner)
            return
        link.count("reduce_scatter", transfer.reduce_bytes)
        self._reduced = buffer.new_empty(transfer.reduce_segment)
        self._reducing.work = reduce_scatter(hold(self._reduced), hold(buffer), group=link.group, async_op=True)

    def finish(self) -> None:
        """Finish what `reduce` started: averages go to the homes' `.grad`, where this rank has them."""
        with self._named("reduction of gradients"):
            self._reducing.wait()
        reduced, arrived = self._reduced, self._arrived
        assert reduced is not None
        self.drop_gradients()
        with torch.no_grad():
            here = self.transfer.kind == "shards" or self.link.rank == self.transfer.owner
            if here and self.transfer.grad_dtype != torch.float16:
                reduced.div_(self.link.world_size)
            for index, (member, record) in enumerate(zip(self.transfer.members, self.records, strict=True)):
                if not record.owned or not record.home.requires_grad:
                    continue
                # The flag is read, which waits for the device, only where this rank had no gradient itself.
                if arrived[index] or float(reduced[self.transfer.segment + index]) > 0:
                    _deposit(record, reduced.narrow(0, member.offset, member.span))

    def keep_gradients(self) -> None:
        """Leave what was collected for the next backward pass, as under `no_sync`."""
        self._kept = self.grad_state is GradState.COLLECTING
        self._arrived_now.clear()

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced, as after an exception."""
        self._grads = None
        self._reduced = None
        self._reducing = InFlight()
        self._arrived = [False] * len(self.records)
        self._arrived_now.clear()
        self._kept = False
        if self.grad_state is not GradState.NONE:
            check_transition(self.grad_state, GradState.NONE, self.label)
            self.grad_state = GradState.NONE

    # ---- both ----

    def reset(self) -> None:
        """Return to the state between steps after a step that was left by an exception."""
        for pending in (self._fetching, self._reducing):
            with contextlib.suppress(Exception):
                pending.wait()
        if self.state is State.FETCHING:
            self.state = State.WHOLE
        self.release()
        if not self._kept:
            self.drop_gradients()

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except OwnershipError:
            raise
        except Exception as error:
            names = ", ".join(record.name for record in self.records[:3])
            raise OwnershipError(
                f"boundary {self.label}",
                f"the {what} of {names}{', ...' if len(self.records) > 3 else ''} failed: {error}",
                "Most likely another rank left the step: look for the first error of the other ranks",
            ) from error


def _deposit(record: Record, average: Tensor) -> None:
    """Add an averaged gradient to the home's."""
    home = record.home
    if isinstance(home, DTensor):
        local = home.to_local()
        grad: Tensor = average.narrow(0, 0, local.numel()).view(local.shape).to(record.home_grad_dtype)
        grad = DTensor.from_local(
            grad, home.device_mesh, home.placements, run_check=False, shape=home.shape, stride=home.stride()
        )
    else:
        grad = average.view(record.local_shape).to(record.home_grad_dtype)
    if home.grad is None:
        home.grad = grad
    else:
        home.grad.add_(grad)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
