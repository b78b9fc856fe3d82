"""A captured step of sharded parameters: ranks agree before each replay. Graphs themselves: tests/gpu.

Recording and replaying need a card. Here both are ordinary steps, so that what ranks tell each other is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.engine.capture import WARMUP_STEPS, CapturedStep
from dmuown.engine.optimizer import MuonEngine
from dmuown.errors import GradientError
from tests.distributed.harness import RankPool, run_ranks
from tests.distributed.sharding import Run, local, parameters
from tests.distributed.test_layouts import LINE, on


class Replayed(CapturedStep):
    """Counts what it would do on a card."""

    def __init__(self, optimizer: MuonEngine) -> None:
        super().__init__(optimizer, streams=1)
        self.done: list[str] = []

    def _start_over(self) -> None:
        self.done.append("start over")
        super()._start_over()

    def _record(self) -> None:
        self.done.append("record")
        self._remember_gradients()
        self._graph: Any = torch.Generator()  # anything that is there

    def _replay(self) -> None:
        self.done.append("replay")
        self._follow_gradients()
        self._update_live()
        given = {param: param.grad for param in self._gradients}
        for param, static in self._gradients.items():
            param.grad = static  # what the graph reads
        MuonEngine.step(self.optimizer)
        for param, grad in given.items():
            param.grad = grad

    def release(self) -> None:
        self._graph = None
        super().release()


def build(rank: int, world_size: int) -> tuple[Replayed, list[Tensor]]:
    run = Run(on(LINE["rows, uneven"], world_size), ("muown", "adamw"))
    optimizer: Any = run.optimizer(run.layout.distribute)
    params = parameters(optimizer)
    for index, param in enumerate(params):
        param.grad = run.layout.distribute(run.whole(1, index))
    return Replayed(optimizer), params


def change_on_one_rank(rank: int, world_size: int) -> tuple[list[str], list[Tensor]]:
    captured, params = build(rank, world_size)
    for step in range(2 * WARMUP_STEPS + 4):
        if step == WARMUP_STEPS + 2 and rank == 1:
            captured.param_groups[0]["mu"] = 0.9
        captured.step()
    return captured.done, [local(param).clone() for param in params]


def test_when_one_rank_must_record_anew_all_do(ranks2: RankPool) -> None:
    """Else one rank would step, and tell what steps tell, while the other replays."""
    results = ranks2.run(change_on_one_rank)
    expected = ["start over", "record", "replay", "replay", "start over", "record", "replay", "replay"]
    assert [done for done, _ in results] == [expected, expected]


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


def test_gradients_of_shards_that_move_are_followed(ranks2: RankPool) -> None:
    """A DTensor has no address: two gradients of one parameter were taken for the same memory."""
    for replayed, ordinary in ranks2.run(gradients_that_move):
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


def test_a_gradient_missing_on_one_rank_is_refused_on_all(ranks2: RankPool) -> None:
    one, other = ranks2.run(missing_on_one_rank)
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
