"""Optimizer configurations of the host, for `optimizer._target_` in its YAML files.

Each joins its options (`dmuown.automodel.optimizer_options`, which say what they mean and check them) with the
host's base class, so that the host takes it for its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dmuown.automodel.dmuon_options import DMuonOptions
from dmuown.automodel.host import require_host
from dmuown.automodel.optimizer_options import (
    AngularMuownOptions,
    MatrixOptions,
    MuonOptions,
    MuownOptions,
    NorMuonOptions,
    NorMuownOptions,
)

require_host()

from nemo_automodel.components.optim.optimizer import OPTIMIZER_CONFIG_REGISTRY, OptimizerConfig  # noqa: E402

MatrixOptimizerConfig = MatrixOptions
"""Base of all configurations here, and of their options."""


@dataclass
class MuownConfig(MuownOptions, OptimizerConfig):
    """`dmuown.Muown` in the host; see `MuownOptions`."""

    supports_megatron_fsdp_sharding: ClassVar[bool] = False


@dataclass
class NorMuownConfig(NorMuownOptions, OptimizerConfig):
    """`dmuown.NorMuown` in the host; see `NorMuownOptions`."""

    supports_megatron_fsdp_sharding: ClassVar[bool] = False


@dataclass
class MuonConfig(MuonOptions, OptimizerConfig):
    """`dmuown.Muon` in the host; see `MuonOptions`."""

    supports_megatron_fsdp_sharding: ClassVar[bool] = False


@dataclass
class NorMuonConfig(NorMuonOptions, OptimizerConfig):
    """`dmuown.NorMuon` in the host; see `NorMuonOptions`."""

    supports_megatron_fsdp_sharding: ClassVar[bool] = False


@dataclass
class AngularMuownConfig(AngularMuownOptions, OptimizerConfig):
    """`dmuown.AngularMuown` in the host; see `AngularMuownOptions`."""

    supports_megatron_fsdp_sharding: ClassVar[bool] = False


@dataclass
class DMuonConfig(DMuonOptions, OptimizerConfig):
    """The ownership runtime in the host, with any algorithm; see `DMuonOptions`."""

    supports_megatron_fsdp_sharding: ClassVar[bool] = False


SHORT_NAMES: dict[str, type[MatrixOptimizerConfig]] = {
    "dmuown_muown": MuownConfig,
    "dmuown_muon": MuonConfig,
    "dmuown_normuon": NorMuonConfig,
    "dmuown_normuown": NorMuownConfig,
    "dmuown_angular_muown": AngularMuownConfig,
}
"""Names for the host's Python path, `build_optimizer(model, (name, options))`; YAML needs `_target_`."""


def register_short_names() -> None:
    """Add `SHORT_NAMES` to the host's registry; a name that is taken stays as it is."""
    for name, config in SHORT_NAMES.items():
        OPTIMIZER_CONFIG_REGISTRY.setdefault(name, config)


register_short_names()
