"""dmuown inside NVIDIA NeMo AutoModel: optimizer configurations, checks of its YAML files, runs without CUDA.

    optimizer:
      _target_: dmuown.automodel.MuownConfig
      lr: 3e-4

Names load on first use: the checks of `dmuown check` and `dmuown plan` live here too, and need no host. Importing this
package registers the short names `dmuown_muown`, `dmuown_muon`, ... for the host's
`build_optimizer(model, (name, options))`: at once where the host is loaded, else as soon as it is (`registration`).
Using a configuration raises MissingDependencyError where the host is missing or of another version than
`host.SUPPORTED`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dmuown.automodel.registration import register_with_host

if TYPE_CHECKING:
    from dmuown.automodel.configs import SHORT_NAMES as SHORT_NAMES
    from dmuown.automodel.configs import AngularMuownConfig as AngularMuownConfig
    from dmuown.automodel.configs import DMuonConfig as DMuonConfig
    from dmuown.automodel.configs import MuonConfig as MuonConfig
    from dmuown.automodel.configs import MuownConfig as MuownConfig
    from dmuown.automodel.configs import NorMuonConfig as NorMuonConfig
    from dmuown.automodel.configs import NorMuownConfig as NorMuownConfig

__all__ = [
    "SHORT_NAMES",
    "AngularMuownConfig",
    "DMuonConfig",
    "MuonConfig",
    "MuownConfig",
    "NorMuonConfig",
    "NorMuownConfig",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.configs"), name)


register_with_host()
