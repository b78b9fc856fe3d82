"""What NeMo AutoModel 0.7 needs to train on a machine without CUDA.

The host assumes a CUDA device in three places. `enable` replaces exactly these, only where torch
finds no CUDA, and says so once in the log; `disable` puts the originals back.

| replaced | why |
|---|---|
| `torch.cuda.reset_peak_memory_stats` | the recipe resets CUDA's memory counters at setup and after each step |
| `torch.cuda.current_device` | the model loader asks for the index of the CUDA device |
| `apply_model_infrastructure` | places the model on that device; it must be told `cpu` |

The backend of the process group is configuration, not a patch: `dist_env.backend: gloo`, which
`dmuown finetune` sets where there is no CUDA.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dmuown.automodel.host import require_host

logger = logging.getLogger(__name__)

_INFRASTRUCTURE = "nemo_automodel._transformers.infrastructure"
_FUNCTION = "apply_model_infrastructure"


class Patch(NamedTuple):
    """One replaced function: where it was, and what it does now."""

    name: str
    effect: str


class _Replaced(NamedTuple):
    owner: Any
    attribute: str
    original: Any


_replaced: list[_Replaced] = []
_applied: tuple[Patch, ...] = ()


def enable() -> tuple[Patch, ...]:
    """Make the host run without CUDA. Does nothing, and returns (), where CUDA is available.

    Idempotent. Call it before the host builds a model; `dmuown finetune` does, on every rank. For
    the host's own command put `plugin_fn: dmuown.automodel.without_cuda` into the YAML.

    Returns:
        The patches in force, one entry per replaced function.

    Raises:
        MissingDependencyError: The host is missing or not a version that these patches were written for.
    """
    global _applied
    if torch.cuda.is_available():
        return ()
    version = require_host()
    if _applied:
        return _applied
    _replace(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    _replace(torch.cuda, "current_device", lambda: 0)
    infrastructure = importlib.import_module(_INFRASTRUCTURE)
    original = getattr(infrastructure, _FUNCTION)
    replacement = _on_cpu(original)
    for module in _modules_that_bind(original):
        _replace(module, _FUNCTION, replacement)
    _applied = (
        Patch("torch.cuda.reset_peak_memory_stats", "does nothing"),
        Patch("torch.cuda.current_device", "returns 0"),
        Patch(f"{_INFRASTRUCTURE}.{_FUNCTION}", "places models on the CPU"),
    )
    logger.info(
        "No CUDA device: nemo-automodel %s runs on the CPU with these replacements: %s",
        version,
        "; ".join(f"{patch.name} {patch.effect}" for patch in _applied),
    )
    return _applied


def disable() -> None:
    """Put the replaced functions back."""
    global _applied
    while _replaced:
        owner, attribute, original = _replaced.pop()
        # Modules imported since then took the replacement.
        for module in _modules_that_bind(getattr(owner, attribute)) if attribute == _FUNCTION else ():
            setattr(module, attribute, original)
        setattr(owner, attribute, original)
    _applied = ()


def _modules_that_bind(function: Any) -> list[Any]:
    """Modules of the host that hold their own reference to the function."""
    return [
        module
        for name, module in list(sys.modules.items())
        # Not getattr: packages of the host import lazily, and raise for names they do not have.
        if name.startswith("nemo_automodel") and vars(module).get(_FUNCTION) is function
    ]


def _replace(owner: Any, attribute: str, replacement: Any) -> None:
    _replaced.append(_Replaced(owner, attribute, getattr(owner, attribute)))
    setattr(owner, attribute, replacement)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)

    return apply
