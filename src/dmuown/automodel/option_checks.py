"""Checks of options that need more than their value: the policy, and the rules of the optimizer itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dmuown.automodel import options
from dmuown.errors import OptionError

if TYPE_CHECKING:
    from dmuown.policy import ParamPolicy

PRECISION_FIELDS = ("param_dtype", "grad_dtype", "output_dtype", "cast_forward_inputs", "master_dtype", "optim_dtype")


def parse_policy(value: Any) -> ParamPolicy | None:
    """Return a `param_policy` as it stands in YAML, parsed; None stays None.

    Raises:
        OptionError: A bad policy; the subject starts with `param_policy`.
    """
    if value is None:
        return None
    from dmuown.policy import ParamPolicy

    if isinstance(value, ParamPolicy):
        return value
    if not isinstance(value, str | Mapping):
        raise OptionError(
            "param_policy", f"must be a mapping, got {value!r}", "Write defaults: and overrides: below it"
        )
    try:
        return ParamPolicy.model_validate(dict(value) if isinstance(value, Mapping) else value)
    except OptionError as error:
        subject = error.subject if error.subject.startswith("param_policy") else f"param_policy.{error.subject}"
        raise OptionError(subject.rstrip("."), error.rule, error.remedy) from None


def check_as_group(optimizer_class: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> None:
    """Check arguments by the rules of the optimizer itself: now rather than after the model is loaded.

    The optimizer is not built: building any torch optimizer imports torch's compiler, seconds for a check.

    Raises:
        OptionError: What the optimizer would refuse.
        MissingDependencyError: `use_triton` without Triton.
    """
    from dmuown.engine.optimizer import MuonEngine
    from dmuown.engine.options import check_names, complete_group

    class Collector(MuonEngine):
        """Stands in the engine's place, below the optimizer's own constructor, and keeps what arrives."""

        def __init__(self, params: Any, *, defaults: Mapping[str, Any], nonfinite: str = "", **others: Any) -> None:
            self.arguments, self.nonfinite = dict(defaults), nonfinite

    probe: Any = type("Probe", (optimizer_class, Collector), {})((), **arguments)
    where = optimizer_class.__qualname__
    options.choice(f"{where}: nonfinite", probe.nonfinite, ("raise", "skip", "propagate"))
    defaults = {key: value for key, value in probe.arguments.items() if value is not None}
    check_names(defaults, where)
    # Matrices have no decay in AngularMuown, whose groups of other algorithms may have one.
    complete_group({"params": [], **defaults, "weight_decay": 0.0}, where, defaults)


def precision_fields(policy: ParamPolicy) -> list[str]:
    """Return the precision fields that a policy sets, which only the ownership runtime obeys."""
    given = {name for fields in (policy.defaults, *(rule.set for rule in policy.overrides)) for name in fields.given()}
    return [name for name in PRECISION_FIELDS if name in given]
