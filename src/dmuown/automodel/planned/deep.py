"""The model's parameters from transformers, on the meta device: slow to import, and right for any architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dmuown.automodel.checks.document import read_document
from dmuown.automodel.planned.model import NAME, SHAPE_KEYS, KnownModel
from dmuown.errors import MissingDependencyError, OptionError, install_extra
from dmuown.policy.fused import fused_splits
from dmuown.policy.roles import describe_parameters


def deep_model(path: str | Path, overrides: Sequence[str] = (), model_config: Path | None = None) -> KnownModel:
    """Build the model of a YAML without weights, and describe its parameters.

    Raises:
        MissingDependencyError: transformers is not installed.
        OptionError: The YAML names no model, or transformers cannot build it.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise MissingDependencyError("transformers", "is not installed", install_extra("automodel")) from None
    document = read_document(path, overrides)
    named = model_config or document.get(NAME)
    if named is None:
        raise OptionError(NAME, "is missing", "Write it, or give the model's config.json with --model-config")
    try:
        # Never the checkpoint's own code.
        config = AutoConfig.from_pretrained(str(named), trust_remote_code=False)
        for key in SHAPE_KEYS:
            if document.get(f"model.{key}") is not None:
                setattr(config, key, document.get(f"model.{key}"))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # it raises what it likes, KeyError and ImportError among it
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OptionError(
            "model", f"transformers cannot build it: {first}", "Give its config.json: --model-config"
        ) from None
    return KnownModel(
        describe_parameters(model, trainable_only=False),
        fused_splits(model, per_head=True),
        frozenset(name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)),
    )
