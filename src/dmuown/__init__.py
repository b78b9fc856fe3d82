"""The Muon family of matrix optimizers for AutoModel and any torch DTensor / FSDP2 training loop.

Public names load on first use, so `import dmuown` costs little, has no side effects, and needs neither the optional
libraries nor the ones that only the command line and the policies use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dmuown._version import __version__

if TYPE_CHECKING:
    from dmuown import errors as errors
    from dmuown.algorithms import BufferSpec as BufferSpec
    from dmuown.algorithms import MuonAlgorithm as MuonAlgorithm
    from dmuown.algorithms import register_muon_algorithm as register_muon_algorithm
    from dmuown.checkpoint import convert_optimizer_state as convert_optimizer_state
    from dmuown.checkpoint import get_model_state_dict as get_model_state_dict
    from dmuown.checkpoint import get_optimizer_state_dict as get_optimizer_state_dict
    from dmuown.checkpoint import load_checkpoint as load_checkpoint
    from dmuown.checkpoint import read_checkpoint as read_checkpoint
    from dmuown.checkpoint import save_checkpoint as save_checkpoint
    from dmuown.checkpoint import set_model_state_dict as set_model_state_dict
    from dmuown.checkpoint import set_optimizer_state_dict as set_optimizer_state_dict
    from dmuown.diagnostics.exchange import summarize_exchange as summarize_exchange
    from dmuown.diagnostics.param_groups import summarize_param_groups as summarize_param_groups
    from dmuown.engine.capture import capture as capture
    from dmuown.engine.info import engine_info as engine_info
    from dmuown.engine.optimizers import AngularMuown as AngularMuown
    from dmuown.engine.optimizers import Muon as Muon
    from dmuown.engine.optimizers import MuonLP as MuonLP
    from dmuown.engine.optimizers import Muown as Muown
    from dmuown.engine.optimizers import NorMuon as NorMuon
    from dmuown.engine.optimizers import NorMuown as NorMuown
    from dmuown.ownership import clip_grad_norm_ as clip_grad_norm_
    from dmuown.ownership import dedicate_params as dedicate_params
    from dmuown.ownership import dedicated_parameters as dedicated_parameters
    from dmuown.ownership import gathered as gathered
    from dmuown.ownership import no_sync as no_sync
    from dmuown.policy import ParamPolicy as ParamPolicy
    from dmuown.policy import param_groups as param_groups

# Where each public name lives. A new one is a line here, and an import above for type checkers.
_PUBLIC: dict[str, str] = {
    "AngularMuown": "dmuown.engine.optimizers",
    "Muon": "dmuown.engine.optimizers",
    "MuonLP": "dmuown.engine.optimizers",
    "Muown": "dmuown.engine.optimizers",
    "NorMuon": "dmuown.engine.optimizers",
    "NorMuown": "dmuown.engine.optimizers",
    "BufferSpec": "dmuown.algorithms",
    "MuonAlgorithm": "dmuown.algorithms",
    "register_muon_algorithm": "dmuown.algorithms",
    "summarize_exchange": "dmuown.diagnostics.exchange",
    "capture": "dmuown.engine.capture",
    "engine_info": "dmuown.engine.info",
    "convert_optimizer_state": "dmuown.checkpoint",
    "get_model_state_dict": "dmuown.checkpoint",
    "get_optimizer_state_dict": "dmuown.checkpoint",
    "load_checkpoint": "dmuown.checkpoint",
    "read_checkpoint": "dmuown.checkpoint",
    "save_checkpoint": "dmuown.checkpoint",
    "set_model_state_dict": "dmuown.checkpoint",
    "set_optimizer_state_dict": "dmuown.checkpoint",
    "summarize_param_groups": "dmuown.diagnostics.param_groups",
    "clip_grad_norm_": "dmuown.ownership",
    "dedicate_params": "dmuown.ownership",
    "dedicated_parameters": "dmuown.ownership",
    "gathered": "dmuown.ownership",
    "no_sync": "dmuown.ownership",
    "ParamPolicy": "dmuown.policy",
    "param_groups": "dmuown.policy",
}

# Submodules reachable as attributes without an import of their own.
_SUBMODULES = ("errors",)

__all__ = ["__version__", *_PUBLIC, *_SUBMODULES]


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        value: object = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
