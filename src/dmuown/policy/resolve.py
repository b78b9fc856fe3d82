"""From rules to routes: a pure function of names, shapes, roles and the policy.

Whatever the rules say is decided here, before any parameter is touched and before any collective,
so that a bad policy fails at construction on every rank alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from dmuown.errors import OptionError, OptionTypeError, ParameterError

if TYPE_CHECKING:
    from dmuown.policy.schema import ParamPolicy, PolicyFields

Route = Literal["muon", "adamw", "sharded_adamw"]
ROUTES: tuple[Route, ...] = ("muon", "adamw", "sharded_adamw")
FIELD_NAMES = (
    "route",
    "param_dtype",
    "grad_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "master_dtype",
    "optim_dtype",
)

# A tensor of fewer elements gains nothing from being sharded, and each costs a slice of two
# collectives; this many of them mean that a rule matches more than it was written for.
_SMALL_NUMEL = 1_000_000
_MANY_SMALL = 100

PolicyFn = Callable[[str, nn.Parameter], "PolicyFields | Mapping[str, Any] | None"]
RouteFn = Callable[[str, nn.Parameter], str | None]


@dataclass(frozen=True)
class ResolvedRoute:
    """Everything decided for one parameter.

    Attributes:
        route: Update rule and placement.
        param_dtype: Dtype in forward and backward; None is the parameter's own.
        grad_dtype: Dtype of the gradient's buffer and reduction; None follows `param_dtype`.
        output_dtype: Dtype of the boundary's floating-point outputs; None leaves them.
        cast_forward_inputs: Whether the boundary casts its floating-point inputs to `param_dtype`.
        master_dtype: Dtype of the stored parameter; None is its own.
        optim_dtype: Dtype of the update; None follows `master_dtype`.
        matched: Indices of the overrides that matched, in order.
        role: The parameter's role in its module, where known.
    """

    route: Route = "muon"
    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    master_dtype: torch.dtype | None = torch.float32
    optim_dtype: torch.dtype | None = torch.float32
    matched: tuple[int, ...] = ()
    role: str | None = None

    @property
    def effective_grad_dtype(self) -> torch.dtype | None:
        """`grad_dtype`, or else `param_dtype`; None is the parameter's own dtype."""
        return self.grad_dtype if self.grad_dtype is not None else self.param_dtype


@dataclass
class Resolution:
    """The routes of all parameters, and what looks unintended about them.

    Attributes:
        routes: By canonical name, in the order given.
        warnings: Sentences for the summary: rules that match nothing, routes that match too much.
    """

    routes: dict[str, ResolvedRoute]
    warnings: list[str] = field(default_factory=list)


def resolve_routes(
    params: Mapping[str, Tensor],
    *,
    policy: ParamPolicy | Mapping[str, Any] | str | None = None,
    policy_fn: PolicyFn | None = None,
    route_hint_fn: RouteFn | None = None,
    roles: Mapping[str, str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Resolution:
    """Resolve route and precision of every parameter.

    Args:
        params: The parameters by canonical name. Only shapes are read.
        policy: Rules; a `ParamPolicy`, what it validates (a mapping, YAML text), or None.
        policy_fn: `(name, parameter)` -> fields to set, as a mapping or `PolicyFields`, or None.
        route_hint_fn: Legacy: `(name, parameter)` -> route, or None.
        roles: Role of each parameter by canonical name; needed if the policy selects by role.
        shapes: Logical shapes where they differ from the tensors' own.

    Raises:
        OptionError: Two of `policy`, `policy_fn` and `route_hint_fn` at once; unknown keys, routes, dtypes.
        ParameterError: A vector (fewer than two axes) is left on `muon`.
    """
    given = [
        name
        for name, value in (("param_policy", policy), ("param_policy_fn", policy_fn), ("route_hint_fn", route_hint_fn))
        if value is not None
    ]
    if len(given) > 1:
        raise OptionError(" and ".join(given), "exclude each other", "Pass at most one of them")
    roles = roles or {}
    if policy is not None:
        resolution = _by_policy(params, _validated(policy), roles)
    elif policy_fn is not None or route_hint_fn is not None:
        resolution = Resolution({})
        for name, param in params.items():
            parameter = cast("nn.Parameter", param)
            fields = _fields(policy_fn(name, parameter), name) if policy_fn is not None else {}
            if route_hint_fn is not None:
                fields = {"route": _hinted(route_hint_fn(name, parameter), name)}
            resolution.routes[name] = _set(ResolvedRoute(role=roles.get(name)), fields)
    else:
        resolution = Resolution({name: ResolvedRoute(role=roles.get(name)) for name in params})
    dims = {name: len((shapes or {}).get(name, param.shape)) for name, param in params.items()}
    check_vectors({name: dims[name] for name, route in resolution.routes.items() if route.route == "muon"})
    resolution.warnings += broad_routes(params, resolution.routes)
    return resolution


def check_vectors(dims: Mapping[str, int]) -> None:
    """Refuse parameters on `muon` that are no matrices.

    Args:
        dims: Number of axes by name of the parameters on `muon`.

    Raises:
        ParameterError: One has fewer than two axes.
    """
    vectors = [name for name, ndim in dims.items() if ndim < 2]
    if vectors:
        others = f" (and {len(vectors) - 1} more: {', '.join(vectors[1:4])}, ...)" if len(vectors) > 1 else ""
        raise ParameterError(
            vectors[0],
            f"is a vector on route 'muon', which orthogonalizes matrices{others}",
            "Add an override that matches it with route 'adamw', for example {'name': ['norm', '.bias'], "
            "'set': {'route': 'adamw'}}",
        )


def _by_policy(params: Mapping[str, Tensor], policy: ParamPolicy, roles: Mapping[str, str]) -> Resolution:
    hits = [0] * len(policy.overrides)
    routes: dict[str, ResolvedRoute] = {}
    for name in params:
        role = roles.get(name)
        resolved = _set(ResolvedRoute(role=role), policy.defaults.given())
        matched = []
        for index, override in enumerate(policy.overrides):
            if override.matches(name, role):
                resolved = _set(resolved, override.set.given())
                matched.append(index)
                hits[index] += 1
        routes[name] = dataclasses.replace(resolved, matched=tuple(matched))
    warnings = [
        f"override {index} ({_selectors(policy.overrides[index])}) matches no parameter"
        for index, count in enumerate(hits)
        if count == 0
    ]
    return Resolution(routes, warnings)


def _validated(policy: ParamPolicy | Mapping[str, Any] | str) -> ParamPolicy:
    from dmuown.policy.schema import ParamPolicy

    if isinstance(policy, ParamPolicy):
        return policy
    if isinstance(policy, (Mapping, str)):
        return ParamPolicy.model_validate(policy)
    raise OptionTypeError("param_policy", f"must be a ParamPolicy, a mapping or YAML text, got {type(policy).__name__}")


def _fields(value: PolicyFields | Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    from dmuown.policy.schema import PolicyFields

    try:
        return PolicyFields.model_validate(value).given()
    except OptionError as error:
        raise OptionError(f"param_policy_fn({name!r}).{error.subject}", error.rule, error.remedy) from None


def _hinted(value: str | None, name: str) -> Route:
    from dmuown.policy.names import nearest

    if value is None:
        return "muon"
    if value not in ROUTES:
        raise OptionError(f"route_hint_fn({name!r})", f"unknown route {value!r}", nearest(str(value), ROUTES))
    return value


def _set(route: ResolvedRoute, fields: Mapping[str, Any]) -> ResolvedRoute:
    values = dict(fields)
    if values.get("route", "") is None:
        values["route"] = "muon"
    return dataclasses.replace(route, **values)


def _selectors(override: Any) -> str:
    return ", ".join(
        f"{key}={list(getattr(override, key))}"
        for key in ("name", "contains", "regex", "role")
        if getattr(override, key)
    )


def broad_routes(params: Mapping[str, Tensor], routes: Mapping[str, ResolvedRoute]) -> list[str]:
    """Return a warning if hundreds of small tensors are on `sharded_adamw`."""
    small = [
        name for name, route in routes.items() if route.route == "sharded_adamw" and params[name].numel() < _SMALL_NUMEL
    ]
    if len(small) < _MANY_SMALL:
        return []
    return [
        f"{len(small)} tensors of fewer than {_SMALL_NUMEL} elements are on 'sharded_adamw' "
        f"({small[0]}, {small[1]}, ...): the rule is too broad; 'adamw' moves them with fewer collectives"
    ]
