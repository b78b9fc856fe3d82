"""Roles of parameters: by module, by place, by identity; by name only where nothing else tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dmuown.errors import ParameterError
from dmuown.policy.names import canonical_name
from dmuown.policy.roles import Role, describe_parameters, parameter_roles


class Table(nn.Module):
    """An embedding class that neither derives from nn.Embedding nor says so in its name."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))


class VocabParallelEmbedding(Table):
    """As tensor-parallel libraries name theirs."""


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = RMSNorm(width)
        self.attn = nn.Linear(width, width)
        self.mlp = nn.ModuleDict({"gate": nn.Linear(width, 2 * width), "out": nn.Linear(2 * width, width)})


class GPT(nn.Module):
    """Blocks between a table called `wte` and a head called `score`; nothing in the names helps."""

    def __init__(self, width: int = 8, labels: int = 3) -> None:
        super().__init__()
        self.wte = Table(20, width)
        self.wpe = nn.Embedding(6, width)
        self.h = nn.ModuleList([Block(width), Block(width)])
        self.ln_f = nn.LayerNorm(width)
        self.score = nn.Linear(width, labels, bias=False)


def roles(model: nn.Module) -> dict[str, str]:
    return {entry.name: entry.role.value for entry in describe_parameters(model)}


def test_wte_and_score_are_recognized_and_blocks_are_matrices() -> None:
    found = roles(GPT())
    assert found["wte.weight"] == "embedding"
    assert found["wpe.weight"] == "embedding"
    assert found["score.weight"] == "head"
    assert found["h.0.ln_1.scale"] == found["ln_f.weight"] == "norm"
    assert found["ln_f.bias"] == found["h.1.attn.bias"] == "bias"
    # `gate` and `out` inside a block are halves of an MLP, not a router and a head.
    assert found["h.1.mlp.gate.weight"] == found["h.0.mlp.out.weight"] == found["h.0.attn.weight"] == "matrix"
    assert len(found) == len(list(GPT().parameters()))


@pytest.mark.parametrize("embedding", [nn.EmbeddingBag(9, 4), VocabParallelEmbedding(9, 4), nn.Embedding(9, 4)])
def test_embedding_classes_under_any_name(embedding: nn.Module) -> None:
    model = nn.Sequential()
    model.add_module("lookup", embedding)
    assert roles(model) == {"lookup.weight": "embedding"}


def test_the_models_own_accessors_win_over_names() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Table(11, 4)
            self.middle = nn.Linear(4, 4, bias=False)
            self.last = nn.Linear(4, 7, bias=False)

        def get_input_embeddings(self) -> nn.Module:
            return self.first

        def get_output_embeddings(self) -> nn.Module:
            return self.last

    assert roles(Odd()) == {"first.weight": "embedding", "middle.weight": "matrix", "last.weight": "head"}


def test_a_head_is_found_by_the_size_of_the_vocabulary_outside_blocks_only() -> None:
    model = nn.Module()
    model.tokens = nn.Embedding(50, 8)
    model.blocks = nn.ModuleList([nn.Linear(8, 50, bias=False)])
    model.readout = nn.Linear(8, 50, bias=False)
    assert roles(model) == {"tokens.weight": "embedding", "blocks.0.weight": "matrix", "readout.weight": "head"}


@pytest.mark.parametrize(
    "name", ["lm_head", "score", "classifier", "qa_outputs", "embed_out", "v_head", "output", "head", "fc"]
)
def test_heads_by_name_outside_blocks(name: str) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Linear(4, 4, bias=False))
    model.add_module(name, nn.Linear(4, 3))
    assert roles(model) == {"body.weight": "matrix", f"{name}.weight": "head", f"{name}.bias": "bias"}


def test_classification_head_of_two_layers() -> None:
    class RobertaClassificationHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4, bias=False)
            self.out_proj = nn.Linear(4, 2, bias=False)

    model = nn.Sequential()
    model.add_module("top", RobertaClassificationHead())
    assert roles(model) == {"top.dense.weight": "head", "top.out_proj.weight": "head"}


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_tied_weights_count_once_and_belong_to_the_embedding(first: str) -> None:
    model = nn.Module()
    embedding, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    head.weight = embedding.weight
    for name in ("embedding", "head") if first == "embedding" else ("head", "embedding"):
        model.add_module(
            {"embedding": "embed_tokens", "head": "lm_head"}[name], embedding if name == "embedding" else head
        )
    (entry,) = describe_parameters(model)
    assert (entry.name, entry.role, entry.aliases) == ("embed_tokens.weight", Role.EMBEDDING, ("lm_head.weight",))
    assert entry.parameter is embedding.weight
    assert parameter_roles(model) == {"embed_tokens.weight": Role.EMBEDDING, "lm_head.weight": Role.EMBEDDING}


def test_a_module_used_twice_counts_once() -> None:
    shared = nn.Linear(4, 4, bias=False)
    (entry,) = describe_parameters(nn.Sequential(shared, nn.ReLU(), shared))
    assert (entry.name, entry.aliases) == ("0.weight", ("2.weight",))


def test_biases_of_two_axes() -> None:
    module = nn.Module()
    module.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 6))
    module.relative_position_bias_table = nn.Parameter(torch.zeros(5, 2))
    module.unbiased = nn.Parameter(torch.zeros(4, 6))
    assert roles(module) == {
        "gate_up_proj_bias": "bias",
        "relative_position_bias_table": "bias",
        "unbiased": "matrix",
    }


def test_convolutions() -> None:
    model = nn.ModuleDict(
        {
            "dense": nn.Conv2d(4, 6, 3, bias=False),
            "depthwise": nn.Conv1d(8, 8, 4, groups=8, bias=False),
            "grouped": nn.Conv2d(8, 8, 3, groups=2, bias=False),
            "up_depthwise": nn.ConvTranspose1d(8, 8, 4, groups=8, bias=False),
        }
    )
    assert roles(model) == {
        "dense.weight": "conv",
        "depthwise.weight": "depthwise_conv",
        "grouped.weight": "grouped_conv",
        "up_depthwise.weight": "depthwise_conv",
    }


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.Module()
        self.experts.gate_up = nn.Parameter(torch.zeros(3, 8, 4))
        self.shared_expert_gate = nn.Linear(4, 1, bias=False)


def test_a_gate_beside_experts_is_a_router() -> None:
    assert roles(nn.ModuleList([MoE()])) == {
        "0.gate.weight": "router",
        "0.experts.gate_up": "expert",
        "0.shared_expert_gate.weight": "router",
    }


def test_router_classes() -> None:
    class TopKRouter(Table):
        pass

    assert roles(nn.ModuleDict({"choose": TopKRouter(4, 8)})) == {"choose.weight": "router"}


def test_elementwise_matrices_are_vectors() -> None:
    module = nn.Module()
    module.A_log = nn.Parameter(torch.zeros(6, 4))
    module.layer_scale = nn.Parameter(torch.zeros(2, 4))
    module.row = nn.Parameter(torch.zeros(1, 4))
    module.scalar = nn.Parameter(torch.zeros(()))
    assert set(roles(module).values()) == {"vector"}


def test_learned_tokens_and_positions_are_embeddings() -> None:
    module = nn.Module()
    module.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
    module.pos_embed = nn.Parameter(torch.zeros(1, 7, 4))
    module.query_tokens = nn.Parameter(torch.zeros(1, 3, 4))
    assert set(roles(module).values()) == {"embedding"}


def test_adapters_are_matrices_beside_head_and_router() -> None:
    class LinearLoRA(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs, bias=False)
            self.weight.requires_grad_(False)
            self.lora_A = nn.Linear(inputs, 2, bias=False)
            self.lora_B = nn.Linear(2, outputs, bias=False)

    model = nn.Module()
    model.lm_head = LinearLoRA(4, 9)
    model.block = nn.ModuleDict({"gate": LinearLoRA(4, 3), "experts": nn.Module()})
    assert roles(model) == {
        f"{path}.lora_{part}.weight": "matrix" for path in ("lm_head", "block.gate") for part in ("A", "B")
    }


def test_declared_transposed_parameters() -> None:
    model = MoE()
    model.experts._nemo_transposed_matrix_parameters = ("gate_up",)  # type: ignore[assignment]
    assert {entry.name: entry.transposed for entry in describe_parameters(model)} == {
        "gate.weight": False,
        "experts.gate_up": True,
        "shared_expert_gate.weight": False,
    }


def test_transposed_names_that_are_no_parameters_are_refused() -> None:
    model = MoE()
    model.experts._nemo_transposed_matrix_parameters = ("gate_upp",)  # type: ignore[assignment]
    with pytest.raises(ParameterError, match=r"experts\._nemo_transposed_matrix_parameters: lists 'gate_upp'"):
        describe_parameters(model)


def test_experts_that_say_they_are_transposed() -> None:
    model = MoE()
    model.experts.is_transposed = True  # type: ignore[assignment]
    assert [entry.name for entry in describe_parameters(model) if entry.transposed] == ["experts.gate_up"]


def test_frozen_parameters_are_left_out_unless_asked_for() -> None:
    model = GPT()
    model.wte.requires_grad_(False)
    assert "wte.weight" not in roles(model)
    assert parameter_roles(model)["wte.weight"] is Role.EMBEDDING


def test_names_are_canonical_under_wrappers() -> None:
    class DDP(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    plain = GPT()
    expected = roles(plain)
    plain.h[0] = checkpoint_wrapper(plain.h[0])
    plain.h[1] = torch.compile(plain.h[1])  # type: ignore[assignment]
    assert roles(DDP(plain)) == expected


def test_a_submodule_called_module_keeps_its_name() -> None:
    assert canonical_name("module.layers.module.weight") == "layers.module.weight"
    assert canonical_name("module") == "module"
