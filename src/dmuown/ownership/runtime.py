"""When transfers happen: one runtime per dedicated model.

Every rank issues the same collectives in the same order (`schedule`), whatever its own forward did.
Entering a boundary catches up with the order, so that a rank that skips a boundary still takes part in
its transfers and frees them at once; the end of a pass does the rest. The next boundary's transfer is
under way while a boundary computes.

Called outside a forward of the model (a submodule alone), a boundary is fetched on demand, and all
ranks must call it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dmuown.errors import OwnershipError
from dmuown.ownership.boundaries import Boundary
from dmuown.ownership.link import Link
from dmuown.ownership.plan import OwnershipPlan
from dmuown.ownership.record import GradState, Record, State
from dmuown.ownership.schedule import Schedule, backward_schedule, forward_schedule
from dmuown.ownership.transport import Buffer

# Reductions under way before the oldest is waited for: enough to overlap, few enough to bound memory.
_REDUCTIONS_IN_FLIGHT = 2


def in_backward() -> bool:
    """Whether the caller runs inside a backward pass, as a recomputed forward does."""
    return bool(torch._C._current_graph_task_id() != -1)


class Pass:
    """Progress of one pass through a schedule.

    Attributes:
        schedule: The order.
        cursor: Operations before it have been issued.
        limit: Fetches before it may be issued.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.cursor = 0
        self.limit = 0


class BoundaryState:
    """What one boundary is doing.

    Attributes:
        boundary: The plan's entry.
        module: The module.
        buffers: All transfers that it uses.
        depth: Forward calls that have begun and not ended.
        calls: Differentiable forward calls whose backward has not come yet.
        plain_calls: Calls without gradients in this pass, which activation checkpointing may repeat.
        inputs_pending: Inputs whose gradients have not been computed yet.
        done: Whether its backward is complete.
    """

    def __init__(self, boundary: Boundary, module: nn.Module, buffers: Sequence[Buffer]) -> None:
        self.boundary = boundary
        self.module = module
        self.buffers = tuple(buffers)
        self.forget()

    @property
    def complete(self) -> bool:
        """Whether every parameter has its gradient, and so every operation that used one has run backward.

        Never true with a frozen parameter: nothing tells when the last operation used that.
        """
        return all(
            buffer.complete and all(record.home.requires_grad for record in buffer.records) for buffer in self.buffers
        )

    def forget(self) -> None:
        """Start anew, as after a backward pass."""
        self.depth = 0
        self.calls = 0
        self.plain_calls = 0
        self.inputs_pending = 0
        self.done = False


class OwnershipRuntime:
    """Places the parameters of one model, moves their gradients, and hands the owned ones to optimizers.

    Attributes:
        plan: Who owns what, and all transfers.
        records: The dedicated parameters by canonical name.
        warnings: What looked unintended in the policy.
        sync: Whether backward passes reduce gradients; False under `no_sync`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: OwnershipPlan,
        records: Mapping[str, Record],
        modules: Sequence[nn.Module],
        link: Link,
        *,
        prefetch: int = 1,
        warnings: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        self.records = dict(records)
        for record in self.records.values():
            record.model = self.records
        self.warnings = list(warnings)
        self.sync = True
        self.link = link
        self.prefetch = prefetch
        self._model = weakref.ref(model)
        self.buffers = [
            Buffer(
                transfer,
                [self.records[member.name] for member in transfer.members],
                link,
                ", ".join(plan.boundaries[index].label for index in transfer.boundaries),
            )
            for transfer in plan.transfers
        ]
        for buffer in self.buffers:
            buffer.on_gradient = self.gradient_arrived
        self.states = [
            BoundaryState(
                boundary, module, [buffer for buffer in self.buffers if boundary.index in buffer.transfer.boundaries]
            )
            for boundary, module in zip(plan.boundaries, modules, strict=True)
        ]
        self._forward_schedule = forward_schedule(plan, prefetch)
        self._backward_schedule = backward_schedule(plan, prefetch)
        self._forward: Pass | None = None
        self._backward: Pass | None = None
        self._with_grad = False
        self._in_flight: deque[Buffer] = deque()

    # ---- forward ----

    def begin_forward(self) -> None:
        """A forward of the model begins; anything that an interrupted step left is undone."""
        if in_backward():
            return
        self.reset()
        for record in self.records.values():
            self._check_home(record)
        self._with_grad = torch.is_grad_enabled()
        self._forward = Pass(self._forward_schedule)

    def end_forward(self) -> None:
        """A forward of the model has ended: join the transfers that this rank skipped."""
        if in_backward() or self._forward is None:
            return
        self._advance(self._forward, required=len(self._forward.schedule.operations))
        for buffer in self.buffers:
            if buffer.state is State.FETCHING or not self._keeps():
                buffer.release()
        self._forward = None

    def enter(self, state: BoundaryState) -> None:
        """A boundary's forward begins: make its parameters whole."""
        index = state.boundary.index
        if in_backward():  # recomputed by activation checkpointing
            self._require(state, self.start_backward())
            return
        state.depth += 1
        self._require(state, self._forward)
        if self._forward is not None:
            self._give_up_skipped(self._forward, index)

    def leave(self, state: BoundaryState, *, differentiable: bool) -> None:
        """A boundary's forward has ended: free what no backward of it is waiting for here."""
        if in_backward():
            return
        state.depth = max(0, state.depth - 1)
        if differentiable:
            state.calls += 1
            state.done = False
        else:
            state.plain_calls += 1
        if state.depth == 0 and not self._keeps(differentiable):
            for buffer in state.buffers:
                # A tied weight stays whole from its first boundary to its last.
                if self._forward is None or buffer.transfer.boundaries[-1] == state.boundary.index:
                    buffer.release()

    def _keeps(self, differentiable: bool = True) -> bool:
        """Whether parameters stay whole after forward, as far as a backward may come."""
        expected = self._with_grad if self._forward is not None else differentiable
        return not self.plan.reshard_after_forward and expected

    # ---- backward ----

    def before_backward(self, state: BoundaryState) -> None:
        """The gradient of a boundary's output is there: make its parameters whole again."""
        progress = self.start_backward()
        self._require(state, progress)
        self._give_up_skipped(progress, state.boundary.index)

    def input_done(self, state: BoundaryState) -> None:
        """The gradient of one of a boundary's inputs is complete."""
        state.inputs_pending -= 1
        if state.inputs_pending == 0:
            self._maybe_done(state, inputs_done=True)

    def gradient_arrived(self, buffer: Buffer) -> None:
        """Autograd accumulated a gradient of one of the buffer's parameters."""
        self.start_backward()
        if buffer.complete:
            for index in buffer.transfer.boundaries:
                self._maybe_done(self.states[index], inputs_done=False)

    def start_backward(self) -> Pass:
        """A backward pass begins, or has begun."""
        if self._backward is None:
            self._backward = Pass(self._backward_schedule)
            # Runs when the whole backward pass is over, in the thread that called it.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        return self._backward

    def _maybe_done(self, state: BoundaryState, *, inputs_done: bool) -> None:
        """Mark a boundary whose backward is over, and start what waited for it."""
        # A boundary called more than once is over when all calls are: the end of the pass.
        if state.done or self._backward is None or state.calls + state.plain_calls > 1:
            return
        if not inputs_done and not state.complete:
            return
        state.done = True
        for buffer in state.buffers:
            if all(self.states[index].done for index in buffer.transfer.boundaries):
                buffer.release()
        self._advance(self._backward)

    def _ready(self, buffer: Buffer) -> bool:
        """Whether no more gradients are expected; a boundary that this rank did not run has none."""
        states = [self.states[index] for index in buffer.transfer.boundaries]
        return all(state.done or state.calls + state.plain_calls == 0 for state in states)

    def _reduce(self, buffer: Buffer) -> None:
        if not self.sync or not buffer.takes_gradients:
            return
        while len(self._in_flight) >= _REDUCTIONS_IN_FLIGHT:
            self._finish_oldest()
        buffer.reduce()
        self._in_flight.append(buffer)

    def _finish_oldest(self) -> None:
        buffer = self._in_flight.popleft()
        if buffer.grad_state is GradState.REDUCING:
            buffer.finish()

    def end_backward(self) -> None:
        """A backward pass is over: join what this rank skipped, reduce the rest, free everything."""
        progress = self._backward
        if progress is None:
            return
        self._advance(progress, required=len(progress.schedule.operations))
        for buffer in self.buffers:
            buffer.release()
        while self._in_flight:
            self._finish_oldest()
        if self.sync:
            self._reduce_late()
        else:
            for buffer in self.buffers:
                buffer.keep_gradients()
        self._backward = None
        for state in self.states:
            state.forget()

    def _reduce_late(self) -> None:
        """Reduce gradients that came after their boundary's reduction on any rank, from uses that nothing announced."""
        late = [buffer.grad_state is GradState.COLLECTING for buffer in self.buffers]
        try:
            late = self.link.on_any_rank(late)
        except Exception as error:
            raise OwnershipError(
                f"boundary {self.plan.boundaries[0].label}",
                f"the end of the backward pass was not reached by all ranks: {error}",
                "Most likely another rank left the step: look for the first error of the other ranks",
            ) from error
        for buffer, here in zip(reversed(self.buffers), reversed(late), strict=True):
            if here:
                self._reduce(buffer)
        while self._in_flight:
            self._finish_oldest()

    # ---- both ----

    @property
    def busy(self) -> bool:
        """Whether a boundary is in its forward or backward."""
        return in_backward() or any(state.depth for state in self.states)

    def reset(self) -> None:
        """Free everything that is whole or under way."""
        self._forward = self._backward = None
        self._in_flight.clear()
        for state in self.states:
            state.depth = state.plain_calls = 0
        for buffer in self.buffers:
            buffer.reset()

    def _require(self, state: BoundaryState, progress: Pass | None) -> None:
        """Make a boundary's parameters whole, in order as far as a pass is under way."""
        index = state.boundary.index
        if progress is not None:
            progress.limit = max(progress.limit, progress.schedule.ahead[index])
            self._advance(progress, required=progress.schedule.entered[index])
        for buffer in state.buffers:
            if buffer.state is State.HOME:  # called again, or outside a forward of the model
                buffer.fetch()
        for buffer in state.buffers:
            buffer.wait()

    def _advance(self, progress: Pass, *, required: int = 0) -> None:
        """Issue operations in order: all before `required`, and those after it that are due and allowed."""
        operations = progress.schedule.operations
        while progress.cursor < len(operations):
            operation, forced = operations[progress.cursor], progress.cursor < required
            buffer = self.buffers[operation.transfer]
            if operation.kind == "fetch":
                if not forced and progress.cursor >= progress.limit:
                    return
                progress.cursor += 1
                if buffer.state is State.HOME:
                    buffer.fetch()
            else:
                # What is frozen now may take gradients in another step: it is in the order, and passed over.
                if not forced and buffer.takes_gradients and not self._ready(buffer):
                    return
                progress.cursor += 1
                self._reduce(buffer)

    def _give_up_skipped(self, progress: Pass, current: int) -> None:
        """Free what was fetched for boundaries that this rank passed by."""
        position = progress.schedule.position
        for buffer in self.buffers:
            if (
                buffer.state is State.FETCHING
                and max(position[use] for use in buffer.transfer.boundaries) < (position[current])
            ):
                buffer.release()

    def _check_home(self, record: Record) -> None:
        module, attribute = record.places[0]
        held = module._parameters.get(attribute)
        if held is not record.home:
            raise OwnershipError(
                record.name,
                "was replaced in its module after dedicate_params",
                "Change parameters in place, or replace them before the model is dedicated",
            )
        if record.home.device.type == "meta":
            raise OwnershipError(
                record.name,
                "is still on the meta device",
                "Materialize the model first: model.to_empty(device=...), then initialize it under "
                "dmuown.gathered(model, writeback=True) or load a checkpoint",
            )


def compiler_disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile from tracing a hook: communication stays outside compiled graphs."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled
