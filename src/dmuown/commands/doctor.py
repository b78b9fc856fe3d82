"""`dmuown doctor`."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Say which versions are installed, what works with them, and what to install for the rest.

    Looks at torch, CUDA, NCCL, Triton, quack, Dion (and which generation it is), the host, torchao and matplotlib.
    Imports neither the host nor its libraries.

    Exit code 0: nothing is broken, though parts may be missing. 1: something installed cannot work.
    """
    from dmuown.automodel.environment import examine
    from dmuown.commands.output import print_json, table

    found = examine()
    if as_json:
        print_json(found.to_dict())
    else:
        for line in table(("part", "version", "status", "note"), [part.row() for part in found.parts]):
            typer.echo(line)
        typer.echo("")
        for line in table(("what", "works", "why, and what to do"), [ability.row() for ability in found.abilities]):
            typer.echo(line)
    if found.broken:
        raise typer.Exit(1)
