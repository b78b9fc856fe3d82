"""The host's own reading of a file: slow to import, and the last word."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

from dmuown.automodel.checks.document import Document
from dmuown.automodel.checks.problems import Report
from dmuown.errors import DmuownError

#: Typed views of the host's `RecipeConfig`, by section.
_VIEWS = (
    "step_scheduler",
    "lr_scheduler",
    "optimizer",
    "loss_fn",
    "freeze_config",
    "checkpoint",
    "wandb",
    "mlflow",
    "comet",
)


def check_with_host(document: Document, report: Report) -> None:
    """Load the file with the host and build every typed section; nothing is trained or downloaded."""
    with _quiet():
        _check(document, report)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the host prints and logs out of a report, which may be JSON."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _check(document: Document, report: Report) -> None:
    from dmuown.automodel.request import read_request

    overrides = [f"--{key}={document.get(key)!r}" for key in document.overridden]
    try:
        read_request(document.path, overrides)
    except DmuownError as error:
        report.error(error.subject, error.rule, error.remedy)
        return
    from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from nemo_automodel.recipes._typed_config import RecipeConfig

    try:
        raw = parse_args_and_load_config(str(document.path), argv=overrides)
    except Exception as error:  # whatever the host raises is what the job would have died of
        report.error(str(document.path), f"cannot be loaded by the host: {error}", "Correct the name that it gives")
        return
    config = RecipeConfig(raw)
    for name in (*_VIEWS, "dataloader", "validation_dataloaders"):
        try:
            getattr(config, name)
        except Exception as error:
            report.error(
                name.removesuffix("s") if name.endswith("loaders") else name, f"is refused by the host: {error}"
            )
    if raw.get("distributed", None) is not None:
        try:
            parse_distributed_section(raw.get("distributed").to_dict())
        except Exception as error:
            report.error("distributed", f"is refused by the host: {error}")
