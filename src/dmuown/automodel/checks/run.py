"""The whole check of one file."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dmuown.automodel.checks import data, model, optimizer, relations
from dmuown.automodel.checks.document import Document, parallel_size, read_document, unset_variables
from dmuown.automodel.checks.problems import Report
from dmuown.automodel.checks.rules import Rule, text
from dmuown.automodel.checks.sections import (
    MOE,
    MP_POLICY,
    OTHER_SECTIONS,
    REQUIRED,
    SCALARS,
    SECTIONS,
    STRATEGIES,
    TARGET_SECTIONS,
)
from dmuown.automodel.checks.targets import Target, describe, find_target, fits
from dmuown.automodel.dmuon_options import DMuonOptions, own_options
from dmuown.automodel.host import DISTRIBUTION, SUPPORTED, installed_version
from dmuown.automodel.optimizer_options import MatrixOptions
from dmuown.errors import OptionError, ParameterError
from dmuown.policy.names import nearest
from dmuown.policy.roles import ParameterRole

_REMEDIES = {
    "recipe": "Write recipe: TrainFinetuneRecipeForNextTokenPrediction",
    "model": "Write a section with _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
    "dataset": "Write a section with the _target_ of a data set",
    "loss_fn": "Write _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    "optimizer": "Write a section with _target_: dmuown.automodel.MuownConfig",
}
#: What the host hands to a target itself.
_GIVEN = frozenset({"tokenizer", "dataset", "self", "model"})


def check_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    sizes: Mapping[str, int | None] | None = None,
    deep: bool = False,
    model_config: Path | None = None,
) -> Report:
    """Return every problem of a recipe's YAML.

    Args:
        path: The file.
        overrides: `--dotted.key value` arguments, as `dmuown finetune` takes them.
        world_size: Processes of the job, to check that sizes divide; None leaves that out.
        sizes: `tp`, `ep`, `pp`, `cp`, `replicas` that stand in for the YAML's; None leaves the YAML's.
        deep: Also load the file with the host itself and build its typed sections (10 s of imports).
        model_config: The model's `config.json`, where the YAML names a checkpoint that is not on this machine.
    """
    report = Report(str(path))
    try:
        document = read_document(path, overrides, sizes)
    except OptionError as error:
        report.error(error.subject, error.rule, error.remedy, line=getattr(error, "line", None))
        return report
    report.lines, report.overridden = document.lines, document.overridden
    _check_host(report)
    _check_variables(document.config, "", report)
    _check_top(document, report)
    _check_recipe(document, report)
    for name, rules in SECTIONS.items():
        if document.has(name):
            _check_keys(name, document.get(name), rules, report)
    _check_distributed(document, report)
    for name in [*(name for name in TARGET_SECTIONS if name != "optimizer"), *data.data_sections(document)]:
        if document.has(name) and not report.has_error(name):
            _check_target(name, document, report)
    for name in ("dataloader", "validation_dataloader"):
        _check_function(f"{name}.collate_fn", document, report)
    with optimizer.quiet():
        options = optimizer.check_optimizer(document, report)
    _check_other_optimizer(document, report)
    data.check_data(document, report)
    parameters = model.check_model(document, report, model_config=model_config)
    if not report.has_error("freeze_config"):
        model.check_frozen(document, report, parameters)
    _check_routes(document, options, parameters, report)
    _check_ownership(document, report)
    relations.check_relations(document, report, options, world_size=world_size)
    # Last of those of pp_size, whose first error is told.
    own = own_options(document.get("optimizer._target_")) is not None
    model.check_stages(document, report, parameters, own_optimizer=own)
    if deep and not report.errors:
        from dmuown.automodel.checks.deep import check_with_host

        check_with_host(document, report)
    return report


def _check_ownership(document: Document, report: Report) -> None:
    """Report all that the ownership runtime refuses.

    Before other rules of these keys, whose remedies would end here; and from the name of the configuration, whose other
    options may be wrong as well.
    """
    section = document.get("distributed")
    if own_options(document.get("optimizer._target_")) is not DMuonOptions or not isinstance(section, Mapping):
        return
    from dmuown.automodel.ownership import refusals

    # Tensor parallelism under ddp is told with the strategy to use.
    told = section.get("strategy") == "ddp" and parallel_size(document, "tp_size") > 1
    for error in refusals(section):
        if not (told and error.subject == "distributed.strategy"):
            report.raised(error)


def _check_routes(
    document: Document, options: MatrixOptions | None, parameters: Sequence[ParameterRole] | None, report: Report
) -> None:
    """Route the model's parameters as the run will: a policy that no parameter can obey is told here."""
    if options is None or options.param_policy is None or parameters is None:
        return
    if document.get("peft") is not None or report.has_error("freeze_config"):
        return  # what is trained is not known
    from dmuown.automodel.grouping import group_parameters
    from dmuown.automodel.planned.model import trainable_flags

    flags = trainable_flags(document, parameters)
    trained = [entry for entry, flag in zip(parameters, flags, strict=True) if flag]
    try:
        with optimizer.quiet():
            if trained:
                group_parameters(trained, options.grouping_rules())
    except ParameterError as error:
        report.error("optimizer.param_policy", f"{error.subject} {error.rule}", error.remedy)


def _check_host(report: Report) -> None:
    version = installed_version()
    if version is None:
        report.warning(
            DISTRIBUTION, "is not installed here: arguments of its classes were not checked", "See dmuown doctor"
        )
    elif version.split(".")[:2] != SUPPORTED.split(".")[:2]:
        report.error(
            DISTRIBUTION, f"is {version}, and dmuown works with {SUPPORTED}", f"pip install {DISTRIBUTION}=={SUPPORTED}"
        )


def _check_variables(node: Any, key: str, report: Report) -> None:
    if isinstance(node, Mapping):
        for name, value in node.items():
            _check_variables(value, f"{key}.{name}" if key else str(name), report)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _check_variables(value, f"{key}[{index}]", report)
    elif isinstance(node, str) and "$" in node:
        for name in unset_variables(node):
            report.error(key, f"refers to the environment variable {name}, which is not set", f"export {name}=...")


def _check_top(document: Document, report: Report) -> None:
    known = {*SECTIONS, *TARGET_SECTIONS, *SCALARS, *OTHER_SECTIONS, "validation_dataset"}
    for key, value in document.config.items():
        if key in known or key.startswith("validation_dataset"):
            if key in SCALARS:
                _apply(SCALARS[key], key, value, report)
            elif value is not None and not isinstance(value, Mapping):
                report.error(key, f"must be a section of keys, got {value!r}", "Indent its keys below it")
        elif key == "rng":
            report.warning("rng", "is not read by this version of the host", "Write seed at the top level")
        elif isinstance(value, Mapping) and "_target_" in value and nearest(key, known).startswith("Use one of"):
            report.warning(key, "is a section that no part of the recipe reads", "Remove it if it is not your own")
        elif (near := nearest(key, known)).startswith("Did you") or not _is_own_recipe(document):
            report.error(key, "is no section or key of the recipe", near if near.startswith("Did you") else "Remove it")
        else:
            report.warning(key, "is no section or key of the host's recipes", "Remove it if yours does not read it")
    for key in REQUIRED:
        if document.config.get(key) is None:
            report.missing("error", key, "is missing", _REMEDIES[key])


def _is_own_recipe(document: Document) -> bool:
    """Whether the recipe is a class of the user's, which may read sections that nobody else knows."""
    named = document.get("recipe._target_") or document.get("recipe")
    return isinstance(named, str) and "." in named and named.partition(".")[0] not in ("nemo_automodel", "dmuown")


def _check_recipe(document: Document, report: Report) -> None:
    named = document.get("recipe")
    key = "recipe"
    if isinstance(named, Mapping):
        named, key = named.get("_target_"), "recipe._target_"
    if named is None:
        return
    if not isinstance(named, str) or not named.strip():
        report.error(key, f"must be the name of a recipe, got {named!r}", _REMEDIES["recipe"])
        return
    if "." in named:
        if find_target(named).status == "missing":
            report.error(key, f"{named!r} does not exist", "Correct the dotted name")
        return
    known = _recipes()
    if known and named not in known:
        report.error(key, f"{named!r} is unknown", nearest(named, known))


@functools.cache
def _recipes() -> frozenset[str]:
    """Names of the host's recipes, as the host finds them: classes in its `recipes` folder."""
    import importlib.util

    spec = importlib.util.find_spec("nemo_automodel")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(next(iter(spec.submodule_search_locations))) / "recipes"
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        if not file.name.startswith("_"):
            source = file.read_text(encoding="utf-8")
            found |= set(re.findall(r"^class\s+(\w*Recipe\w*)\s*[(:]", source, re.MULTILINE))
    return frozenset(found - {"BaseRecipe"})


def _apply(rule: Rule, key: str, value: Any, report: Report) -> None:
    try:
        rule(key, value)
    except OptionError as error:
        report.raised(error)


def _check_keys(name: str, section: Any, rules: Mapping[str, Rule], report: Report) -> None:
    if not isinstance(section, Mapping):
        return  # reported where the section was met
    for key, value in section.items():
        if key in rules:
            _apply(rules[key], f"{name}.{key}", value, report)
        else:
            report.error(f"{name}.{key}", f"is no key of {name}", nearest(key, rules))


def _check_distributed(document: Document, report: Report) -> None:
    section = document.get("distributed")
    if not isinstance(section, Mapping):
        return
    strategy = section.get("strategy", "fsdp2")
    rules = STRATEGIES.get(strategy) if isinstance(strategy, str) else None
    if rules is None:
        report.error("distributed.strategy", f"{strategy!r} is unknown", nearest(str(strategy), STRATEGIES))
        rules = STRATEGIES["fsdp2"]
    _check_keys("distributed", section, rules, report)
    for key, inner in (("mp_policy", MP_POLICY), ("moe", MOE)):
        if isinstance(section.get(key), Mapping):
            _check_keys(f"distributed.{key}", section[key], inner, report)
            _check_name(f"distributed.{key}._target_", section[key].get("_target_"), report)


def _check_target(name: str, document: Document, report: Report) -> None:
    section = document.get(name)
    if not isinstance(section, Mapping):
        return
    target = section.get("_target_")
    if target is None:
        report.missing(
            "error",
            f"{name}._target_",
            "is missing",
            _REMEDIES.get(name, "Write the name of a class or function"),
        )
        return
    found = _check_name(f"{name}._target_", target, report)
    if found is None:
        return
    if name == "model":
        model.check_model_keys(document, report, found.arguments)
        _check_arguments(name, section, found, report, closed=False)
        _check_nested("model.backend", section.get("backend"), report)
    else:
        _check_arguments(name, section, found, report, closed=not found.takes_any)


def _check_nested(name: str, section: Any, report: Report) -> None:
    if isinstance(section, Mapping) and "_target_" in section:
        found = _check_name(f"{name}._target_", section["_target_"], report)
        if "attn" in section:
            _apply(text, f"{name}.attn", section["attn"], report)
        if found is not None:
            _check_arguments(name, section, found, report, closed=not found.takes_any)


def _check_arguments(name: str, section: Mapping[str, Any], target: Target, report: Report, *, closed: bool) -> None:
    for key, value in section.items():
        if key == "_target_":
            continue
        argument = target.arguments.get(key)
        if argument is None:
            if closed:
                report.error(
                    f"{name}.{key}", f"is no argument of {section['_target_']}", nearest(key, target.arguments)
                )
        elif not fits(value, argument.annotation):
            report.error(f"{name}.{key}", f"must be {describe(argument.annotation)}, got {value!r}", "Correct it")
    for key, argument in target.arguments.items():
        if argument.required and key not in section and key not in _GIVEN:
            report.missing("error", f"{name}.{key}", f"is missing: {section['_target_']} needs it", "Write it")


def _check_name(key: str, value: Any, report: Report) -> Target | None:
    """Check that a dotted name exists; None where it does not, or cannot be looked up."""
    if value is None:
        return None
    if not isinstance(value, str):
        report.error(key, f"must be a dotted name, got {value!r}", "Write it as text")
        return None
    if ".py:" in value:
        file = Path(value.partition(".py:")[0] + ".py")
        if not file.is_file():
            report.error(key, f"{str(file)!r} is no file", "Give the path of a Python file")
        return None
    found = find_target(value)
    if found.status == "missing":
        near = next((hint for part in reversed(value.split(".")) if (hint := _near(part, found.candidates))), "")
        report.error(key, f"{value!r} does not exist", near or "Correct the dotted name")
        return None
    if found.status == "unknown":
        if "." not in value or installed_version() is not None:
            _report_unknown(key, value, report)
        return None
    return found


def _near(name: str, candidates: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.7)
    return f"Did you mean {close[0]!r}" if close and close[0] != name else ""


def _report_unknown(key: str, value: str, report: Report) -> None:
    import importlib.util

    top = value.partition(".")[0]
    try:
        installed = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        installed = False
    if not installed and own_options(f"dmuown.automodel.{value}") is not None:
        report.error(key, f"{value!r} is no full path", f"Write dmuown.automodel.{value}")
    elif not installed:
        report.error(key, f"{value!r} names a package that is not installed: {top!r}", "Correct it, or install it")
    else:
        report.warning(key, f"{value!r} could not be looked up in the source of {top!r}", "Use --deep to import it")


def _check_function(key: str, document: Document, report: Report) -> None:
    value = document.get(key)
    if isinstance(value, Mapping):
        _check_name(f"{key}._target_", value.get("_target_"), report)
    elif document.has(key):
        if isinstance(value, str) and "." not in value and value:
            report.error(key, f"must be the dotted name of a function, got {value!r}", "Write package.module.function")
        else:
            _check_name(key, value if value is not None else 0, report)


def _check_other_optimizer(document: Document, report: Report) -> None:
    """Classes that are neither ours nor torch's, such as the host's own configurations."""
    section = document.get("optimizer")
    target = section.get("_target_") if isinstance(section, Mapping) else None
    if not isinstance(target, str) or target.startswith(("dmuown", "torch.optim.")):
        return
    found = _check_name("optimizer._target_", target, report)
    if found is not None and isinstance(section, Mapping):
        arguments = {key: value for key, value in found.arguments.items() if key != "params"}
        _check_arguments(
            "optimizer", section, Target("found", arguments, found.takes_any), report, closed=not found.takes_any
        )
