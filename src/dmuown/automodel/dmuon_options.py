"""The options of the ownership runtime, and the table of all configurations; checked without the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dmuown.automodel import options
from dmuown.automodel.grouping import GroupingRules
from dmuown.automodel.optimizer_options import OPTIONS_BY_ALGORITHM, MatrixOptions
from dmuown.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dmuown.policy.schema import ParamPolicy

#: Options that belong to some algorithms only; None leaves them to the algorithm.
_ALGORITHM_FIELDS = (
    "adjust_lr",
    "adjust_lr_fn",
    "cautious_wd",
    "decay_degree",
    "decay_scale",
    "muon_beta2",
    "muon_update_scale",
    "normalization_epsilon",
    "shape_scaling_type",
    "use_gram_newton_schulz",
    "use_polar_express",
    "warmup_steps",
)

_OPTIONAL_HERE = frozenset({*_ALGORITHM_FIELDS, "lr", "nesterov", "ns_epsilon"})

#: Routes of `DMuonConfig` where the YAML has no `param_policy`: by role, as the other configurations do it.
DEFAULT_POLICY: Mapping[str, Any] = {
    "defaults": {"route": "adamw"},
    "overrides": [
        {"role": ["matrix", "expert"], "set": {"route": "muon"}},
        {"role": ["embedding", "head"], "set": {"route": "sharded_adamw"}},
    ],
}


@dataclass
class DMuonOptions(MatrixOptions):
    """The ownership runtime with any algorithm: every parameter has one owner, which steps it whole.

    Takes the options of the chosen algorithm's own configuration; what is left out is that one's default.

    Attributes:
        algorithm: "muown", "muon", "normuon", "normuown" or "angular_muown": steps what is on route `muon`.
        param_policy: Route and precision of every parameter; see `dmuown.ParamPolicy`. Without one, matrices and
            experts are on `muon`, embeddings and heads on `sharded_adamw`, the rest on `adamw`.
        reshard_after_forward: Whether parameters are given up between forward and backward.
        prefetch: Boundaries fetched ahead of the one that computes, >= 0.
    """

    algorithm: str = "muown"  # type: ignore[misc]
    lr: float | None = None  # type: ignore[assignment]
    nesterov: bool | None = None  # type: ignore[assignment]
    ns_epsilon: float | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    adjust_lr: str | None = None
    adjust_lr_fn: str | None = None
    cautious_wd: bool | None = None
    decay_degree: float | None = None
    decay_scale: float | None = None
    muon_beta2: float | None = None
    muon_update_scale: float | None = None
    normalization_epsilon: float | None = None
    shape_scaling_type: str | None = None
    use_gram_newton_schulz: bool | None = None
    use_polar_express: bool | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        self.algorithm = options.choice("algorithm", self.algorithm, tuple(OPTIONS_BY_ALGORITHM))
        self.reshard_after_forward = options.switch("reshard_after_forward", self.reshard_after_forward)
        self.prefetch = options.count_or_zero("prefetch", self.prefetch)
        chosen = OPTIONS_BY_ALGORITHM[self.algorithm]
        known = {entry.name for entry in dataclasses.fields(chosen)}
        given = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.name in ("algorithm", "reshard_after_forward", "prefetch"):
                continue
            if entry.name in _ALGORITHM_FIELDS and value is not None and entry.name not in known:
                raise OptionError(entry.name, f"is no option of algorithm {self.algorithm!r}", "Leave it out")
            if entry.name in known and (value is not None or entry.name not in _OPTIONAL_HERE):
                given[entry.name] = value
        if given.get("param_policy") is None:
            given["param_policy"] = DEFAULT_POLICY
        self.chosen: MatrixOptions = chosen(**given)
        for name in given:
            setattr(self, name, getattr(self.chosen, name))
        self.lr = self.chosen.lr
        # Dtypes of computation and of gradients' reduction; the host's parallelizer fills them in.
        self.mixed_precision: tuple[torch.dtype | None, torch.dtype | None] = (None, None)

    def routes(self) -> ParamPolicy:
        """Return the policy of the runtime: the YAML's, or the default."""
        policy: ParamPolicy = self.param_policy
        return policy

    def grouping_rules(self) -> GroupingRules:
        """Return where each parameter goes, as the chosen algorithm's configuration does."""
        return self.chosen.grouping_rules()

    def optimizer_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer class, groups and mesh excepted."""
        return self.chosen.optimizer_options()

    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """Return the optimizer class of the chosen algorithm."""
        return self.chosen.optimizer_class()

    def build(
        self, model: torch.nn.Module, *, device_mesh: DeviceMesh | None = None, is_peft: bool = False
    ) -> list[torch.optim.Optimizer]:
        """Give every parameter of `model` an owner, and build the optimizer of what this rank owns.

        Args:
            model: The model with whole parameters, equal on all ranks, or cut by tensor parallelism alone.
            device_mesh: The host's mesh; its data-parallel ranks are owners. None: all ranks.
            is_peft: Whether adapters are trained; nothing here depends on it.

        Raises:
            OptionError: The model is sharded already.
        """
        from dmuown.automodel.ownership import build_owned

        return build_owned(self, model, device_mesh)


_ALL: tuple[type[MatrixOptions], ...] = (*OPTIONS_BY_ALGORITHM.values(), DMuonOptions)

OPTIONS_BY_CONFIG: Mapping[str, type[MatrixOptions]] = {found.title(): found for found in _ALL}
"""Options by the name of the configuration in `dmuown.automodel`."""

PACKAGE = "dmuown.automodel"


def own_options(target: object) -> type[MatrixOptions] | None:
    """Return the options of the configuration of this package that a `_target_` names, or None."""
    if not isinstance(target, str):
        return None
    package, _, name = target.rpartition(".")
    return OPTIONS_BY_CONFIG.get(name) if package in (PACKAGE, f"{PACKAGE}.configs") else None
