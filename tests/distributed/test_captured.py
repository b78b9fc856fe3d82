"""A captured step of sharded parameters: ranks agree before each replay. Graphs themselves: tests/gpu.

Recording and replaying need a card. Here both are ordinary steps, so that what ranks tell each other is seen.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import dmuown
from dmuown.engine.capture import WARMUP_STEPS, CapturedStep, _swapped
from dmuown.engine.optimizer import MuonEngine
from dmuown.errors import GradientError, PlanMismatchError
from tests.distributed.harness import run_ranks
from tests.distributed.sharding import Run, local, parameters
from tests.distributed.test_layouts import LINE, on


class Graph:
    """Does what the recorded step would, on the gradients and live values that were there; the host counts nothing."""

    def __init__(self, captured: Replayed) -> None:
        self.captured = captured

    def replay(self) -> None:
        captured, optimizer = self.captured, self.captured.optimizer
        captured.done.append("replay")
        given = {param: param.grad for param in captured._gradients}
        for param, static in captured._gradients.items():
            assert isinstance(param, DTensor)
            param.grad = DTensor.from_local(
                static, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
            )
        counted, exchanged = [group["step"] for group in captured.param_groups], copy(optimizer.exchange_count)
        with _swapped(captured.param_groups, captured._live):
            MuonEngine.step(optimizer)
        optimizer.exchange_count = exchanged
        for group, count in zip(captured.param_groups, counted, strict=True):
            group["step"] = count
        for param, grad in given.items():
            param.grad = grad

    def reset(self) -> None:
        pass


class Replayed(CapturedStep):
    """Records nothing, and counts what it does."""

    def __init__(self, optimizer: MuonEngine) -> None:
        super().__init__(optimizer, streams=1)
        self.done: list[str] = []
        self.fail = False

    def _start_over(self) -> None:
        self.done.append("start over")
        super()._start_over()

    def _record(self) -> None:
        self.done.append("record")
        super()._record()


class Recorder:
    """Stands for `torch.cuda.graph`: what is recorded is not done."""

    def __init__(self, captured: Replayed) -> None:
        self.captured = captured

    def __call__(self, graph: object, **options: object) -> Recorder:
        return self

    def __enter__(self) -> None:
        optimizer = self.captured.optimizer
        self.kept = [local(param).clone() for param in parameters(optimizer)]
        self.state = [
            {key: local(value).clone() for key, value in optimizer.state[param].items()}
            for param in parameters(optimizer)
        ]

    def __exit__(self, *failure: object) -> None:
        optimizer = self.captured.optimizer
        for param, kept, state in zip(parameters(optimizer), self.kept, self.state, strict=True):
            local(param).data.copy_(kept)
            for key, value in state.items():
                local(optimizer.state[param][key]).copy_(value)
        if self.captured.fail:
            self.captured.fail = False
            raise torch.cuda.OutOfMemoryError("while recording")


def build(rank: int, world_size: int) -> tuple[Replayed, list[Tensor]]:
    run = Run(on(LINE["rows, uneven"], world_size), ("muown", "adamw"))
    optimizer: Any = run.optimizer(run.layout.distribute)
    params = parameters(optimizer)
    for index, param in enumerate(params):
        param.grad = run.layout.distribute(run.whole(1, index))
    captured = Replayed(optimizer)
    # Of this process alone, which ends with the test.
    torch.cuda.CUDAGraph = lambda: Graph(captured)  # type: ignore[assignment,misc]
    torch.cuda.graph = Recorder(captured)  # type: ignore[assignment,misc]
    torch.cuda.synchronize = lambda *device: None
    return captured, params


def change_on_one_rank(rank: int, world_size: int) -> tuple[list[str], list[Tensor]]:
    captured, params = build(rank, world_size)
    for step in range(2 * WARMUP_STEPS + 4):
        if step == WARMUP_STEPS + 2 and rank == 1:
            captured.param_groups[0]["mu"] = 0.9
        captured.step()
    return captured.done, [local(param).clone() for param in params]


def test_when_one_rank_must_record_anew_all_do() -> None:
    """Else one rank would step, and tell what steps tell, while the other replays."""
    results = run_ranks(2, change_on_one_rank)
    expected = ["start over", "record", "replay", "replay", "start over", "record", "replay", "replay"]
    assert [done for done, _ in results] == [expected, expected]


def live_values(rank: int, world_size: int) -> tuple[list[list[Tensor]], list[list[int]], list[int]]:
    """Weights, steps counted and matrices counted on a falling rate and a changing decay, replayed and ordinary."""
    weights, steps, matrices = [], [], []
    for replayed in (True, False):
        captured, params = build(rank, world_size)
        for step in range(WARMUP_STEPS + 4):
            for group in captured.param_groups:
                group["lr"] = 0.05 / (1 + step)
            captured.param_groups[0]["weight_decay"] = 0.1 + 0.1 * step
            captured.step() if replayed else captured.optimizer.step()
        weights.append([local(param).clone() for param in params])
        steps.append([group["step"] for group in captured.param_groups])
        matrices.append(captured.optimizer.exchange_count.matrices)
    return weights, steps, matrices


def test_replays_follow_live_values_and_count() -> None:
    for (replayed, ordinary), steps, matrices in run_ranks(2, live_values):
        for one, other in zip(replayed, ordinary, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert steps == [[WARMUP_STEPS + 4] * 2] * 2
        assert matrices[0] == matrices[1]


def recording_fails_on_one_rank(rank: int, world_size: int) -> list[str]:
    captured, _ = build(rank, world_size)
    captured.fail = rank == 1
    for _ in range(2 * WARMUP_STEPS + 3):
        try:
            captured.step()
        except torch.cuda.OutOfMemoryError:
            captured.done.append("failed")
        except PlanMismatchError as error:
            captured.done.append(str(error).split(".")[0])
    return captured.done


def test_when_recording_fails_on_one_rank_all_record_anew() -> None:
    """Else the others would wait in a replay for a rank that has nothing to replay."""
    well, failing = run_ranks(2, recording_fails_on_one_rank, timeout=60)
    told = "capture: another rank could not record its step"
    assert well == ["start over", "record", told, "start over", "record", "replay", "replay"]
    assert failing == ["start over", "record", "failed", "start over", "record", "replay", "replay"]


def gradients_that_move(rank: int, world_size: int) -> list[list[Tensor]]:
    """Weights after steps on new gradient tensors each time, replayed and ordinary."""
    results = []
    for replayed in (True, False):
        captured, params = build(rank, world_size)
        run = Run(on(LINE["rows, uneven"], world_size), ("muown", "adamw"))
        for step in range(WARMUP_STEPS + 3):
            for index, param in enumerate(params):
                param.grad = run.layout.distribute(run.whole(step + 1, index))
            captured.step() if replayed else captured.optimizer.step()
        results.append([local(param).clone() for param in params])
    return results


def test_gradients_of_shards_that_move_are_followed() -> None:
    """A DTensor has no address: two gradients of one parameter were taken for the same memory."""
    for replayed, ordinary in run_ranks(2, gradients_that_move):
        for one, other in zip(replayed, ordinary, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)  # live rates are fp32


def missing_on_one_rank(rank: int, world_size: int) -> tuple[str, str]:
    captured, params = build(rank, world_size)
    messages: list[str] = []
    for moment in (0, WARMUP_STEPS + 2):
        while len(messages) == 0 and moment and captured.done.count("replay") < 2:
            captured.step()
        before = [local(param).clone() for param in params]
        kept, params[0].grad = params[0].grad, None if rank == 1 else params[0].grad
        with pytest.raises(GradientError, match="no gradient") as raised:
            captured.step()
        params[0].grad = kept
        assert all(torch.equal(one, local(param)) for one, param in zip(before, params, strict=True))
        messages.append(str(raised.value))
    captured.step()  # and all goes on
    return messages[0], messages[1]


def test_a_gradient_missing_on_one_rank_is_refused_on_all() -> None:
    one, other = run_ranks(2, missing_on_one_rank)
    assert one == other
    assert "Freeze it out of the optimizer" in one[0]


def recorded_by_the_user(rank: int, world_size: int) -> str:
    """A graph of the user's own, with `capturable=True`: ranks agree while it records."""
    run = Run(on(LINE["rows, uneven"], world_size), ("muown",))
    params = [torch.nn.Parameter(run.layout.distribute(run.whole(0, index))) for index in range(2)]
    optimizer = dmuown.Muown(params, capturable=True)
    for index, param in enumerate(params):
        param.grad = run.layout.distribute(run.whole(1, index))
    torch.cuda.is_initialized = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: True
    optimizer.step()
    if rank == 1:
        params[1].grad = None
    with pytest.raises(GradientError, match="no gradient on some rank") as raised:
        optimizer.step()
    return str(raised.value)


def test_a_graph_of_ones_own_refuses_a_missing_gradient_on_all_ranks() -> None:
    one, other = run_ranks(2, recorded_by_the_user)
    assert one == other
