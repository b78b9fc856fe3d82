"""The flattened form of optimizer state dicts, one level of keys: what hosts hand to DCP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmuown.errors import CheckpointError

_STATE, _GROUPS = "state.", "param_groups."


def flatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state.<fqn>.<buffer>` and `param_groups.<fqn>.<option>`, the options once a parameter."""
    flat: dict[str, Any] = {}
    for fqn, buffers in state_dict["state"].items():
        for key, value in buffers.items():
            flat[f"{_STATE}{fqn}.{key}"] = value
    for group in state_dict["param_groups"]:
        # torch's loader asks for the names; each parameter brings its own, not those of its whole group.
        names = group.get("param_names", ())
        for index, fqn in enumerate(group["params"]):
            own = {"param_names": [names[index]]} if names else {}
            for key, value in {**group, **own}.items():
                if key != "params":
                    flat[f"{_GROUPS}{fqn}.{key}"] = value
    return flat


def unflatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested form of a flattened or nested state dict; each parameter is a group of its own.

    Raises:
        CheckpointError: A key of neither form.
    """
    if not state_dict or ("state" in state_dict and "param_groups" in state_dict):
        return dict(state_dict)
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in state_dict.items():
        for prefix, target in ((_STATE, state), (_GROUPS, groups)):
            if name.startswith(prefix):
                fqn, _, key = name.removeprefix(prefix).rpartition(".")
                target.setdefault(fqn, {})[key] = value
                break
        else:
            raise CheckpointError(name, "is no key of an optimizer state dict, nested or flattened")
    for options in groups.values():
        options.pop("param_names", None)
    return {"state": state, "param_groups": [{**options, "params": [fqn]} for fqn, options in groups.items()]}
