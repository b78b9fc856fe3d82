"""Canonical parameter names, and the nearest known name for one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Path components that wrappers of torch insert between a module and its content: torch.compile, the
# activation-checkpoint wrapper, FSDP1. DDP inserts `module` at the front, and only there is it stripped: a model
# may have a submodule of that name.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def canonical_name(name: str) -> str:
    """Return `name` without the components that wrappers inserted: `module.layers.0._orig_mod.w` -> `layers.0.w`."""
    parts = without_wrappers(name).split(".")
    while len(parts) > 1 and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def without_wrappers(name: str) -> str:
    """Return `name` without the components that only wrappers have; `module` is kept, which a model may have too."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a remedy that names the known name nearest to `name`, or all of them if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"Did you mean {close[0]!r}"
    return "Use one of " + ", ".join(repr(item) for item in names)
