"""Invariant 1 through NCCL: every layout of a line of ranks, on the cards of one host, against one card.

    torchrun --standalone --nproc-per-node 2 -m tests.gpu.nccl_layouts

Prints one line a layout and ends with a non-zero status if any differs. fp32 orthogonalization; tables
and rules are those of the gloo tests, `tests/distributed/test_layouts.py`.
"""

from __future__ import annotations

import os
import sys

os.environ["DMUOWN_TEST_DEVICE"] = "cuda"

import torch
import torch.distributed as dist

from tests.distributed.sharding import Run, assert_sharded_equals_whole, train_sharded, train_whole
from tests.distributed.test_layouts import GRID, LINE, on

#: Twice the gloo tests': in fp32 the Gram form of Polar Express differs by 1.4e-5 between batch sizes of cuBLAS.
RTOL = 2e-5


def main() -> int:
    """Run all layouts that fit the number of ranks; return how many failed."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    layouts = {name: on(layout, world_size) for name, layout in LINE.items()}
    if world_size == 4:
        layouts |= GRID
    failed = 0
    for name, layout in layouts.items():
        run = Run(layout, per_group=2)
        result = train_sharded(rank, world_size, run)
        try:
            assert_sharded_equals_whole(run, [result], train_whole(run), rtol=RTOL)
            wrong = ""
        except AssertionError as error:
            wrong = str(error)
        verdicts: list[str | None] = [None] * world_size
        dist.all_gather_object(verdicts, wrong)
        bad = next((text for text in verdicts if text), None)
        failed += bad is not None
        if rank == 0:
            print(f"{'FAIL' if bad else 'ok  '} {name} {bad or ''}", flush=True)
    if rank == 0:
        print(f"{len(layouts) - failed} passed, {failed} failed on {world_size} x {torch.cuda.get_device_name()}")
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
