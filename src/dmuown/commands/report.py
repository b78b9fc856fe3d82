"""`dmuown report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Checkpoint folders of runs, or folders of several, or training.jsonl.", metavar="RUN..."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page. Default: report.html, in the run's folder if there is one run."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", help="The picture. Default: beside the page, with the ending .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON and draw nothing.")] = False,
) -> None:
    """Compare runs: loss, validation loss, gradient norm, step time, matrices orthogonalized.

    Reads the logs that the host writes into the checkpoint folder, also of a run that is still going or was killed.
    Writes one HTML page that needs no other file, and a PNG of its plots; prints a table.

        dmuown report runs/muown runs/adamw -o compare.html

    Exit code 0: done. 2: a folder holds no log, or matplotlib is missing.
    """
    from dmuown.commands.output import print_json, table
    from dmuown.diagnostics.run_report import COLUMNS, table_rows, write_report
    from dmuown.diagnostics.runs import read_runs

    found = read_runs(runs)
    if as_json:
        print_json({"runs": [run.to_dict() for run in found]})
        return
    page = output or (found[0].folder if len(found) == 1 else Path()) / "report.html"
    files = write_report(found, page, png or page.with_suffix(".png"))
    for line in table([title for title, _ in COLUMNS], table_rows(found), right=range(2, len(COLUMNS))):
        typer.echo(line)
    for run in found:
        for text in run.warnings:
            typer.echo(f"warning: {run.name}: {text}", err=True)
    for file in files:
        typer.echo(f"wrote {file}")
