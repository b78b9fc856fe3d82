"""The shipped recipes with models and data that exist, and ways to spoil them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).parents[3]
SHIPPED = [*sorted((ROOT / "configs/automodel").glob("*.yaml")), *sorted((ROOT / "examples/automodel").glob("*.yaml"))]

#: Shapes of a model of every family that the recipes name, deep enough for what they freeze.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 30},
    "qwen3": {"num_hidden_layers": 30, "head_dim": 16},
    "qwen3_moe": {
        "num_hidden_layers": 30,
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
}


def write_assets(folder: Path, family: str, columns: dict[str, str]) -> None:
    """A checkpoint's configuration beside a file of no weights, and two data sets."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    content = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "tie_word_embeddings": True,
        **CONFIGS[family],
    }
    (model / "config.json").write_text(json.dumps(content))
    (model / "model.safetensors").touch()
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").write_text(json.dumps(dict.fromkeys(columns.values(), "text")) + "\n")


def family_of(recipe: dict[str, Any]) -> str:
    """The family of the model that a recipe names."""
    named = str(recipe["model"]["pretrained_model_name_or_path"]).lower()
    if "qwen" not in named:
        return "llama"
    return "qwen3_moe" if "a3b" in named else "qwen3"


def load(file: Path, folder: Path) -> dict[str, Any]:
    """A shipped recipe, its paths replaced by those of the assets."""
    recipe: dict[str, Any] = yaml.safe_load(file.read_text())
    write_assets(folder, family_of(recipe), recipe["dataset"]["column_mapping"])
    recipe["model"]["pretrained_model_name_or_path"] = str(folder / "model")
    for section, name in (("dataset", "train"), ("validation_dataset", "validation")):
        recipe[section]["path_or_dataset_id"] = str(folder / f"{name}.jsonl")
    recipe["checkpoint"]["checkpoint_dir"] = str(folder / "run")
    return recipe


class Mutation(NamedTuple):
    """A spoilt recipe.

    Attributes:
        kind: `missing`, `misspelled`, `type`, `range` or `conflict`.
        key: The key that the message must name.
        recipe: The content.
    """

    kind: str
    key: str
    recipe: dict[str, Any]


def mutations(recipe: dict[str, Any]) -> Iterator[Mutation]:
    """Every way in which this file spoils a recipe."""
    for path in _paths(recipe):
        value = _get(recipe, path)
        if path[-1] not in _FREE_KEYS:
            wrong = _misspelled(str(path[-1]))
            if wrong not in _get(recipe, path[:-1]):
                yield Mutation("misspelled", _dotted([*path[:-1], wrong]), _renamed(recipe, path, wrong))
        if not isinstance(value, dict | list):
            yield Mutation("type", _dotted(path), _replaced(recipe, path, _other_type(value)))
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield Mutation("range", _dotted(path), _replaced(recipe, path, -1))
        if isinstance(value, str) and path[-1] in ("_target_", "collate_fn", "recipe"):
            spoilt = _misspelled(value.rpartition(".")[2])
            text = value[: value.rfind(".") + 1] + spoilt
            yield Mutation("misspelled", _dotted(path), _replaced(recipe, path, text))
        elif isinstance(value, dict):
            yield Mutation("type", _dotted(path), _replaced(recipe, path, "text"))
    for dotted in MISSING:
        path = dotted.split(".")
        if _has(recipe, path):
            yield Mutation("missing", dotted, _without(recipe, path))
    own = str(recipe["optimizer"]["_target_"]).startswith("dmuown.")
    for dotted, changes in CONFLICTS:
        if not own and any(key.startswith("optimizer.") and key != "optimizer.lr" for key in changes):
            continue  # options of ours
        spoilt_recipe = copy.deepcopy(recipe)
        for key, value in changes.items():
            _set(spoilt_recipe, key.split("."), value)
        yield Mutation("conflict", dotted, spoilt_recipe)


MISSING = (
    "recipe",
    "model",
    "model._target_",
    "model.pretrained_model_name_or_path",
    "model.torch_dtype",
    "dataset",
    "dataset._target_",
    "dataset.path_or_dataset_id",
    "dataset.column_mapping",
    "dataset.column_mapping.answer",
    "validation_dataset._target_",
    "validation_dataset.path_or_dataset_id",
    "validation_dataloader",
    "loss_fn",
    "loss_fn._target_",
    "optimizer",
    "optimizer._target_",
    "optimizer.lr",
    "step_scheduler",
    "step_scheduler.global_batch_size",
    "step_scheduler.local_batch_size",
    "step_scheduler.ckpt_every_steps",
    "step_scheduler.val_every_steps",
    "lr_scheduler",
    "lr_scheduler.lr_decay_style",
    "clip_grad_norm",
    "clip_grad_norm.max_norm",
    "checkpoint",
    "checkpoint.checkpoint_dir",
    "distributed",
    "dist_env",
    "dist_env.timeout_minutes",
    "seed",
    "dataloader",
)

CONFLICTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("step_scheduler.global_batch_size", {"step_scheduler.global_batch_size": 7, "step_scheduler.local_batch_size": 2}),
    ("model.backend", {"model.force_hf": True, "model.backend": {"rms_norm": "torch"}}),
    ("lr_scheduler.lr_warmup_steps", {"lr_scheduler.lr_warmup_steps": 50, "step_scheduler.max_steps": 40}),
    ("lr_scheduler.min_lr", {"lr_scheduler.min_lr": 1.0, "optimizer.lr": 1e-4}),
    ("lr_scheduler.max_lr", {"lr_scheduler.max_lr": 1.0, "optimizer.lr": 1e-4}),
    ("lr_scheduler.wsd_decay_steps", {"lr_scheduler.lr_decay_style": "WSD"}),
    ("optimizer.lr", {"optimizer.lr": 0}),
    ("distributed.tp_size", {"distributed": {"strategy": "ddp", "tp_size": 2}}),
    ("distributed.pp_size", {"distributed.pp_size": 2}),
    ("checkpoint.restore_from", {"checkpoint.enabled": False, "checkpoint.restore_from": "LATEST"}),
    ("checkpoint.restore_from", {"checkpoint.restore_from": "epoch_9_step_9"}),
    ("packed_sequence.packing_strategy", {"packed_sequence": {"packed_sequence_size": 0, "packing_strategy": "neat"}}),
    ("optimizer.adamw_param_patterns", {"optimizer.adamw_param_patterns": ["x"], "optimizer.param_policy": {}}),
    (
        "optimizer.param_policy.overrides[0].set.route",
        {"optimizer.param_policy": {"overrides": [{"name": "w", "set": {"route": "muno"}}]}},
    ),
    ("optimizer.param_policy.defualts", {"optimizer.param_policy": {"defualts": {}}}),
    ("dataset.column_mapping.answer", {"dataset.column_mapping": {"answer": "reply"}}),
    ("freeze_config.unfreeze_modules[0].path", {"freeze_config.unfreeze_modules": [{"path": "model.layers.999"}]}),
    ("model.pretrained_model_name_or_path", {"model.pretrained_model_name_or_path": "./no/such/folder"}),
    ("dataset.path_or_dataset_id", {"dataset.path_or_dataset_id": "./no/such/file.jsonl"}),
)

#: Keys whose names are the user's, not the host's: columns are the data's.
_FREE_KEYS = frozenset({"_target_"})


def _misspelled(name: str) -> str:
    """Two letters swapped in the middle; a letter doubled where they are equal."""
    middle = len(name) // 2
    if len(name) > 2 and name[middle] != name[middle - 1]:
        return name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return name + name[-1]


def _other_type(value: Any) -> Any:
    if isinstance(value, bool):
        return "perhaps"
    if isinstance(value, int | float):
        return "many"
    return [1, 2] if value is None or isinstance(value, str) else "text"


def _paths(node: Any, prefix: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        path = [*prefix, key]
        if not isinstance(key, int):
            yield path
        yield from _paths(value, tuple(path))


def _dotted(path: list[Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _get(node: Any, path: list[Any]) -> Any:
    for part in path:
        node = node[part]
    return node


def _has(node: Any, path: list[Any]) -> bool:
    try:
        _get(node, path)
    except (KeyError, TypeError, IndexError):
        return False
    return True


def _set(node: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        node = node.setdefault(part, {})
    node[path[-1]] = value


def _replaced(recipe: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    spoilt = copy.deepcopy(recipe)
    _get(spoilt, path[:-1])[path[-1]] = value
    return spoilt


def _renamed(recipe: dict[str, Any], path: list[Any], name: str) -> dict[str, Any]:
    spoilt = copy.deepcopy(recipe)
    parent = _get(spoilt, path[:-1])
    parent[name] = parent.pop(path[-1])
    return spoilt


def _without(recipe: dict[str, Any], path: list[Any]) -> dict[str, Any]:
    spoilt = copy.deepcopy(recipe)
    del _get(spoilt, path[:-1])[path[-1]]
    return spoilt
