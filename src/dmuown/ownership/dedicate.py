"""`dedicate_params`: give every parameter an owner, and let the model's own passes move it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuown.errors import LayoutError, OptionError, OptionTypeError, OwnershipError, PlanMismatchError
from dmuown.ownership.assignment import Item, assign_owners
from dmuown.ownership.away import make_away, released_tensor
from dmuown.ownership.boundaries import Boundaries, find_boundaries
from dmuown.ownership.group import OwnerGroup, owner_group
from dmuown.ownership.hooks import Casts, attach_boundary, attach_root, attach_state
from dmuown.ownership.link import Link
from dmuown.ownership.plan import Entry, OwnershipPlan, build_plan
from dmuown.ownership.record import Record, mark_replaced, note_dedication, record_of
from dmuown.ownership.registry import find_runtime, register
from dmuown.ownership.runtime import OwnershipRuntime
from dmuown.ownership.shards import cut_into_shards
from dmuown.policy.groups import model_roles
from dmuown.policy.names import canonical_name
from dmuown.policy.resolve import PolicyFn, Resolution, ResolvedRoute, RouteFn, resolve_routes

if TYPE_CHECKING:
    from dmuown.policy.schema import ParamPolicy

Predicate = Callable[[str, nn.Parameter], bool]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    predicate: Predicate,
    param_policy: ParamPolicy | Mapping[str, Any] | str | None = None,
    param_policy_fn: PolicyFn | None = None,
    route_hint_fn: RouteFn | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    replicate_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
) -> OwnershipPlan:
    """Put parameters under the ownership runtime. Collective over the mesh.

    From then on each parameter lives with one owner (`muon`, `adamw`) or in one shard per rank
    (`sharded_adamw`). Forward and backward passes of the model make parameters whole for the boundary
    that needs them, average the gradients over the mesh, and leave them with whoever steps the parameter.

    Call order: tensor parallelism first, then `dedicate_params`, then `fully_shard(...,
    ignored_params=dmuown.dedicated_parameters(model))` or DDP for the rest, then the optimizer.

    Args:
        model: The model, with real or meta parameters of equal values on all ranks (the owner's count).
        mesh: The shard dimension of the device mesh, or `(replicate, shard)`; data-parallel ranks only.
        predicate: `(canonical name, parameter)` -> whether the runtime manages it.
        param_policy: Rules for route and precision; see `dmuown.ParamPolicy`.
        param_policy_fn: `(name, parameter)` -> fields, instead of `param_policy`.
        route_hint_fn: Legacy: `(name, parameter)` -> route, instead of `param_policy`.
        hook_boundary_predicate: `(module)` -> whether transfers hang there; the lowest matching ancestor of
            a parameter is its boundary. None takes the nearest enclosing element of a `ModuleList`, else the
            parameter's own module.
        replicate_mesh: The replicate dimension, where `mesh` holds the shard dimension only.
        reshard_after_forward: Whether parameters are given up between forward and backward: less memory,
            one more transfer.
        prefetch: Boundaries fetched ahead of the one that computes.

    Returns:
        The plan: owners, transfers, bytes; printable.

    Raises:
        OptionError: A bad policy or option; two sources of policy.
        ParameterError: A vector on `muon`.
        LayoutError: The mesh does not fit.
        OwnershipError: Nothing selected; an override that names only parameters the predicate leaves out; a
            parameter without a boundary; conflicting casts at one boundary; the model is dedicated or
            sharded by FSDP2 already.
        PlanMismatchError: Ranks differ in what they would communicate.
    """
    _check_options(model, reshard_after_forward, prefetch)
    selected, left_out, uses = _select(model, predicate)
    roles = model_roles(model)
    resolution = resolve_routes(
        selected, policy=param_policy, policy_fn=param_policy_fn, route_hint_fn=route_hint_fn, roles=roles
    )
    _check_disagreement(resolution, left_out, param_policy, roles)
    found = find_boundaries(model, uses, hook_boundary_predicate)
    tensor_parallel = [name for name, param in selected.items() if isinstance(param, DTensor)]
    for name, route in resolution.routes.items():
        _check_route(name, selected[name], route)
    group = owner_group(mesh, replicate_mesh, tensor_parallel=bool(tensor_parallel))
    for name in tensor_parallel:
        _check_tensor_parallel(name, selected[name], group)
    entries = _entries(selected, resolution, found, len(group.ranks))
    plan = build_plan(
        entries,
        found.entries,
        world_size=len(group.ranks),
        reshard_after_forward=reshard_after_forward,
        shard_size=group.stages.size if group.stages is not None else None,
    )
    casts = _casts(plan, resolution.routes)
    _compare(plan, casts, group)
    records = {
        name: _dedicate(model, name, selected[name], uses[name], resolution.routes[name], plan.entries[name], group)
        for name in selected
    }
    runtime = OwnershipRuntime(
        model,
        plan,
        records,
        found.modules,
        Link(group.group, group.rank, group.ranks, group.stages),
        prefetch=prefetch,
        warnings=resolution.warnings,
    )
    _attach(model, runtime, casts)
    register(model, runtime)
    note_dedication()
    # DDP, if it wraps the rest of the model, leaves these alone.
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [raw for names in uses.values() for raw in names]
    )
    return plan


def _check_options(model: nn.Module, reshard_after_forward: object, prefetch: object) -> None:
    if not isinstance(model, nn.Module):
        raise OptionTypeError("model", f"must be an nn.Module, got {type(model).__name__}")
    if not isinstance(reshard_after_forward, bool):
        raise OptionTypeError("reshard_after_forward", f"must be True or False, got {reshard_after_forward!r}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise OptionError("prefetch", f"must be a number of boundaries, 0 or more, got {prefetch!r}")
    if not dist.is_initialized():
        raise OwnershipError(
            "dedicate_params", "needs a process group", "Call torch.distributed.init_process_group first"
        )
    if find_runtime(model) is not None or any(record_of(param) is not None for param in model.parameters()):
        raise OwnershipError(
            type(model).__name__,
            "has dedicated parameters already; owners and policy are decided once",
            "Call dedicate_params once, with the whole policy",
        )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise OwnershipError(
                name or type(model).__name__,
                "is sharded by fully_shard already, and dedicate_params needs whole parameters",
                "Call dedicate_params first, then fully_shard(module, "
                "ignored_params=dmuown.dedicated_parameters(model))",
            )


def _select(
    model: nn.Module, predicate: Predicate
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter], dict[str, list[str]]]:
    """Split parameters by the predicate; also the raw names of every use of the selected ones."""
    if not callable(predicate):
        raise OptionTypeError("predicate", f"must be a function (name, parameter) -> bool, got {predicate!r}")
    names: dict[int, list[str]] = defaultdict(list)
    params: dict[int, nn.Parameter] = {}
    for raw, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(raw)
        params[id(param)] = param
    selected: dict[str, nn.Parameter] = {}
    left_out: dict[str, nn.Parameter] = {}
    uses: dict[str, list[str]] = {}
    for identity, param in params.items():
        name = canonical_name(names[identity][0])
        if predicate(name, param):
            selected[name] = param
            uses[name] = names[identity]
        elif param.requires_grad:
            left_out[name] = param
    if not selected:
        raise OwnershipError(
            "predicate",
            f"selects none of the {len(params)} parameters, so nothing would be dedicated",
            "Pass for example predicate=lambda name, param: param.requires_grad",
        )
    return selected, left_out, uses


def _check_disagreement(
    resolution: Resolution,
    left_out: Mapping[str, nn.Parameter],
    policy: ParamPolicy | Mapping[str, Any] | str | None,
    roles: Mapping[str, str],
) -> None:
    """Refuse a policy with a rule that only parameters match which the predicate leaves out."""
    if policy is None or not left_out:
        return
    from dmuown.policy.schema import ParamPolicy

    used = {index for route in resolution.routes.values() for index in route.matched}
    for index, override in enumerate(ParamPolicy.model_validate(policy).overrides):
        if index in used:
            continue
        for name in left_out:
            if override.matches(name, roles.get(name)):
                raise OwnershipError(
                    name,
                    f"is matched by param_policy override {index}, but `predicate` leaves it out, and the override "
                    "matches nothing else",
                    "Let the predicate select it, or remove the override",
                )


def _check_route(name: str, param: nn.Parameter, route: ResolvedRoute) -> None:
    if not param.is_floating_point():
        raise OwnershipError(name, f"has dtype {param.dtype}; only floating-point parameters can be dedicated")
    if route.route != "sharded_adamw":
        return
    if param.ndim == 0:
        raise LayoutError(name, "is a scalar and cannot be sharded", "Use route 'adamw'")


def _check_tensor_parallel(name: str, param: nn.Parameter, group: OwnerGroup) -> None:
    assert isinstance(param, DTensor)
    names = tuple(param.device_mesh.mesh_dim_names or ())
    if not names or not set(names) <= set(group.tensor_parallel):
        raise LayoutError(
            name,
            f"is a DTensor over mesh dimensions {names or 'without names'}, which are not apart from the "
            "data-parallel ones",
            "Slice one named mesh: parallelize_module(model, mesh['tp'], ...), then dedicate_params(model, "
            "mesh['shard'], ...)",
        )


def _entries(
    selected: Mapping[str, nn.Parameter], resolution: Resolution, found: Boundaries, slots: int
) -> list[Entry]:
    routes = resolution.routes
    items = [
        Item(name, tuple(param.shape), found.of[name][0], routes[name].route == "muon")
        for name, param in selected.items()
        if routes[name].route != "sharded_adamw"
    ]
    owners = assign_owners(items, slots)
    entries = []
    for name, param in selected.items():
        route = routes[name]
        local = param.to_local() if isinstance(param, DTensor) else param
        param_dtype = route.param_dtype or param.dtype
        entries.append(
            Entry(
                name=name,
                shape=tuple(local.shape),
                route=route.route,
                owner=owners.get(name),
                boundaries=found.of[name],
                param_dtype=param_dtype,
                grad_dtype=route.effective_grad_dtype or param_dtype,
                trainable=param.requires_grad,
            )
        )
    return entries


def _casts(plan: OwnershipPlan, routes: Mapping[str, ResolvedRoute]) -> list[Casts]:
    """Activation casts per boundary; a boundary has one set of inputs and outputs, so they must agree."""
    members: dict[int, list[str]] = defaultdict(list)
    for entry in plan.entries.values():
        for index in entry.boundaries:
            members[index].append(entry.name)
    casts = []
    for boundary in plan.boundaries:
        names = members[boundary.index]
        compute = {plan.entries[name].param_dtype for name in names}
        casting = [name for name in names if routes[name].cast_forward_inputs]
        outputs = {dtype for name in names if (dtype := routes[name].output_dtype) is not None}
        if casting and len(compute) > 1:
            raise OwnershipError(
                f"boundary {boundary.label}",
                f"holds parameters of several param_dtypes ({_listed(compute)}) while {casting[0]} sets "
                "cast_forward_inputs: its inputs cannot be cast to all of them",
                "Give the module its own boundary by hook_boundary_predicate, or set cast_forward_inputs=False and "
                "let the module cast",
            )
        if len(outputs) > 1:
            raise OwnershipError(
                f"boundary {boundary.label}",
                f"holds parameters of several output_dtypes ({_listed(outputs)})",
                "Give the modules their own boundaries by hook_boundary_predicate",
            )
        casts.append(Casts(next(iter(compute)) if casting else None, next(iter(outputs), None)))
    return casts


def _compare(plan: OwnershipPlan, casts: Sequence[Casts], group: OwnerGroup) -> None:
    lines = [*plan.lines(), *(f"casts {cast.inputs} {cast.outputs}" for cast in casts)]
    if group.group is None:
        return
    everyone: list[list[str]] = [[]] * len(group.ranks)
    dist.all_gather_object(everyone, lines, group=group.group)
    for rank, other in zip(group.ranks, everyone, strict=True):
        if other != everyone[0]:
            pairs = itertools.zip_longest(everyone[0], other, fillvalue="nothing")
            here, there = next((first, second) for first, second in pairs if first != second)
            raise PlanMismatchError(
                f"rank {rank}",
                f"would communicate something else than rank {group.ranks[0]}: {there!r} instead of {here!r}",
                "Build the model, predicate and policy alike on every rank",
            )


def _dedicate(
    model: nn.Module,
    name: str,
    param: nn.Parameter,
    raw_names: Sequence[str],
    route: ResolvedRoute,
    entry: Entry,
    group: OwnerGroup,
) -> Record:
    """Turn a parameter into its home on this rank."""
    shape, dtype = tuple(param.shape), route.master_dtype or param.dtype
    tensor_parallel = (param.device_mesh, tuple(param.placements)) if isinstance(param, DTensor) else None
    owned = entry.owner is None or entry.owner == group.rank
    owner_global = group.ranks[entry.owner] if entry.owner is not None else None
    places = tuple(_place(model, raw) for raw in raw_names)
    away = f"rank {owner_global}"
    home = param
    with torch.no_grad():
        if entry.owner is None:
            home = nn.Parameter(cut_into_shards(param, dtype, group), requires_grad=param.requires_grad)
        elif owned and tensor_parallel is None:
            param.data = param.data.to(dtype).contiguous()
        elif owned:
            home = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
        elif tensor_parallel is None:
            param.data = released_tensor(shape, dtype, param.device)
            make_away(param, name, away)
        else:
            # Without data on this rank it is no DTensor any more.
            home = nn.Parameter(released_tensor(shape, dtype, param.device), requires_grad=param.requires_grad)
            make_away(home, name, away)
    record = Record(
        name=name,
        aliases=tuple(canonical_name(raw) for raw in raw_names[1:]),
        places=places,
        route=route,
        shape=shape,
        owner=entry.owner,
        owner_global=owner_global,
        owned=owned,
        home=home,
        compute_dtype=entry.param_dtype,
        grad_dtype=entry.grad_dtype,
        local_shape=entry.shape,
        tensor_parallel=tensor_parallel,
    )
    if home is not param:
        vars(home).update({key: value for key, value in vars(param).items() if key not in vars(home)})
        record.install(home)
        mark_replaced(param, name)
    record.mark()
    return record


def _place(model: nn.Module, raw: str) -> tuple[nn.Module, str]:
    path, _, attribute = raw.rpartition(".")
    return model.get_submodule(path), attribute


def _attach(model: nn.Module, runtime: OwnershipRuntime, casts: Sequence[Casts]) -> None:
    attach_root(model, runtime)
    for state, cast in zip(runtime.states, casts, strict=True):
        attach_boundary(state, runtime, cast)
    holders: dict[int, tuple[nn.Module, dict[str, Record]]] = {}
    for record in runtime.records.values():
        for module, attribute in record.places:
            holders.setdefault(id(module), (module, {}))[1][attribute] = record
    for module, attributes in holders.values():
        attach_state(module, attributes)


def _listed(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
