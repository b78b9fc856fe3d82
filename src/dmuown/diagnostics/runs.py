"""What the logs of a training run say: the host's `training.jsonl` and `validation*.jsonl`, and our `summary.json`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dmuown.errors import OptionError

TRAINING = "training.jsonl"
Series = dict[int, float]

#: Prefix of the metrics that this package adds to the host's.
HEALTH_PREFIX = "dmuown/"


@dataclass
class Run:
    """One run.

    Attributes:
        name: How tables and plots call it.
        folder: Its checkpoint folder.
        metrics: Training metrics by name, each by step, counted from 1.
        validation: Validation losses by data set, each by step.
        summary: Content of `summary.json`; empty without one.
        warnings: What was wrong with the logs, such as a line cut off when the job was killed.
    """

    name: str
    folder: Path
    metrics: dict[str, Series] = field(default_factory=dict)
    validation: dict[str, Series] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def series(self, name: str) -> Series:
        """A metric by step; empty where it was not logged."""
        return self.metrics.get(name, {})

    @property
    def matrices(self) -> int | None:
        """Matrices orthogonalized at each step, None where neither log nor summary says."""
        logged = self.series(f"{HEALTH_PREFIX}orthogonalized")
        if logged:
            return int(logged[max(logged)])
        counted = self.summary.get("matrices")
        return counted if isinstance(counted, int) else None

    def to_dict(self) -> dict[str, Any]:
        """The run in numbers, for a table or JSON."""
        loss, norms, times = self.series("loss"), self.series("grad_norm"), self.series("step_time")
        validation = {name: finite(values[max(values)]) for name, values in self.validation.items() if values}
        best = {name: finite(min(values.values())) for name, values in self.validation.items() if values}
        return {
            "run": self.name,
            "folder": str(self.folder),
            "steps": len(loss),
            "first_step": min(loss, default=None),
            "last_step": max(loss, default=None),
            "first_loss": finite(loss[min(loss)]) if loss else None,
            "last_loss": finite(loss[max(loss)]) if loss else None,
            "validation_loss": validation,
            "best_validation_loss": best,
            "median_grad_norm": finite(statistics.median(norms.values())) if norms else None,
            "median_step_seconds": finite(statistics.median(times.values())) if times else None,
            "matrices_orthogonalized": self.matrices,
            "optimizer": self.summary.get("optimizer"),
            "nonfinite_steps": sum(not math.isfinite(value) for value in loss.values()),
            "warnings": list(self.warnings),
        }


def finite(value: float) -> float | None:
    """The value where it is finite, else None, which JSON can hold."""
    return value if math.isfinite(value) else None


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read runs, each under the shortest end of its path that tells it from the others.

    A folder without a log that holds folders with one stands for all of those, by name.

    Raises:
        OptionError: A folder holds no `training.jsonl`, nor do the folders in it.
    """
    paths = [path for folder in folders for path in _runs_in(folder)]
    return [read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _runs_in(folder: Path) -> list[Path]:
    if folder.name == TRAINING:
        return [folder.parent]
    inside = [] if (folder / TRAINING).is_file() else sorted(file.parent for file in folder.glob(f"*/{TRAINING}"))
    return inside or [folder]


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read one run's checkpoint folder.

    Raises:
        OptionError: It holds no `training.jsonl`, or one without a record.
    """
    file = folder / TRAINING
    if not file.is_file():
        raise OptionError(
            str(folder), f"holds no {TRAINING}", "Give the checkpoint_dir of a run; the host writes its logs there"
        )
    run = Run(name or folder.name, folder)
    stamps: dict[int, float] = {}
    for record in _records(file, run):
        step = _step(record)
        for key, value in record.items():
            if key not in ("step", "epoch") and isinstance(value, (int, float)) and not isinstance(value, bool):
                run.metrics.setdefault(key, {})[step] = float(value)
        stamp = _seconds(record.get("timestamp"))
        if stamp is not None:
            stamps[step] = stamp
    if not run.series("loss"):
        raise OptionError(str(file), "holds no record of a step", "Wait: the host writes records in blocks of 100")
    run.metrics["step_time"] = _step_times(run, stamps)
    for found in sorted(folder.glob("validation*.jsonl")):
        losses = {
            _step(record): float(record["val_loss"])
            for record in _records(found, run)
            if isinstance(record.get("val_loss"), (int, float))
        }
        run.validation[found.stem.removeprefix("validation").lstrip("_-") or "validation"] = losses
    summary = folder / "summary.json"
    if summary.is_file():
        try:
            content = json.loads(summary.read_text(encoding="utf-8"))
            run.summary = content if isinstance(content, dict) else {}
        except ValueError:
            run.warnings.append(f"{summary.name} is no valid JSON and was left out")
    return run


def _step(record: Mapping[str, Any]) -> int:
    """The host counts from 0, people from 1."""
    return int(record["step"]) + 1


def _records(file: Path, run: Run) -> Iterator[dict[str, Any]]:
    """Records of a log. A resumed run appends, so that the last record of a step counts."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("no step")
        except ValueError:
            run.warnings.append(f"{file.name} line {number} is no record and was left out")
            continue
        yield record


def _step_times(run: Run, stamps: Mapping[int, float]) -> Series:
    """Seconds of each step: tokens by tokens per second, which excludes validation and saving; else by the clock."""
    tokens, speeds = run.series("num_tokens_per_step"), run.series("tps")
    times = {step: tokens[step] / speed for step, speed in speeds.items() if speed > 0 and step in tokens}
    if times:
        return times
    return {
        step: stamp - stamps[step - 1]
        for step, stamp in stamps.items()
        if step - 1 in stamps and stamp >= stamps[step - 1]
    }


def _seconds(stamp: Any) -> float | None:
    if isinstance(stamp, (int, float)) and not isinstance(stamp, bool):
        return float(stamp)
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return None


def _names(paths: list[Path]) -> list[str]:
    resolved = [path.resolve() for path in paths]
    for depth in range(1, max((len(path.parts) for path in resolved), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(set(resolved)):
            return names
    return [str(path) for path in resolved]
