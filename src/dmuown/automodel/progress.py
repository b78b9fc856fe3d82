"""Progress of a run on one rank: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

_LINES = 20
"""Without a terminal, about this many lines a run."""


class ProgressReport:
    """Steps done, loss, validation loss and learning rate. The host closes it after training.

    Args:
        total: Steps of the run, None if unknown.
        initial: Steps done before, by the run that this one resumes.
    """

    def __init__(self, total: int | None, initial: int = 0) -> None:
        self.total = total
        self.step = initial
        self._every = max(1, (total or 10 * _LINES) // _LINES)
        self._fields: dict[str, Any] = {"loss": "-", "val_loss": "-", "lr": "-"}
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._start_bar()

    def update(self, metrics: dict[str, Any]) -> None:
        """Count one step and show its loss and learning rate."""
        self.step += 1
        self._fields["loss"] = f"{metrics['loss']:.4f}"
        self._fields["lr"] = f"{metrics['lr']:.2e}"
        last = self.total is not None and self.step >= self.total
        if self._bar is not None:
            self._bar.update(self._task, completed=self.step, **self._fields)
        elif last or self.step == 1 or self.step % self._every == 0:
            print(self._line(), flush=True)

    def validation(self, name: str, loss: float) -> None:
        """Show a validation loss; `name` is the host's name of the data set, "default" if it has but one."""
        self._fields["val_loss"] = f"{loss:.4f}"
        if self._bar is not None:
            self._bar.update(self._task, **self._fields)
        else:
            print(
                f"step {self.step}: validation loss {loss:.4f}" + ("" if name == "default" else f" on {name}"),
                flush=True,
            )

    def close(self) -> None:
        """Leave the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self) -> str:
        of = f"/{self.total}" if self.total is not None else ""
        return f"step {self.step}{of}: loss {self._fields['loss']}, lr {self._fields['lr']}"

    def _start_bar(self) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("training"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("loss {task.fields[loss]}  val {task.fields[val_loss]}  lr {task.fields[lr]}"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("training", total=self.total, completed=self.step, **self._fields)
        self._bar.start()
