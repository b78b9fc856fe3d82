"""The subcommands of `dmuown` besides `finetune`. Each imports what it needs when it runs.

Exit codes, for job scripts: 0 done; 1 a check failed or something is broken; 2 the request itself was wrong.
"""

from __future__ import annotations

import typer

from dmuown.commands.check import check
from dmuown.commands.convert import convert
from dmuown.commands.doctor import doctor
from dmuown.commands.plan import plan
from dmuown.commands.report import report

#: Options of the YAML that a command passes on: `--dotted.key value`.
OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def register(app: typer.Typer) -> None:
    """Add every subcommand to the command line."""
    app.command(context_settings=OVERRIDES)(check)
    app.command(context_settings=OVERRIDES)(plan)
    app.command()(report)
    app.command()(doctor)
    app.command(context_settings=OVERRIDES)(convert)
