"""The task protocol of Dion's engine, for when Dion itself is not installed.

A task is a generator that yields exactly where a collective is in flight; the runtime keeps a few
of them going, so that one task's communication overlaps another's computation. Dion's
`dion.opt_utils` has classes of the same names and behaviour, and is used instead where present.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator


class AsyncTask:
    """One unit of work, started on construction and resumed by `run`.

    Args:
        generator: Yields while a collective is in flight; its return value is ignored.
    """

    def __init__(self, generator: Generator[None, None, None]) -> None:
        self._generator = generator
        self.run()

    def run(self) -> bool:
        """Advance to the next yield; return whether the task has more to do."""
        try:
            next(self._generator)
        except StopIteration:
            return False
        return True


class AsyncRuntime:
    """Runs tasks in order of creation, at most `max_concurrent_tasks` of them begun and unfinished.

    Every rank must create the same tasks in the same order: the order of collectives follows it.

    Args:
        task_gen: Creates the tasks, one per `next`.
        max_concurrent_tasks: How many tasks may be in flight; at least 1.
    """

    def __init__(self, task_gen: Iterator[AsyncTask], max_concurrent_tasks: int) -> None:
        if max_concurrent_tasks < 1:
            raise ValueError(f"max_concurrent_tasks: must be at least 1, got {max_concurrent_tasks}")
        self._task_gen = task_gen
        self._max_concurrent_tasks = max_concurrent_tasks

    def run(self) -> None:
        """Run every task to its end."""
        exhausted = False
        running: list[AsyncTask] = []
        while running or not exhausted:
            begun: list[AsyncTask] = []
            if not exhausted and len(running) < self._max_concurrent_tasks:
                task = next(self._task_gen, None)
                if task is None:
                    exhausted = True
                else:
                    begun.append(task)
            running = begun + [task for task in running if task.run()]
