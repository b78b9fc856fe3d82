"""Runs as pictures: one self-contained HTML page, and a PNG of the same plots."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuown.diagnostics.runs import HEALTH_PREFIX, Run, Series
from dmuown.errors import MissingDependencyError, install_extra

# More points than this a curve are averaged in blocks: a page of a long run stays small.
_MAX_POINTS = 1000


@dataclass(frozen=True)
class Plot:
    """One plot.

    Attributes:
        title: Its title.
        unit: Label of its axis.
        curves: `run -> {label: series}`; runs without a series are left out.
        logarithmic: Whether the axis is logarithmic.
    """

    title: str
    unit: str
    curves: Callable[[Run], dict[str, Series]]
    logarithmic: bool = False


def _metric(key: str) -> Callable[[Run], dict[str, Series]]:
    return lambda run: {"": run.series(key)}


PLOTS = (
    Plot("Training loss", "loss", _metric("loss")),
    Plot("Validation loss", "loss", lambda run: run.validation),
    Plot("Gradient norm", "norm before clipping", _metric("grad_norm"), logarithmic=True),
    Plot("Step time", "seconds", _metric("step_time")),
    Plot("Learning rate", "lr", _metric("lr")),
    Plot("Matrices orthogonalized", "matrices a step", lambda run: {"": _matrices(run)}),
    Plot("Orthogonality residual", "largest of all matrices", _metric(f"{HEALTH_PREFIX}orthogonality_residual_max")),
    Plot("Update to weight", "mean ratio", _metric(f"{HEALTH_PREFIX}update_to_weight_mean"), logarithmic=True),
    Plot("Magnitudes", "mean", _metric(f"{HEALTH_PREFIX}magnitude_mean")),
    Plot("Non-finite gradients", "parameters a step", _metric(f"{HEALTH_PREFIX}nonfinite")),
)


def write_report(runs: Sequence[Run], page: Path, picture: Path | None) -> list[Path]:
    """Write the page, and the PNG where asked for; returns the files.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    figures = [(plot, curves) for plot in PLOTS if (curves := _curves(plot, runs))]
    _require_matplotlib()
    page.parent.mkdir(parents=True, exist_ok=True)
    drawn = [_svg(plot, curves) for plot, curves in figures]
    page.write_text(_page(runs, drawn), encoding="utf-8")
    if picture is None:
        return [page]
    picture.parent.mkdir(parents=True, exist_ok=True)
    _draw(figures, picture)
    return [page, picture]


def _matrices(run: Run) -> Series:
    logged = run.series(f"{HEALTH_PREFIX}orthogonalized")
    if logged or run.matrices is None:
        return logged
    return dict.fromkeys(run.series("loss"), float(run.matrices))


def _curves(plot: Plot, runs: Sequence[Run]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for run in runs:
        for label, series in plot.curves(run).items():
            usable = {step: value for step, value in sorted(series.items()) if math.isfinite(value)}
            if plot.logarithmic:
                usable = {step: value for step, value in usable.items() if value > 0}
            if usable:
                name = run.name if label in ("", "validation") else f"{run.name}: {label}"
                found[name] = thinned(usable)
    return found


def thinned(series: Series, points: int = _MAX_POINTS) -> Series:
    """Return a series of at most `points` points: means of blocks of steps, the last point kept as it is."""
    if len(series) <= points:
        return series
    items = list(series.items())
    block = math.ceil((len(items) - 1) / (points - 1))
    result: Series = {}
    for start in range(0, len(items) - 1, block):
        part = items[start : min(start + block, len(items) - 1)]
        result[part[len(part) // 2][0]] = sum(value for _, value in part) / len(part)
    result[items[-1][0]] = items[-1][1]
    return result


def _require_matplotlib() -> None:
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingDependencyError(
            "matplotlib", "draws the plots and is not installed", f"{install_extra('plot')}, or use --json"
        ) from None
    mpl.use("Agg")


def _fill(axes: Any, plot: Plot, curves: dict[str, Series]) -> None:
    for label, series in curves.items():
        few = "o-" if len(series) <= 30 else "-"
        axes.plot(list(series), list(series.values()), few, markersize=3, linewidth=1.2, label=label)
    axes.set(title=plot.title, xlabel="step", ylabel=plot.unit)
    if plot.logarithmic:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend(fontsize="small")


def _svg(plot: Plot, curves: dict[str, Series]) -> str:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    # Text as text: it can be searched, and the page stays small. The salt makes equal runs give equal pages.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title}):
        figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
        _fill(axes, plot, curves)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw(figures: Sequence[tuple[Plot, dict[str, Series]]], file: Path) -> None:
    from matplotlib import pyplot as plt

    columns = 2
    rows = math.ceil(len(figures) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(6 * columns, 3.4 * rows), layout="constrained", squeeze=False)
    flat = [axes for row in grid for axes in row]
    for axes, (plot, curves) in zip(flat, figures, strict=False):
        _fill(axes, plot, curves)
    for axes in flat[len(figures) :]:
        axes.set_axis_off()
    figure.savefig(file, format="png", dpi=110)
    plt.close(figure)


COLUMNS = (
    ("run", "run"),
    ("optimizer", "optimizer"),
    ("steps", "steps"),
    ("first loss", "first_loss"),
    ("last loss", "last_loss"),
    ("validation", "validation_loss"),
    ("grad norm", "median_grad_norm"),
    ("s/step", "median_step_seconds"),
    ("matrices", "matrices_orthogonalized"),
)
"""Titles and keys of `Run.to_dict` of the table."""


def table_rows(runs: Sequence[Run]) -> list[list[str]]:
    """The runs as cells of a table with `COLUMNS`."""
    return [[_cell(run.to_dict()[key]) for _, key in COLUMNS] for run in runs]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        if len(value) == 1:
            return _cell(next(iter(value.values())))
        return ", ".join(f"{name} {_cell(entry)}" for name, entry in value.items()) or "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; flex: 1 1 34rem; } svg { width: 100%; height: auto; } .warning { color: #a40; }
"""


def _page(runs: Sequence[Run], drawings: Sequence[str]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title, _ in COLUMNS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table_rows(runs)
    )
    warnings = "".join(
        f'<p class="warning">{html.escape(run.name)}: {html.escape(text)}</p>' for run in runs for text in run.warnings
    )
    plots = "".join(f"<figure>{drawing}</figure>" for drawing in drawings)
    title = html.escape(", ".join(run.name for run in runs))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{warnings}"
        f'<div class="plots">{plots}</div></body></html>\n'
    )
