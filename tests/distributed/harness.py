"""Run a function on N gloo ranks on this machine and get each rank's result back.

A distributed test is two functions: one that every rank runs, at module level so that the ranks can import it,
and the test that starts it and looks at what came back::

    import torch
    import torch.distributed as dist
    from tests.distributed.harness import RankPool, run_ranks

    def _sum_of_ranks(rank: int, world_size: int, scale: float) -> torch.Tensor:
        value = torch.full((2,), scale * rank)
        dist.all_reduce(value)
        return value

    def test_sum(ranks2: RankPool) -> None:              # pooled: ranks2, ranks4 (fixtures in tests/conftest.py)
        for result in ranks2.run(_sum_of_ranks, 3.0):    # one result per rank, in rank order
            torch.testing.assert_close(result, torch.full((2,), 3.0))

    def test_sum_in_fresh_processes() -> None:
        run_ranks(3, _sum_of_ranks, 3.0, timeout=30)     # any world size, its own processes

What the function gets: `rank`, `world_size`, then the caller's arguments. The default process group is up, torch uses
one thread and the seed is 0 on every rank (add `rank` to it where ranks should differ).

What it may return: anything that pickles. Tensors come back detached and on the CPU; DTensors are refused, since they
mean nothing outside their mesh: return `.full_tensor()` or `.to_local()`.

What fails the test (`RanksFailed`, which shows every rank's traceback and the end of its output):
- a rank raises, or its process dies;
- the timeout passes: the stacks of the ranks still running are shown;
- a rank leaves a collective unmatched: every call ends in a barrier, so it fails the test that caused it, not the next.

Pooled or fresh: a pool keeps its processes and process group between calls (milliseconds a call), and starts anew
after a failure and every 16 calls. Functions that change the process (environment, default process group, patches of
torch, logging set up once) belong in `run_ranks`. To assert on an exception, use `pytest.raises` inside the function.

Functions travel by name, not by value. The ranks import the module under the name that pytest gave it, and load it
from its file where no import path leads to it. Lambdas and nested functions are refused. What a test patches in its
own process (monkeypatch, environment) does not reach the ranks: pass it as an argument.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

# A server that has torch imported and forks the ranks: a rank starts in tenths of a second instead of in seconds.
# Nothing of this package is preloaded, and torch starts no threads on import, so the fork is safe. An optimizer's first
# step imports dynamo.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"])

_START_TIMEOUT = 120.0  # seconds until every rank has joined the process group
_GRACE = 5.0  # seconds that the other ranks have to report, once one has failed
# A pool starts anew after this many calls: sub-groups of meshes are never freed, and every one keeps threads that poll
# (a pool of four with 160 groups a rank used a whole core while idle). Starting takes a third of a second.
_CALLS_PER_START = 16
_OUTPUT_TAIL = 4000  # characters of a rank's own output in a failure


class RanksFailed(AssertionError):
    """At least one rank raised, died or ran out of time.

    Attributes:
        reports: One text per rank, in rank order: its traceback, its stack, or "finished".
    """

    def __init__(self, headline: str, reports: list[str]) -> None:
        self.reports = reports
        parts = [headline]
        parts += [f"---- rank {rank} ----\n{report.rstrip()}" for rank, report in enumerate(reports)]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class _Function:
    """Where to find a module-level function in another process."""

    module: str
    file: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Self:
        qualname = getattr(function, "__qualname__", repr(function))
        code = getattr(function, "__code__", None)
        if code is None or "<" in qualname:
            raise TypeError(f"{qualname}: ranks run module-level functions, which they can import. Move it there.")
        return cls(function.__module__, str(Path(code.co_filename).resolve()), qualname)

    def load(self) -> Callable[..., Any]:
        value: Any = _import(self.module, self.file)
        for name in self.qualname.split("."):
            value = getattr(value, name)
        function: Callable[..., Any] = value
        return function


def _import(name: str, file: str) -> ModuleType:
    if name in sys.modules and name != "__main__":
        return sys.modules[name]
    with contextlib.suppress(ModuleNotFoundError):
        module = importlib.import_module(name)
        if str(Path(module.__file__ or "").resolve()) == file:
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name}: no module at {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _portable(value: Any) -> Any:
    """A result as the parent may hold it: tensors detached, on the CPU, owning just their own elements."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"a rank returned a {type(leaf).__name__}: return .full_tensor() or .to_local()")
        return leaf.detach().cpu().clone()

    return pytree.tree_map(convert, value)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - stays open as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # SIGABRT, which the parent sends to a rank that hangs, then writes every thread's stack to the log.
    faulthandler.enable(sys.stderr, all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _join_group(rank: int, world_size: int, backend: str, store: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    # The loopback interface exists everywhere; resolving the host's name may not work or be slow.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(minutes=30)
    )
    dist.barrier()


def _worker(rank: int, world_size: int, backend: str, store: str, log: str, path: list[str], pipe: Connection) -> None:
    """Life of one rank: join the group, then answer calls until the parent hangs up."""
    sys.path[:] = path
    _redirect_output(log)
    try:
        _join_group(rank, world_size, backend, store)
    except BaseException:
        _send(pipe, ("error", traceback.format_exc()))
        return
    _send(pipe, ("ready", None))
    while True:
        try:
            function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the parent closed the pool, or is gone
            break
        try:
            torch.manual_seed(0)
            args, kwargs = pickle.loads(arguments)
            result = pickle.dumps(_portable(function.load()(rank, world_size, *args, **kwargs)))
            dist.barrier()
        except BaseException:
            _send(pipe, ("error", traceback.format_exc()))
        else:
            _send(pipe, ("result", result))
    # Ranks leave at different times, and a group's orderly end is not under test: leave without destructors.
    os._exit(0)


def _send(pipe: Connection, message: tuple[str, Any]) -> None:
    # Plain pickle, by value: multiprocessing's own would pass tensors as shared memory, which dies with its sender.
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(pickle.dumps(message))


class RankPool:
    """Processes of one world that run functions together; see the module's docstring.

    Args:
        world_size: Number of ranks.
        backend: Backend of the default process group. With "nccl", rank r uses CUDA device r.

    The processes start with the first call, and again with the first call after a failure.
    """

    def __init__(self, world_size: int, *, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._processes: list[multiprocessing.context.ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None
        self._calls = 0
        # multiprocessing joins its children at exit: hang up first, since they wait for the next call.
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        atexit.unregister(self.close)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Run `function(rank, world_size, *args, **kwargs)` on every rank.

        Args:
            function: A module-level function.
            args: Arguments that pickle, the same for every rank.
            timeout: Seconds for the call on all ranks; starting the processes is not counted.
            kwargs: Keyword arguments, likewise.

        Returns:
            Each rank's result, in rank order.

        Raises:
            RanksFailed: A rank raised, died or did not finish in time. The pool starts anew with the next call.
            TypeError: `function` is a lambda or a nested function.
        """
        request = pickle.dumps((_Function.of(function), pickle.dumps((args, kwargs))))
        if self._calls >= _CALLS_PER_START:
            self.close()
        if not self._processes:
            self._start()
        self._calls += 1
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it died between calls: collecting says how
                pipe.send_bytes(request)
        return [pickle.loads(result) for result in self._collect(function.__qualname__, timeout)]

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder, self._calls = [], [], None, 0

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dmuown-ranks-"))
        for rank in range(self.world_size):
            parent, child = _CONTEXT.Pipe()
            arguments = (
                rank,
                self.world_size,
                self.backend,
                str(self._folder / "store"),
                str(self._log(rank)),
                list(sys.path),
                child,
            )
            process = _CONTEXT.Process(target=_worker, args=arguments, name=f"rank-{rank}")
            process.start()
            child.close()
            self._processes.append(process)
            self._pipes.append(parent)
        self._collect("joining the process group", _START_TIMEOUT)

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{rank}.log"

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """Wait for one message of each rank; on a failure, close the pool and raise with every rank's report."""
        waiting = dict(enumerate(self._pipes))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        headline = ""
        while waiting:
            ready = multiprocessing.connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                headline = headline or f"{what}: no result from ranks {sorted(waiting)} within {timeout:g} s"
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                pipe = waiting.pop(rank)
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(_GRACE)
                    kind, value = "error", f"process died: {_exit_text(self._processes[rank].exitcode)}"
                if kind == "error":
                    errors[rank] = value
                else:
                    results[rank] = value
            if errors and not headline:
                headline = f"{what}: failed on rank {min(errors)}"
                deadline = min(deadline, time.monotonic() + _GRACE)
        if not headline:
            return [results[rank] for rank in range(self.world_size)]
        # All at once: the end of one rank would wake the others from the collective that they are stuck in.
        for rank in waiting:
            self._abort(rank)
        reports = [self._report(rank, errors.get(rank), rank in waiting) for rank in range(self.world_size)]
        self.close()
        raise RanksFailed(headline, reports)

    def _abort(self, rank: int) -> None:
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks to the log, then the process dies

    def _report(self, rank: int, error: str | None, running: bool) -> str:
        if running:
            self._processes[rank].join(_GRACE)
            error = "still running; its stacks are at the end of its output"
        output = self._log(rank).read_text(errors="replace")[-_OUTPUT_TAIL:] if self._log(rank).exists() else ""
        return (error or "finished") + (f"\n-- its output --\n{output}" if output.strip() else "")


def _exit_text(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Run `function(rank, world_size, *args, **kwargs)` in fresh processes; see `RankPool.run`."""
    with RankPool(world_size, backend=backend) as pool:
        return pool.run(function, *args, timeout=timeout, **kwargs)
