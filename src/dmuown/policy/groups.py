"""Routes as optimizer param groups.

Without the ownership runtime the same policy drives any optimizer of this package: `muon` becomes a
group of the matrix algorithm, `adamw` and `sharded_adamw` alike become AdamW groups, which step on
whatever shards the parameters have. A user's own groups keep their hyper-parameters and are split
by route.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dmuown.errors import OptionError, OptionTypeError, OwnershipError, ParameterError
from dmuown.policy.fused import fused_splits, regrouped, split_param_groups
from dmuown.policy.names import canonical_name, nearest
from dmuown.policy.resolve import ROUTES, Resolution, ResolvedRoute, check_vectors, resolve_routes
from dmuown.policy.roles import Role, describe_parameters, parameter_roles
from dmuown.policy.splits import ELEMENTWISE

if TYPE_CHECKING:
    from dmuown.policy.schema import ParamPolicy

_RESOLUTION = "_dmuown_resolution"
# Keys by which a user's group overrides the policy for all its parameters.
OVERRIDE_KEYS = ("dmuon_route", "dmuon_optimizer", "matrix_optimizer")


def model_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` by canonical name; one that is tied appears under its first name."""
    return {canonical_name(name): param for name, param in model.named_parameters()}


def model_roles(model: nn.Module) -> dict[str, str]:
    """Return the role of every parameter by canonical name, frozen ones included."""
    return {name: role.value for name, role in parameter_roles(model).items()}


def resolve_model(
    model: nn.Module,
    policy: ParamPolicy | Mapping[str, Any] | str | None,
    *,
    params: Mapping[str, nn.Parameter] | None = None,
    **functions: Any,
) -> Resolution:
    """Resolve the routes of a model's trainable parameters, roles included; see `resolve_routes`."""
    if params is None:
        params = {name: param for name, param in model_parameters(model).items() if param.requires_grad}
    return resolve_routes(params, policy=policy, roles=model_roles(model), **functions)


#: Stands for an algorithm until the groups are made.
_OPTIMIZERS_OWN = "the optimizer's own"


def param_groups(
    model: nn.Module,
    policy: ParamPolicy | Mapping[str, Any] | str | None = None,
    *,
    algorithm: str | None = None,
    groups: Iterable[Mapping[str, Any]] | None = None,
    auto_split: bool = False,
    per_head: bool = False,
) -> list[dict[str, Any]]:
    """Return param groups for an optimizer of this package from a model.

    What only a model can say goes into the groups: which weights are matrices, which are stored `[input, output]`
    (`matrix_transposed`), and, on request, where fused ones are cut.

    Args:
        model: The model, sharded or not; its trainable parameters are used.
        policy: The rules; None sends matrices and experts to route `muon`, and all else to AdamW.
        algorithm: Algorithm of the parameters on route `muon`; None leaves it to the optimizer that takes the groups.
        groups: The user's own groups, to be split by route; None takes one group of all parameters.
        auto_split: Cut fused weights into their blocks, by the model's config (`dmuown.policy.fused`).
        per_head: With `auto_split`: cut attention's weights, fused or not, into heads instead.

    Returns:
        Groups with `params`, `param_names`, `dmuon_route`, `algorithm` (see there) and the user's keys; no empty ones.

    Raises:
        OptionError, ParameterError: The policy is bad, or leaves a vector on `muon`; `per_head` without
            `auto_split`; `auto_split` for a model in which no module has a config and no weight is known to be fused.
        OptionTypeError: Not a model.
        OwnershipError: The model is dedicated: its policy is decided.
    """
    if not isinstance(model, nn.Module):
        raise OptionTypeError("model", f"must be an nn.Module, got {type(model).__name__}", "Pass the model itself")
    if policy is None:
        roles = parameter_roles(model)
        matrices = {name for name, role in roles.items() if role in (Role.MATRIX, Role.EXPERT)}
        functions = {"route_hint_fn": lambda name, _: "muon" if name in matrices else "adamw"}
    else:
        functions = {}
    if auto_split:
        _check_splittable(model)
    elif per_head:
        raise OptionError("per_head", "needs auto_split, which finds the heads", "Set auto_split=True as well")
    found = _routed_groups(model, policy, functions, algorithm or _OPTIMIZERS_OWN, groups, auto_split, per_head)
    for group in found:
        if group["algorithm"] == _OPTIMIZERS_OWN:
            del group["algorithm"]
    return found


def _routed_groups(
    model: nn.Module,
    policy: ParamPolicy | Mapping[str, Any] | str | None,
    functions: Mapping[str, Any],
    algorithm: str,
    groups: Iterable[Mapping[str, Any]] | None,
    auto_split: bool,
    per_head: bool,
) -> list[dict[str, Any]]:
    params = {name: param for name, param in model_parameters(model).items() if param.requires_grad}
    for name, param in params.items():
        if hasattr(param, "_dmuown_record"):
            raise OwnershipError(
                name,
                "is dedicated already, with the policy that was given then",
                "Pass the policy to dedicate_params, and the model itself to the optimizer",
            )
    resolution = resolve_model(model, policy, params=params, **functions)
    vars(model)[_RESOLUTION] = resolution
    routes = resolution.routes
    names = {id(param): name for name, param in params.items()}
    if groups is None:
        groups = [{"params": list(params.values())}]
    split = split_groups_by_route(groups, names=names, routes=routes, algorithm=algorithm)
    oriented = orient_groups(split, model)
    return split_param_groups(oriented, model, per_head=per_head) if auto_split else oriented


def orient_groups(groups: Iterable[Mapping[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Give matrices that are stored `[input, output]` groups of their own, with `matrix_transposed`.

    Groups that say `matrix_transposed` themselves, and elementwise ones, stay as they are.
    """
    transposed = {id(entry.parameter) for entry in describe_parameters(model) if entry.transposed}
    result: list[dict[str, Any]] = []
    for group in groups:
        if "matrix_transposed" in group or group.get("algorithm") in ELEMENTWISE:
            result.append({**group})
            continue
        for is_transposed, part in regrouped(group, lambda tensor: id(tensor) in transposed):
            result.append({**part, "matrix_transposed": True} if is_transposed else part)
    return result


def _check_splittable(model: nn.Module) -> None:
    if any(getattr(module, "config", None) is not None for module in model.modules()) or fused_splits(model):
        return
    raise OptionError(
        "auto_split",
        f"reads where weights are fused from the model's config, and no module of {type(model).__name__} has one",
        "Set model.config, or split_sizes in the groups of fused weights",
    )


def model_resolution(model: nn.Module) -> Resolution | None:
    """Return what `param_groups` last decided for a model, for summaries; None if it did not."""
    found = vars(model).get(_RESOLUTION)
    return found if isinstance(found, Resolution) else None


def split_groups_by_route(
    groups: Iterable[Mapping[str, Any]],
    *,
    names: Mapping[int, str],
    routes: Mapping[str, ResolvedRoute],
    algorithm: str = "muown",
) -> list[dict[str, Any]]:
    """Split each group by the routes of its parameters, keeping its other keys and the order.

    Args:
        groups: Param groups as torch takes them; `params` holds tensors or `(name, tensor)` pairs.
        names: Canonical name by `id` of the parameter.
        routes: Resolved route by canonical name. Parameters without one stay as their group says.
        algorithm: Algorithm of the parameters on route `muon`.

    Returns:
        Groups that each have one `dmuon_route` and one `algorithm`; no empty ones.

    Raises:
        OptionError: Override keys that name no route, or that contradict each other.
        ParameterError: An override that sends a vector to `muon`.
    """
    result: list[dict[str, Any]] = []
    for group in groups:
        overridden, named_algorithm = group_route(group)
        split: dict[str, list[tuple[str, Tensor]]] = {route: [] for route in (*ROUTES, "")}
        for param in _tensors(group.get("params", ())):
            name = names.get(id(param), "")
            found = routes.get(name)
            split[overridden or (found.route if found is not None else "")].append((name, param))
        if overridden == "muon":
            check_vectors({name or "parameter": param.ndim for name, param in split["muon"]})
        for route, members in split.items():
            if not members:
                continue
            part = {key: value for key, value in group.items() if key not in ("params", "param_names", *OVERRIDE_KEYS)}
            part["params"] = [param for _, param in members]
            part["param_names"] = [name for name, _ in members]
            if route:
                part["dmuon_route"] = route
                part["algorithm"] = _algorithm(route, group, named_algorithm or algorithm)
            result.append(part)
    return result


def group_route(group: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the route that a group's own keys demand for all its parameters, and the algorithm if one is named.

    `matrix_optimizer` and `dmuon_optimizer` also take the name of a matrix algorithm, which means route
    `muon` with that algorithm.

    Raises:
        OptionError: Unknown values, or keys that contradict each other.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for key in OVERRIDE_KEYS:
        value = group.get(key)
        if value is None:
            continue
        text = value.strip().lower() if isinstance(value, str) else ""
        if text in ROUTES:
            found[key] = (text, None)
        elif key != "dmuon_route" and text in _MATRIX_ALGORITHMS:
            found[key] = ("muon", text)
        else:
            known = ROUTES if key == "dmuon_route" else (*ROUTES, *_MATRIX_ALGORITHMS)
            raise OptionError(key, f"names no route: {value!r}", nearest(text, known))
    if len({route for route, _ in found.values()}) > 1:
        raise OptionError(" and ".join(found), "override the group's route differently", "Keep one of them")
    for route, algorithm in found.values():
        if algorithm is not None:
            return route, algorithm
    return next(iter(found.values()), (None, None))


_MATRIX_ALGORITHMS = ("normuon", "muown", "normuown", "angular_muown")


def _algorithm(route: str, group: Mapping[str, Any], matrix_algorithm: str) -> str:
    """The group's own algorithm where it fits the route, else the route's."""
    own = group.get("algorithm")
    elementwise = ("adamw", "adam", "lion")
    if route == "muon":
        return str(own) if own is not None and own not in elementwise else matrix_algorithm
    return str(own) if own in elementwise else "adamw"


def _tensors(params: Any) -> Sequence[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    tensors = [item[1] if isinstance(item, tuple) else item for item in params]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise OptionTypeError("params", f"must hold tensors, got {type(tensor).__name__}")
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) in seen:
            raise ParameterError("params", "the same parameter appears twice in one group", "List it once")
        seen.add(id(tensor))
    return tensors
