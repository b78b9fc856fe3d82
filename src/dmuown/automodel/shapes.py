"""The parameters of common language models, from the numbers in their `config.json` alone.

Llama, Mistral, Qwen2, Qwen3, SmolLM and relatives, and the mixtures of experts Mixtral, Qwen2-MoE and Qwen3-MoE,
named and shaped as transformers 5 builds them, or as the host does where it has a class of its own. A test compares
every family with what transformers builds on the meta device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmuown.automodel.options import count
from dmuown.errors import OptionError
from dmuown.policy.roles import ParameterRole, Role

DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = (*DENSE, *MIXTURES)

# Mixtures of experts that the host builds itself, with stacks stored [expert, input, output], unless force_hf is set.
_HOST_MIXTURES = ("qwen3_moe",)


class _Numbers:
    """The numbers of a configuration, each checked when it is read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of these keys that is given."""
        for key in keys:
            if self.config.get(key) is not None:
                return count(f"{self.where}: {key}", self.config[key])
        if default is None:
            raise OptionError(f"{self.where}: {keys[0]}", "is missing", "Complete the model's configuration")
        return default

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.config.get(key)
        return default if value is None else bool(value)


def model_parameters(
    config: Mapping[str, Any], *, where: str = "config.json", host_layout: bool = False
) -> list[ParameterRole]:
    """Return every parameter of a model as `dmuown.policy.roles.describe_parameters` would, on the meta device.

    Args:
        config: Content of a `config.json`.
        where: How errors call it.
        host_layout: Whether the host builds its own class (`force_hf: false`), which stores experts transposed.

    Raises:
        OptionError: A family that is not in `FAMILIES`, or a number that is missing or wrong.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise OptionError(
            f"{where}: model_type",
            f"{family!r} is none of the families whose shapes are known here: {', '.join(FAMILIES)}",
            "Use --deep, which asks transformers",
        )
    numbers = _Numbers(config, where)
    tied = numbers.flag("tie_word_embeddings", default=family != "mixtral" and family not in ("llama", "mistral"))
    return list(_parameters(str(family), numbers, tied, host_layout and family in _HOST_MIXTURES))


def _parameters(family: str, numbers: _Numbers, tied: bool, host: bool) -> Iterator[ParameterRole]:
    hidden, vocabulary = numbers.number("hidden_size"), numbers.number("vocab_size")
    heads = numbers.number("num_attention_heads")
    key_heads = numbers.number("num_key_value_heads", default=heads)
    head = numbers.number("head_dim", default=max(1, hidden // heads))
    for key, value, of in (("num_key_value_heads", key_heads, heads),):
        if of % value:
            raise OptionError(f"{numbers.where}: {key}", f"must divide num_attention_heads, got {value} and {of}")
    qkv_bias = numbers.flag("attention_bias", default=family in ("qwen2", "qwen2_moe"))
    if family in ("qwen2", "qwen2_moe"):
        qkv_bias = numbers.flag("qkv_bias", default=True)
    output_bias = qkv_bias and family not in ("qwen2", "qwen2_moe")
    aliases = ("lm_head.weight",) if tied else ()
    yield _entry("model.embed_tokens.weight", (vocabulary, hidden), Role.EMBEDDING, "embedding", aliases=aliases)
    for layer in range(numbers.number("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", heads * head), ("k_proj", key_heads * head), ("v_proj", key_heads * head)):
            yield from _linear(f"{prefix}.self_attn.{name}", rows, hidden, qkv_bias)
        yield from _linear(f"{prefix}.self_attn.o_proj", hidden, heads * head, output_bias)
        if family in ("qwen3", "qwen3_moe"):
            for name in ("q_norm", "k_norm"):
                yield _entry(f"{prefix}.self_attn.{name}.weight", (head,), Role.NORM, "norm")
        if family in DENSE or not _is_sparse(layer, numbers):
            bias = numbers.flag("mlp_bias", default=False)
            yield from _gated(f"{prefix}.mlp", numbers.number("intermediate_size"), hidden, bias)
        else:
            yield from _experts(f"{prefix}.mlp", family, numbers, hidden, host)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield _entry(f"{prefix}.{name}.weight", (hidden,), Role.NORM, "norm")
    yield _entry("model.norm.weight", (hidden,), Role.NORM, "norm")
    if not tied:
        yield _entry("lm_head.weight", (vocabulary, hidden), Role.HEAD, "output head")


def _is_sparse(layer: int, numbers: _Numbers) -> bool:
    """Whether a layer of a mixture holds experts: Qwen names dense layers and a step between sparse ones."""
    if layer in (numbers.config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % numbers.number("decoder_sparse_step", default=1) == 0


def _experts(prefix: str, family: str, numbers: _Numbers, hidden: int, host: bool) -> Iterator[ParameterRole]:
    experts = numbers.number("num_local_experts" if family == "mixtral" else "num_experts", "num_local_experts")
    inner = numbers.number("intermediate_size" if family == "mixtral" else "moe_intermediate_size")
    yield _entry(f"{prefix}.gate.weight", (experts, hidden), Role.ROUTER, "gate of experts")
    if host:
        shapes = {"gate_and_up_projs": (experts, hidden, 2 * inner), "down_projs": (experts, inner, hidden)}
    else:
        shapes = {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
    for name, shape in shapes.items():
        yield _entry(f"{prefix}.experts.{name}", shape, Role.EXPERT, f"stack of {experts} matrices", transposed=host)
    if family == "qwen2_moe":
        shared = numbers.number("shared_expert_intermediate_size")
        yield from _gated(f"{prefix}.shared_expert", shared, hidden, bias=False)
        yield _entry(f"{prefix}.shared_expert_gate.weight", (1, hidden), Role.ROUTER, "gate of experts")


def _gated(prefix: str, inner: int, hidden: int, bias: bool) -> Iterator[ParameterRole]:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, bias)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, bias)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, bias)


def _linear(prefix: str, rows: int, columns: int, bias: bool) -> Iterator[ParameterRole]:
    yield _entry(f"{prefix}.weight", (rows, columns), Role.MATRIX, "matrix of Linear")
    if bias:
        yield _entry(f"{prefix}.bias", (rows,), Role.BIAS, "bias")


def _entry(
    name: str,
    shape: tuple[int, ...],
    role: Role,
    reason: str,
    *,
    transposed: bool = False,
    aliases: tuple[str, ...] = (),
) -> ParameterRole:
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    return ParameterRole(name, parameter, role, transposed, aliases, reason)


def find_model_config(named: str) -> Path | None:
    """Return the `config.json` of a checkpoint folder, of a hub name in the local cache, or the file itself.

    Nothing is downloaded.
    """
    path = Path(named).expanduser()
    if path.is_file() and path.suffix == ".json":
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    if named.count("/") != 1 or path.exists():
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = hub / f"models--{named.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return found[-1] if found else None


def read_model_config(file: Path) -> dict[str, Any]:
    """Read a `config.json`; the text part of a multimodal one.

    Raises:
        OptionError: No JSON, or no object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise OptionError(str(file), f"is no valid JSON: {error}", "Restore the checkpoint's config.json") from None
    if not isinstance(content, dict):
        raise OptionError(str(file), "must hold an object", "Restore the checkpoint's config.json")
    text = content.get("text_config")
    return text if isinstance(text, dict) and content.get("model_type") not in FAMILIES else content
