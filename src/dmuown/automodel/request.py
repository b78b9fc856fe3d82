"""What a run was asked for: the YAML file and its overrides, checked before any work.

Everything here is cheap, and nothing of it builds a model or a process group. The command line
checks a request once before it starts processes; every rank checks its own again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmuown.automodel.checks.document import read_document, with_variables
from dmuown.automodel.checks.restore import KEY as RESTORE
from dmuown.automodel.checks.restore import check_algorithm, checkpoint_folder, named_checkpoint
from dmuown.automodel.dmuon_options import OPTIONS_BY_CONFIG, PACKAGE, own_options
from dmuown.errors import OptionError
from dmuown.policy.names import nearest


@dataclass(frozen=True)
class Request:
    """A fine-tuning run, checked.

    Attributes:
        path: The YAML file.
        config: Its content with the overrides applied, as plain containers.
        overrides: The overrides as `--dotted.key=value`.
        recipe: Dotted path of the host's recipe class.
    """

    path: Path
    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    recipe: str

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value at a dotted key, or `default`."""
        node: Any = self.config
        for part in dotted.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of checkpoints and logs; the host's default where the YAML names none."""
        return checkpoint_folder(self.config)


def read_request(path: str | os.PathLike[str], arguments: Sequence[str] = ()) -> Request:
    """Read and check a YAML file and `--dotted.key value` arguments.

    Raises:
        OptionError: The file is missing or no mapping, an argument is no override, an option of a
            dmuown optimizer is unknown or out of range, `recipe` is unknown, or a path in the
            configuration does not exist.
        CheckpointError: The checkpoint to resume from does not exist or belongs to another algorithm.
    """
    document = read_document(path, arguments)
    config = document.config
    overrides = {dotted: document.get(dotted) for dotted in document.overridden}
    written = tuple(f"--{dotted}={value}" for dotted, value in overrides.items())
    request = Request(document.path, config, written, _recipe(config))
    check_paths(request)
    check_optimizer(config.get("optimizer"))
    check_checkpoint(request)
    return request


def check_optimizer(section: Any) -> None:
    """Check the `optimizer` section where it names something of dmuown; others are the host's to check.

    Raises:
        OptionError: There is no section, its `_target_` is one of our optimizer classes or unknown,
            or an option is wrong.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("_target_"), str):
        raise OptionError(
            "optimizer", "must be a section with a _target_", "Write _target_: dmuown.automodel.MuownConfig"
        )
    target: str = section["_target_"]
    options_class = own_options(target)
    if options_class is None:
        if target.startswith("dmuown."):
            name = target.rpartition(".")[2].removesuffix("Config") + "Config"
            raise OptionError(
                "optimizer._target_",
                f"must be a configuration class, got {target!r}: the host would hand it one flat list of parameters",
                f"Write _target_: {PACKAGE}.{name}" if name in OPTIONS_BY_CONFIG else nearest(name, OPTIONS_BY_CONFIG),
            )
        return
    options_class(**{key: value for key, value in section.items() if key != "_target_"})


def check_paths(request: Request) -> None:
    """Check that local files the configuration names exist.

    Raises:
        OptionError: A model folder or data file does not exist.
    """
    model = request.get("model.pretrained_model_name_or_path")
    if isinstance(model, str) and _is_path(model) and not Path(with_variables(model)).expanduser().exists():
        raise OptionError(
            "model.pretrained_model_name_or_path", f"{model!r} does not exist", "Give the folder of a checkpoint"
        )
    for section, content in request.config.items():
        if "dataset" not in section or not isinstance(content, Mapping):
            continue
        named = content.get("path_or_dataset_id")
        for entry in named if isinstance(named, list) else [named]:
            if not isinstance(entry, str) or not entry.endswith((".json", ".jsonl")):
                continue
            if not Path(with_variables(entry)).is_file():
                raise OptionError(f"{section}.path_or_dataset_id", f"{entry!r} is no file", "Give the path of the data")


def check_checkpoint(request: Request) -> None:
    """Check the checkpoint that the run resumes from: named, or the latest in the checkpoint folder.

    Raises:
        CheckpointError: It does not exist, or another algorithm wrote it.
    """
    from nemo_automodel.components.checkpoint.utils import find_latest_checkpoint

    folder = named_checkpoint(request.config)
    if str(request.get(RESTORE) or "LATEST").upper() == "LATEST" and request.checkpoint_dir.is_dir():
        latest = find_latest_checkpoint(request.checkpoint_dir)
        folder = None if latest is None else Path(latest)
    if folder is not None:
        check_algorithm(folder, request.config)


def _recipe(config: Mapping[str, Any]) -> str:
    from nemo_automodel.cli.utils import resolve_recipe_name

    named = config.get("recipe")
    if isinstance(named, Mapping):
        named = named.get("_target_")
    if not isinstance(named, str) or not named.strip():
        raise OptionError("recipe", "is missing", "Write recipe: TrainFinetuneRecipeForNextTokenPrediction")
    try:
        resolved: str = resolve_recipe_name(named.strip())
    except ValueError as error:
        raise OptionError("recipe", f"{named!r} is unknown", str(error).partition("\n")[2]) from None
    return resolved


def _is_path(value: str) -> bool:
    return value.startswith(("/", ".", "~")) or value.count("/") > 1
