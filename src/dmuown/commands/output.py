"""Plain tables and JSON on standard output, the same in a terminal and in a log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import typer


def print_json(data: Any) -> None:
    """Print data as JSON, indented by one space."""
    typer.echo(json.dumps(data, indent=1, allow_nan=False, default=str))


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table.

    Args:
        header: Titles of the columns.
        rows: Cells, printed with `str`.
        right: Columns that are aligned to the right, counted from 0.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(title), *(len(row[index]) for row in cells)]) for index, title in enumerate(header)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(header), line(["-" * width for width in widths]), *(line(row) for row in cells)]


def size(number: float) -> str:
    """Return a number of bytes in the largest unit that leaves it at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")
