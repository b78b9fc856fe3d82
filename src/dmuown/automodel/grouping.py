"""Parameter groups of one model part, as the host's scheduler and checkpoints need them.

The host's `OptimizerParamScheduler` reads the base learning rate and decay of a whole optimizer
from group 0 and writes both into every group at each step, scaled by the group's `lr_mult` and
`wd_mult`. So group 0 must have a learning rate, and a decay if any group has one, and every group
says its multipliers. The host's checkpoints cannot load an empty group, so there is none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from dmuown.errors import ParameterError
from dmuown.policy.fused import split_param_groups
from dmuown.policy.resolve import resolve_routes
from dmuown.policy.roles import ParameterRole, Role, describe_parameters
from dmuown.policy.splits import ELEMENTWISE, block_count

if TYPE_CHECKING:
    from dmuown.policy.schema import ParamPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Override:
    """Factors on the learning rate and the decay of parameters whose name matches."""

    pattern: str
    lr_mult: float = 1.0
    wd_mult: float = 1.0


@dataclass(frozen=True)
class GroupingRules:
    """Where each role goes and at which rate.

    Attributes:
        algorithm: Algorithm of matrices and experts.
        scalar_algorithm: Algorithm of everything else, "adamw" or "lion".
        lr: Base learning rate, of matrices.
        weight_decay: Base decay. Embeddings and heads always have none.
        matrix_decay: Whether matrices have it.
        scalar_lr: Rate of `scalar_algorithm`; None is `lr`.
        embed_lr: Rate of embeddings; None is `scalar_lr`.
        lm_head_lr: Rate of untied heads; None is `lr`.
        scalar_betas: Coefficients of `scalar_algorithm`.
        scalar_eps: Epsilon of `scalar_algorithm`.
        flatten: Dense convolutions are matrices, their input and kernel axes flattened.
        adamw_patterns: Names matching one of these regular expressions (`re.search`) go to AdamW
            at `scalar_lr`, whatever their role.
        overrides: The first whose pattern matches a name scales its rate and decay.
        policy: Routes that stand in for roles: `muon` goes to `algorithm`, the others to `scalar_algorithm`.
        auto_split: Fused weights are cut into blocks by the model's config (`dmuown.policy.fused`).
        per_head: They, and q, k and v weights of their own, are cut into heads.
        qkv_heuristic: Matrices of three times as many rows as columns are cut into three.
    """

    algorithm: str
    scalar_algorithm: str
    lr: float
    weight_decay: float
    matrix_decay: bool
    scalar_lr: float | None
    embed_lr: float | None
    lm_head_lr: float | None
    scalar_betas: tuple[float, float]
    scalar_eps: float
    flatten: bool
    adamw_patterns: Sequence[str]
    overrides: Sequence[Override]
    policy: ParamPolicy | None = None
    auto_split: bool = False
    per_head: bool = False
    qkv_heuristic: bool = False


@dataclass(frozen=True)
class _Settings:
    """What a group is made of; parameters with equal settings share a group."""

    order: int
    algorithm: str
    matrix: bool
    lr: float
    decay_factor: float
    transposed: bool = False
    flatten: bool = False


@dataclass
class _Used:
    adamw: set[str] = field(default_factory=set)
    overrides: set[str] = field(default_factory=set)
    #: Earlier patterns that took what a later one matches too, by the later one; in the order of the list.
    taken: dict[str, list[str]] = field(default_factory=dict)


def build_param_groups(parts: Iterable[nn.Module], rules: GroupingRules) -> list[list[dict[str, Any]]]:
    """Return the parameter groups of every model part, one optimizer's worth each.

    Each group has `params` as (name, parameter) pairs, `algorithm`, `lr`, `weight_decay`, `lr_mult`
    and `wd_mult`; matrix groups add `matrix_transposed` and `flatten`, the others `beta1`, `beta2`
    and `epsilon`. Patterns that match nothing in any part are warned about.

    Raises:
        ParameterError: A part has no trainable parameter.
    """
    used = _Used()
    built = []
    for part in parts:
        groups = group_parameters(describe_parameters(part), rules, owner=type(part).__name__, used=used)
        built.append(split_param_groups(groups, part, per_head=rules.per_head) if rules.auto_split else groups)
    for key, patterns, seen in (
        ("adamw_param_patterns", rules.adamw_patterns, used.adamw),
        ("param_group_overrides", [entry.pattern for entry in rules.overrides], used.overrides),
    ):
        for pattern in patterns:
            if pattern in seen:
                continue
            if pattern in used.taken:
                logger.warning(
                    "%s: pattern %r has no effect: all that it matches is taken by %s, earlier in the list; the first "
                    "match counts, so put the narrower pattern first",
                    key,
                    pattern,
                    " and ".join(map(repr, used.taken[pattern])),
                )
            else:
                logger.warning("%s: pattern %r matches no trainable parameter of this model", key, pattern)
    return built


def count_matrices(groups: Iterable[dict[str, Any]]) -> int:
    """Count the matrices that groups orthogonalize: each of a stack of experts, each block of a fused weight."""
    total = 0
    for group in groups:
        if group["algorithm"] in ELEMENTWISE:
            continue
        for entry in group["params"]:
            parameter = entry[1] if isinstance(entry, tuple) else entry
            stacked = 1
            for size in () if group.get("flatten") else parameter.shape[:-2]:
                stacked *= size
            total += stacked * block_count(group, parameter.shape)
    return total


def group_parameters(
    roles: Sequence[ParameterRole], rules: GroupingRules, *, owner: str = "the model", used: _Used | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups of described parameters; see `build_param_groups`.

    Raises:
        ParameterError: There is none, or the policy leaves a vector on `muon`.
    """
    used = used or _Used()
    if not roles:
        raise ParameterError(owner, "has no trainable parameter", "Unfreeze some: see freeze_config in the YAML")
    routes: dict[str, str] = {}
    if rules.policy is not None:
        resolution = resolve_routes(
            {entry.name: entry.parameter for entry in roles},
            policy=rules.policy,
            roles={entry.name: entry.role.value for entry in roles},
        )
        routes = {name: found.route for name, found in resolution.routes.items()}
        for warning in resolution.warnings:
            logger.warning("param_policy: %s", warning)
    collected: dict[_Settings, list[tuple[str, nn.Parameter]]] = {}
    for entry in roles:
        settings = _settings(entry, rules, used, routes.get(entry.name))
        collected.setdefault(settings, []).append((entry.name, entry.parameter))
    if not any(settings.matrix for settings in collected):
        logger.warning(
            "%s has no trainable matrix: %s steps all of it and %s nothing",
            owner,
            rules.scalar_algorithm,
            rules.algorithm,
        )
    ordered = sorted(collected, key=lambda settings: _position(settings, rules))
    return [_group(settings, collected[settings], rules, ordered[0]) for settings in ordered]


def _position(settings: _Settings, rules: GroupingRules) -> tuple[bool, bool, int, bool, bool, float, float]:
    """Sort key: a group fit to be group 0 first, then by role, the plain group before its overrides."""
    decay = settings.decay_factor * rules.weight_decay
    return (
        settings.lr == 0,
        rules.weight_decay > 0 and decay == 0,
        settings.order,
        settings.transposed,
        settings.flatten,
        abs(settings.lr - rules.lr),
        abs(settings.decay_factor - 1),
    )


def _settings(entry: ParameterRole, rules: GroupingRules, used: _Used, route: str | None = None) -> _Settings:
    scalar_lr = rules.lr if rules.scalar_lr is None else rules.scalar_lr
    by_pattern = [pattern for pattern in rules.adamw_patterns if re.search(pattern, entry.name)]
    used.adamw.update(by_pattern)
    matrix = flatten = False
    decay, order, lr, algorithm = 1.0, 1, scalar_lr, rules.scalar_algorithm
    if entry.role in (Role.EMBEDDING, Role.HEAD):
        decay = 0.0
    orthogonalize = entry.role in (Role.MATRIX, Role.EXPERT) or (entry.role is Role.CONV and rules.flatten)
    if route is not None:
        orthogonalize = route == "muon"
    if by_pattern:
        algorithm = "adamw"
    elif orthogonalize:
        matrix, order, lr, algorithm = True, 0, rules.lr, rules.algorithm
        flatten, decay = entry.role is Role.CONV, float(rules.matrix_decay)
    elif entry.role is Role.EMBEDDING:
        order, lr = 2, scalar_lr if rules.embed_lr is None else rules.embed_lr
    elif entry.role is Role.HEAD:
        order, lr = 3, rules.lr if rules.lm_head_lr is None else rules.lm_head_lr
    matching = [override for override in rules.overrides if re.search(override.pattern, entry.name)]
    if matching:
        first, *later = matching
        used.overrides.add(first.pattern)
        lr, decay = lr * first.lr_mult, decay * first.wd_mult
        for override in later:
            takers = used.taken.setdefault(override.pattern, [])
            if first.pattern not in takers:
                takers.append(first.pattern)
    return _Settings(order, algorithm, matrix, lr, decay, matrix and entry.transposed, flatten)


def _group(
    settings: _Settings, params: list[tuple[str, nn.Parameter]], rules: GroupingRules, base: _Settings
) -> dict[str, Any]:
    group: dict[str, Any] = {
        "params": params,
        "algorithm": settings.algorithm,
        "lr": settings.lr,
        "weight_decay": settings.decay_factor * rules.weight_decay,
        "lr_mult": settings.lr / base.lr if base.lr else 1.0,
        # Explicit also without a decay: one that the scheduler brings must not reach embeddings and heads.
        "wd_mult": settings.decay_factor / base.decay_factor if base.decay_factor else settings.decay_factor,
    }
    if settings.matrix:
        group |= {"matrix_transposed": settings.transposed, "flatten": settings.flatten}
        return group | ({"qkv_heuristic": True} if rules.qkv_heuristic else {})
    return group | {
        "beta1": rules.scalar_betas[0],
        "beta2": rules.scalar_betas[1],
        "epsilon": rules.scalar_eps,
    }
