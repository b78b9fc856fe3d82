"""The harness itself: results, failures of each kind, and recovery."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed import harness
from tests.distributed.harness import RankPool, RanksFailed, run_ranks


def _gather(rank: int, world_size: int, scale: float, *, offset: float) -> dict[str, object]:
    parts = [torch.empty(()) for _ in range(world_size)]
    dist.all_gather(parts, torch.tensor(scale * rank + offset))
    return {"rank": rank, "parts": torch.stack(parts).requires_grad_(), "random": torch.rand(1)}


def _raise_on(rank: int, world_size: int, failing: int) -> None:
    print(f"note of rank {rank}")
    if rank == failing:
        raise ValueError(f"wrong on {rank}")
    dist.barrier()


def _die_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        os._exit(7)
    dist.barrier()


def _stay_away(rank: int, world_size: int) -> None:
    if rank == 0:
        _wait_forever()
    dist.barrier()


def _wait_forever() -> None:
    while True:
        time.monotonic()


def _leave_unmatched(rank: int, world_size: int) -> None:
    if rank == 1:  # does not wait: the function itself returns on both ranks
        dist.all_reduce(torch.ones(3), async_op=True)


def _return_dtensor(rank: int, world_size: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])


def _sharded_sum(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    total = cast("DTensor", sharded.sum())
    return sharded.to_local(), total.full_tensor()


def _process(rank: int, world_size: int) -> tuple[int, int, str | None]:
    return os.getpid(), torch.get_num_threads(), os.environ.get("RANK")


def _check_gather(results: list[dict[str, torch.Tensor]], world_size: int) -> None:
    assert [result["rank"] for result in results] == list(range(world_size))
    for result in results:
        torch.testing.assert_close(result["parts"], 2.0 * torch.arange(world_size) + 1.0)
        assert not result["parts"].requires_grad
        assert torch.equal(result["random"], torch.rand(1, generator=torch.Generator().manual_seed(0)))


def test_results_come_back_in_rank_order(ranks2: RankPool, ranks4: RankPool) -> None:
    _check_gather(ranks2.run(_gather, 2.0, offset=1.0), 2)
    _check_gather(ranks4.run(_gather, 2.0, offset=1.0), 4)


def test_fresh_processes_run_in_any_world_size() -> None:
    _check_gather(run_ranks(3, _gather, 2.0, offset=1.0, timeout=30), 3)


def test_a_pool_keeps_its_processes_at_one_thread_each(ranks2: RankPool) -> None:
    first, second = ranks2.run(_process), ranks2.run(_process)
    assert first == second
    assert len({pid for pid, _, _ in first} | {os.getpid()}) == 3
    assert [(threads, rank) for _, threads, rank in first] == [(1, "0"), (1, "1")]


def test_dtensors_work_inside_and_are_refused_outside(ranks2: RankPool) -> None:
    results = ranks2.run(_sharded_sum)
    torch.testing.assert_close(torch.cat([local for local, _ in results]), torch.arange(6.0))
    assert [total.item() for _, total in results] == [15.0, 15.0]
    with pytest.raises(RanksFailed, match=r"returned a DTensor: return \.full_tensor\(\)"):
        ranks2.run(_return_dtensor)


def test_a_raising_rank_shows_traceback_and_output(ranks2: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks2.run(_raise_on, 1)
    assert str(caught.value).startswith("_raise_on: failed on rank 1")
    assert "ValueError: wrong on 1" in caught.value.reports[1]
    assert "note of rank 1" in caught.value.reports[1]
    # Rank 0 waited in its barrier for a rank that never came.
    assert "_raise_on" in caught.value.reports[0]
    assert "ValueError" not in caught.value.reports[0]
    _check_gather(ranks2.run(_gather, 2.0, offset=1.0), 2)  # the pool is back


def test_a_dying_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _die_on, 0)
    assert "process died: exit code 7" in caught.value.reports[0]


def test_a_hang_ends_at_the_timeout_with_stacks() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"no result from ranks \[0, 1\] within 1 s") as caught:
        run_ranks(2, _stay_away, timeout=1.0)
    assert time.monotonic() - start < 60
    assert "_wait_forever" in caught.value.reports[0]
    assert "barrier" in caught.value.reports[1]


def test_an_unmatched_collective_fails_the_call_that_left_it() -> None:
    with pytest.raises(RanksFailed):
        run_ranks(2, _leave_unmatched, timeout=2.0)


def test_a_pool_starts_anew_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_CALLS_PER_START", 2)
    with RankPool(1) as pool:
        pids = [pool.run(_process)[0][0] for _ in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def test_a_function_is_loaded_from_its_file_where_no_import_finds_it(ranks2: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "not_on_any_path.py"
    file.write_text("def double(rank, world_size, value):\n    return 2 * value + rank\n")
    spec = importlib.util.spec_from_file_location("not_on_any_path", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert ranks2.run(module.double, 4) == [8, 9]


def test_functions_that_ranks_cannot_import_are_refused(ranks2: RankPool) -> None:
    def nested(rank: int, world_size: int) -> None: ...

    for function in (nested, lambda rank, world_size: None):
        with pytest.raises(TypeError, match="module-level"):
            ranks2.run(function)
