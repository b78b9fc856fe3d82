"""Where every parameter goes: rules written by the user, resolved to one route per parameter.

    schema   the rules as the user writes them (pydantic)
    names    the nearest known name for a misspelled one
    roles    what a parameter is in its model: embedding, head, norm, bias, conv, router, expert, ...
    resolve  names, roles and rules -> one `ResolvedRoute` per parameter
    fused    which weights are several matrices in one, from the model's config
    splits   how one of them is cut
    groups   routes -> optimizer param groups

Only `schema` imports pydantic, and only when `ParamPolicy` is used: optimizers and the ownership
runtime work without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuown.policy.groups import param_groups, split_groups_by_route
    from dmuown.policy.resolve import ResolvedRoute, resolve_routes
    from dmuown.policy.schema import ParamPolicy

__all__ = [
    "ParamPolicy",
    "ResolvedRoute",
    "param_groups",
    "resolve_routes",
    "split_groups_by_route",
]

_HOMES = {
    "ParamPolicy": "dmuown.policy.schema",
    "ResolvedRoute": "dmuown.policy.resolve",
    "resolve_routes": "dmuown.policy.resolve",
    "param_groups": "dmuown.policy.groups",
    "split_groups_by_route": "dmuown.policy.groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
