"""Param groups of a bare model: roles, storage, and fused weights cut where its config says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import dmuown
from dmuown.automodel.grouping import count_matrices
from dmuown.automodel.summary import RunSummary
from dmuown.errors import OptionError, OptionTypeError, OwnershipError
from dmuown.policy.fused import count_blocks
from tests.unit.algorithms.oracles import assert_near, gradients, initial
from tests.unit.policy.fused_models import (
    ALGORITHMS,
    CASES,
    STEPS,
    Case,
    Fused,
    fused_optimizer,
    stored,
    train_separate,
)
from tests.unit.policy.test_fused import tiny


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", CASES)
def test_a_fused_weight_equals_separate_parameters(name: str, algorithm: str) -> None:
    case = CASES[name]
    optimizer, param = fused_optimizer(case, algorithm, stored(case, initial(*case.shape)))
    for grad in gradients(case.shape, steps=STEPS):
        param.grad = stored(case, grad)
        optimizer.step()
    assert_near(param.detach(), train_separate(case, algorithm), 2e-6)
    assert optimizer.orthogonalized == len(case.rows) * max(1, case.experts)
    assert optimizer.orthogonalized == count_matrices(optimizer.param_groups)


def test_without_auto_split_nothing_is_cut() -> None:
    for case in CASES.values():
        model = Fused(case, stored(case, initial(*case.shape)))
        (group,) = dmuown.param_groups(model)
        assert not {"split_sizes", "num_heads"} & group.keys()
        assert group.get("matrix_transposed", False) == case.transposed


@pytest.mark.parametrize("optimizer", [dmuown.Muon, dmuown.AngularMuown])
def test_matrices_go_to_the_optimizers_own_algorithm(optimizer: Any) -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 4), "layer": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    own = optimizer([nn.Parameter(torch.ones(2, 2))], lr=0.1).param_groups[0]["algorithm"]
    built = optimizer(dmuown.param_groups(model), lr=0.1)
    assert {name: group["algorithm"] for group in built.param_groups for name in group["param_names"]} == {
        "embed_tokens.weight": "adamw",
        "layer.weight": own,
        "layer.bias": "adamw",
        "norm.weight": "adamw",
        "norm.bias": "adamw",
    }
    users = [{"params": [model["layer"].weight], "algorithm": "normuon"}]
    (group,) = dmuown.param_groups(model, groups=users)
    assert group["algorithm"] == "normuon"


def test_roles_and_storage_go_into_groups() -> None:
    model = tiny("gpt2", n_embd=32, n_head=4, n_layer=1)
    groups = dmuown.param_groups(model, algorithm="normuon")
    matrices = [group for group in groups if group["algorithm"] == "normuon"]
    rest = [group for group in groups if group["algorithm"] != "normuon"]
    assert [group["matrix_transposed"] for group in matrices] == [True]
    assert len(matrices[0]["params"]) == 4
    assert {group["algorithm"] for group in rest} == {"adamw"}
    named = [name for group in groups for name in group["param_names"]]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())
    (own,) = dmuown.param_groups(model, groups=[{"params": [matrices[0]["params"][0]], "matrix_transposed": False}])
    assert own["matrix_transposed"] is False  # what the user says stands


def test_the_summary_shows_the_blocks() -> None:
    model = tiny("phi3", num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    groups = dmuown.param_groups(model, auto_split=True)
    optimizer = dmuown.Muown(groups, lr=0.1)
    summary = dmuown.summarize_param_groups(model, optimizer)
    shown = {row.name.split(".")[-2]: row.blocks for row in summary.parameters}
    assert shown["qkv_proj"] == "q 32, k 16, v 16"
    assert shown["gate_up_proj"] == "gate 24, up 24"
    assert shown["o_proj"] == shown["norm"] == ""
    line = next(line for line in str(summary).splitlines() if ".qkv_proj." in line)
    assert "  q 32, k 16, v 16  " in line
    assert "q 32, k 16, v 16" in json.dumps(summary.to_dict())
    expected = {"q 32, k 16, v 16": 1, "gate 24, up 24": 1}
    assert count_blocks(groups, [model]) == count_blocks(optimizer.param_groups, [model]) == expected
    assert "fused weights" not in str(RunSummary())
    assert "1 of q 32, k 16, v 16; 1 of gate 24, up 24" in str(RunSummary(blocks=expected))


@pytest.mark.parametrize(
    "options, shown",
    [
        ({}, ""),
        ({"num_heads": 4}, "4 heads"),
        ({"split_sizes": (8, 4, 4)}, "8 + 4 + 4"),
        ({"split_sizes": (8, 8), "interleaved": True}, "2 x 8 interleaved"),
        ({"split_sizes": (8, 4, 4), "split_groups": 2}, "8 + 4 + 4 in 2 groups"),
    ],
)
def test_blocks_that_the_user_gave(options: dict[str, Any], shown: str) -> None:
    model = nn.Sequential(nn.Linear(4, 16))
    groups = [{"params": [model[0].weight], **options}, {"params": [model[0].bias], "algorithm": "adamw"}]
    summary = dmuown.summarize_param_groups(model, dmuown.Muown(groups))
    assert [row.blocks for row in summary.parameters] == [shown, ""]


def test_equal_cuts_share_a_group() -> None:
    model = tiny("llama", num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    groups = dmuown.param_groups(model, auto_split=True, per_head=True)
    heads = {tuple(name.split(".")[-2] for name in group["param_names"]): group.get("num_heads") for group in groups}
    assert heads[("q_proj",)] == 4
    assert heads[("k_proj", "v_proj")] == 2


def test_what_only_a_model_can_say_is_asked_of_the_model() -> None:
    model = tiny("phi3", num_attention_heads=4, num_key_value_heads=2, intermediate_size=24)
    weight = nn.Parameter(torch.zeros(4, 4))
    remedy = r"auto_split: needs the model .* Pass dmuown\.param_groups\(model, auto_split=True\) as params"
    with pytest.raises(OptionError, match=f"Muown: {remedy}"):
        dmuown.Muown([weight], auto_split=True)
    with pytest.raises(OptionError, match=f"param group 0: {remedy}"):
        dmuown.Muon([{"params": [weight], "auto_split": True}])
    with pytest.raises(OptionTypeError, match=r"must be an nn.Module, got list"):
        dmuown.param_groups([weight], auto_split=True)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"auto_split: reads .* no module of Linear has one"):
        dmuown.param_groups(nn.Linear(4, 4), auto_split=True)
    with pytest.raises(OptionError, match="per_head: needs auto_split"):
        dmuown.param_groups(model, per_head=True)
    with pytest.raises(OwnershipError, match=r"has no dedicated parameters. Pass dmuown\.param_groups\(model\)"):
        dmuown.Muown(model)


def test_a_config_that_does_not_fit_leaves_the_weight_whole(caplog: pytest.LogCaptureFixture) -> None:
    case = Case("qkv_proj", ((*range(50),),), CASES["grouped queries"].config)
    with caplog.at_level("INFO", logger="dmuown"):
        (group,) = dmuown.param_groups(Fused(case, initial(50, 8)), auto_split=True)
    assert "split_sizes" not in group
    assert "qkv_proj of 50 rows has a fused weight's name" in caplog.text
