"""Faults: a rank that dies or does not come, ranks that run different things; the others end with an error."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dmuown
from dmuown.engine.collectives import ALL_GATHER
from dmuown.engine.groups import control_group, mesh_group, warm_up
from tests.distributed.harness import RankPool, RanksFailed, run_ranks
from tests.distributed.sharding import Layout, Run, parameters
from tests.distributed.test_layouts import GRID, SQUARE, on

TIMEOUT = 5.0


def shorten_timeout() -> None:
    """Of the default group, which groups made later take over."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)


def die_in_the_middle(rank: int, world_size: int, layout: Layout) -> float:
    """Rank 1 is killed between the first and the second half of its second step; others report how long they hung."""
    shorten_timeout()
    run = Run(layout, ("muown", "normuon"), per_group=2)
    optimizer = run.optimizer(layout.distribute)
    calls = 0
    send = dist.all_to_all_single

    def killing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*args, **kwargs)

    dist.all_to_all_single = killing
    begin = time.monotonic()
    for step in range(1, 3):
        for index, param in enumerate(parameters(optimizer)):
            param.grad = layout.distribute(run.whole(step, index))
        try:
            begin = time.monotonic()
            optimizer.step()
        except RuntimeError:
            waited = time.monotonic() - begin
            assert waited < 2 * TIMEOUT, waited
            raise
    return 0.0


def test_a_killed_rank_ends_the_others_with_an_error() -> None:
    """Within the process group's timeout, and by an exception, not by a signal."""
    layout = on(Layout((10, 6), placements=("S0",)), 3)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, die_in_the_middle, layout, timeout=120)
    assert "process died: signal SIGKILL" in caught.value.reports[1]
    for rank in (0, 2):
        assert "RuntimeError" in caught.value.reports[rank], caught.value.reports[rank]
        assert "AssertionError" not in caught.value.reports[rank]
        assert "still running" not in caught.value.reports[rank]


def stay_away(rank: int, world_size: int) -> None:
    """One rank never steps: what the others wait in has the default group's timeout, not thirty minutes."""
    shorten_timeout()
    store = dist.distributed_c10d._get_default_store()
    layout = Layout((8, 6), SQUARE, ("S0", "S1"))
    run = Run(layout, ("muon",))
    optimizer = run.optimizer(layout.distribute)
    for param in parameters(optimizer):
        param.grad = torch.ones_like(param)
    if rank == 3:
        store.wait(["0", "1", "2"])  # alive, and elsewhere, until the others have given up
        return
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time|closed|reset"):
        optimizer.step()
    assert time.monotonic() - begin < 2 * TIMEOUT
    store.set(str(rank), "")
    os._exit(9)


@pytest.mark.slow
def test_a_rank_that_does_not_come_ends_the_others_with_an_error() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, stay_away, timeout=120)
    assert all("exit code 9" in caught.value.reports[rank] for rank in range(3))


def timeouts(rank: int, world_size: int) -> list[timedelta]:
    shorten_timeout()
    mesh = GRID["FSDP x row-wise TP"].build_mesh()
    groups = [mesh_group(mesh, (0, 1)), control_group((0, 1, 2))] if rank < 3 else [mesh_group(mesh, (0, 1))]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None]


def test_groups_take_over_the_default_timeout() -> None:
    for result in run_ranks(4, timeouts, timeout=120):
        assert set(result) == {timedelta(seconds=TIMEOUT)}


def exotic_config(rank: int, world_size: int) -> str:
    """One rank reads another config: its learning rate is not even a number there."""
    layout = Layout((8, 6), (0, 1), ("S0",))
    groups = [{"params": [torch.nn.Parameter(layout.distribute(torch.ones(8, 6)))], "nesterov": rank == 1}]
    try:
        dmuown.Muon(groups, lr=0.1)
    except dmuown.errors.PlanMismatchError as error:
        return str(error)
    return "built"


def test_a_rank_with_another_config_is_an_error_on_all(ranks2: RankPool) -> None:
    for message in ranks2.run(exotic_config, timeout=120):
        assert message == (
            "param group 0, parameter 0: ranks 0 and 1 disagree on it: nesterov False and nesterov True. "
            "Build the same model, policy and options on every rank."
        )


def used_and_warm(rank: int, world_size: int) -> tuple[int, int]:
    """Count the collectives that a first step runs on groups that had not run one of that kind before."""
    cold = 0
    warm: set[tuple[int, str]] = set()
    kinds = {"all_to_all_single": "all_to_all", ALL_GATHER: "all_gather", "all_reduce": "all_reduce"}
    originals = {name: getattr(dist, name) for name in kinds}
    stepping = False

    def watching(name: str) -> object:
        def call(*args: Any, **kwargs: Any) -> object:
            nonlocal cold
            key = (id(kwargs.get("group")), kinds[name])
            cold += stepping and key not in warm
            warm.add(key)
            return originals[name](*args, **kwargs)

        return call

    for name in kinds:
        setattr(dist, name, watching(name))
    layouts = [GRID["HSDP by columns"], GRID["EP x FSDP by rows"], GRID["FSDP x row-wise TP"], GRID["EP x replicas"]]
    groups = []
    for index, layout in enumerate(layouts):
        weight = torch.nn.Parameter(layout.distribute(torch.ones(layout.shape)))
        groups.append({"params": [(f"p{index}", weight)], "algorithm": ("muown", "normuon")[index % 2]})
    optimizer = dmuown.Muon(groups, lr=0.1)
    for param in parameters(optimizer):
        param.grad = torch.ones_like(param)
    stepping = True
    optimizer.step()
    return cold, len(warm)


def test_every_group_is_warm_before_the_first_step() -> None:
    """PrimeIntellect-ai/prime-rl#3490: the first all-to-all between machines stalled in the middle of a step."""
    for cold, used in run_ranks(4, used_and_warm, timeout=120):
        assert cold == 0
        assert used >= 6


def warm_twice(rank: int, world_size: int) -> int:
    calls = 0
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> object:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    for _ in range(3):
        warm_up(dist.group.WORLD, torch.device("cpu"), "all_reduce")
    dist.all_reduce = original
    return calls


def test_a_group_is_warmed_up_once() -> None:
    assert run_ranks(2, warm_twice) == [1, 1]


def renew(rank: int, world_size: int, store: str) -> list[bool]:
    """The default group is destroyed and made anew: groups made under the old one are forgotten."""
    layout = Layout((8, 6), SQUARE, ("S0", "S1"))
    run = Run(layout, ("muown",))
    finite = []
    for attempt in range(2):
        if attempt:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        mesh = DeviceMesh("cpu", torch.tensor(SQUARE))
        local = layout.cut(run.whole(0, 0), mesh.get_coordinate() or ()).clone()
        shape = torch.Size((8, 6))
        sharded = DTensor.from_local(local, mesh, [Shard(0), Shard(1)], shape=shape, stride=(6, 1))
        weight = torch.nn.Parameter(sharded)
        optimizer = dmuown.Muown([weight], lr=0.1)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        finite.append(bool(local.isfinite().all()))
    return finite


def test_a_new_default_group_gets_new_groups(tmp_path: object) -> None:
    assert run_ranks(4, renew, f"{tmp_path}/store", timeout=120) == [[True, True]] * 4
