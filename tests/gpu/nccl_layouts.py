"""Invariant 1 through NCCL: every layout of a line of ranks, on the cards of one host, against one card.

    torchrun --standalone --nproc-per-node 2 -m tests.gpu.nccl_layouts

Each layout steps ordinarily, and replayed from a graph that holds its collectives. Prints one line each and ends with
a non-zero status if any differs. fp32 orthogonalization; tables and rules are those of the gloo tests,
`tests/distributed/test_layouts.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ["DMUOWN_TEST_DEVICE"] = "cuda"

import torch
import torch.distributed as dist
from torch import Tensor

import dmuown
from tests.distributed.sharding import (
    Run,
    assert_sharded_equals_whole,
    parameters,
    snapshot,
    train_sharded,
    train_whole,
)
from tests.distributed.test_layouts import GRID, LINE, on

#: Twice the gloo tests': in fp32 the Gram form of Polar Express differs by 1.4e-5 between batch sizes of cuBLAS.
RTOL = 2e-5


#: Two steps as usual, one that records and replays, two replays.
CAPTURED_STEPS = 5


@dataclass
class CapturedRun(Run):
    """Groups that a graph can hold."""

    steps: int = CAPTURED_STEPS

    def group(self, algorithm: str, params: Sequence[Tensor], names: list[str]) -> dict[str, Any]:
        group = super().group(algorithm, params, names)
        return group | {"decay_degree": 0} if algorithm == "angular_muown" else group


def train_captured(rank: int, world_size: int, run: Run) -> tuple[list[int], list[dict[str, Tensor]]]:
    """As `train_sharded`, from a graph."""
    optimizer = run.optimizer(run.layout.distribute)
    captured = dmuown.capture(optimizer)
    for step in range(run.steps):
        for index, param in enumerate(parameters(optimizer)):
            param.grad = run.layout.distribute(run.whole(step + 1, index))
        captured.step()
    captured.release()
    coordinate = run.layout.build_mesh().get_coordinate() if run.layout.placements else ()
    assert coordinate is not None
    return list(coordinate), _on_card(snapshot(optimizer))


def _on_card(states: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{key: value.cuda() for key, value in state.items()} for state in states]


def main() -> int:
    """Run all layouts that fit the number of ranks; return how many failed."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layouts = {name: on(layout, world_size) for name, layout in LINE.items()}
    if world_size == 4:
        layouts |= GRID
    cases: list[tuple[str, Any, Run]] = [
        (name, train_sharded, Run(layout, per_group=2)) for name, layout in layouts.items()
    ]
    cases += [
        (f"{name}, captured", train_captured, CapturedRun(layout, per_group=2)) for name, layout in layouts.items()
    ]
    wanted = sys.argv[1:]  # parts of names
    cases = [case for case in cases if not wanted or any(part in case[0] for part in wanted)]
    failed = 0
    for name, train, run in cases:
        wrong = ""
        try:
            coordinate, states = train(rank, world_size, run)
            assert_sharded_equals_whole(run, [(coordinate, _on_card(states))], _on_card(train_whole(run)), rtol=RTOL)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        verdicts: list[str | None] = [None] * world_size
        dist.all_gather_object(verdicts, wrong)
        bad = next((text for text in verdicts if text), None)
        failed += bad is not None
        if rank == 0:
            print(f"{'FAIL' if bad else 'ok  '} {name} {bad or ''}", flush=True)
    if rank == 0:
        print(f"{len(cases) - failed} passed, {failed} failed on {world_size} x {torch.cuda.get_device_name()}")
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
