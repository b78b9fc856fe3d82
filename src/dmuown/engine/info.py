"""Which engine runs underneath: Dion's, where it is installed, or the embedded one.

Dion is not on the package index, so it is optional. Two generations of it are in use; they differ
in the hook that `step` calls for matrix parameters:

- `muon_tasks` (revision 7452a58, the one AutoModel locks): `_create_muon_tasks`;
- `ortho_tasks` (current main): `_create_ortho_tasks`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dmuown.algorithms.muown import _DION_MUON_HOOKS
from dmuown.errors import MissingDependencyError

#: Hooks of either generation through which Dion's `step` asks for tasks and state.
_GENERATION_BY_HOOKS = {
    "muon_tasks": _DION_MUON_HOOKS,
    "ortho_tasks": ("_create_ortho_tasks", "_create_adamw_tasks", "_get_or_initialize_state"),
}


@dataclass(frozen=True)
class EngineInfo:
    """What `engine_info` reports.

    Attributes:
        base: `"dion"` or `"embedded"`.
        generation: `"muon_tasks"`, `"ortho_tasks"` or `"embedded"`.
        revision: Dion's version and, where it can be told, git revision; None when embedded.
        path: Folder of the installed Dion; None when embedded.
        torch: Version of torch.
        backends: Orthogonalization backends that can run here.
        ns_dtype: What `ns_dtype="auto"` is on this machine, by device.
    """

    base: str
    generation: str
    revision: str | None
    path: str | None
    torch: str
    backends: tuple[str, ...]
    ns_dtype: str

    def __str__(self) -> str:
        return "\n".join(f"{key}: {value}" for key, value in asdict(self).items())


def import_dion() -> ModuleType | None:
    """Return the module `dion`, or None where it is not installed.

    Raises:
        MissingDependencyError: Dion is installed and cannot be imported.
    """
    try:
        return importlib.import_module("dion")
    except ModuleNotFoundError as error:
        if error.name == "dion":
            return None
        raise MissingDependencyError(
            "dion", f"is installed but needs the module {error.name!r}", "Install it, or uninstall dion"
        ) from error


@cache
def generation_of(base: type) -> str:
    """Tell Dion's generations apart by the hook that the base class defines.

    Raises:
        MissingDependencyError: The class calls neither hook, so that overriding it would change
            nothing and silently train plain Muon.
    """
    if base.__module__.startswith("dmuown."):
        return "embedded"
    for generation, hooks in _GENERATION_BY_HOOKS.items():
        source = "".join(_source(owner) for owner in base.__mro__ if owner.__module__.startswith("dion"))
        if all(hasattr(base, hook) for hook in hooks) and f"self.{hooks[0]}(" in source:
            return generation
    raise MissingDependencyError(
        f"{base.__module__}.{base.__qualname__}",
        "this Dion's step calls neither _create_muon_tasks nor _create_ortho_tasks",
        "Install a Dion of either generation (revision 7452a58, or main of August 2026), or none",
    )


def _source(owner: type) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


def _revision(module: ModuleType) -> str:
    """Dion's version plus the git revision it was installed from, where that was recorded."""
    try:
        distribution = importlib.metadata.distribution("dion")
    except importlib.metadata.PackageNotFoundError:
        return _git_revision(module) or "unknown"
    recorded = distribution.read_text("direct_url.json") or ""
    commit = recorded.partition('"commit_id"')[2].partition('"')[2].partition('"')[0]
    return f"{distribution.version} {commit[:12]}".strip()


def _git_revision(module: ModuleType) -> str | None:
    if not module.__file__:
        return None
    folder = Path(module.__file__).resolve().parent
    if not (folder.parent / ".git").exists():
        return None
    found = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


def _auto_ns_dtype() -> str:
    from dmuown.orthogonalize import auto_dtype

    told = []
    for name in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        gram, plain = (auto_dtype(torch.device(name), may_be_gram=may_be) for may_be in (True, False))
        told.append(f"{_short(gram)} on {name}" + (f" ({_short(plain)} with ns_form='plain')" if plain != gram else ""))
    return ", ".join(told)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def engine_info() -> EngineInfo:
    """Report which base class, which Dion revision and which backends are in use."""
    from dmuown.engine.base import _MuonBase
    from dmuown.orthogonalize import available_backends

    generation = generation_of(_MuonBase)
    module: Any = import_dion() if generation != "embedded" else None
    return EngineInfo(
        base="embedded" if module is None else "dion",
        generation=generation,
        revision=None if module is None else _revision(module),
        path=None if module is None or not module.__file__ else str(Path(module.__file__).parent),
        torch=str(torch.__version__),
        backends=tuple(available_backends()),
        ns_dtype=_auto_ns_dtype(),
    )
