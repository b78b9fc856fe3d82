"""What third parties say while our commands run and no user can act on, in one place.

Only commands call this; importing the package changes neither warnings nor logging.
"""

from __future__ import annotations

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

#: Loggers that are kept to errors.
_LOGGERS = (
    # Kernels for other Pythons and other GPUs that it cannot load when the host imports it; low-bit state needs none.
    "torchao",
    # A deprecated call of torch in torchao's own files.
    "torch.utils._pytree",
)

#: Messages that are dropped from a logger, by their beginning; its other messages pass.
_MESSAGES = {
    # `torch_dtype` is what the host's loader calls the key; the YAML has no other name for it.
    "transformers.configuration_utils": ("`torch_dtype` is deprecated",),
    "transformers.modeling_utils": ("`torch_dtype` is deprecated",),
    # Of the host's gradient norm under tensor parallelism: the meshes are the host's, and no key changes them.
    "torch.distributed.tensor._redistribute": ("While redistributing from",),
}


class _Dropped(logging.Filter):
    """Drops the messages of one logger that begin with given texts."""

    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginnings)


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
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, beginnings in _MESSAGES.items():
        logger = logging.getLogger(name)
        if not any(isinstance(found, _Dropped) for found in logger.filters):
            logger.addFilter(_Dropped(beginnings))
