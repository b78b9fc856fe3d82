"""The checkpoint that `checkpoint.restore_from` names, found as the host finds it, without importing the host."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dmuown.automodel.checks.document import with_variables
from dmuown.automodel.dmuon_options import own_options
from dmuown.errors import CheckpointError
from dmuown.policy.names import nearest

KEY = "checkpoint.restore_from"
_INCOMPLETE = ".incomplete"
"""What the host leaves in a folder while it writes it."""


def checkpoint_folder(config: Mapping[str, Any]) -> Path:
    """Return the folder of checkpoints and logs; the host's default where the YAML names none."""
    section = config.get("checkpoint")
    named = section.get("checkpoint_dir") if isinstance(section, Mapping) else None
    return Path(with_variables(str(named or "checkpoints")))


def named_checkpoint(config: Mapping[str, Any]) -> Path | None:
    """Return the folder that `checkpoint.restore_from` names; None for `LATEST`, nothing, or storage elsewhere.

    A name without a slash is a folder, a link or (where links cannot be made) a text file in the folder of checkpoints.

    Raises:
        CheckpointError: There is no such folder, or a save that was interrupted left it.
    """
    section = config.get("checkpoint")
    value = section.get("restore_from") if isinstance(section, Mapping) else None
    if value is None or str(value).upper() == "LATEST":
        return None
    written = with_variables(str(value))
    if "://" in written:
        return None
    root = checkpoint_folder(config)
    folder = Path(written) if os.sep in written else _pointed(root, written)
    if not folder.is_dir():
        saved = sorted(path.name for path in root.glob("*step_*")) if root.is_dir() else []
        remedy = nearest(folder.name, saved) if saved and os.sep not in written else "Give a saved checkpoint"
        raise CheckpointError(KEY, f"{str(folder)!r} does not exist", remedy)
    if (folder / _INCOMPLETE).exists():
        raise CheckpointError(KEY, f"{str(folder)!r} was left incomplete by an interrupted save", "Give another one")
    return folder


def check_algorithm(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that a checkpoint was written by the optimizer that a configuration names.

    Raises:
        CheckpointError: Another algorithm wrote it.
    """
    if not (folder / "config.yaml").is_file():
        return
    try:
        saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CheckpointError(str(folder), f"its config.yaml cannot be read: {type(error).__name__}") from None
    before = _algorithm(saved.get("optimizer") if isinstance(saved, Mapping) else None)
    now = _algorithm(config.get("optimizer"))
    if before != now and None not in (before, now):
        raise CheckpointError(
            str(folder),
            f"was written by {before}, and this run uses {now}",
            "Resume with the optimizer that wrote it, or start in another checkpoint.checkpoint_dir",
        )


def _pointed(root: Path, name: str) -> Path:
    """The folder of a name in the folder of checkpoints, such as `epoch_0_step_9` or `LOWEST_VAL`."""
    file = root / f"{name}.txt"
    if (root / name).exists() or not file.is_file():
        return root / name
    return root / file.read_text(encoding="utf-8").strip()


def _algorithm(section: Any) -> str | None:
    target = section.get("_target_") if isinstance(section, Mapping) else None
    if not isinstance(target, str):
        return None
    own = own_options(target)
    return target if own is None else own.title()
