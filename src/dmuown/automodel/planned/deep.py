"""The model's parameters from transformers, on the meta device: slow to import, and right for any architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dmuown.automodel.checks.document import read_document
from dmuown.errors import MissingDependencyError, OptionError
from dmuown.policy.roles import ParameterRole, describe_parameters


def deep_parameters(
    path: str | Path, overrides: Sequence[str] = (), model_config: Path | None = None
) -> list[ParameterRole]:
    """Build the model of a YAML without weights, and describe its parameters.

    Raises:
        MissingDependencyError: transformers is not installed.
        OptionError: It cannot build the model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise MissingDependencyError("transformers", "is not installed", 'pip install "dmuown[automodel]"') from None
    document = read_document(path, overrides)
    named = str(model_config or document.get("model.pretrained_model_name_or_path"))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(named))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OptionError(
            "model", f"transformers cannot build it: {first}", "Give its config.json: --model-config"
        ) from None
    return describe_parameters(model, trainable_only=False)
