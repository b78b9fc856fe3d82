"""The host's own expert class, whose weights are stored [expert, input, output] and do not say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.experts import GroupedExperts
from torch import nn

from dmuown.automodel import MuonConfig, MuownConfig
from dmuown.automodel.configs import MatrixOptimizerConfig
from dmuown.policy.roles import describe_parameters

EXPERTS, WIDTH, INNER = 3, 8, 6


def experts() -> GroupedExperts:
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
        expert_bias=True,
        dtype=torch.float32,
    )
    module = GroupedExperts(config)
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def test_expert_stacks_are_transposed_matrices_and_their_biases_are_biases() -> None:
    found = {entry.name: (entry.role.value, entry.transposed) for entry in describe_parameters(experts())}
    assert found == {
        "gate_and_up_projs": ("expert", True),
        "down_projs": ("expert", True),
        "gate_up_proj_bias": ("bias", False),
        "down_proj_bias": ("bias", False),
    }
    assert tuple(experts().gate_and_up_projs.shape) == (EXPERTS, WIDTH, 2 * INNER), "stored [expert, input, output]"


@pytest.mark.parametrize("config", [MuownConfig, MuonConfig])
def test_a_step_is_that_of_the_same_matrices_stored_output_first(config: type[MatrixOptimizerConfig]) -> None:
    """Muown's magnitudes belong to output neurons, and both scale steps by the shape: a wrong axis shows."""
    module = experts()
    mirror = nn.ParameterDict({name: nn.Parameter(p.detach().mT.clone()) for name, p in _stacks(module)})
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}
    (ours,) = config(**options).build(module)
    (reference,) = config(**options).build(mirror)
    for _ in range(3):
        for name, parameter in _stacks(module):
            parameter.grad = torch.randn(parameter.shape)
            mirror[name].grad = parameter.grad.mT.clone()
        ours.step()
        reference.step()
    for name, parameter in _stacks(module):
        torch.testing.assert_close(parameter.detach().mT, mirror[name].detach(), rtol=1e-5, atol=1e-6)


def _stacks(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.ndim == 3]
