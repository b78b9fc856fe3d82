"""Reading of DCP folders that executes nothing from them.

torch's reader unpickles `.metadata` and loads byte entries with any class they name. This one allows
the classes that DCP's metadata consists of, and plain Python values (and tensors) in byte entries.

Low-bit state is saved as it is stored: codes, and scales of blocks of one rank's elements. A shard that lies here as it
was saved takes codes and scales; any other part is decoded, put together in fp32 and encoded anew. torch's reader cuts
such tensors along the first axis alone, at ends of blocks.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.futures import Future

from dmuown.errors import CheckpointError, MissingDependencyError, install_extra
from dmuown.state import lowbit

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    "collections": ("OrderedDict",),
}

#: What torch says on every save and load without a process group, which is how one process works.
NO_GROUP_WARNING = "torch.distributed is disabled, unavailable or uninitialized"

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Tensor)


class _MetadataUnpickler(pickle.Unpickler):
    """Finds nothing but the classes that DCP's metadata consists of, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of checkpoint metadata")
        if module.startswith("pathlib"):
            return str if name.startswith("Pure") else Path
        return super().find_class(module, name)


def check_plain(value: Any, where: str) -> None:
    """Refuse what is not plain: numbers, strings, None, dtypes, tensors, and containers of them.

    Raises:
        CheckpointError: Anything else.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_plain(key, where)
            check_plain(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            check_plain(item, where)
    elif not isinstance(value, _PLAIN):
        raise CheckpointError(where, f"is a {type(value).__name__}, not a plain Python value", "Save plain values only")


def plain_numbers(value: Any) -> Any:
    """Return a value with NumPy's numbers (which subclass Python's) as Python's own, in containers too."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain_numbers(item) for item in value)
    if isinstance(value, (float, int)) and type(value) not in (float, int, bool):
        return float(value) if isinstance(value, float) else int(value)
    return value


def load_plain(stream: Any, where: str) -> Any:
    """Load one value that `torch.save` wrote, with nothing but plain values in it.

    Raises:
        CheckpointError: Something else, or a damaged stream.
    """
    try:
        value = torch.load(stream, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            where, f"cannot be read as plain values: {reason}", "Do not trust this checkpoint"
        ) from None
    check_plain(value, where)
    return value


class PlainReader(FileSystemReader):
    """DCP's reader of folders, with metadata from a restricted unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`.

        Raises:
            CheckpointError: It is missing, damaged, or holds anything but metadata.
        """
        path = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except FileNotFoundError:
            raise CheckpointError(str(path.parent), "is no checkpoint: it has no .metadata", "Check the path") from None
        except Exception as error:
            raise CheckpointError(
                str(path), f"cannot be read: {error}", "The file is damaged, or not from DCP"
            ) from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(str(path), f"holds a {type(metadata).__name__}, not metadata")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(str(path), f"points outside the checkpoint: {info.relative_path!r}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors and byte entries.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        try:
            self._read_bytes(plan, planner)
            self._read_tensors(plan, planner)
            done: Future[None] = Future()
            done.set_result(None)
            return done
        except CheckpointError:
            raise
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, AssertionError) as error:
            names = sorted({item.dest_index.fqn for item in plan.items})
            raise CheckpointError(
                str(self.path),
                f"cannot be read, among {len(names)} entries from {names[0]!r}: {error}",
                "The checkpoint is truncated or damaged: use an earlier one",
            ) from error

    def _read_bytes(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if items:
            super().read_data(replace(plan, items=items), planner)

    def _read_tensors(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert isinstance(planner, PlainPlanner)
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for file, items in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, file), "rb") as stream:
                for item in items:
                    planner.take(item, self._saved_chunk(stream, item))
        planner.encode_assembled()

    def _saved_chunk(self, stream: Any, item: ReadItem) -> Tensor:
        """The whole chunk that an item is part of, as it was saved."""
        info = self.storage_data[item.storage_index]
        content = self.transforms.transform_load_stream(
            item, info.transform_descriptors or (), self._slice_file(stream, info)
        ).read(-1)
        try:
            chunk = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            if "torchao" not in str(error):
                raise
            try:
                lowbit.register_classes()
            except MissingDependencyError as missing:
                raise CheckpointError(
                    item.dest_index.fqn, "is low-bit state, which torchao decodes", install_extra("lp")
                ) from missing
            chunk = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(chunk, Tensor):
            raise CheckpointError(item.dest_index.fqn, f"is a {type(chunk).__name__} in the checkpoint, not a tensor")
        return chunk


class PlainPlanner(DefaultLoadPlanner):
    """DCP's planner without flattening, with plain values only in byte entries."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Low-bit targets by name and place, and fp32 values on their way there.
        self._assembled: dict[tuple[str, Any], tuple[Tensor, Tensor]] = {}

    def take(self, item: ReadItem, chunk: Tensor) -> None:
        """Copy what an item asks for.

        Args:
            item: Which part of the chunk goes to which part of the target.
            chunk: As it was saved, on the CPU.
        """
        target = self.lookup_tensor(item.dest_index).detach()
        is_whole = item.lengths == chunk.shape == target.shape
        if is_whole and (lowbit.is_low_bit(target) or not lowbit.is_low_bit(chunk)):
            lowbit.copy(target, chunk)
            return
        if lowbit.is_low_bit(target):
            key = item.dest_index.fqn, item.dest_index.offset
            if key not in self._assembled:
                self._assembled[key] = target, torch.zeros(target.shape, dtype=torch.float32)
            target = self._assembled[key][1]
        part = narrow_tensor_by_index(lowbit.decoded(chunk), item.storage_offsets, item.lengths)
        place = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
        if place.shape != part.shape:
            raise CheckpointError(
                item.dest_index.fqn, f"has a part of shape {tuple(part.shape)} where {tuple(place.shape)} is expected"
            )
        place.copy_(part)

    def encode_assembled(self) -> None:
        """Encode what was put together from parts, once all of them are there."""
        for target, values in self._assembled.values():
            lowbit.copy(target, values)
        self._assembled = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one byte entry.

        Raises:
            CheckpointError: It is not a plain value.
        """
        fqn = read_item.dest_index.fqn
        self.state_dict[fqn] = load_plain(value, fqn)

    def lookup_tensor(self, index: Any) -> Tensor:
        """Where an entry goes."""
        found = find_state_dict_object(self.state_dict, index)
        assert isinstance(found, Tensor)
        return found
