"""Parameter groups: aliases resolved, defaults filled in, every value validated before any work."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dmuown import kernels
from dmuown.algorithms import Algorithm, MuonAlgorithm, get_algorithm, loaded_algorithms, source_of
from dmuown.engine.capturable import check_capturable
from dmuown.engine.state_version import STATE_VERSION
from dmuown.errors import MissingDependencyError, OptionError, install_extra
from dmuown.orthogonalize import resolve_orthogonalizer
from dmuown.state.spec import OPTIM_DTYPES, PRECISIONS

#: Other libraries' names for the same option.
ALIASES = {
    "wd": "weight_decay",
    "use_cautious_wd": "cautious_wd",
    "momentum": "mu",
    "orthogonalization_strategy": "scheme",
    "eps": "epsilon",
    "adam_eps": "epsilon",
}

#: Aliases of `(beta1, beta2)`.
BETA_ALIASES = ("betas", "adam_betas")

#: Options of every matrix group, whatever its algorithm.
MATRIX_OPTIONS: dict[str, Any] = {
    "matrix_transposed": False,
    "flatten": False,
    "ns_steps": 5,
    "ns_epsilon": None,
    "ns_dtype": "auto",
    "ns_norm": "add",
    "ns_form": "auto",
    "scheme": "newton_schulz",
    "coefficients": None,
    "backend": "auto",
    "split_sizes": None,
    "split_groups": None,
    "interleaved": False,
    "num_heads": None,
    "qkv_heuristic": False,
    "batch_size": None,
    "batch_bytes": None,
    "use_triton": False,
}

#: Options of every group.
COMMON_OPTIONS: dict[str, Any] = {
    "lr": None,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "epsilon": 1e-8,
    "step": 0,
    "algorithm": None,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "state_precision": None,
    "optim_dtype": None,
    "offload_state": False,
    "master_weights": False,
    "stochastic_rounding": False,
    "rounding_seed": 0,
    "state_version": STATE_VERSION,
}

#: Run-level settings: read from the configuration, also on resume; a checkpoint's values are set aside.
RUN_LEVEL_OPTIONS = (
    "muon_update_scale",
    "backend",
    "batch_size",
    "batch_bytes",
    "use_triton",
    "foreach",
    "ns_dtype",
    "ns_form",
    "fused_adam",
    "foreach_adam",
    "capturable",
    "maximize",
    "state_precision",
    "optim_dtype",
    "offload_state",
    "master_weights",
    "stochastic_rounding",
    "rounding_seed",
)

#: Constructor arguments that groups of any algorithm inherit; the others stay with the optimizer's own algorithm.
SHARED_OPTIONS = frozenset({*COMMON_OPTIONS, *RUN_LEVEL_OPTIONS, "mu", "cautious_wd", "ns_steps"}) - {"algorithm"}

#: What an optimizer hands on to algorithms in the whole-tensor form, beside the options of every group.
WHOLE_TENSOR_OPTIONS = frozenset({"mu", "nesterov", "cautious_wd"})

#: Keys that schedulers, hosts and torch itself put into groups, and that mean nothing here.
FOREIGN_KEYS = frozenset(
    {
        "params",
        "param_names",
        "name",
        "names",
        "initial_lr",
        "max_lr",
        "min_lr",
        "max_momentum",
        "base_momentum",
        "lr_mult",
        "wd_mult",
        "pre_lr_mult",
        "pre_wd_mult",
        "start_wd",
        "end_wd",
        "is_expert",
        "is_expert_parallel",
        "is_decoupled_lr",
        "differentiable",
        "fused",
        "swa_lr",
        "dmuon_route",
        "dmuon_optimizer",
        "matrix_optimizer",
        "decoupled_weight_decay",
        "amsgrad",
        "algorithm_source",
    }
)


def complete_group(group: dict[str, Any], where: str, class_defaults: Mapping[str, Any]) -> Algorithm:
    """Validate one group in place and fill in what it leaves out.

    Order of precedence: the group's own keys, the optimizer's arguments, the algorithm's defaults.

    Args:
        group: A param group, changed in place.
        where: How errors call it, such as `"param group 1"`.
        class_defaults: The optimizer's constructor arguments as group keys.

    Returns:
        The group's algorithm.

    Raises:
        OptionError: An unknown key or a bad value.
        MissingDependencyError: `use_triton` without Triton.
    """
    _resolve_aliases(group, where)
    class_defaults = dict(class_defaults)
    _resolve_aliases(class_defaults, where)
    name = group.get("algorithm", class_defaults["algorithm"])
    is_adamw = _taken_flag("is_adamw", group, class_defaults, where)
    if name == "adamw" and not is_adamw:
        name = "adam"
    algorithm = get_algorithm(name)
    group["algorithm"] = name
    source = source_of(algorithm)
    if source is not None:
        group["algorithm_source"] = source  # names the package to import, should a checkpoint meet a program without it
    known = {**COMMON_OPTIONS, **(MATRIX_OPTIONS if isinstance(algorithm, MuonAlgorithm) else {})}
    own = algorithm.all_options()
    for key in group:
        if key not in known and key not in own and key not in FOREIGN_KEYS and key not in every_option():
            _refuse_unknown(key, where, {*known, *own, *ALIASES, *BETA_ALIASES, "is_adamw"})
    if name != class_defaults["algorithm"]:
        # What belongs to the optimizer's own algorithm does not leak into groups of another, unless that other
        # one is in the whole-tensor form, which takes all of a Muon's options.
        shared = SHARED_OPTIONS
        if isinstance(algorithm, MuonAlgorithm) and algorithm.updates_whole_tensors():
            shared = (frozenset(known) | WHOLE_TENSOR_OPTIONS) - type(algorithm).options.keys() - {"algorithm"}
        class_defaults = {key: value for key, value in class_defaults.items() if key in shared}
    defaults = {**known, **own, **class_defaults}
    for given in (class_defaults, group):
        if "scheme" in given and "coefficients" in known:  # coefficients belong to the scheme they were chosen with
            defaults["coefficients"] = given.get("coefficients")
    for key, default in defaults.items():
        group.setdefault(key, default)
    validate_group(group, where)
    return algorithm


def _taken_flag(key: str, group: dict[str, Any], class_defaults: dict[str, Any], where: str) -> bool:
    """Remove an option that only spells another one, and return its value."""
    default = class_defaults.pop(key, True)
    value = group.pop(key, default)
    if not isinstance(value, bool):
        raise OptionError(f"{where}: {key}", f"must be True or False, got {value!r}")
    return value


def validate_group(group: dict[str, Any], where: str) -> None:
    """Validate a complete group's values in place: numbers spelt as strings become numbers.

    Raises:
        OptionError: A bad value.
        MissingDependencyError: `use_triton` without Triton.
    """
    _refuse_meaningful(group, where)
    algorithm = get_algorithm(group["algorithm"])
    _validate(group, where, {**COMMON_OPTIONS, **MATRIX_OPTIONS, **algorithm.all_options()})
    try:
        algorithm.check_options(group)
        if isinstance(algorithm, MuonAlgorithm):
            resolve_orthogonalizer(group, torch.device("cpu"))  # checks alike for every device
    except OptionError as error:
        raise OptionError(f"{where}: {error.subject}", error.rule, error.remedy) from None


def every_option() -> set[str]:
    """Names of all options of all registered algorithms: one optimizer may hold groups of any."""
    own = (key for algorithm in loaded_algorithms() for key in algorithm.all_options())
    return {*COMMON_OPTIONS, *MATRIX_OPTIONS, *own}


def prefer_aliases(arguments: Mapping[str, Any], signature: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Let an alias among constructor arguments stand for the argument it names.

    Args:
        arguments: Constructor arguments by name, aliases among them.
        signature: The constructor's own defaults by name.
        where: How errors call the optimizer.

    Returns:
        The arguments under their canonical names, `betas` for both aliases of it.

    Raises:
        OptionError: An argument was given under two names, with different values.
    """
    resolved = dict(arguments)
    for alias, canonical in {**ALIASES, "adam_betas": "betas"}.items():
        if alias not in resolved:
            continue
        value = resolved.pop(alias)
        # What differs from the signature's default was given by the caller.
        given = canonical in resolved and canonical in signature and resolved[canonical] != signature[canonical]
        if given and resolved[canonical] != value:
            raise OptionError(f"{where}: {alias}", f"disagrees with {canonical}, its alias", "Give one of them")
        resolved[canonical] = value
    return resolved


def check_names(arguments: Mapping[str, Any], where: str) -> None:
    """Refuse constructor arguments that no algorithm knows.

    Raises:
        OptionError: With the nearest name.
    """
    known = every_option() | {*ALIASES, *BETA_ALIASES, "is_adamw"}
    _refuse_meaningful(arguments, where)
    for key in arguments:
        if key not in known and key not in FOREIGN_KEYS:
            _refuse_unknown(key, where, known)


def _refuse_meaningful(given: Mapping[str, Any], where: str) -> None:
    """Refuse keys of torch's optimizers that would change an update, and change none here."""
    for key, only in MEANINGFUL_KEYS.items():
        if given.get(key, only) is not only:
            raise OptionError(
                f"{where}: {key}", f"is not supported, got {given[key]!r}", "Leave it out, or use torch's own"
            )


def _resolve_aliases(group: dict[str, Any], where: str) -> None:
    for alias, canonical in ALIASES.items():
        if alias in group:
            if canonical in group and group[canonical] != group[alias]:
                raise OptionError(f"{where}: {alias}", f"disagrees with {canonical}, its alias", "Give one of them")
            group[canonical] = group.pop(alias)
    for alias in BETA_ALIASES:
        if alias in group:
            betas = group.pop(alias)
            if not isinstance(betas, (tuple, list)) or len(betas) != 2:
                raise OptionError(f"{where}: {alias}", f"must be two numbers, got {betas!r}")
            group.setdefault("beta1", betas[0])
            group.setdefault("beta2", betas[1])


#: Foreign keys that other optimizers go by, and the only value that means the same here.
MEANINGFUL_KEYS = {"amsgrad": False, "differentiable": False}

#: What only a model can answer is asked of `dmuown.param_groups`, which writes the answer into groups.
_OF_THE_MODEL = ("auto_split", "per_head", "param_policy")


def _refuse_unknown(key: str, where: str, known: set[str]) -> None:
    if key in _OF_THE_MODEL:
        raise OptionError(
            f"{where}: {key}",
            "needs the model (its modules and config), and an optimizer sees only parameters",
            f"Pass dmuown.param_groups(model, {'policy' if key == 'param_policy' else f'{key}=True'}) as params",
        )
    near = difflib.get_close_matches(key, sorted(known), n=1)
    hint = f"Did you mean {near[0]!r}" if near else "Remove it"
    raise OptionError(f"{where}: {key}", "is not an option of this algorithm", hint)


def _validate(group: dict[str, Any], where: str, defaults: Mapping[str, Any]) -> None:
    for key, (rule, holds) in _NUMBER_RULES.items():
        # None stands for itself where it is the default, and for no number elsewhere.
        if key in group and not (group[key] is None and defaults.get(key) is None):
            group[key] = checked_number(group[key], f"{where}: {key}", rule, holds)
    if group["lr"] is None:
        raise OptionError(f"{where}: lr", "is missing")
    for key in _FLAGS:
        if key in group and not isinstance(group[key], bool):
            raise OptionError(f"{where}: {key}", f"must be True or False, got {group[key]!r}")
    for key in ("foreach", "fused_adam", "foreach_adam"):
        if group.get(key) not in (None, True, False):
            raise OptionError(f"{where}: {key}", f"must be True, False or None, got {group[key]!r}")
    if group.get("differentiable"):
        raise OptionError(f"{where}: differentiable", "updates cannot be differentiated through", "Leave it out")
    if group.get("use_triton") and not kernels.available():
        raise MissingDependencyError(
            f"{where}: use_triton", "needs Triton, which is not installed", install_extra("triton")
        )
    if group.get("capturable"):
        check_capturable(group, where)
    _validate_storage(group, where)
    for key in ("split_groups", "interleaved"):
        if group.get(key) and group.get("split_sizes") is None:
            raise OptionError(f"{where}: {key}", "needs split_sizes beside it", "Give the rows of each block")
    if group.get("split_groups") and group.get("interleaved"):
        raise OptionError(f"{where}: split_groups", "excludes interleaved", "Set only one of them")
    for key in ("ns_steps", "batch_size", "batch_bytes", "num_heads", "split_groups"):
        if group.get(key) is not None:
            _check_count(group[key], f"{where}: {key}")
    if group.get("split_sizes") is not None:
        for other, set_too in (("num_heads", (group["num_heads"] or 1) > 1), ("flatten", group["flatten"])):
            if set_too:
                raise OptionError(f"{where}: split_sizes", f"excludes {other}", "Set only one of them")
    if group.get("flatten") and (group.get("num_heads") or 1) > 1:
        raise OptionError(f"{where}: num_heads", "excludes flatten", "Set only one of them")


_FLAGS = (
    "nesterov",
    "cautious_wd",
    "matrix_transposed",
    "flatten",
    "interleaved",
    "qkv_heuristic",
    "maximize",
    "use_triton",
    "offload_state",
    "capturable",
    "master_weights",
    "stochastic_rounding",
)


def _validate_storage(group: dict[str, Any], where: str) -> None:
    precision = group.get("state_precision")
    if precision is not None and precision not in PRECISIONS:
        near = difflib.get_close_matches(str(precision), PRECISIONS, n=1)
        raise OptionError(
            f"{where}: state_precision",
            f"must be None or one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}",
            f"Did you mean {near[0]!r}" if near else "",
        )
    seed = group.get("rounding_seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptionError(f"{where}: rounding_seed", f"must be an integer, got {seed!r}")
    if group.get("master_weights") and group.get("stochastic_rounding"):
        raise OptionError(f"{where}: stochastic_rounding", "excludes master_weights", "Set only one of them")
    if group.get("optim_dtype") is None:
        return
    group["optim_dtype"] = name = str(group["optim_dtype"]).removeprefix("torch.")
    if name not in OPTIM_DTYPES:
        near = difflib.get_close_matches(name, OPTIM_DTYPES, n=1)
        raise OptionError(
            f"{where}: optim_dtype",
            f"must be None or one of {', '.join(OPTIM_DTYPES)}, got {name!r}",
            f"Did you mean {near[0]!r}" if near else "",
        )
    for key in ("master_weights", "stochastic_rounding"):
        if group.get(key) and name != "float32":
            raise OptionError(f"{where}: {key}", f"computes in float32 and excludes optim_dtype {name}", "Drop one")


def _check_count(value: object, subject: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(subject, f"must be an integer of at least 1, got {value!r}")


Check = tuple[str, Callable[[float], bool]]
_AT_LEAST_ZERO: Check = ("finite and >= 0", lambda value: 0 <= value < math.inf)
_UNIT: Check = ("in [0, 1)", lambda value: 0 <= value < 1)
_POSITIVE: Check = ("finite and > 0", lambda value: 0 < value < math.inf)

_NUMBER_RULES: dict[str, Check] = {
    "lr": _AT_LEAST_ZERO,
    "weight_decay": _AT_LEAST_ZERO,
    "mu": _UNIT,
    "beta1": _UNIT,
    "beta2": _UNIT,
    "muon_beta2": _UNIT,
    "epsilon": _POSITIVE,
    "ns_epsilon": _POSITIVE,
    "normalization_epsilon": _POSITIVE,
    "muon_update_scale": _AT_LEAST_ZERO,
    "warmup_steps": _AT_LEAST_ZERO,
    "decay_scale": _AT_LEAST_ZERO,
    "decay_degree": _AT_LEAST_ZERO,
}


def checked_number(value: Any, subject: str, rule: str, holds: Callable[[float], bool]) -> Any:
    """Return `value` as a number that obeys a rule.

    A string that spells a number is taken as one: YAML reads `1e-4` as a string. A tensor of one element
    stays as it is (a live hyper-parameter); its value is checked on the host only, since reading it from
    a device would wait for that.

    Raises:
        OptionError: Not a number, or against the rule.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise OptionError(subject, f"must be one number {rule}, got a tensor of shape {tuple(value.shape)}")
        if value.device.type == "cpu" and not holds(float(value)):
            raise OptionError(subject, f"must be {rule}, got {value!r}")
        return value
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise OptionError(subject, f"must be a number {rule}, got the string {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise OptionError(subject, f"must be a number {rule}, got {value!r}")
    if not holds(float(value)):
        raise OptionError(subject, f"must be {rule}, got {value!r}")
    # NumPy's numbers are Python's here: a checkpoint that names NumPy's classes is not read back.
    kind: type = type(value)
    return value if kind in (int, float) else float(value)
