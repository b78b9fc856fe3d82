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
from dmuown.checkpoint.flat import unflatten
from dmuown.checkpoint.reader import load_plain
from dmuown.engine.optimizer import MuonEngine
from dmuown.errors import CheckpointError, OptionError
from dmuown.policy.names import nearest
from dmuown.policy.roles import ParameterRole

SOURCES = ("automodel", "dion", "muonium", "muown", "torch")
_OPTIMIZER, _SCHEDULER = "optim.", "sched."

_WRITE = "Give what torch.save(optimizer.state_dict(), file) wrote"

#: What to do from the command line instead of what errors of the conversion advise callers from Python.
_REMEDIES = {
    "Check `source`": "Check --from",
    "Pass the optimizer instead of the model": "Take a checkpoint from after every parameter had a gradient, "
    "or a folder of the host with --config",
}

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
    converted = _converted(state, library, optimizer)
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
        raise CheckpointError(str(source), f"holds a {type(loaded).__name__}", _WRITE)
    for key in ("optimizer", "optimizer_state_dict", "optim"):
        if "param_groups" not in loaded and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    state = _nested(loaded, source)
    weights = {name: tensor for name, tensor in read_weights(model).items() if tensor.is_floating_point()}
    if names is not None:
        state = _named(state, names, weights, model)
    elif not _has_names(state):
        raise OptionError(
            "--names",
            f"is missing: the parameters in {str(source)!r} have positions, no names",
            "Give a file with their names, one a line, in the order in which the optimizer was given them",
        )
    root = _module({name: nn.Parameter(tensor) for name, tensor in weights.items()})
    converted = _converted(state, library, root)
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


def _converted(state: Mapping[str, Any], library: str, target: nn.Module | MuonEngine) -> dict[str, Any]:
    """Convert state; remedies that speak of a Python call speak of the command line instead."""
    try:
        return convert_optimizer_state(state, source=library, model_or_optimizer=target)
    except CheckpointError as error:
        raise CheckpointError(error.subject, error.rule, _REMEDIES.get(error.remedy, error.remedy)) from None
    except KeyError as error:  # an option or buffer that this library's optimizers always have
        raise CheckpointError(
            "--from", f"{library!r} did not write this state, which has no {error.args[0]!r}", "Name what did"
        ) from None


def _nested(loaded: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """A state dict of nested form, of whatever a file holds."""
    try:
        state = unflatten(loaded)
    except (CheckpointError, AttributeError):
        state = {}
    groups = state.get("param_groups")
    whole = isinstance(state.get("state"), Mapping) and isinstance(groups, Sequence)
    if not whole or not all(isinstance(group, Mapping) and "params" in group for group in groups or ()):
        raise CheckpointError(str(source), "holds no optimizer's state dict", _WRITE)
    return state


def _has_names(state: Mapping[str, Any]) -> bool:
    """Whether every parameter of a nested state dict has a name: its key, or one beside it."""
    for group in state["param_groups"]:
        by_name = all(isinstance(key, str) for key in group["params"])
        if not by_name and len(group.get("param_names", ())) != len(group["params"]):
            return False
    return True


def _named(
    state: Mapping[str, Any], names: Sequence[str], weights: Mapping[str, Tensor], model: Path
) -> dict[str, Any]:
    """State by position, as state by name."""
    if any(isinstance(key, str) for group in state["param_groups"] for key in group["params"]):
        raise OptionError("--names", "is for state by position, and this state has names", "Leave it out")
    count = sum(len(group["params"]) for group in state["param_groups"])
    if count != len(names):
        raise OptionError("--names", f"lists {len(names)} names, the state has {count} parameters", "List each once")
    for index, name in enumerate(names):
        if name in names[:index]:
            raise OptionError("--names", f"lists {name!r} twice", "List each once")
        if name not in weights:
            rule = f"lists {name!r}, which is not among the weights in {str(model)!r}"
            raise OptionError("--names", rule, nearest(name, weights))
        _check_shapes(name, state["state"].get(index, {}), weights[name])
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[index]: buffers for index, buffers in state["state"].items()}, "param_groups": groups}


def _check_shapes(name: str, buffers: Mapping[str, Any], weight: Tensor) -> None:
    """Refuse a name whose weight has another shape than the state at its position: the order is another one."""
    for buffer in buffers.values():
        if not isinstance(buffer, Tensor) or buffer.ndim != weight.ndim:
            continue
        if any(held not in (1, size) for held, size in zip(buffer.shape, weight.shape, strict=True)):
            raise OptionError(
                "--names",
                f"gives {name!r} of shape {tuple(weight.shape)} the state of a parameter of {tuple(buffer.shape)}",
                "List the names in the order in which the optimizer was given the parameters",
            )


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
