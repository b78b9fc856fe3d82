"""What third parties say while our commands run and no user can act on, in one place.

Only programs call this, as commands, the demo and the example are; importing the package changes neither warnings nor
logging.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import warnings

#: Warnings (of Python's `warnings`) that are dropped: the package whose code warns, and how the text begins.
_WARNINGS = (
    # Optional kernels of a strategy of the host's, which it imports whatever the strategy is.
    ("megatron_fsdp", "Transformer Engine and Apex are not installed"),
    # Calls of torch in the host's and its data loader's own files that torch has deprecated.
    ("torchdata", "'set_vital' is deprecated"),
    ("nemo_automodel", "TypedStorage is deprecated"),
    # Of the mesh that the host makes on a machine without GPUs; nothing that it does there is random.
    ("torch.distributed.tensor", "DTensor random operators may not have complete support on cpu"),
)

#: Packages whose own files may warn about their syntax when Python compiles them, as it does once after an installation
#: that did not: strings in torchao, which transformers imports whatever the model is, under Python 3.12 and newer.
_SYNTAX = ("torchao",)

#: Messages that are dropped from a logger, by their beginning; its other messages pass.
_MESSAGES = {
    # Kernels for other Pythons, other GPUs and Triton that torchao cannot load when it is imported; a run needs none.
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    "torchao.kernel.intmm": ("Warning: Detected no triton",),
    # `torch_dtype` is what the host's loader calls the key; the YAML has no other name for it.
    "transformers.configuration_utils": ("`torch_dtype` is deprecated",),
    "transformers.modeling_utils": ("`torch_dtype` is deprecated",),
    # Of the host's gradient norm under tensor parallelism: the meshes are the host's, and no key changes them.
    "torch.distributed.tensor._redistribute": ("While redistributing from",),
}

#: Messages that are dropped from a logger where they are about a class of a package: logger, package, beginning.
_ABOUT = (
    # A deprecated call of torch in torchao's own files, when it is imported.
    ("torch.utils._pytree", "torchao", "%s is an Enum subclass"),
)


class _Dropped(logging.Filter):
    """Drops the messages of one logger that begin with given texts; with `package`, those about its classes only."""

    def __init__(self, beginnings: tuple[str, ...], package: str | None = None) -> None:
        super().__init__()
        self.beginnings, self.package = beginnings, package

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(self.beginnings):
            return True
        arguments = record.args if isinstance(record.args, tuple) else ()
        return self.package is not None and not any(
            isinstance(argument, type) and argument.__module__.partition(".")[0] == self.package
            for argument in arguments
        )


def quieten_host() -> None:
    """Keep the host's log to warnings, and drop what its libraries warn about themselves.

    Nothing is dropped where `LOGGING_LEVEL` is set to another level, as `dmuown finetune --verbose` does.
    """
    if os.environ.setdefault("LOGGING_LEVEL", str(logging.WARNING)) != str(logging.WARNING):
        return
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    for module, beginning in _WARNINGS:
        pattern = re.escape(beginning)
        warnings.filterwarnings("ignore", message=pattern, category=UserWarning, module=rf"{re.escape(module)}\.")
    for package in _SYNTAX:
        warnings.filterwarnings("ignore", category=SyntaxWarning, module=_files_of(package))
    for name, beginnings in _MESSAGES.items():
        _drop(name, _Dropped(beginnings))
    for name, package, beginning in _ABOUT:
        _drop(name, _Dropped((beginning,), package))


def _drop(name: str, dropped: _Dropped) -> None:
    logger = logging.getLogger(name)
    if not any(isinstance(found, _Dropped) for found in logger.filters):
        logger.addFilter(dropped)


def _files_of(package: str) -> str:
    """A pattern of what the compiler says it warns about: files of an installed package, by path or by module.

    By the package's own folder, so that folders of users that are called the same are not among them.
    """
    spec = importlib.util.find_spec(package)  # imports nothing
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    places = [re.escape(f"{folder}{os.sep}") for folder in folders]
    return "|".join([rf"{re.escape(package)}(\.|$)", *places])
