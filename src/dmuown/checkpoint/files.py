"""Save, load and read checkpoints on disk: DCP's format, replaced atomically, read safely.

What is saved is what `dcp.save({"model": ..., "optimizer": ...})` writes, so `dcp.load` reads it too.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from dmuown._version import __version__
from dmuown.checkpoint.archive import Archive
from dmuown.checkpoint.flat import unflatten
from dmuown.checkpoint.folder import EXTRA, begin, check_complete, commit, locate, write_synced
from dmuown.checkpoint.names import as_optimizers
from dmuown.checkpoint.reader import NO_GROUP_WARNING, check_plain, load_plain, plain_numbers
from dmuown.checkpoint.state_dicts import (
    check_model_state,
    check_optimizer_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from dmuown.engine.matching import resolve_name
from dmuown.engine.state_version import STATE_VERSION
from dmuown.errors import CheckpointError

_MODEL, _OPTIMIZER = "model", "optimizer"


def save_checkpoint(
    folder: str | Path,
    model: nn.Module | None = None,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model, its optimizers and plain values, each rank its own shards.

    Collective. The folder is replaced only when everything is on disk: a process killed in the middle
    leaves the checkpoint that was there usable. Only an empty folder or a checkpoint is ever replaced.

    Args:
        folder: Checkpoint to write or replace, on a file system that all ranks share; a folder of its own.
        model: Its parameters and buffers; needed also to name the optimizers' parameters.
        optimizers: One or several.
        extra: Plain values that are equal on all ranks, such as a scheduler's state dict; rank 0's are written.
        process_group: Ranks that save; the default group.

    Raises:
        CheckpointError: Optimizers without a model. On all ranks: `extra` holds something else, the folder holds
            something else than a checkpoint, or writing failed.
    """
    folder = Path(folder).absolute()
    check_plain(dict(extra or {}), "extra")
    stepped = as_optimizers(optimizers)
    if stepped and model is None:
        raise CheckpointError("model", "is needed to name the parameters of optimizers", "Pass the model as well")
    state_dict: dict[str, Any] = {}
    if model is not None:
        state_dict[_MODEL] = get_model_state_dict(model)
        if stepped:
            state_dict[_OPTIMIZER] = plain_numbers(get_optimizer_state_dict(model, stepped))
    extra = None if extra is None else plain_numbers(dict(extra))
    saving: Path = _on_first_rank(lambda: begin(folder), process_group)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
            save(
                state_dict,
                storage_writer=FileSystemWriter(saving, sync_files=True),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
    except (CheckpointException, OSError) as error:
        raise CheckpointError(str(folder), f"could not be written: {error}", "Check the disk") from error

    def finish() -> None:
        if extra is not None:
            stream = io.BytesIO()
            torch.save(dict(extra), stream)
            write_synced(saving / EXTRA, stream.getvalue())
        world_size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        commit(folder, {"dmuown": __version__, "torch": str(torch.__version__), "world_size": world_size})

    _on_first_rank(finish, process_group)


@torch.no_grad()
def load_checkpoint(
    folder: str | Path,
    model: nn.Module | None = None,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    process_group: dist.ProcessGroup | None = None,
    require_complete: bool = True,
) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote, on any number of ranks and any layout; collective.

    Everything is checked against the checkpoint's metadata before any tensor is changed. Nothing in
    the checkpoint is executed: it may hold tensors and plain values, nothing else.

    Args:
        folder: The checkpoint. After a killed save, the newest complete one of this name is taken.
        model: Whose parameters and buffers to load, in place.
        optimizers: Whose state to load, in place; needs `model`.
        process_group: Ranks that load; the default group.
        require_complete: Whether to insist on the marker that `save_checkpoint` writes last, and on the
            sizes it lists. False reads what `dcp.save({"model": ..., "optimizer": ...})` wrote.

    Returns:
        The `extra` of the save.

    Raises:
        CheckpointError: An unfinished, truncated or unsafe checkpoint, or one of another model or
            optimizer; it names the parameter.
    """
    folder = _checked_folder(folder, require_complete)
    optimizers = as_optimizers(optimizers)
    archive = Archive(folder)
    extra = load_plain(folder / EXTRA, str(folder / EXTRA)) if (folder / EXTRA).exists() else {}
    targets: dict[str, Tensor] = {}
    model_state: dict[str, Any] = {}
    if model is not None:
        check_model_state(model, archive.outline.get(_MODEL, {}))
        model_state = _aim(
            archive, archive.names[_MODEL], archive.outline[_MODEL], get_model_state_dict(model), targets
        )
    optimizer_state: dict[str, Any] = {}
    if optimizers:
        if model is None:
            raise CheckpointError("model", "is missing: it names the optimizers' parameters", "Pass it too")
        outline = unflatten(archive.outline.get(_OPTIMIZER, {}))
        check_optimizer_state(model, optimizers, outline)
        names = unflatten(archive.names[_OPTIMIZER])["state"]
        live = get_optimizer_state_dict(model, optimizers)["state"]
        ours = [group for group in outline["param_groups"] if "algorithm" in group]
        current = all(group.get("state_version") == STATE_VERSION for group in ours)
        for fqn, buffers in outline["state"].items():
            # State of an older version is read as it is, whole, and then upgraded.
            known = live.get(resolve_name(fqn, live))
            if known is None:
                continue  # a dedicated parameter of another rank
            aims = known if current else {}
            optimizer_state[fqn] = _aim(archive, names[fqn], buffers, aims, targets)
    archive.read(targets, process_group)
    if model is not None:
        set_model_state_dict(model, model_state)
    if model is not None and optimizers:
        set_optimizer_state_dict(model, optimizers, {"state": optimizer_state, "param_groups": outline["param_groups"]})
    return dict(extra)


def read_checkpoint(folder: str | Path, *, require_complete: bool = True) -> dict[str, Any]:
    """Read a whole checkpoint into plain CPU tensors and values, safely and in one process.

    Args:
        folder: As `load_checkpoint`.
        require_complete: As `load_checkpoint`; False for another tool's DCP folder.

    Returns:
        Nested as it was saved, such as `{"model": {...}, "optimizer": {"state": ..., "param_groups": ...}}`.

    Raises:
        CheckpointError: As `load_checkpoint`.
    """
    return dict(Archive(_checked_folder(folder, require_complete)).read_whole())


def _checked_folder(folder: str | Path, require_complete: bool) -> Path:
    found = locate(Path(folder).absolute())
    if require_complete:
        check_complete(found)
    return found


def _aim(
    archive: Archive,
    names: Mapping[str, str],
    outline: Mapping[str, Any],
    live: Mapping[str, Any],
    targets: dict[str, Tensor],
) -> dict[str, Any]:
    """Choose where saved entries go: into live tensors where there are, else into new ones; values as they are."""
    aimed = {}
    for key, value in outline.items():
        if isinstance(value, Tensor):
            place = live.get(resolve_name(key, live))
            value = targets[names[key]] = place if isinstance(place, Tensor) else archive.new(names[key])
        aimed[key] = value
    return aimed


def _on_first_rank(action: Callable[[], Any], process_group: dist.ProcessGroup | None) -> Any:
    """Run `action` on the group's first rank and return its result, or raise its error, on every rank."""
    if not dist.is_initialized():
        return _as_checkpoint_error(action)
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    outcome: list[Any] = [None, None]
    if dist.get_rank() == first:
        try:
            outcome[0] = _as_checkpoint_error(action)
        except CheckpointError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=first, group=process_group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _as_checkpoint_error(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except OSError as error:
        raise CheckpointError(
            str(error.filename), f"could not be written: {error.strerror}", "Check the disk"
        ) from error
