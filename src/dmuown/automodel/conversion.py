"""Checkpoints of other optimizers, converted so that a run of this package resumes from them.

Two kinds: a checkpoint folder of the host, whose optimizer state becomes that of the YAML given; and a file that
`torch.save` wrote with one optimizer's state dict. Both are read without executing anything from them.
"""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmuown.automodel.checks.document import Document, read_document
from dmuown.automodel.dmuon_options import own_options
from dmuown.automodel.grouping import group_parameters
from dmuown.automodel.shapes import model_parameters, read_model_config
from dmuown.checkpoint import convert_optimizer_state, get_optimizer_state_dict, read_checkpoint
from dmuown.checkpoint.reader import load_plain
from dmuown.engine.optimizer import MuonEngine
from dmuown.errors import CheckpointError, OptionError
from dmuown.policy.roles import ParameterRole

SOURCES = ("automodel", "dion", "muonium", "muown", "torch")
_OPTIMIZER, _SCHEDULER = "optim.", "sched."

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Conversion:
    """What was converted.

    Attributes:
        destination: The file or folder.
        parameters: Parameters with state.
        groups: Param groups.
        algorithms: Parameters by algorithm.
    """

    destination: Path
    parameters: int
    groups: int
    algorithms: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The result as data that JSON can hold."""
        return {**vars(self), "destination": str(self.destination), "algorithms": dict(self.algorithms)}


def convert_folder(
    source: Path,
    destination: Path,
    *,
    library: str,
    config: Path,
    overrides: Sequence[str] = (),
    model: Path | None = None,
) -> Conversion:
    """Convert a checkpoint folder of the host (`epoch_E_step_S`) into one that a run of `config` resumes from.

    Args:
        source: The folder, with `optim/` and `model/` in it; left as it is.
        destination: A folder that does not exist yet.
        library: What wrote the optimizer's state, one of `SOURCES`.
        config: The YAML of the run that will resume, with an optimizer of this package.
        overrides: `--dotted.key value` arguments.
        model: Folder of the weights, where `source` holds no consolidated ones.

    Raises:
        OptionError: A bad configuration, or a destination that exists.
        CheckpointError: State that cannot be read or mapped.
    """
    _check_destination(destination)
    document = read_document(config, overrides)
    weights = _weights_folder(source, model)
    entries = _entries(document, weights, read_weights(weights))
    root, optimizer = _optimizer(document, entries)
    stored = _flat(read_checkpoint(source / "optim", require_complete=False))
    state = {key.removeprefix(_OPTIMIZER): value for key, value in stored.items() if key.startswith(_OPTIMIZER)}
    if not state:
        raise CheckpointError(str(source / "optim"), "holds no optimizer state", "Give a checkpoint of the host")
    fresh = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    converted = convert_optimizer_state(state, source=library, model_or_optimizer=optimizer)
    optimizer.load_state_dict(converted)
    for group, before in zip(optimizer.param_groups, fresh, strict=True):
        # The multipliers of the host's scheduler belong to the new run's groups.
        group.update({key: before[key] for key in ("lr_mult", "wd_mult") if key in before})
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    flat = get_optimizer_state_dict(root, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    whole = {f"{_OPTIMIZER}{key}": value for key, value in flat.items() if value is not None}
    whole |= {key: value for key, value in stored.items() if key.startswith(_SCHEDULER)}
    _write_folder(source, destination, whole)
    return _result(destination, optimizer.state_dict())


def convert_file(
    source: Path, destination: Path, *, library: str, model: Path, names: Sequence[str] | None = None
) -> Conversion:
    """Convert a file with one optimizer's state dict.

    Args:
        source: What `torch.save(optimizer.state_dict(), file)` wrote, or a flattened state dict by name.
        destination: A file that does not exist yet.
        library: What wrote it, one of `SOURCES`.
        model: Folder of the model's weights in safetensors: names, shapes and values of the parameters.
        names: Names of the parameters in the order in which the optimizer was given them, for state by position.

    Raises:
        OptionError: A destination that exists, or names that do not fit.
        CheckpointError: State that cannot be read or mapped.
    """
    _check_destination(destination)
    with source.open("rb") as stream:
        loaded = load_plain(stream, str(source))
    if not isinstance(loaded, Mapping):
        raise CheckpointError(str(source), f"holds a {type(loaded).__name__}", "Give an optimizer's state dict")
    for key in ("optimizer", "optimizer_state_dict", "optim"):
        if "param_groups" not in loaded and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    state = dict(loaded) if names is None else _named(loaded, names)
    root = _module(
        {name: nn.Parameter(tensor) for name, tensor in read_weights(model).items() if tensor.is_floating_point()}
    )
    converted = convert_optimizer_state(state, source=library, model_or_optimizer=root)
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f"{destination.name}.partial")
    torch.save(converted, partial)
    partial.replace(destination)
    return _result(destination, converted)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a folder's safetensors files, mapped from disk.

    Raises:
        CheckpointError: No such file, or a damaged one.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(str(folder), "holds no safetensors", "Give the folder of the weights with --model")
    found: dict[str, Tensor] = {}
    for file in files:
        found.update(_read_safetensors(file))
    return found


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    """The format: 8 bytes of header length, a JSON header with dtype, shape and offsets, then the data."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        start = 8 + length
        mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - start:
                raise ValueError(f"{name} lies outside the file")
            raw = mapped[start + begin : start + end]
            found[name] = raw.clone().view(_DTYPES[entry["dtype"]]).view(entry["shape"])
        return found
    except (ValueError, KeyError, TypeError, struct.error, RuntimeError) as error:
        raise CheckpointError(str(file), f"is no valid safetensors file: {error}", "Restore it") from None


def _check_destination(destination: Path) -> None:
    if destination.exists():
        raise OptionError(str(destination), "exists already", "Give a new path: nothing is overwritten")


def _weights_folder(source: Path, model: Path | None) -> Path:
    if model is not None:
        return model
    for folder in (source / "model" / "consolidated", source / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise OptionError(
        "--model", f"{str(source)!r} holds no consolidated weights", "Give the folder of the weights of that step"
    )


def _entries(document: Document, folder: Path, weights: Mapping[str, Tensor]) -> list[ParameterRole]:
    described = model_parameters(
        read_model_config(folder / "config.json"),
        where=str(folder / "config.json"),
        # Consolidated weights have the names of transformers.
        host_layout=False,
    )
    entries = []
    for entry in described:
        if entry.name not in weights:
            raise CheckpointError(entry.name, f"is not among the weights in {str(folder)!r}", "Give them with --model")
        tensor = weights[entry.name]
        if tensor.shape != entry.parameter.shape:
            raise CheckpointError(
                entry.name, f"has shape {tuple(tensor.shape)}, its config.json says {tuple(entry.parameter.shape)}"
            )
        parameter = nn.Parameter(tensor)
        entries.append(ParameterRole(entry.name, parameter, entry.role, entry.transposed, entry.aliases, entry.reason))
    return entries


def _optimizer(document: Document, entries: Sequence[ParameterRole]) -> tuple[nn.Module, MuonEngine]:
    from dmuown.automodel.planned.model import trainable_flags

    section = document.get("optimizer")
    target = section.get("_target_") if isinstance(section, Mapping) else None
    found = own_options(target)
    if found is None or not isinstance(section, Mapping):
        raise OptionError(
            "optimizer._target_", f"must name a configuration of dmuown.automodel, got {target!r}", "See dmuown check"
        )
    options = found(**{key: value for key, value in section.items() if key != "_target_"})
    root = _module({entry.name: entry.parameter for entry in entries})
    trained = [entry for entry, flag in zip(entries, trainable_flags(document, entries), strict=True) if flag]
    for entry in entries:
        entry.parameter.requires_grad_(entry in trained)
    groups = group_parameters(trained, options.grouping_rules())
    built = options.optimizer_class()(groups, **options.optimizer_options())
    assert isinstance(built, MuonEngine)
    return root, built


def _module(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that has parameters of these names and does nothing."""
    root = nn.Module()
    for name, parameter in parameters.items():
        node = root
        *path, last = name.split(".")
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            child = node._modules[part]
            assert child is not None
            node = child
        node.register_parameter(last, parameter)
    return root


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            found.update(_flat(value, name))
        else:
            found[name] = value
    return found


def _named(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """State by position, as state by name."""
    count = sum(len(group["params"]) for group in state["param_groups"])
    if count != len(names):
        raise OptionError("--names", f"lists {len(names)} names, the state has {count} parameters", "List each once")
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[index]: buffers for index, buffers in state["state"].items()}, "param_groups": groups}


def _write_folder(source: Path, destination: Path, whole: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    partial = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=lambda folder, _: ["optim"] if Path(folder) == source else [])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled")
        save(dict(whole), checkpoint_id=str(partial / "optim"), no_dist=True)
    partial.rename(destination)


def _result(destination: Path, state: Mapping[str, Any]) -> Conversion:
    counts: dict[str, int] = {}
    for group in state["param_groups"]:
        counts[group["algorithm"]] = counts.get(group["algorithm"], 0) + len(group["params"])
    return Conversion(destination, len(state["state"]), len(state["param_groups"]), counts)
