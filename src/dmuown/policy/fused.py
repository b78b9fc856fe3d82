"""Which weights of a model are several matrices in one tensor, from the model's own modules and config.

A fused q/k/v or gate/up weight is one GEMM and several logical matrices. Names say that a weight is
fused; the config says how long each part is, and the class of model how the parts are arranged:

    contiguous     q rows, then k rows, then v rows           Phi-3, GPT-2, nn.MultiheadAttention
    grouped        every head or query group has its q, k, v  GPT-NeoX, BLOOM, Falcon, Qwen3-Next, Megatron
    interleaved    row by row in turn                         gpt-oss experts

A weight whose parts cannot be told for certain is left whole, with one log line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from dmuown.policy.names import canonical_name
from dmuown.policy.roles import ParameterRole, Role, describe_parameters
from dmuown.policy.splits import ELEMENTWISE, FusedSplit, blocks_text

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


def fused_splits(model: nn.Module, *, per_head: bool = False) -> dict[str, FusedSplit]:
    """Return the splits of a model's fused weights by canonical name.

    Args:
        model: Any module. Configs are read from the nearest enclosing module that has one (`config`, its
            `text_config` included); parameters are only looked at, and may be sharded or on the meta device.
        per_head: Include q, k and v weights of their own, which are one part of several heads.
    """
    owners = {canonical_name(name): module for name, module in model.named_modules()}
    splits = {}
    for entry in describe_parameters(model, trainable_only=False):
        path = entry.name.rpartition(".")[0]
        found = split_of_entry(entry, _configs(path, owners), owners.get(path), per_head=per_head)
        if found is not None:
            splits[entry.name] = found
    return splits


def split_of_entry(
    entry: ParameterRole, configs: Sequence[Any], module: nn.Module | None = None, *, per_head: bool = False
) -> FusedSplit | None:
    """The split of one parameter; `split_of` describes `configs` and `module`, `fused_splits` `per_head`."""
    if entry.role not in (Role.MATRIX, Role.EXPERT):
        return None
    path, _, leaf = entry.name.rpartition(".")
    module_name = path.rpartition(".")[2] if leaf == "weight" else leaf
    shape = entry.parameter.shape
    rows = shape[-1] if entry.transposed else shape[-2]
    found = split_of(module_name, rows, configs, module)
    if found is None and per_head:
        found = _heads_of(module_name, rows, configs)
    return found


def split_of(name: str, rows: int, configs: Iterable[Any], module: nn.Module | None = None) -> FusedSplit | None:
    """The split of one weight, or None where it is not fused, or its parts cannot be told.

    Args:
        name: The module's own name, such as `qkv_proj`, or the parameter's where it is no module's `weight`.
        rows: Its output rows.
        configs: Configs that may describe it, nearest first.
        module: The module that holds it.
    """
    if name in ("in_proj_weight",) and isinstance(module, nn.MultiheadAttention):
        return FusedSplit((rows // 3,) * 3, parts=("q", "k", "v"), heads=(module.head_dim,) * 3)
    for config in configs:
        sizes = _Sizes.of(config)
        for names, rule in _RULES:
            if name in names:
                found = rule(rows, sizes)
                if found is not None:
                    return found
    if any(name in names for names, _ in _RULES) and name not in _SOMETIMES_FUSED:
        logger.info("%s of %d rows has a fused weight's name, but no config says what its parts are", name, rows)
    return None


def split_param_groups(
    groups: Iterable[Mapping[str, Any]], model: nn.Module, *, per_head: bool = False
) -> list[dict[str, Any]]:
    """Give fused weights groups of their own that carry their splits.

    Args:
        groups: Param groups with `params` (tensors, or pairs of name and tensor) and any options.
            Those that have `split_sizes` or `num_heads` already, and elementwise ones, stay as they are.
        model: The model that the parameters belong to.
        per_head: Cut attention's weights, fused or not, into heads instead.

    Returns:
        New groups in the same order; weights of one group and split stay together. Those of fused weights that
        are stored `[input, output]` say `matrix_transposed`, unless they did already.
    """
    transposed = {id(entry.parameter) for entry in describe_parameters(model) if entry.transposed}
    splits = fused_splits(model, per_head=per_head)
    cuts: dict[int, dict[str, Any]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        split = splits.get(canonical_name(name))
        if split is not None:
            orientation = {"matrix_transposed": True} if id(param) in transposed else {}
            cuts[id(param)] = {**split.group_options(per_head=per_head), **orientation}
    return cut_groups(groups, cuts)


def cut_groups(groups: Iterable[Mapping[str, Any]], cuts: Mapping[int, Mapping[str, Hashable]]) -> list[dict[str, Any]]:
    """Split groups by what their parameters are to have as options, those of `cuts`, by parameter's `id`.

    Returns:
        As `split_param_groups`.
    """
    result: list[dict[str, Any]] = []
    for group in groups:
        if group.get("split_sizes") or group.get("num_heads") or group.get("algorithm") in ELEMENTWISE:
            result.append({**group, "params": list(group["params"])})
            continue
        for options, part in regrouped(group, lambda tensor: tuple(cuts.get(id(tensor), {}).items())):
            result.append({**dict(options), **part})
    return result


def count_blocks(groups: Iterable[Mapping[str, Any]], models: Iterable[nn.Module]) -> dict[str, int]:
    """Return how many weights are cut into which blocks, by `blocks_text`; whole ones are left out."""
    groups = list(groups)
    splits: dict[int, FusedSplit] = {}
    if any(group.get("split_sizes") for group in groups):
        for model in models:
            found = fused_splits(model)
            named = ((canonical_name(name), param) for name, param in model.named_parameters(remove_duplicate=False))
            splits |= {id(param): found[name] for name, param in named if name in found}
    counts: dict[str, int] = {}
    for group in groups:
        for item in group["params"]:
            tensor = item[1] if isinstance(item, tuple) else item
            text = blocks_text(group, tensor.shape, splits.get(id(tensor)))
            if text:
                counts[text] = counts.get(text, 0) + 1
    return counts


def regrouped(group: Mapping[str, Any], key_of: Callable[[Tensor], K]) -> list[tuple[K, dict[str, Any]]]:
    """Split a group by a property of its parameters; names, order and other keys are kept."""
    params, names = list(group["params"]), group.get("param_names")
    members: dict[K, list[int]] = {}
    for index, item in enumerate(params):
        members.setdefault(key_of(item[1] if isinstance(item, tuple) else item), []).append(index)
    result = []
    for key, indices in members.items():
        part = {**group, "params": [params[index] for index in indices]}
        if names is not None:
            part["param_names"] = [names[index] for index in indices]
        result.append((key, part))
    return result


@dataclass(frozen=True)
class _Sizes:
    """What configs call the lengths of the parts; 0 where they do not say."""

    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    config: Any

    @classmethod
    def of(cls, config: Any) -> _Sizes:
        heads = _first(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        hidden = _first(config, "hidden_size", "n_embd", "d_model", "dim")
        kv_heads = _first(config, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups") or heads
        return cls(
            model_type=str(getattr(config, "model_type", "")),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_first(config, "head_dim", "kv_channels") or (hidden // heads if heads else 0),
            gated=bool(getattr(config, "attn_output_gate", False) or getattr(config, "attention_output_gate", False)),
            config=config,
        )


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _configs(path: str, owners: Mapping[str, nn.Module]) -> list[Any]:
    """Configs of a module and of those around it, nearest first."""
    found: list[Any] = []
    while True:
        config = getattr(owners.get(path), "config", None)
        if config is not None:
            found += [config, *filter(None, (getattr(config, key, None) for key in ("text_config", "vision_config")))]
        if not path:
            return found
        path = path.rpartition(".")[0]


#: Models whose fused attention keeps q, k and v of each head (or query group) together.
_BY_HEAD = ("gpt_neox", "gpt_neox_japanese", "bloom", "falcon", "megatron", "RefinedWeb", "persimmon")


def _attention(rows: int, sizes: _Sizes) -> FusedSplit | None:
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    if not q:
        return None
    if rows == 2 * q + 2 * kv and sizes.gated:
        groups = sizes.kv_heads if sizes.model_type in _BY_HEAD else 1
        return FusedSplit((q, q, kv, kv), groups, parts=("q", "gate", "k", "v"), heads=(sizes.head_dim,) * 4)
    if rows == q + 2 * kv:
        return FusedSplit((q, kv, kv), parts=("q", "k", "v"), heads=(sizes.head_dim,) * 3)
    return None


def _heads_of(name: str, rows: int, configs: Iterable[Any]) -> FusedSplit | None:
    """Heads of a q, k or v weight of its own."""
    for config in configs:
        sizes = _Sizes.of(config)
        heads = sizes.heads if name in _QUERIES else sizes.kv_heads if name in _KEYS_AND_VALUES else 0
        if heads and sizes.head_dim and rows == heads * sizes.head_dim:
            return FusedSplit((rows,), parts=(name,), heads=(sizes.head_dim,))
    return None


_QUERIES = ("q_proj", "query", "wq", "q", "to_q", "q_lin")
_KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "wk", "wv", "k", "v", "to_k", "to_v", "k_lin", "v_lin")


def _attention_by_head(rows: int, sizes: _Sizes) -> FusedSplit | None:
    """`query_key_value`: arranged by head in the models that are known to, contiguous in the others (ChatGLM)."""
    config, q = sizes.config, sizes.heads * sizes.head_dim
    if not q:
        return None
    kv_heads = sizes.kv_heads
    if sizes.model_type == "falcon" and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1 if getattr(config, "multi_query", False) else sizes.heads
    multi_query_groups = getattr(config, "multi_query_group_num", None)
    if multi_query_groups and getattr(config, "multi_query_attention", False):
        kv_heads = multi_query_groups
    kv = kv_heads * sizes.head_dim
    if rows != q + 2 * kv:
        return None
    if sizes.model_type in _BY_HEAD:
        return FusedSplit((q, kv, kv), groups=kv_heads, parts=("q", "k", "v"), heads=(sizes.head_dim,) * 3)
    if multi_query_groups:
        return FusedSplit((q, kv, kv), parts=("q", "k", "v"), heads=(sizes.head_dim,) * 3)
    return None  # both arrangements have this many rows


def _megatron_attention(rows: int, sizes: _Sizes) -> FusedSplit | None:
    """`linear_qkv`: per query group its queries, (their gates,) its key and its value."""
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    if q and rows == q + 2 * kv:
        return FusedSplit((q, kv, kv), sizes.kv_heads, parts=("q", "k", "v"), heads=(sizes.head_dim,) * 3)
    if q and rows == 2 * q + 2 * kv:
        heads = (sizes.head_dim,) * 4
        return FusedSplit((q, q, kv, kv), sizes.kv_heads, parts=("q", "gate", "k", "v"), heads=heads)
    return None


def _gated_query(rows: int, sizes: _Sizes) -> FusedSplit | None:
    """`q_proj` of Qwen3-Next and Qwen3.5: per head its query and its output gate."""
    q = sizes.heads * sizes.head_dim
    if q and rows == 2 * q and sizes.model_type.startswith(("qwen3_next", "qwen3_5")):
        return FusedSplit((q, q), groups=sizes.heads, parts=("q", "gate"), heads=(sizes.head_dim,) * 2)
    return None


def _linear_attention(rows: int, sizes: _Sizes) -> FusedSplit | None:
    """`in_proj_qkvz` of gated delta nets: per key head q, k, v and the gate z."""
    heads, value_heads, key, value = _delta_net(sizes.config)
    if heads and rows == 2 * heads * key + 2 * value_heads * value:
        q, v = heads * key, value_heads * value
        return FusedSplit((q, q, v, v), heads, parts=("q", "k", "v", "gate"), heads=(key, key, value, value))
    return None


def _linear_attention_without_gate(rows: int, sizes: _Sizes) -> FusedSplit | None:
    """`in_proj_qkv` of Qwen3.5: q, k and v, contiguous."""
    heads, value_heads, key, value = _delta_net(sizes.config)
    if heads and rows == 2 * heads * key + value_heads * value:
        rows_of_parts = (heads * key, heads * key, value_heads * value)
        return FusedSplit(rows_of_parts, parts=("q", "k", "v"), heads=(key, key, value))
    return None


def _delta_net(config: Any) -> tuple[int, int, int, int]:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    heads, value_heads, key, value = (_first(config, name) for name in names)
    return heads, value_heads, key, value


def _gate_up(rows: int, sizes: _Sizes) -> FusedSplit | None:
    """Gate and up projections, contiguous; gpt-oss interleaves those of its experts."""
    if rows % 2:
        return None
    interleaved = sizes.model_type in ("gpt_oss", "openai_moe")
    return FusedSplit((rows // 2, rows // 2), interleaved=interleaved, parts=("gate", "up"))


def _host_gate_up(rows: int, sizes: _Sizes) -> FusedSplit | None:
    """`gate_and_up_projs` of the host's experts: gated at twice the inner width; quick_geglu takes rows in turn."""
    config = sizes.config
    width = _first(config, "moe_inter_dim", "moe_intermediate_size", "intermediate_size")
    if not width or rows != 2 * width:
        return None
    interleaved = getattr(config, "expert_activation", "") == "quick_geglu"
    return FusedSplit((width, width), interleaved=interleaved, parts=("gate", "up"))


_SOMETIMES_FUSED = ("q_proj", "wi", "Wi")

_RULES = (
    (("qkv_proj", "wqkv", "Wqkv", "qkv", "c_attn", "in_proj_weight", "query_key_value_proj", "W_pack"), _attention),
    (("query_key_value",), _attention_by_head),
    (("linear_qkv",), _megatron_attention),
    (("q_proj",), _gated_query),
    (("in_proj_qkvz",), _linear_attention),
    (("in_proj_qkv",), _linear_attention_without_gate),
    (("gate_up_proj", "gate_up_projs", "w12", "w1w3", "linear_fc1_gated"), _gate_up),
    (("gate_and_up_projs",), _host_gate_up),
)


__all__ = [
    "FusedSplit",
    "count_blocks",
    "cut_groups",
    "fused_splits",
    "regrouped",
    "split_of",
    "split_of_entry",
    "split_param_groups",
]
