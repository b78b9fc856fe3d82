"""`param_policy` in the host's configurations: rules in order, by name and by role, over the roles of modules."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.experts import GroupedExperts
from torch import nn

from dmuown.automodel import DMuonConfig, MuonConfig, MuownConfig
from dmuown.automodel.configs import MatrixOptimizerConfig
from dmuown.automodel.grouping import build_param_groups, count_matrices
from dmuown.errors import OptionError, ParameterError

EXPERTS, WIDTH, INNER = 3, 8, 6

#: Everything elementwise, then matrices and experts by role, then the last block by name and the gate back by role.
POLICY: dict[str, Any] = {
    "defaults": {"route": "adamw"},
    "overrides": [
        {"role": ["matrix", "expert"], "set": {"route": "muon"}},
        {"name": "blocks.1", "set": {"route": "adamw"}},
        {"role": "router", "set": {"route": "muon"}},
    ],
}


class Model(nn.Module):
    """Two attention-like layers, the host's own experts behind a gate, an embedding, a head."""

    def __init__(self) -> None:
        super().__init__()
        config = MoEConfig(
            n_routed_experts=EXPERTS,
            n_shared_experts=0,
            n_activated_experts=1,
            n_expert_groups=1,
            n_limited_groups=1,
            train_gate=True,
            gate_bias_update_factor=0.0,
            aux_loss_coeff=0.0,
            score_func="softmax",
            route_scale=1.0,
            dim=WIDTH,
            inter_dim=INNER,
            moe_inter_dim=INNER,
            norm_topk_prob=False,
            dtype=torch.float32,
        )
        self.embed_tokens = nn.Embedding(12, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.moe = nn.ModuleDict({"gate": nn.Linear(WIDTH, EXPERTS, bias=False), "experts": GroupedExperts(config)})
        self.lm_head = nn.Linear(WIDTH, 12, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def groups_of(config: MatrixOptimizerConfig, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The group of every parameter."""
    (groups,) = build_param_groups([model], config.grouping_rules())
    found = {name: group for group in groups for name, _ in group["params"]}
    assert found.keys() == {name for name, _ in model.named_parameters()}
    return found


def test_rules_route_by_role_and_by_name_and_the_last_that_matches_decides() -> None:
    config = MuownConfig(
        lr=1.0, weight_decay=0.5, scalar_lr=2.0, embed_lr=3.0, lm_head_lr=4.0, scalar_opt="lion", param_policy=POLICY
    )
    found = groups_of(config, Model())
    described = {
        name: (group["algorithm"], group["lr"], group["weight_decay"], group.get("matrix_transposed", False))
        for name, group in found.items()
    }
    assert described == {
        "embed_tokens.weight": ("lion", 3.0, 0.0, False),
        "blocks.0.weight": ("muown", 1.0, 0.5, False),
        "blocks.0.bias": ("lion", 2.0, 0.5, False),
        "blocks.1.weight": ("lion", 2.0, 0.5, False),
        "blocks.1.bias": ("lion", 2.0, 0.5, False),
        "norm.weight": ("lion", 2.0, 0.5, False),
        "moe.gate.weight": ("muown", 1.0, 0.5, False),
        # A route changes the algorithm, not what the parameter is: experts stay stored [expert, input, output].
        "moe.experts.gate_and_up_projs": ("muown", 1.0, 0.5, True),
        "moe.experts.down_projs": ("muown", 1.0, 0.5, True),
        "lm_head.weight": ("lion", 4.0, 0.0, False),
    }


@pytest.mark.parametrize("config", [MuonConfig, MuownConfig])
def test_only_what_is_routed_to_it_is_orthogonalized(config: type[MatrixOptimizerConfig]) -> None:
    """A Muon step has singular values alike: a full-rank gradient moves the first block so and the second one not."""
    policy = {"defaults": {"route": "adamw"}, "overrides": [{"name": "blocks.0.weight", "set": {"route": "muon"}}]}
    model = Model()
    (optimizer,) = config(lr=1e-3, epsilon=1e-8, param_policy=policy).build(model)
    assert count_matrices(optimizer.param_groups) == 1
    weights = [model.blocks[0].weight, model.blocks[1].weight]
    gradient = torch.diag(torch.logspace(0, -1, WIDTH)) @ torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
    before = [weight.detach().clone() for weight in weights]  # type: ignore[operator]
    for weight in weights:
        weight.grad = gradient.clone()
    optimizer.step()
    moved = [torch.linalg.svdvals(weight.detach() - old) for weight, old in zip(weights, before, strict=True)]  # type: ignore[operator]
    assert float(moved[1].max() / moved[1].min()) > 3
    if config is MuonConfig:
        assert float(moved[0].max() / moved[0].min()) < 2
    # AdamW's first step is the sign of the gradient.
    sign = -1e-3 * gradient.sign()
    torch.testing.assert_close(weights[1].detach() - before[1], sign, rtol=1e-3, atol=1e-6)  # type: ignore[operator]
    assert not torch.allclose(weights[0].detach() - before[0], sign, rtol=0.1)  # type: ignore[operator]


def test_the_policy_is_that_of_the_ownership_runtime() -> None:
    """One section of YAML, with and without owners: the same algorithm, rate and decay for every parameter."""
    shared: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "scalar_lr": 2e-2, "param_policy": POLICY}
    keys = ("algorithm", "lr", "weight_decay", "matrix_transposed")
    plain, owned = (groups_of(config(**shared), Model()) for config in (MuownConfig, DMuonConfig))
    assert {name: [group.get(key) for key in keys] for name, group in plain.items()} == {
        name: [group.get(key) for key in keys] for name, group in owned.items()
    }


def test_without_a_policy_roles_route() -> None:
    found = groups_of(MuownConfig(), Model())
    matrices = {name for name, group in found.items() if group["algorithm"] == "muown"}
    assert matrices == {
        "blocks.0.weight",
        "blocks.1.weight",
        "moe.experts.gate_and_up_projs",
        "moe.experts.down_projs",
    }


def test_a_rule_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    policy = POLICY | {"overrides": [*POLICY["overrides"], {"name": "blokcs", "set": {"route": "muon"}}]}
    with caplog.at_level(logging.WARNING):
        MuownConfig(param_policy=policy).build(Model())
    assert [text for text in caplog.messages if "blokcs" in text and "matches no parameter" in text]
    assert not [text for text in caplog.messages if "override 0" in text]


def test_precision_is_told_to_have_no_effect_without_owners(caplog: pytest.LogCaptureFixture) -> None:
    policy = {"defaults": {"route": "adamw", "grad_dtype": "float32"}}
    with caplog.at_level(logging.WARNING):
        MuownConfig(param_policy=policy).build(Model())
    assert [text for text in caplog.messages if "grad_dtype have no effect without the ownership runtime" in text]


def test_vectors_on_muon_and_bad_policies_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"blocks\.0\.bias.*vector on route 'muon'"):
        MuownConfig(param_policy={"defaults": {"route": "muon"}}).build(Model())
    with pytest.raises(OptionError, match=r"param_policy.*unknown role 'expertt'"):
        MuownConfig(param_policy={"overrides": [{"role": "expertt", "set": {"route": "muon"}}]})
