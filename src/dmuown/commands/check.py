"""`dmuown check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dmuown.commands.layout import ExpertParallel, PipelineParallel, Replicas, TensorParallel


def check(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML configuration of an AutoModel recipe.", metavar="CONFIG.yaml")],
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Processes of the job: checks that its sizes divide.")
    ] = None,
    tp: TensorParallel = None,
    ep: ExpertParallel = None,
    pp: PipelineParallel = None,
    replicas: Replicas = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Load the file with the host too, which takes 10 s of imports.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Find every error and warning of a YAML before its job is queued.

    Checks keys and values of all sections (a misspelled key is told its nearest name), arguments of every _target_,
    files and their columns, the optimizer's options and param_policy, and keys that must agree with each other.
    Imports neither the host nor a model. Overrides are checked with it: --optimizer.lr 1e-3.

    Exit code 0: no errors. 1: errors, or with --strict warnings. In a job script:

        dmuown check run.yaml --world-size 16 && sbatch run.sh

    Another layout than the YAML's is checked as it is planned; the run takes it as --distributed.tp_size 2:

        dmuown check run.yaml --world-size 16 --tp 2 --replicas 4
    """
    from dmuown.automodel.checks import check_config
    from dmuown.automodel.host import require_host
    from dmuown.commands.output import print_json
    from dmuown.commands.quiet import quieten_host

    if deep:
        quieten_host()
        require_host()

    sizes = {"tp": tp, "ep": ep, "pp": pp, "replicas": replicas}
    found = check_config(config, context.args, world_size=world_size, sizes=sizes, deep=deep)
    if as_json:
        print_json(found.to_dict())
    else:
        for line in found.text():
            typer.echo(line)
    if found.errors or (strict and found.warnings):
        raise typer.Exit(1)
