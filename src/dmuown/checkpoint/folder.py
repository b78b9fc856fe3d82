"""A checkpoint folder that is replaced as a whole or not at all.

A save writes beside the old checkpoint, into `.NAME.saving`, and ends with a marker that lists every
file and its size. Only then the old folder moves to `.NAME.previous`, the new one takes its name, and
the old one goes. Killed at any point, `locate` finds a complete checkpoint: the old or the new one.
Only an empty folder or a checkpoint is ever replaced: a save into anything else is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from dmuown.errors import CheckpointError

#: Written last; a folder without it was not finished.
MARKER = "complete.json"

#: Holds the plain values beside the tensors.
EXTRA = "extra.pt"


def saving_folder(folder: Path) -> Path:
    """Where a save of `folder` is written."""
    return folder.parent / f".{folder.name}.saving"


def previous_folder(folder: Path) -> Path:
    """Where the old checkpoint waits while it is replaced."""
    return folder.parent / f".{folder.name}.previous"


def begin(folder: Path) -> Path:
    """Finish or clear what a killed save left behind, and return an empty folder to save into.

    Raises:
        CheckpointError: `folder`, or what lies under the names of an unfinished save, holds something else than a
            checkpoint; nothing has been changed then.
    """
    saving, previous = saving_folder(folder), previous_folder(folder)
    _check_replaceable(folder, finished=True)
    for unfinished in (saving, previous):
        _check_replaceable(unfinished, finished=False)
    if not folder.exists() and (saving / MARKER).exists():
        saving.replace(folder)
    if not folder.exists() and previous.exists():
        previous.replace(folder)
    for leftover in (saving, previous):
        if leftover.exists():
            shutil.rmtree(leftover)
    saving.mkdir(parents=True)
    return saving


def _check_replaceable(folder: Path, *, finished: bool) -> None:
    """Refuse to replace what is neither absent, nor empty, nor a checkpoint; with its marker, where it was finished."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(str(folder), "is no folder, and would be replaced by one", "Choose another path")
    names = sorted(entry.name for entry in folder.iterdir())
    listed = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = set(json.loads((folder / MARKER).read_bytes())["files"])
    strange = [name for name in names if name not in listed and not _is_written_by_a_save(folder / name)]
    if names and finished and MARKER not in names:
        strange = names
    if strange:
        raise CheckpointError(
            str(folder),
            f"holds {strange[0]!r}, which is no part of a checkpoint of dmuown, and would be replaced with it",
            "Choose a folder of the checkpoint's own",
        )


def _is_written_by_a_save(file: Path) -> bool:
    known = file.suffix == ".distcp" or file.name in (MARKER, EXTRA, ".metadata", ".metadata.tmp")
    return known and file.is_file() and not file.is_symlink()


def commit(folder: Path, details: dict[str, Any]) -> None:
    """Mark what was saved as complete, and put it in place of the old checkpoint.

    Args:
        folder: The checkpoint.
        details: Plain values for the marker.
    """
    saving, previous = saving_folder(folder), previous_folder(folder)
    files = {file.name: file.stat().st_size for file in sorted(saving.iterdir())}
    write_synced(saving / MARKER, json.dumps({**details, "files": files}, indent=1).encode())
    _sync_folder(saving)
    if folder.exists():
        folder.replace(previous)
    saving.replace(folder)
    _sync_folder(folder.parent)
    if previous.exists():
        shutil.rmtree(previous)


def locate(folder: Path) -> Path:
    """Return where the newest complete checkpoint of `folder` lies; nothing is changed.

    Raises:
        CheckpointError: There is none.
    """
    saving, previous = saving_folder(folder), previous_folder(folder)
    if folder.is_dir():
        return folder
    if (saving / MARKER).exists():
        return saving
    if previous.is_dir():
        return previous
    raise CheckpointError(str(folder), "does not exist", "Check the path")


def check_complete(folder: Path) -> dict[str, Any]:
    """Check that a checkpoint was finished and that its files are whole; return the marker's details.

    Raises:
        CheckpointError: No marker, or a file that is missing or has another size.
    """
    try:
        details = json.loads((folder / MARKER).read_bytes())
        files = dict(details["files"])
    except FileNotFoundError:
        raise CheckpointError(
            str(folder),
            f"was not finished, or not written by dmuown: it has no {MARKER}",
            "Use an earlier checkpoint; another tool's is read with require_complete=False",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(str(folder / MARKER), f"cannot be read: {error}", "Use an earlier checkpoint") from None
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            state = "is missing" if found is None else f"is truncated or changed: {found} bytes of {size}"
            raise CheckpointError(str(folder / name), state, "Use an earlier checkpoint")
    return dict(details)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
