"""dmuown inside NVIDIA NeMo AutoModel: optimizer configurations, runs without CUDA, the demo.

    optimizer:
      _target_: dmuown.automodel.MuownConfig
      lr: 3e-4

Importing this package imports the host's optimizer module and registers the short names
`dmuown_muown`, `dmuown_muon`, ... there, for `build_optimizer(model, (name, options))`. It raises
MissingDependencyError where the host is missing or of another version than `host.SUPPORTED`.
"""

from __future__ import annotations

from dmuown.automodel.configs import (
    SHORT_NAMES,
    AngularMuownConfig,
    MuonConfig,
    MuownConfig,
    NorMuonConfig,
    NorMuownConfig,
    register_short_names,
)

register_short_names()

__all__ = ["SHORT_NAMES", "AngularMuownConfig", "MuonConfig", "MuownConfig", "NorMuonConfig", "NorMuownConfig"]
