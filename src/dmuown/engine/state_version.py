"""The version of saved optimizer state, and how older state becomes current.

Every group carries `state_version`, since groups survive whatever carries optimizer state: torch's
state dicts, flattened ones, DCP and the host. Raise `STATE_VERSION` when the meaning or the names
of state change, and add the step from the version before to `UPGRADES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmuown.errors import CheckpointError

#: Version that this package writes.
STATE_VERSION = 1


def _from_unversioned(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Version 0 had the same buffers and no version."""
    return state_dict


#: Per version, what turns a state dict of it into one of the next. Steps return new containers where
#: they change any; tensors may be shared.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: _from_unversioned}


def upgrade(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of any known version as one of the current version.

    Raises:
        CheckpointError: A newer version, one that cannot be upgraded, or groups of several versions.
    """
    versions = {_version(group, index) for index, group in enumerate(state_dict["param_groups"])}
    if len(versions) > 1:
        raise CheckpointError(
            "state_version", f"differs between groups of the checkpoint: {sorted(versions)}", "Merge whole state dicts"
        )
    version = versions.pop() if versions else STATE_VERSION
    if version > STATE_VERSION:
        raise CheckpointError(
            "state_version",
            f"the checkpoint has version {version}, this dmuown reads up to {STATE_VERSION}",
            "Upgrade dmuown",
        )
    while version < STATE_VERSION:
        if version not in UPGRADES:
            raise CheckpointError(
                "state_version", f"version {version} can no longer be read", "Load and save it with an older dmuown"
            )
        state_dict = UPGRADES[version](state_dict)
        version += 1
    return state_dict


def _version(group: dict[str, Any], index: int) -> int:
    version = group.get("state_version", 0)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise CheckpointError(f"param group {index}: state_version", f"must be an integer >= 0, got {version!r}")
    return version
