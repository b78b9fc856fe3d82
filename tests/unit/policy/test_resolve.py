"""From rules to routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dmuown.errors import OptionError, OptionTypeError, ParameterError
from dmuown.policy.resolve import ResolvedRoute, resolve_routes
from tests.unit.policy.test_schema import GUIDE


def _params(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name.replace("__", "."): torch.empty(shape) for name, shape in shapes.items()}


PARAMS = _params(
    model__embed_tokens__weight=(32, 8),
    model__layers__0__self_attn__q_proj__weight=(8, 8),
    model__layers__0__self_attn__q_proj__bias=(8,),
    model__layers__0__input_layernorm__weight=(8,),
    action_head__proj__weight=(4, 8),
    action_head__norm__weight=(8,),
    lm_head__weight=(32, 8),
)


def test_guide_policy() -> None:
    routes = resolve_routes(PARAMS, policy=GUIDE).routes
    assert {name: (route.route, route.matched) for name, route in routes.items()} == {
        "model.embed_tokens.weight": ("sharded_adamw", (0,)),
        "model.layers.0.self_attn.q_proj.weight": ("muon", ()),
        "model.layers.0.self_attn.q_proj.bias": ("adamw", (1,)),
        "model.layers.0.input_layernorm.weight": ("adamw", (1,)),
        "action_head.proj.weight": ("muon", (2,)),
        "action_head.norm.weight": ("adamw", (1, 2)),
        "lm_head.weight": ("sharded_adamw", (0,)),
    }
    head = routes["action_head.norm.weight"]
    # The third override sets precision only: the second one's route stays.
    assert (head.param_dtype, head.output_dtype, head.cast_forward_inputs) == (torch.float32, torch.float32, True)
    body = routes["model.layers.0.self_attn.q_proj.weight"]
    assert body.param_dtype is torch.bfloat16
    assert body.grad_dtype is None
    assert body.effective_grad_dtype is torch.bfloat16


def test_later_overrides_win_field_by_field_and_all_matches_are_reported() -> None:
    policy = {
        "defaults": {"route": "adamw", "param_dtype": "bf16"},
        "overrides": [
            {"name": "a", "set": {"route": "sharded_adamw", "param_dtype": "fp16"}},
            {"name": "zzz", "set": {"route": "muon"}},
            {"name": "a.b", "set": {"route": "muon"}},
            {"contains": ["b.c"], "set": {"grad_dtype": "fp32"}},
        ],
    }
    resolution = resolve_routes(_params(a__b__c=(2, 2), a__x=(2, 2)), policy=policy)
    first, second = resolution.routes["a.b.c"], resolution.routes["a.x"]
    assert first == ResolvedRoute("muon", torch.float16, torch.float32, matched=(0, 2, 3))
    assert first.effective_grad_dtype is torch.float32
    assert second == ResolvedRoute("sharded_adamw", torch.float16, matched=(0,))
    assert resolution.warnings == ["override 1 (name=['zzz']) matches no parameter"]


def test_missing_route_becomes_muon_then_vectors_are_refused() -> None:
    policy: dict[str, Any] = {"overrides": [{"name": "w", "set": {"param_dtype": "bf16"}}]}
    assert resolve_routes(_params(w=(3, 4)), policy=policy).routes["w"].route == "muon"
    with pytest.raises(ParameterError, match=r"ln\.weight: is a vector on route 'muon'.*and 1 more: b"):
        resolve_routes({"w": torch.empty(3, 4), "ln.weight": torch.empty(4), "b": torch.empty(())}, policy=policy)
    with pytest.raises(ParameterError, match=r"ln\.weight: is a vector"):
        resolve_routes(
            {"ln.weight": torch.empty(4)},
            policy={"defaults": {"route": "adamw"}, "overrides": [{"name": "ln", "set": {"route": None}}]},
        )


def test_regex_and_role_selectors() -> None:
    roles = {"a.0.weight": "router", "a.1.weight": "matrix", "conv.weight": "depthwise_conv"}
    policy = {
        "overrides": [
            {"regex": r"^a\.\d+\.weight$", "set": {"param_dtype": "bf16"}},
            {"role": "router", "set": {"route": "adamw"}},
            {"role": "conv", "set": {"route": "adamw"}},
            {"regex": r"\.1\.", "role": "router", "set": {"route": "sharded_adamw"}},
        ]
    }
    params = {name: torch.empty(2, 2) for name in roles}
    resolution = resolve_routes(params, policy=policy, roles=roles)
    assert {name: route.matched for name, route in resolution.routes.items()} == {
        "a.0.weight": (0, 1),
        "a.1.weight": (0,),
        "conv.weight": (2,),
    }
    # Both selectors of the last override must match: a.1 is no router.
    assert resolution.warnings == ["override 3 (regex=['\\\\.1\\\\.'], role=['router']) matches no parameter"]
    assert resolution.routes["a.0.weight"].role == "router"


def test_many_small_sharded_tensors_are_a_warning() -> None:
    params = {f"layers.{index}.norm.weight": torch.empty(8) for index in range(100)}
    params["embed.weight"] = torch.empty(1, device="meta").expand(1_000_000)
    policy = {"defaults": {"route": "sharded_adamw"}}
    assert "100 tensors of fewer than 1000000 elements" in resolve_routes(params, policy=policy).warnings[0]
    params.pop("layers.7.norm.weight")
    assert resolve_routes(params, policy=policy).warnings == []


def test_functions() -> None:
    def policy_fn(name: str, param: nn.Parameter) -> dict[str, Any] | None:
        return {"route": "adamw", "grad_dtype": "fp32"} if param.ndim < 2 else None

    routes = resolve_routes(PARAMS, policy_fn=policy_fn).routes
    assert routes["action_head.norm.weight"] == ResolvedRoute("adamw", grad_dtype=torch.float32)
    assert routes["lm_head.weight"] == ResolvedRoute("muon")
    hinted = resolve_routes(PARAMS, route_hint_fn=lambda name, param: None if param.ndim > 1 else "adamw").routes
    assert [route.route for route in hinted.values()] == ["muon", "muon", "adamw", "adamw", "muon", "adamw", "muon"]


def test_functions_are_validated() -> None:
    with pytest.raises(OptionError, match=r"param_policy_fn\('lm_head.weight'\)\.rout: unknown key.*'route'"):
        resolve_routes(_params(lm_head__weight=(2, 2)), policy_fn=lambda name, param: {"rout": "muon"})
    with pytest.raises(OptionError, match=r"route_hint_fn\('w'\): unknown route 'adam'. Did you mean 'adamw'"):
        resolve_routes(_params(w=(2, 2)), route_hint_fn=lambda name, param: "adam")
    with pytest.raises(OptionError, match="param_policy and route_hint_fn: exclude each other"):
        resolve_routes(PARAMS, policy=GUIDE, route_hint_fn=lambda name, param: "muon")
    with pytest.raises(OptionError, match="param_policy_fn and route_hint_fn: exclude each other"):
        resolve_routes(PARAMS, policy_fn=lambda name, param: None, route_hint_fn=lambda name, param: "muon")
    with pytest.raises(OptionTypeError, match="param_policy: must be"):
        resolve_routes(PARAMS, policy=3)  # type: ignore[arg-type]
