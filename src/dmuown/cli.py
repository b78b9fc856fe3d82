"""The command `dmuown`. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dmuown._version import __version__
from dmuown.commands import register
from dmuown.commands.quiet import quieten_host
from dmuown.errors import DmuownError

app = typer.Typer(
    name="dmuown",
    help="Muon-family optimizers for NVIDIA NeMo AutoModel and torch FSDP2.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # --nproc_per_node is --nproc-per-node, as torchrun has both; what is no option is taken for a key of the YAML.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)

_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the run failed, 2 the request was wrong."""
    try:
        app(args=None if arguments is None else list(arguments))
    except DmuownError as error:
        if os.environ.get("RANK", "0") == "0":  # every rank finds the same error
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dmuown {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Muon-family optimizers for NVIDIA NeMo AutoModel and torch FSDP2."""


@app.command(context_settings=_OVERRIDES)
def finetune(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML configuration of an AutoModel recipe.", metavar="CONFIG.yaml")],
    nproc_per_node: Annotated[
        int | None,
        typer.Option("--nproc-per-node", min=1, help="Processes: one per GPU by default, one without GPUs."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the host's own log.")] = False,
) -> None:
    """Fine-tune with an AutoModel recipe, with NCCL on GPUs and gloo without.

    Everything else is an override of the YAML: --step_scheduler.max_steps 100, --optimizer.lr=1e-3.
    """
    if verbose:
        os.environ["LOGGING_LEVEL"] = str(logging.INFO)
    else:
        quieten_host()
    from dmuown.automodel.launch import launch

    raise typer.Exit(launch(config, context.args, processes=nproc_per_node))


register(app)


if __name__ == "__main__":
    main()
