"""Match the parameters of a state dict to those of an optimizer, by name where both have names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmuown.errors import CheckpointError
from dmuown.policy.names import nearest, without_wrappers


@dataclass(frozen=True)
class SavedParam:
    """A parameter of a state dict: the key of its state, and the group it was in."""

    state_key: Any
    group_index: int


def match_by_name(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Reorder a state dict into an optimizer's groups, if both name their parameters.

    Names are canonical FQNs: wrappers' prefixes are no part of them. Where nothing matches (no
    names, or names of another scheme), the state dict is returned as it is, to be matched by position.

    Raises:
        CheckpointError: Some names match and others are missing or too many.
    """
    if any("param_names" not in group for group in groups):
        return dict(state_dict)
    live = [[without_wrappers(name) for name in group["param_names"]] for group in groups]
    known = {name for names in live for name in names}
    saved = saved_params(state_dict, known)
    if saved is None or not saved.keys() & known:
        return dict(state_dict)
    return regroup(live, saved, state_dict)


def resolve_name(name: str, known: Collection[str]) -> str:
    """Return which of the known names a saved one is, or the saved one without wrappers' components.

    `module`, which DDP inserts at the front and a model may have too, decides only where nothing else does.
    """
    bare = without_wrappers(name)
    for candidate in (bare, bare.removeprefix("module."), f"module.{bare}"):
        if candidate in known:
            return candidate
    return bare


def saved_params(state_dict: Mapping[str, Any], known: Collection[str]) -> dict[str, SavedParam] | None:
    """Return the parameters of a state dict by canonical name; None if they have no names.

    Args:
        state_dict: With keys `state` and `param_groups`.
        known: Canonical names to resolve the saved ones to.

    Raises:
        CheckpointError: Two parameters of one name.
    """
    found: dict[str, SavedParam] = {}
    for index, group in enumerate(state_dict["param_groups"]):
        ids = group["params"]
        names = ids if all(isinstance(key, str) for key in ids) else group.get("param_names")
        if names is None or len(names) != len(ids):
            return None
        for name, key in zip(names, ids, strict=True):
            canonical = resolve_name(str(name), known)
            if canonical in found:
                raise CheckpointError(canonical, "appears twice in the checkpoint's groups")
            found[canonical] = SavedParam(key, index)
    return found


def regroup(
    names: Sequence[Sequence[str]],
    saved: Mapping[str, SavedParam],
    state_dict: Mapping[str, Any],
    *,
    ignore_extra: bool = False,
) -> dict[str, Any]:
    """Return a state dict in the groups and order of `names`, keyed by position.

    Args:
        names: Canonical names of an optimizer's parameters, group by group.
        saved: The parameters of the state dict, by canonical name.
        state_dict: With keys `state` and `param_groups`.
        ignore_extra: Leave out what `names` does not ask for, instead of refusing it.

    Raises:
        CheckpointError: A missing or extra parameter, or groups that cannot be merged.
    """
    wanted = {name for group in names for name in group}
    for name in (name for group in names for name in group if name not in saved):
        raise CheckpointError(name, "is not in the checkpoint", nearest(name, saved) if saved else "")
    extra = sorted(saved.keys() - wanted)
    if extra and not ignore_extra:
        raise CheckpointError(
            extra[0], "is in the checkpoint and not in this optimizer", "Build the optimizer with the same parameters"
        )
    state: dict[int, Any] = {}
    groups = []
    for members in names:
        first = len(state)
        for position, name in enumerate(members, start=first):
            state[position] = state_dict["state"].get(saved[name].state_key, {})
        groups.append(_merge(members, saved, state_dict["param_groups"], list(range(first, len(state)))))
    return {"state": state, "param_groups": groups}


def _merge(
    members: Sequence[str], saved: Mapping[str, SavedParam], groups: Sequence[Mapping[str, Any]], ids: list[int]
) -> dict[str, Any]:
    """Values of one group whose parameters may have been saved in several."""
    merged = {key: value for key, value in groups[saved[members[0]].group_index].items() if key != "param_names"}
    for name in members:
        other = groups[saved[name].group_index]
        for key in (merged.keys() | other.keys()) - {"params", "param_names"}:
            if not _equal(merged.get(key), other.get(key)):
                raise CheckpointError(
                    name,
                    f"its {key!r} is {other.get(key)!r} in the checkpoint and that of {members[0]}, "
                    f"in the same group here, {merged.get(key)!r}",
                    "Group the parameters as they were saved",
                )
    return {**merged, "params": ids}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return float(one) == float(other) if one is not None and other is not None else False
    return bool(one == other)
