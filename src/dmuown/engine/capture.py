"""A whole optimizer step as one CUDA graph: host time shrinks to one launch.

A graph freezes addresses and numbers. Live are the learning rates, weight decays that were not 0 at capture, and the
step counts; any other change of a group records the graph anew. Gradients are read where they were at capture:
one that backward put elsewhere is copied there.

Of sharded parameters the graph holds the collectives too; where they go through several process groups, tasks are
recorded one after another, since a graph keeps no order among branches. Ranks tell each other before every step,
through the host, whether all gradients are there and whether to record anew: none waits in a replay for another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor

from dmuown.algorithms import MuonAlgorithm, get_algorithm
from dmuown.engine.capturable import check_capturable
from dmuown.engine.exchange import ExchangeCount
from dmuown.engine.gradients import RESTART, agree_on_gradients
from dmuown.engine.layout import local_tensor
from dmuown.engine.optimizer import MuonEngine
from dmuown.engine.streams import SideStreams
from dmuown.errors import LayoutError, OptionError, OptionTypeError, PlanMismatchError

logger = logging.getLogger(__name__)

#: Steps taken ordinarily before the one that is recorded: kernels compile and caches fill outside the graph.
WARMUP_STEPS = 2

#: Streams of a recorded step. Measured on H200 (`docs/lab-log.md`): more help only where buckets are split.
STREAMS = 1

#: Group keys that a replay does not freeze.
_LIVE = frozenset({"params", "lr", "weight_decay", "step"})


class CapturedStep:
    """Steps an optimizer by replaying its recorded step. Made by `capture`.

    The first `WARMUP_STEPS` calls of `step` are ordinary steps; the next one records. Learning-rate schedulers
    are built on the optimizer as usual. Gradients: zero them with this object's `zero_grad`, which keeps their
    memory, so that backward accumulates into what the graph reads.

    Args:
        optimizer: One that `capture` takes.
        streams: As for `capture`.

    Attributes:
        optimizer: The optimizer; its groups and state remain the place to look at and to save.
    """

    def __init__(self, optimizer: MuonEngine, streams: int = STREAMS) -> None:
        self.optimizer = optimizer
        self._streams = streams
        self._warm = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._frozen: list[dict[str, Any]] | None = None
        self._live: list[dict[str, tuple[Tensor, float]]] = []
        self._gradients: dict[Tensor, Tensor] = {}
        self._exchanged = ExchangeCount()
        self._moved_before = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step.

        Args:
            closure: Re-evaluates the model and returns the loss; runs outside the graph.

        Returns:
            What the closure returned, or None.

        Raises:
            GradientError: A parameter has no gradient; on every rank that shares parameters with one that raises.
            PlanMismatchError: Another rank could not record its step, and says why. All start over in the next.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._must_start_over():
            self._start_over()
        if not self.optimizer.records:
            MuonEngine.step(self.optimizer)  # an owner of nothing counts steps
        elif self._warm < WARMUP_STEPS:
            self._warm += 1
            self._update_live()
            with _swapped(self.param_groups, self._live):
                MuonEngine.step(self.optimizer)
        else:
            if self._graph is None:
                self._record_on_all_ranks()
            self._replay()
        self.optimizer.__dict__["_opt_called"] = True  # what torch's schedulers look at
        return loss

    def zero_grad(self) -> None:
        """Zero gradients in place."""
        self.optimizer.zero_grad(set_to_none=False)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load into the optimizer, and start over: state may live elsewhere now."""
        self.release()
        self.optimizer.load_state_dict(dict(state_dict))

    def release(self) -> None:
        """Free the graph and its memory. The optimizer steps ordinarily again; a later `step` here starts over.

        Call it on all ranks before `destroy_process_group()`, which waits for the collectives that a graph holds.
        """
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph = None
        self._frozen, self._live, self._gradients, self._warm = None, [], {}, 0

    def _must_start_over(self) -> bool:
        """Whether groups differ from those recorded, on any rank that shares parameters; all gradients are there."""
        return self._told_by_any(self._frozen != _frozen_options(self.optimizer))

    def _told_by_any(self, here: bool) -> bool:
        """Whether any rank that shares parameters starts over; all of them see that every gradient is there."""
        told, plan = RESTART if here else 0, self.optimizer.plan
        _, gravest = agree_on_gradients(
            self.optimizer.records, plan.audiences, "propagate", needed=True, told=told, told_back=plan.told_back
        )
        return max(told, gravest) == RESTART

    def _start_over(self) -> None:
        """Warm up again, with the live values where the graph will read them."""
        self.release()
        _steps_to_device(self.optimizer)
        self._frozen = _frozen_options(self.optimizer)
        self._live = _live_options(self.optimizer)

    def _remember_gradients(self) -> None:
        # Shards that a collective is still filling are waited for here: a graph cannot wait for what is outside of it.
        self._gradients = {
            record.param: local_tensor(record.param.grad)
            for record in self.optimizer.records
            if record.param.grad is not None
        }

    def _record_on_all_ranks(self) -> None:
        """Record, and replay nowhere before all have: a replay would wait for a rank that could not."""
        failure: BaseException | None = None
        try:
            self._record()
        except BaseException as error:
            failure = error
        if self._told_by_any(failure is not None):
            self.release()
            raise failure or PlanMismatchError(
                "capture", "another rank could not record its step", "See the error there, or step the optimizer itself"
            )

    def _record(self) -> None:
        self._remember_gradients()
        counted, exchanged = [group["step"] for group in self.param_groups], copy(self.optimizer.exchange_count)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        if self._streams > 1 and self.optimizer.plan.communicators < 2:
            self.optimizer._streams = SideStreams(self._streams, torch.device("cuda", torch.cuda.current_device()))
        self.optimizer._agreed = True
        try:
            # Of this thread alone: NCCL's own threads ask the driver about earlier collectives meanwhile.
            with (
                _swapped(self.param_groups, self._live),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                MuonEngine.step(self.optimizer)
        finally:
            self.optimizer._streams, self.optimizer._agreed = None, False
            for group, count in zip(self.param_groups, counted, strict=True):
                group["step"] = count
        self._exchanged = self.optimizer.exchange_count.since(exchanged)
        self.optimizer.exchange_count.add(self._exchanged, times=-1)  # recorded, not done
        self._graph = graph

    def _replay(self) -> None:
        assert self._graph is not None
        self._follow_gradients()
        self.optimizer._advance_host_step_counters()
        self.optimizer.exchange_count.add(self._exchanged)
        self._update_live()
        self._graph.replay()

    def _follow_gradients(self) -> None:
        """Copy gradients that are not where they were at capture to there; this rank's shards alone."""
        moved: list[tuple[Tensor, Tensor]] = []
        for param, static in self._gradients.items():
            if param.grad is not None:
                here = local_tensor(param.grad)  # a DTensor has no address of its own
                if here.data_ptr() != static.data_ptr():
                    moved.append((static, here))
        if not moved:
            return
        if not self._moved_before:
            logger.warning(
                "captured step: %d gradients have moved since capture and are copied each time; "
                "use its zero_grad(), which keeps their memory",
                len(moved),
            )
            self._moved_before = True
        torch._foreach_copy_([there for there, _ in moved], [here for _, here in moved])

    def _update_live(self) -> None:
        for group, live in zip(self.param_groups, self._live, strict=True):
            for key, (tensor, last) in live.items():
                if group[key] != last:
                    tensor.fill_(group[key])
                    live[key] = (tensor, group[key])


@contextmanager
def _swapped(groups: list[dict[str, Any]], live: list[dict[str, tuple[Tensor, float]]]) -> Iterator[None]:
    """Let groups hold the live tensors for a while."""
    kept = [{key: group[key] for key in options} for group, options in zip(groups, live, strict=True)]
    for group, options in zip(groups, live, strict=True):
        group.update({key: tensor for key, (tensor, _) in options.items()})
    try:
        yield
    finally:
        for group, values in zip(groups, kept, strict=True):
            group.update(values)


def capture(optimizer: torch.optim.Optimizer, *, streams: int = STREAMS) -> CapturedStep:
    """Replay this optimizer's step from a CUDA graph.

    Args:
        optimizer: One of this package's, all of this rank's shards on one CUDA device. Sharded parameters, dedicated
            ones and NCCL's collectives are recorded as well: capture on every rank.
        streams: Buckets that may run beside each other; 1 runs them one after another, with less memory.

    Returns:
        An object whose `step` takes the place of the optimizer's.

    Raises:
        OptionTypeError: Another optimizer.
        LayoutError: Parameters off CUDA.
        OptionError: An option that needs the host in every step, or `streams` below 1.
    """
    if not isinstance(optimizer, MuonEngine):
        raise OptionTypeError("capture", f"takes an optimizer of this package, got {type(optimizer).__name__}")
    if not isinstance(streams, int) or isinstance(streams, bool) or streams < 1:
        raise OptionError("streams", f"must be an int of at least 1, got {streams!r}")
    if optimizer._nonfinite != "propagate":
        raise OptionError(
            "nonfinite", f"must be 'propagate' under capture, got {optimizer._nonfinite!r}: others wait for the card"
        )
    devices = {local_tensor(record.param).device for record in optimizer.records}
    # A rank that owns no parameter has no device, and nothing to record.
    if len(devices) > 1 or any(device.type != "cuda" for device in devices):
        raise LayoutError("capture", f"needs all parameters on one CUDA device, got {sorted(map(str, devices))}")
    for index, group in enumerate(optimizer.param_groups):
        _check_group(group, f"param group {index}")
    return CapturedStep(optimizer, streams)


def _check_group(group: Mapping[str, Any], where: str) -> None:
    if group["capturable"]:
        raise OptionError(f"{where}: capturable", "is for graphs of your own: capture keeps floats live", "Turn it off")
    check_capturable(group, where)
    for key in ("lr", "weight_decay"):
        if isinstance(group[key], Tensor):
            raise OptionError(f"{where}: {key}", "must be a float under capture: it is kept live from there")


def _frozen_options(optimizer: MuonEngine) -> list[dict[str, Any]]:
    """What a recorded step depends on: all options but the live ones, and whether weight decays."""
    return [
        {**{key: value for key, value in group.items() if key not in _LIVE}, **_frozen_decay(optimizer, group)}
        for group in optimizer.param_groups
    ]


def _frozen_decay(optimizer: MuonEngine, group: Mapping[str, Any]) -> dict[str, Any]:
    live = _decays_live(group)
    return {"decays": group["weight_decay"] != 0} if live else {"weight_decay": group["weight_decay"]}


def _decays_live(group: Mapping[str, Any]) -> bool:
    """Matrix algorithms read decay from the device; torch's fused AdamW takes a number."""
    return isinstance(get_algorithm(group["algorithm"]), MuonAlgorithm)


def _live_options(optimizer: MuonEngine) -> list[dict[str, tuple[Tensor, float]]]:
    """By group, tensors that a graph reads, and the numbers that they hold; none where this rank steps nothing."""
    devices = {record.group_index: local_tensor(record.param).device for record in optimizer.records}
    live: list[dict[str, tuple[Tensor, float]]] = [{} for _ in optimizer.param_groups]
    for index, device in devices.items():
        group = optimizer.param_groups[index]
        keys = ["lr", "weight_decay"] if _decays_live(group) and group["weight_decay"] != 0 else ["lr"]
        for key in keys:
            value = float(group[key])
            live[index][key] = torch.tensor(value, dtype=torch.float32, device=device), value
    return live


def _steps_to_device(optimizer: MuonEngine) -> None:
    """Step counts that the host kept move to the card, where the graph counts them on."""
    for record in optimizer.records:
        state = optimizer.state[record.param]
        step = state.get("step")
        if isinstance(step, Tensor) and step.device.type == "cpu":
            state["step"] = step.to(local_tensor(record.param).device)


__all__ = ["CapturedStep", "capture"]
