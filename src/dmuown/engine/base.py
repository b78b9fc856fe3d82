"""The base class of the optimizers: Dion's `Muon` where it is installed, else an equivalent.

Both have the same hooks (`_create_ortho_tasks`, `_create_adamw_tasks`, `_create_lion_tasks`,
`_get_or_initialize_state`), the same task protocol and the same group keys, so that one engine
(`dmuown.engine.optimizer`) runs on either, and a checkpoint of one resumes on the other.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from dmuown.engine import runtime
from dmuown.engine.info import import_dion


class EmbeddedMuon(Optimizer):
    """Stands in for Dion's `Muon`: takes the same defaults and offers the same hooks.

    It computes nothing itself: `dmuown.engine.optimizer.MuonEngine` overrides every hook.
    """

    def __init__(
        self,
        params: ParamsT,
        distributed_mesh: None = None,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "mu": mu,
            "beta1": betas[0],
            "beta2": betas[1],
            "weight_decay": weight_decay,
            "algorithm": "muon",
            "step": 0,
            "epsilon": epsilon,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for param in group["params"]:
                self._get_or_initialize_state(param, group["algorithm"])

    def _get_or_initialize_state(self, param: Tensor, algo: str) -> dict[str, Any]:
        raise AssertionError("MuonEngine overrides this hook")

    def _create_ortho_tasks(self, param_groups: list[dict[str, Any]]) -> Generator[runtime.AsyncTask, None, None]:
        raise AssertionError("MuonEngine overrides this hook")


_dion = import_dion()

if TYPE_CHECKING:
    from dmuown.engine.runtime import AsyncRuntime, AsyncTask

    _MuonBase = EmbeddedMuon
elif _dion is not None:
    from dion.opt_utils import AsyncRuntime, AsyncTask

    _MuonBase = _dion.Muon
else:
    from dmuown.engine.runtime import AsyncRuntime, AsyncTask

    _MuonBase = EmbeddedMuon

__all__ = ["AsyncRuntime", "AsyncTask", "EmbeddedMuon", "_MuonBase"]
