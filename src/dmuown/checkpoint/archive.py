"""A DCP folder opened for reading: what is in it, by nested name, and reading into given tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from dmuown.checkpoint.reader import NO_GROUP_WARNING, PlainPlanner, PlainReader
from dmuown.errors import CheckpointError


class Archive:
    """What a DCP folder holds.

    Args:
        folder: The folder; every rank opens it.

    Attributes:
        names: Nested as it was saved, leaves being the names of entries in DCP's metadata.
        outline: Nested as it was saved: plain values, and meta tensors of the saved shapes and dtypes.

    Raises:
        CheckpointError: It is no checkpoint, is damaged, or holds more than tensors and plain values.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = PlainReader(folder)
        metadata = self._reader.read_metadata()
        self._paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
        self._tensors = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        values: dict[str, Any] = {name: None for name in metadata.state_dict_metadata if name not in self._tensors}
        self._load(values, no_dist=True, process_group=None)
        for name, entry in self._tensors.items():
            values[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        self.outline = self._nest(values)
        self.names = self._nest({name: name for name in metadata.state_dict_metadata})

    def new(self, name: str) -> Tensor:
        """An uninitialized CPU tensor of an entry's whole shape and dtype."""
        entry = self._tensors[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def read(self, targets: Mapping[str, Tensor], process_group: dist.ProcessGroup | None = None) -> None:
        """Read entries into tensors, in place; DTensors take their shards of it.

        Collective where a process group exists.

        Args:
            targets: Tensors of the entries' global shapes, by name.
            process_group: Ranks that read; the default group.

        Raises:
            CheckpointError: A damaged file.
        """
        self._load(dict(targets), no_dist=not dist.is_initialized(), process_group=process_group)

    def read_whole(self) -> dict[str, Any]:
        """Return everything, nested as it was saved, as plain CPU tensors and values; no collective."""
        tensors = {name: self.new(name) for name in self._tensors}
        self._load(dict(tensors), no_dist=True, process_group=None)
        return dict(_replace(self.names, self.outline, tensors))

    def _load(self, values: dict[str, Any], *, no_dist: bool, process_group: dist.ProcessGroup | None) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=NO_GROUP_WARNING)
                load(
                    values,
                    storage_reader=self._reader,
                    planner=PlainPlanner(),
                    process_group=process_group,
                    no_dist=no_dist,
                )
        except CheckpointException as error:
            first = error.failures[min(error.failures)][0]
            if isinstance(first, CheckpointError):
                raise first from None
            raise CheckpointError(str(self._reader.path), f"cannot be read: {first}") from error

    def _nest(self, values: Mapping[str, Any]) -> Any:
        nested: dict[Any, Any] = {}
        for name, value in values.items():
            *containers, last = self._paths.get(name, (name,))
            place = nested
            for key in containers:
                place = place.setdefault(key, {})
            place[last] = value
        return _lists(nested)


def _lists(value: Any) -> Any:
    """Turn dicts whose keys are 0, 1, 2, ... into lists: that is how lists were flattened."""
    if not isinstance(value, dict):
        return value
    items = {key: _lists(item) for key, item in value.items()}
    if items and all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


def _replace(names: Any, outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(names, dict):
        return {key: _replace(item, outline[key], tensors) for key, item in names.items()}
    if isinstance(names, list):
        return [_replace(item, part, tensors) for item, part in zip(names, outline, strict=True)]
    return tensors.get(names, outline)
