"""Models of the transformers library, under the routing guide's own policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dmuown
from dmuown.ownership import dedicate_params, dedicated_records, gathered, runtime_of
from tests.distributed.harness import RankPool
from tests.distributed.ownership.training import (
    assert_nothing_but_homes,
    assert_state_of_owned_only,
    compare,
    mean_over_ranks,
    mesh_of,
    newton_schulz,
    whole_parameters,
)
from tests.unit.policy.test_schema import GUIDE

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def _build(kind: str, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=tied)
        model: nn.Module = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.MixtralConfig(
            **SHAPE, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=tied
        )
        config._experts_implementation = "eager"  # the grouped product knows no float64
        model = transformers.MixtralForCausalLM(config)
    return model


def _policy(kind: str) -> dict[str, Any]:
    """The guide's, in float64: twenty steps in fp32 drift apart further than a fault would show."""
    wide = dict.fromkeys(("param_dtype", "master_dtype", "optim_dtype"), torch.float64)
    policy = {**GUIDE, "defaults": {**GUIDE["defaults"], **wide}}
    if kind == "mixtral":
        policy["overrides"] = [*GUIDE["overrides"], {"role": "router", "set": {"route": "adamw"}}]
    return policy


def _tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=tokens, labels=tokens)
    assert isinstance(output, transformers.utils.ModelOutput)
    loss: torch.Tensor = output.loss
    return loss


def _train(rank: int, world_size: int, kind: str, tied: bool, checkpointing: str) -> None:
    model, plain = _build(kind, tied).double(), _build(kind, tied).double()
    policy = _policy(kind)
    terminal = {id(model.get_submodule(name)) for name in ("lm_head", "model.embed_tokens")}
    blocks = tuple({type(layer) for layer in model.get_submodule("model.layers").children()})

    def hook_boundary(module: nn.Module) -> bool:
        return id(module) in terminal or isinstance(module, (*blocks, type(model.get_submodule("model.norm"))))

    dedicate_params(
        model,
        mesh_of(world_size),
        predicate=lambda name, param: param.requires_grad,
        param_policy=policy,
        hook_boundary_predicate=hook_boundary if kind == "llama" else None,
    )
    if checkpointing:
        arguments = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)  # type: ignore[operator]
        model.train()
    optimizer = dmuown.Muown(model, lr=1e-3, newton_schulz_func=newton_schulz)
    reference = dmuown.Muown(dmuown.param_groups(plain, policy), lr=1e-3, newton_schulz_func=newton_schulz)
    for step in range(20):
        loss = _loss(model, _tokens(step, rank))
        loss.backward()
        expected = torch.stack([_loss(plain, _tokens(step, each)) for each in range(world_size)]).mean()
        expected.backward()
        torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), rtol=1e-5, atol=0)
        assert_nothing_but_homes(model)
        for stepped in (optimizer, reference):
            stepped.step()
            stepped.zero_grad()
    assert_state_of_owned_only(model, optimizer)
    expected_parameters = {name: param.detach() for name, param in plain.named_parameters()}
    compare(whole_parameters(model), expected_parameters, "parameter", {"rtol": 1e-5, "atol": 1e-6})
    routes = {name: record.route.route for name, record in dedicated_records(model).items()}
    assert routes["model.embed_tokens.weight"] == "sharded_adamw"
    assert routes["model.norm.weight"] == "adamw"
    assert routes["model.layers.0.self_attn.q_proj.weight"] == "muon"
    # Evaluation and generation, with a cache, token by token.
    model.eval()
    plain.load_state_dict(_whole_state(model))
    plain.eval()
    generate: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    made = model.generate(_tokens(9, 0)[:1], **generate)  # type: ignore[operator]
    assert torch.equal(made, plain.generate(_tokens(9, 0)[:1], **generate))  # type: ignore[operator]
    assert_nothing_but_homes(model)


def _whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    with gathered(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "kind, tied, checkpointing",
    [("llama", True, "once"), ("llama", False, "reentrant"), ("mixtral", False, "")],
)
def test_trains_as_one_process(ranks2: RankPool, kind: str, tied: bool, checkpointing: str) -> None:
    ranks2.run(_train, kind, tied, checkpointing, timeout=120)


def test_mixture_of_experts_on_four_ranks(ranks4: RankPool) -> None:
    ranks4.run(_train, "mixtral", False, "", timeout=240)


def _guide(rank: int, world_size: int) -> None:
    """The guide's call as it stands: bf16 compute, fp32 masters, its predicate, policy and boundaries."""
    model = _build("llama", False)
    plan = dmuown.dedicate_params(
        model,
        mesh_of(world_size),
        predicate=lambda name, param: param.requires_grad,
        param_policy=GUIDE,
    )
    assert {transfer.param_dtype for transfer in plan.transfers} == {torch.bfloat16}
    optimizer = dmuown.Muown(model, lr=3e-3)
    losses = []
    for step in range(10):
        loss = _loss(model, _tokens(step % 2, rank))
        loss.backward()
        dmuown.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean_over_ranks(loss.float())))
        assert_nothing_but_homes(model)
    assert losses[-1] < losses[0] - 0.1
    summary = dmuown.summarize_param_groups(model, optimizer)
    by_route = {row.route: row.parameters for row in summary.routes}
    assert by_route == {"muon": 14, "adamw": 5, "sharded_adamw": 2}
    assert "override 2 (name=['action_head', 'action_decoder']) matches no parameter" in summary.warnings
    assert all(record.home.dtype == torch.float32 for record in dedicated_records(model).values())
    assert runtime_of(model).busy is False


def test_the_guides_policy_verbatim(ranks2: RankPool) -> None:
    ranks2.run(_guide, timeout=180)
