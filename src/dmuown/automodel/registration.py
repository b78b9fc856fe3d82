"""Register our short names with the host as soon as both are imported, in either order.

Importing the host takes ten seconds, so `import dmuown.automodel` does not import it. Where the
host's optimizer module is loaded already, names are registered at once; else when it is imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

HOST_MODULE = "nemo_automodel.components.optim.optimizer"


class _ThenRegister(Loader):
    """Loads the host's module as its own loader would, and imports our configurations afterwards."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module("dmuown.automodel.configs")


class _HostFinder(MetaPathFinder):
    """Notices the import of one module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != HOST_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


def register_with_host() -> None:
    """Import the configurations, which register themselves, now or when the host is imported."""
    if HOST_MODULE in sys.modules:
        importlib.import_module("dmuown.automodel.configs")
    elif not any(isinstance(finder, _HostFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _HostFinder())
