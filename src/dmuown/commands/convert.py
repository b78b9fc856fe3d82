"""`dmuown convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(help="Checkpoint folder of AutoModel, or a .pt file.", metavar="SRC")],
    destination: Annotated[Path, typer.Argument(help="What to write; must not exist.", metavar="DST")],
    library: Annotated[
        str, typer.Option("--from", help="What wrote it: automodel (its Muown), dion, muonium, muown or torch.")
    ],
    config: Annotated[
        Path | None, typer.Option("--config", help="For a folder: the YAML of the run that will resume from DST.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with the weights of that step, in safetensors.")
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option("--names", help="For a file whose state is by position: names of the parameters, one a line."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert another optimizer's checkpoint, so that a run of dmuown goes on from it.

    A folder epoch_E_step_S of AutoModel becomes one that the run of --config resumes from; everything but the
    optimizer's state is copied. Its learning rates, decay, momentum and moments go on:

        dmuown convert old/epoch_0_step_100 new/epoch_0_step_100 --from automodel --config run.yaml

    A file with a state dict (torch.save) becomes a file with ours; --model has its parameters, and where the state is
    by position, as optimizer.state_dict() of torch has it, --names lists their names:

        dmuown convert optimizer.pt converted.pt --from dion --model checkpoint/ --names names.txt

    Files are read as plain data: nothing in them is executed. Exit code 0: converted. 2: it cannot be.
    """
    from dmuown.automodel.conversion import SOURCES, convert_file, convert_folder
    from dmuown.automodel.options import choice
    from dmuown.commands.output import print_json
    from dmuown.errors import OptionError

    choice("--from", library, SOURCES)
    if not source.exists():
        raise OptionError("SRC", f"{str(source)!r} does not exist", "Give a checkpoint")
    if source.is_dir():
        if config is None:
            raise OptionError("--config", "is missing", "Give the YAML of the run that will resume")
        done = convert_folder(source, destination, library=library, config=config, overrides=context.args, model=model)
    else:
        if model is None:
            raise OptionError("--model", "is missing", "Give the folder of the model's weights")
        if names is not None and not names.is_file():
            raise OptionError("--names", f"{str(names)!r} is no file", "Give a file with one name a line")
        listed = None if names is None else names.read_text(encoding="utf-8", errors="replace").split()
        done = convert_file(source, destination, library=library, model=model, names=listed)
    if as_json:
        print_json(done.to_dict())
        return
    counts = ", ".join(f"{count} by {name}" for name, count in done.algorithms.items())
    typer.echo(f"wrote {done.destination}: state of {done.parameters} parameters ({counts})")
