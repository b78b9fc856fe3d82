"""The optimizer's section: all wrong keys of our own configurations, the arguments of others."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dmuown.automodel import options
from dmuown.automodel.checks.document import Document
from dmuown.automodel.checks.problems import Report
from dmuown.automodel.dmuon_options import OPTIONS_BY_CONFIG, PACKAGE, DMuonOptions, own_options
from dmuown.automodel.optimizer_options import MatrixOptions
from dmuown.automodel.option_checks import precision_fields
from dmuown.errors import DmuownError, OptionError
from dmuown.policy.names import nearest


def check_optimizer(document: Document, report: Report) -> MatrixOptions | None:
    """Check the section, and return its options where they are ours and right."""
    section = document.get("optimizer")
    if not isinstance(section, Mapping):
        return None  # reported as a missing section
    target = section.get("_target_")
    if not isinstance(target, str):
        report.error(
            "optimizer._target_",
            "is missing" if target is None else f"must be the dotted name of a class, got {target!r}",
            f"Write _target_: {PACKAGE}.MuownConfig",
        )
        return None
    options_class = own_options(target)
    if options_class is not None:
        return _check_own(options_class, section, report)
    if target.startswith("dmuown"):
        name = target.rpartition(".")[2]
        near = nearest(name if name.endswith("Config") else f"{name}Config", OPTIONS_BY_CONFIG)
        report.error("optimizer._target_", f"{target!r} is no configuration of {PACKAGE}", near)
    elif target.startswith("torch.optim."):
        _check_torch(target, section, report)
    return None


def _check_own(options_class: type[MatrixOptions], section: Mapping[str, Any], report: Report) -> MatrixOptions | None:
    given = {key: value for key, value in section.items() if key != "_target_"}
    known = {entry.name for entry in dataclasses.fields(options_class) if entry.init}
    for key in [key for key in given if key not in known]:
        report.error(f"optimizer.{key}", f"is no option of {options_class.title()}", nearest(key, known))
        del given[key]
    built: MatrixOptions | None = None
    wrong = False
    # One wrong option hides those after it: report it, leave it out, and look again.
    for _ in range(len(given) + 1):
        try:
            built = options_class(**given)
            break
        except DmuownError as error:
            wrong = True
            culprit = _key_of(error.subject, given)
            report.error(f"optimizer.{_dotted(error.subject, culprit)}", error.rule, error.remedy)
            if culprit is None:
                break
            del given[culprit]
        except (TypeError, ValueError) as error:  # an option that no rule foresaw
            wrong = True
            report.error("optimizer", f"cannot be built: {error}", "Compare it with the options of the configuration")
            break
    if built is None:
        return None
    if "lr" not in section and not wrong:
        report.default("optimizer.lr", str(built.lr), "Write the learning rate", by="it is")
    _check_policy(options_class, built, report)
    return None if wrong or report.has_error("optimizer") else built


def _check_policy(options_class: type[MatrixOptions], built: MatrixOptions, report: Report) -> None:
    if built.param_policy is None or issubclass(options_class, DMuonOptions):
        return
    ignored = precision_fields(built.param_policy)
    if ignored:
        report.warning(
            "optimizer.param_policy",
            f"sets {', '.join(ignored)}, which have no effect without the ownership runtime",
            f"Use {PACKAGE}.DMuonConfig, or remove them",
        )


def _key_of(subject: str, given: Mapping[str, Any]) -> str | None:
    """The option that an error is about: its subject is `lr`, `betas[0]`, `Muown: ns_dtype`, ..."""
    from dmuown.engine.options import ALIASES

    for part in reversed(subject.replace("[", ".").split(":")):
        name = part.strip().split(".")[0]
        for candidate in (name, "betas" if name in ("beta1", "beta2") else name, *_aliases_of(name, ALIASES)):
            if candidate in given:
                return candidate
    return None


def _aliases_of(name: str, aliases: Mapping[str, str]) -> list[str]:
    return [alias for alias, canonical in aliases.items() if canonical == name]


def _dotted(subject: str, key: str | None) -> str:
    """The subject as a key of the file: elements of lists are `overrides[0]`."""
    if key is None or subject.startswith(key):
        return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", subject)
    return key


def _check_torch(target: str, section: Mapping[str, Any], report: Report) -> None:
    """The arguments of a class of torch, which the host hands one flat list of parameters."""
    import torch

    name = target.rpartition(".")[2]
    found = getattr(torch.optim, name, None)
    classes = [key for key, value in vars(torch.optim).items() if inspect.isclass(value)]
    if not inspect.isclass(found):
        report.error("optimizer._target_", f"torch.optim has no {name!r}", nearest(name, classes))
        return
    if name in ("Muon", "NorMuon"):
        report.error(
            "optimizer._target_",
            f"{target!r} would be replaced by the host with Dion's class of that name",
            f"Use {PACKAGE}.{name}Config",
        )
        return
    known = {*inspect.signature(found).parameters, "param_group_overrides"} - {"params", "self"}
    given = {}
    for key, value in section.items():
        if key == "_target_":
            continue
        if key not in known:
            report.error(f"optimizer.{key}", f"is no argument of {target}", nearest(key, known))
        else:
            given[key] = tuple(value) if isinstance(value, list) else value
            _check_torch_value(key, value, inspect.signature(found).parameters.get(key), report)
    if "lr" not in section and isinstance(default := inspect.signature(found).parameters["lr"].default, float):
        report.default("optimizer.lr", str(default), "Write the learning rate", by="it is")
    if not report.has_error("optimizer"):
        given.pop("param_group_overrides", None)
        factory: Any = found
        try:
            factory([torch.nn.Parameter(torch.zeros(1, 1))], **given)
        except (TypeError, ValueError, RuntimeError) as error:
            key = next((key for key in given if key in str(error) or key.rstrip("s") in str(error)), "")
            report.error(f"optimizer.{key}".rstrip("."), str(error), "Give it a value that the class takes")


_TORCH_RULES: Mapping[str, Any] = {
    "lr": options.not_negative,
    "weight_decay": options.not_negative,
    "eps": options.positive,
    "betas": options.coefficients,
    "momentum": options.not_negative,
}


def _check_torch_value(key: str, value: Any, parameter: inspect.Parameter | None, report: Report) -> None:
    rule = _TORCH_RULES.get(key)
    if rule is None and parameter is not None and isinstance(parameter.default, bool):
        rule = options.switch
    try:
        if rule is not None:
            rule(f"optimizer.{key}", value)
    except OptionError as error:
        report.raised(error)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what building options and groups logs out of a report."""
    logger = logging.getLogger("dmuown")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
