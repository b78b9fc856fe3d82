"""The model of a job, without weights: its parameters, which of them are trained, in which dtype, and cut how."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dmuown.automodel.checks.document import Document, with_variables
from dmuown.automodel.planned.adapters import Adapters, linear_modules
from dmuown.automodel.shapes import find_model_config, model_parameters, read_model_config
from dmuown.errors import OptionError
from dmuown.policy.fused import FusedSplit, split_of_entry
from dmuown.policy.roles import ParameterRole
from dmuown.policy.schema import parse_dtype

#: Keys of a model's section that change the shapes of its checkpoint's configuration.
SHAPE_KEYS = frozenset({"num_hidden_layers", "vocab_size", "tie_word_embeddings"})

NAME = "model.pretrained_model_name_or_path"


@dataclass(frozen=True)
class KnownModel:
    """What is known of a model's parameters, from its numbers or from transformers.

    Attributes:
        entries: Its parameters in order, without adapters, on the meta device.
        splits: Those that are several matrices in one, or of several heads, by name.
        linears: Paths of its `nn.Linear` modules, which can have adapters; None finds them by role.
        experts_per_token: Experts that a token takes; 0 where there are none.
    """

    entries: Sequence[ParameterRole]
    splits: Mapping[str, FusedSplit] = field(default_factory=dict)
    linears: frozenset[str] | None = None
    experts_per_token: int = 0


@dataclass(frozen=True)
class PlannedModel:
    """A model as the job trains it.

    Attributes:
        entries: Its parameters in order, adapters included, on the meta device.
        trainable: Whether each is trained, by name.
        splits: Those that are several matrices in one, or of several heads, by name.
        dtype: Dtype of its weights.
        dtypes: Dtype of those that have another, by name.
        notes: What was assumed.
    """

    entries: Sequence[ParameterRole]
    trainable: Mapping[str, bool]
    splits: Mapping[str, FusedSplit]
    dtype: torch.dtype
    dtypes: Mapping[str, torch.dtype]
    notes: Sequence[str]

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a parameter."""
        return self.dtypes.get(name, self.dtype)

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(entry.parameter.numel() for entry in self.entries)

    @property
    def trained(self) -> int:
        """Elements of those that are trained."""
        return sum(entry.parameter.numel() for entry in self.entries if self.trainable[entry.name])


def plan_model(document: Document, model_config: Path | None = None, known: KnownModel | None = None) -> PlannedModel:
    """Describe the model that a YAML trains.

    Args:
        document: The YAML.
        model_config: The model's `config.json`, where it is not found from the YAML.
        known: The model's parameters, where they are known from elsewhere.

    Raises:
        OptionError: No model, no `config.json`, an unknown family, a wrong section `peft`.
    """
    notes: list[str] = []
    dtype = _dtype(document, model_config, notes)
    found = known or _known(document, model_config)
    section = document.get("peft")
    if section is None:
        flags = trainable_flags(document, found.entries)
        trainable = {entry.name: flag for entry, flag in zip(found.entries, flags, strict=True)}
        return PlannedModel(found.entries, trainable, found.splits, dtype, {}, notes)
    adapters = Adapters.read(section)
    linears = found.linears if found.linears is not None else linear_modules(found.entries)
    entries, added = adapters.add(found.entries, linears, experts_per_token=found.experts_per_token)
    if document.get("quantization") is not None:
        notes.append(f"section quantization: weights are counted in {_short(dtype)}, not quantized")
    dtypes = dict.fromkeys(added, adapters.dtype) if adapters.dtype is not None else {}
    return PlannedModel(entries, {entry.name: entry.name in added for entry in entries}, {}, dtype, dtypes, notes)


def model_file(document: Document, model_config: Path | None) -> Path:
    """Return the model's `config.json`: given, in the checkpoint's folder, or in the hub's cache.

    Raises:
        OptionError: The YAML names no model, or there is no such file.
    """
    if model_config is not None:
        if not model_config.is_file():
            raise OptionError("--model-config", f"{str(model_config)!r} is no file", "Give a config.json")
        return model_config
    named = document.get(NAME) or document.get("model.config")
    if isinstance(named, Mapping):
        named = named.get("pretrained_model_name_or_path")
    if named is None:
        raise OptionError(NAME, "is missing", "Write it, or give the model's config.json with --model-config")
    found = find_model_config(with_variables(named)) if isinstance(named, str) else None
    if found is None:
        raise OptionError(
            NAME,
            f"the config.json of {named!r} is not on this machine",
            "Download it (hf download NAME config.json), or give the file with --model-config",
        )
    return found


def trainable_flags(document: Document, entries: Sequence[ParameterRole]) -> list[bool]:
    """Whether each parameter is trained: what `freeze_modules` selects is not, unless `unfreeze_modules` does."""
    flags = [True] * len(entries)
    for field_name, value in (("freeze_modules", False), ("unfreeze_modules", True)):
        for selector in document.get(f"freeze_config.{field_name}") or ():
            for position, entry in enumerate(entries):
                if isinstance(selector, Mapping) and _selected(entry.name, selector):
                    flags[position] = value
    return flags


def _selected(name: str, selector: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    paths = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    if "path" in selector:
        return selector["path"] in paths
    return any(fnmatch.fnmatch(path, str(selector.get("glob"))) for path in paths)


def _known(document: Document, model_config: Path | None) -> KnownModel:
    file = model_file(document, model_config)
    changed = {
        key: value for key, value in (document.get("model") or {}).items() if key in SHAPE_KEYS and value is not None
    }
    content = {**read_model_config(file), **changed}
    host_layout = not document.get("model.force_hf", False)
    entries = model_parameters(content, where=str(file), host_layout=host_layout)
    per_token = content.get("num_experts_per_tok")
    configs = [SimpleNamespace(**content)]
    found = {entry.name: split_of_entry(entry, configs, per_head=True) for entry in entries}
    splits = {name: split for name, split in found.items() if split is not None}
    return KnownModel(entries, splits, None, per_token if isinstance(per_token, int) else 0)


def _dtype(document: Document, model_config: Path | None, notes: list[str]) -> torch.dtype:
    named = document.get("model.torch_dtype", document.get("model.dtype", "auto"))
    if named in ("auto", None):
        content = read_model_config(model_file(document, model_config))
        named = content.get("dtype") or content.get("torch_dtype") or "float32"
        notes.append(f"dtype of parameters: {named}, the checkpoint's (model.torch_dtype is not set)")
    return parse_dtype(named, "model.torch_dtype") or torch.float32


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
