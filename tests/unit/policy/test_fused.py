"""Fused weights are cut where the model itself cuts them, and blocks are updated as separate parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dmuown
from dmuown.errors import OptionError
from dmuown.orthogonalize.blocks import grouped_blocks, row_indices
from dmuown.policy.fused import FusedSplit, fused_splits, split_of, split_param_groups
from tests.unit.algorithms.oracles import assert_near, gradients, initial

COMMON = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 48, "pad_token_id": 0}


def tiny(model_type: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="the models are transformers'")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **options})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


ATTENTION: dict[str, tuple[str, dict[str, Any], str, str, FusedSplit]] = {
    "phi3": (
        "phi3",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24},
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        FusedSplit((32, 16, 16), parts=("q", "k", "v")),
    ),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_head": 4, "n_layer": 1, "hidden_size": 32},
        "transformer.h.0.attn.c_attn",
        "transformer.h.0.attn.c_proj",
        FusedSplit((32, 32, 32), parts=("q", "k", "v")),
    ),
    "gpt_neox": (
        "gpt_neox",
        {"num_attention_heads": 4, "intermediate_size": 24},
        "gpt_neox.layers.0.attention.query_key_value",
        "gpt_neox.layers.0.attention.dense",
        FusedSplit((32, 32, 32), groups=4, parts=("q", "k", "v")),
    ),
    "falcon": (
        "falcon",
        {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True},
        "transformer.h.0.self_attention.query_key_value",
        "transformer.h.0.self_attention.dense",
        FusedSplit((32, 16, 16), groups=2, parts=("q", "k", "v")),
    ),
    "falcon multi-query": (
        "falcon",
        {"num_attention_heads": 4, "multi_query": True, "new_decoder_architecture": False},
        "transformer.h.0.self_attention.query_key_value",
        "transformer.h.0.self_attention.dense",
        FusedSplit((32, 8, 8), groups=1, parts=("q", "k", "v")),
    ),
}


def rows_of(split: FusedSplit, part: str) -> Tensor:
    index = split.parts.index(part)
    if split.interleaved:
        return torch.arange(index, sum(split.sizes), len(split.sizes))
    return torch.tensor(row_indices(grouped_blocks(split.sizes, split.groups, sum(split.sizes))[index]))


def zero_rows(weight: Tensor, rows: Tensor, transposed: bool) -> None:
    with torch.no_grad():
        (weight if transposed else weight.mT)[..., rows] = 0


def input_of(model: nn.Module, name: str, tokens: Tensor) -> Tensor:
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    return seen[0]


TOKENS = torch.arange(10).reshape(1, 10) + 1


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_cut_where_the_model_cuts_it(case: str) -> None:
    """With the values' rows at zero, attention has nothing to mix."""
    model_type, options, fused, output, expected = ATTENTION[case]
    model = tiny(model_type, **options)
    splits = fused_splits(model)
    assert splits[f"{fused}.weight"] == expected
    module: Any = model.get_submodule(fused)
    transposed = type(module).__name__ == "Conv1D"
    assert input_of(model, output, TOKENS).abs().max() > 1e-6
    zero_rows(module.weight, rows_of(expected, "v"), transposed)
    if module.bias is not None:
        with torch.no_grad():
            module.bias.zero_()
    assert input_of(model, output, TOKENS).abs().max() == 0


GATES: dict[str, tuple[str, dict[str, Any], str, FusedSplit, bool]] = {
    "phi3": (
        "phi3",
        {"num_attention_heads": 4, "intermediate_size": 24},
        "model.layers.0.mlp.gate_up_proj.weight",
        FusedSplit((24, 24), parts=("gate", "up")),
        False,
    ),
    "qwen3_moe experts": (
        "qwen3_moe",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
        },
        "model.layers.0.mlp.experts.gate_up_proj",
        FusedSplit((12, 12), parts=("gate", "up")),
        False,
    ),
    "gpt_oss experts": (
        "gpt_oss",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "intermediate_size": 16,
        },
        "model.layers.0.mlp.experts.gate_up_proj",
        FusedSplit((16, 16), interleaved=True, parts=("gate", "up")),
        True,
    ),
}


@pytest.mark.parametrize("case", GATES)
def test_gates_are_cut_where_the_model_cuts_them(case: str) -> None:
    """With the gate's rows at zero the gated unit is closed: the block contributes nothing, whatever up says."""
    model_type, options, name, expected, transposed = GATES[case]
    model = tiny(model_type, head_dim=8, **options) if model_type != "phi3" else tiny(model_type, **options)
    splits = fused_splits(model)
    assert splits[name] == expected
    mlp: Any = model.get_submodule(name.split(".mlp.")[0] + ".mlp")
    for parameter_name, parameter in mlp.named_parameters():
        if parameter_name.endswith("bias"):
            nn.init.zeros_(parameter)
    x = torch.randn(1, 5, 32)

    def output() -> Tensor:
        with torch.no_grad():
            result = mlp(x)
        return result[0] if isinstance(result, tuple) else result

    assert output().abs().max() > 1e-7
    zero_rows(model.get_parameter(name), rows_of(expected, "gate"), transposed)
    assert output().abs().max() == 0


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


@pytest.mark.parametrize(
    "name, rows, config, expected",
    [
        (
            "qkv_proj",
            96,
            {**HEADS, "attn_output_gate": True},
            FusedSplit((32, 32, 16, 16), 1, False, ("q", "gate", "k", "v")),
        ),
        ("linear_qkv", 96, HEADS, FusedSplit((32, 32, 16, 16), 2, False, ("q", "gate", "k", "v"))),
        ("linear_qkv", 64, HEADS, FusedSplit((32, 16, 16), 2, False, ("q", "k", "v"))),
        ("q_proj", 64, {**HEADS, "model_type": "qwen3_next"}, FusedSplit((32, 32), 4, False, ("q", "gate"))),
        ("q_proj", 32, {**HEADS, "model_type": "qwen3_next"}, None),
        ("q_proj", 64, {**HEADS, "model_type": "llama"}, None),
        ("in_proj_qkvz", 80, DELTA, FusedSplit((16, 16, 24, 24), 2, False, ("q", "k", "v", "gate"))),
        ("in_proj_qkv", 56, DELTA, FusedSplit((16, 16, 24), 1, False, ("q", "k", "v"))),
        ("gate_and_up_projs", 24, {"moe_inter_dim": 12}, FusedSplit((12, 12), parts=("gate", "up"))),
        (
            "gate_and_up_projs",
            24,
            {"moe_inter_dim": 12, "expert_activation": "quick_geglu"},
            FusedSplit((12, 12), interleaved=True, parts=("gate", "up")),
        ),
        ("gate_and_up_projs", 12, {"moe_inter_dim": 12}, None),  # not gated
        ("query_key_value", 64, {**HEADS, "model_type": "unheard_of"}, None),  # either arrangement would fit
        ("qkv_proj", 100, HEADS, None),
        ("up_proj", 96, HEADS, None),  # three times as many rows as columns and no fused weight
    ],
)
def test_splits_follow_from_the_config(
    name: str, rows: int, config: dict[str, Any], expected: FusedSplit | None
) -> None:
    assert split_of(name, rows, [Config(**config)]) == expected


def test_groups_are_split_by_fused_weight() -> None:
    model = tiny("phi3", num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    vectors = [(n, p) for n, p in model.named_parameters() if p.ndim != 2]
    groups = split_param_groups([{"params": matrices, "lr": 0.1}, {"params": vectors, "algorithm": "adamw"}], model)
    described = [
        (group.get("split_sizes"), [name.split(".")[-2] for name, _ in group["params"]]) for group in groups[:3]
    ]
    assert sorted(described, key=str) == sorted(
        [((32, 16, 16), ["qkv_proj"]), ((24, 24), ["gate_up_proj"]), (None, ["o_proj", "down_proj"])], key=str
    )
    assert groups[3]["algorithm"] == "adamw"
    optimizer = dmuown.Muown(groups, lr=0.01)
    for _, param in (*matrices, *vectors):
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.orthogonalized == 3 + 2 + 1 + 1


def test_a_policy_splits_on_request() -> None:
    model = tiny("phi3", num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    policy = {"overrides": [{"role": ["embedding", "head", "norm"], "set": {"route": "adamw"}}]}
    whole, split = (dmuown.param_groups(model, policy, auto_split=flag) for flag in (False, True))
    assert not any("split_sizes" in group for group in whole)
    assert sorted(group["split_sizes"] for group in split if "split_sizes" in group) == [(24, 24), (32, 16, 16)]


@pytest.mark.parametrize("name", ["muon", "normuon", "muown", "normuown", "angular_muown"])
def test_grouped_blocks_equal_separate_parameters(name: str) -> None:
    """GPT-NeoX's arrangement: q, k and v of 3 heads in turn, and Falcon's with unequal parts."""
    for sizes, groups in (((6, 6, 6), 3), ((12, 3, 3), 3)):
        weight = initial(18, 5)
        blocks = [torch.tensor(row_indices(block)) for block in grouped_blocks(sizes, groups, 18)]
        fused = nn.Parameter(weight.clone())
        parts = [nn.Parameter(weight[rows].clone()) for rows in blocks]
        options: dict[str, Any] = {"lr": 0.02, "ns_dtype": "float64", "weight_decay": 0.0}
        group = {"params": [fused], "algorithm": name, "split_sizes": sizes, "split_groups": groups}
        one = dmuown.Muon([group], **options)
        many = dmuown.Muon([{"params": parts, "algorithm": name}], **options)
        for grad in gradients((18, 5), steps=6):
            fused.grad = grad
            for part, rows in zip(parts, blocks, strict=True):
                part.grad = grad[rows]
            one.step()
            many.step()
        for part, rows in zip(parts, blocks, strict=True):
            assert_near(fused.detach()[rows], part.detach(), 2e-6)
        assert one.orthogonalized == 3


@pytest.mark.parametrize("transposed", [False, True])
def test_the_published_guess_on_request(transposed: bool) -> None:
    """Three blocks where rows = 3 columns, output rows meant; nothing else, and nothing without the request."""
    shapes = {(15, 5): 3, (14, 5): 1, (5, 15): 1, (5, 5): 1}
    for shape, blocks in shapes.items():
        weight = initial(*shape)
        params = [nn.Parameter((weight.mT if transposed else weight).clone().contiguous()) for _ in range(3)]
        common: dict[str, Any] = {"matrix_transposed": transposed}
        sizes = {"split_sizes": (5, 5, 5)} if blocks == 3 else {}
        groups = [{**common, "qkv_heuristic": True}, {**common, **sizes}, common]
        optimizers = [
            dmuown.Muown([{"params": [param], **group}], ns_dtype="float64")
            for param, group in zip(params, groups, strict=True)
        ]
        for optimizer, param in zip(optimizers, params, strict=True):
            grad = next(iter(gradients(shape)))
            param.grad = (grad.mT if transposed else grad).contiguous()
            optimizer.step()
        assert torch.equal(params[0], params[1])
        assert [optimizer.orthogonalized for optimizer in optimizers] == [blocks, blocks, 1]
        assert torch.equal(params[0], params[2]) == (blocks == 1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"qkv_heuristic": 1}, "qkv_heuristic: must be True or False"),
        ({"split_groups": 2}, "split_groups: needs split_sizes beside it"),
        ({"interleaved": True}, "interleaved: needs split_sizes beside it"),
        ({"split_sizes": (6, 6), "split_groups": 4}, "must divide every block's rows, but 4 does not divide 6"),
        ({"split_sizes": (6, 6), "split_groups": 2, "interleaved": True}, "split_groups: excludes interleaved"),
        ({"split_sizes": (6, 6), "split_groups": True}, "must be an integer of at least 1, got True"),
        ({"split_sizes": (6, 5)}, r"must sum to the 12 output rows of the weight, but \(6, 5\) sums to 11"),
        ({"split_sizes": (True, 11)}, "must hold ints of at least 1, got True"),
        ({"split_sizes": (6.0, 6.0)}, r"must hold ints of at least 1, got 6\.0"),
        ({"split_sizes": (6, 6), "num_heads": 2}, "split_sizes: excludes num_heads"),
        ({"split_sizes": (6, 6), "flatten": True}, "split_sizes: excludes flatten"),
        ({"num_heads": 5}, "must divide the 12 output rows"),
        ({"num_heads": 2, "flatten": True}, "num_heads: excludes flatten"),
    ],
)
def test_bad_splits_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dmuown.Muown([{"params": [nn.Parameter(initial(12, 4))], **options}])
