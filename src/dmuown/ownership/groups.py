"""Param groups of a dedicated model, by route, ready for any optimizer of this package.

They are the same on every rank, parameters that are elsewhere included, so that schedulers, logs and
checkpoints agree; an optimizer steps those that this rank owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dmuown.errors import OwnershipError
from dmuown.ownership.record import Record, record_of
from dmuown.ownership.registry import find_runtime, runtime_of
from dmuown.policy.fused import split_param_groups
from dmuown.policy.groups import OVERRIDE_KEYS, group_route, model_parameters, orient_groups, split_groups_by_route
from dmuown.policy.resolve import ResolvedRoute


def dedicated_param_groups(
    model: nn.Module,
    groups: Iterable[Mapping[str, Any]] | None = None,
    *,
    algorithm: str = "muown",
    auto_split: bool = False,
    per_head: bool = False,
) -> list[dict[str, Any]]:
    """Return the param groups of a dedicated model.

    Dedicated parameters go by their route: `muon` to `algorithm`, whole plain tensors; `adamw` to AdamW,
    whole plain tensors; `sharded_adamw` to AdamW, DTensor shards. Trainable parameters outside the runtime
    (under FSDP2 or DDP) have no route and go to AdamW, unless their group names an algorithm.

    Args:
        model: The model, after `dedicate_params` and `fully_shard`.
        groups: The user's own groups, split by route; together they must hold every dedicated parameter
            that takes gradients. None takes one group of all parameters.
        algorithm: Algorithm of the parameters on route `muon`.
        auto_split, per_head: As `dmuown.param_groups`.

    Returns:
        Groups with `params`, `param_names`, `dmuon_route`, `algorithm` and the user's keys; no empty ones.

    Raises:
        OwnershipError: The model is not dedicated; a dedicated parameter is in no group; a group asks for
            `sharded_adamw` for a parameter without shards, or for another route for one with shards.
    """
    if find_runtime(model) is None:
        raise OwnershipError(
            type(model).__name__,
            "has no dedicated parameters",
            "Pass dmuown.param_groups(model) instead of the model, or call dmuown.dedicate_params first",
        )
    records = runtime_of(model).records
    params = {name: param for name, param in model_parameters(model).items() if param.requires_grad}
    names = {id(param): name for name, param in params.items()}
    if groups is None:
        groups = [{"params": list(params.values())}]
    given = [{**group, "params": _tensors(group.get("params", ()))} for group in groups]
    for group in given:
        _check_override(group)
    _check_covered(given, records)
    routes: dict[str, ResolvedRoute] = {}
    for name, param in params.items():
        record = record_of(param)
        if record is not None:
            routes[name] = record.route
    split = split_groups_by_route(given, names=names, routes=routes, algorithm=algorithm)
    for part in split:
        if "dmuon_route" not in part:
            part.setdefault("algorithm", "adamw")
    oriented = orient_groups(split, model)
    return split_param_groups(oriented, model, per_head=per_head) if auto_split else oriented


def _check_override(group: Mapping[str, Any]) -> None:
    route, _ = group_route(group)
    if route is None:
        return
    key = next(key for key in OVERRIDE_KEYS if group.get(key) is not None)
    for param in group["params"]:
        record = record_of(param)
        if record is None or (route == "sharded_adamw") == (record.owner is None):
            continue
        if record.owner is None:
            raise OwnershipError(
                record.name,
                f"lies in shards, decided when the model was dedicated; its group's {key} asks for {route!r}",
                "Set its route in param_policy",
            )
        raise OwnershipError(
            record.name,
            f"is whole at {record.owner_text}, decided when the model was dedicated; its group's {key} asks for "
            "'sharded_adamw', which needs shards",
            "Set its route to 'sharded_adamw' in param_policy",
        )


def _check_covered(groups: Iterable[Mapping[str, Any]], records: Mapping[str, Record]) -> None:
    held = {id(param) for group in groups for param in group["params"]}
    absent = [name for name, record in records.items() if record.home.requires_grad and id(record.home) not in held]
    if absent:
        raise OwnershipError(
            absent[0],
            f"is dedicated and takes gradients, but is in no param group ({len(absent)} such parameters): it would "
            "never be stepped",
            "Pass the model itself, or groups that hold all its parameters, built after dedicate_params",
        )


def _tensors(params: Any) -> list[Tensor]:
    if isinstance(params, Tensor):
        return [params]
    return [item[1] if isinstance(item, tuple) else item for item in params]
