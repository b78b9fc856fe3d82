"""Routes as param groups, and users' groups split by route."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dmuown
from dmuown.errors import OptionError, OptionTypeError, ParameterError
from dmuown.policy.groups import group_route


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))
        self.lm_head = nn.Linear(6, 12, bias=False)


POLICY: dict[str, Any] = {
    "overrides": [
        {"role": ["embedding", "head"], "set": {"route": "sharded_adamw"}},
        {"role": ["norm", "bias"], "set": {"route": "adamw"}},
    ]
}


def test_policy_drives_groups_without_the_runtime() -> None:
    model = Tiny()
    model.get_parameter("layers.1.1.weight").requires_grad_(False)
    groups = dmuown.param_groups(model, POLICY, algorithm="normuon")
    assert [(group["dmuon_route"], group["algorithm"], group["param_names"]) for group in groups] == [
        ("muon", "normuon", ["layers.0.1.weight"]),
        (
            "adamw",
            "adamw",
            [f"layers.{layer}.{name}" for layer in range(2) for name in ("0.weight", "0.bias", "1.bias")],
        ),
        ("sharded_adamw", "adamw", ["embed.weight", "lm_head.weight"]),
    ]
    params = dict(model.named_parameters())
    for group in groups:
        assert all(param is params[name] for param, name in zip(group["params"], group["param_names"], strict=True))


def test_users_groups_are_split_and_keep_their_keys() -> None:
    model = Tiny()
    groups = dmuown.param_groups(
        model,
        POLICY,
        groups=[
            {"params": model.layers[0].parameters(), "lr": 0.5, "weight_decay": 0.1, "algorithm": "muon"},
            {"params": [model.embed.weight], "lr": 0.25, "algorithm": "lion"},
            {"params": list(model.layers[1].named_parameters()), "lr": 0.125},
        ],
    )
    assert [(group["dmuon_route"], group.get("algorithm"), group["lr"], len(group["params"])) for group in groups] == [
        ("muon", "muon", 0.5, 1),
        ("adamw", "adamw", 0.5, 3),
        ("sharded_adamw", "lion", 0.25, 1),
        ("muon", None, 0.125, 1),  # the optimizer's own
        ("adamw", "adamw", 0.125, 3),
    ]
    assert groups[1]["weight_decay"] == 0.1
    assert "weight_decay" not in groups[3]


@pytest.mark.parametrize(
    "keys, route, algorithm",
    [
        ({"dmuon_route": "adamw"}, "adamw", "adamw"),
        ({"dmuon_optimizer": "sharded_adamw"}, "sharded_adamw", "adamw"),
        ({"matrix_optimizer": "muon"}, "muon", None),
        ({"matrix_optimizer": "normuon"}, "muon", "normuon"),
        ({"dmuon_route": "muon", "matrix_optimizer": "normuown"}, "muon", "normuown"),
    ],
)
def test_group_override(keys: dict[str, str], route: str, algorithm: str | None) -> None:
    model = Tiny()
    (group,) = dmuown.param_groups(model, POLICY, groups=[{"params": [model.embed.weight], **keys}])
    assert (group["dmuon_route"], group.get("algorithm")) == (route, algorithm)
    assert "dmuon_optimizer" not in group
    assert "matrix_optimizer" not in group


def test_bad_group_overrides() -> None:
    model = Tiny()
    with pytest.raises(OptionError, match=r"dmuon_route: names no route: 'adam'. Did you mean 'adamw'"):
        group_route({"dmuon_route": "adam"})
    with pytest.raises(OptionError, match=r"dmuon_route and matrix_optimizer: override .* differently"):
        group_route({"dmuon_route": "adamw", "matrix_optimizer": "muon"})
    with pytest.raises(ParameterError, match=r"layers\.0\.0\.weight: is a vector on route 'muon'"):
        dmuown.param_groups(model, POLICY, groups=[{"params": model.layers[0].parameters(), "dmuon_route": "muon"}])
    with pytest.raises(OptionTypeError, match="params: must hold tensors, got str"):
        dmuown.param_groups(model, POLICY, groups=[{"params": ["embed.weight"]}])
    with pytest.raises(ParameterError, match="appears twice"):
        dmuown.param_groups(model, POLICY, groups=[{"params": [model.embed.weight, model.embed.weight]}])


def test_tied_and_wrapped_parameters_appear_once_under_their_canonical_name() -> None:
    model = Tiny()
    model.lm_head.weight = model.embed.weight
    model.layers[0] = torch.compile(model.layers[0])  # type: ignore[assignment]
    groups = dmuown.param_groups(model, POLICY)
    names = [name for group in groups for name in group["param_names"]]
    assert len(names) == len(set(names))
    assert "layers.0.1.weight" in names
    assert groups[2]["param_names"] == ["embed.weight"]
