"""Groups: roles to algorithms and rates, and the rules of the host's scheduler for group 0."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import dmuown
from dmuown.automodel import AngularMuownConfig, DMuonConfig, MuonConfig, MuownConfig
from dmuown.automodel.configs import MatrixOptimizerConfig
from dmuown.automodel.grouping import build_param_groups, count_matrices
from dmuown.errors import ParameterError


class Model(nn.Module):
    """One parameter of most roles."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(12, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 8, bias=False)])
        self.norm = nn.LayerNorm(4, bias=False)
        self.conv = nn.Conv2d(2, 3, 2, bias=False)
        self.depthwise = nn.Conv1d(4, 4, 3, groups=4, bias=False)
        self.moe = nn.ModuleDict({"gate": nn.Linear(4, 3, bias=False), "experts": nn.Module()})
        self.moe["experts"].up = nn.Parameter(torch.zeros(3, 8, 4))
        self.lm_head = nn.Linear(4, 12, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def groups_of(config: MatrixOptimizerConfig, model: nn.Module | None = None) -> list[dict[str, Any]]:
    (groups,) = build_param_groups([model or Model()], config.grouping_rules())
    return groups


def by_name(groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {name: group for group in groups for name, _ in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups), "a parameter is in two groups"
    return found


def test_every_role_has_its_algorithm_rate_and_decay() -> None:
    config = MuownConfig(lr=1.0, weight_decay=0.5, scalar_lr=2.0, embed_lr=3.0, lm_head_lr=4.0)
    found = by_name(groups_of(config))
    expected = {
        "blocks.0.weight": ("muown", 1.0, 0.5),
        "blocks.1.weight": ("muown", 1.0, 0.5),
        "moe.experts.up": ("muown", 1.0, 0.5),
        "blocks.0.bias": ("adamw", 2.0, 0.5),
        "norm.weight": ("adamw", 2.0, 0.5),
        "conv.weight": ("adamw", 2.0, 0.5),
        "depthwise.weight": ("adamw", 2.0, 0.5),
        "moe.gate.weight": ("adamw", 2.0, 0.5),
        "embed_tokens.weight": ("adamw", 3.0, 0.0),
        "lm_head.weight": ("adamw", 4.0, 0.0),
    }
    assert {name: (g["algorithm"], g["lr"], g["weight_decay"]) for name, g in found.items()} == expected


@pytest.mark.parametrize(
    "given, scalar, embed, head",
    [
        ({}, 1.0, 1.0, 1.0),
        ({"scalar_lr": 2.0}, 2.0, 2.0, 1.0),
        ({"embed_lr": 3.0}, 1.0, 3.0, 1.0),
        ({"scalar_lr": 2.0, "lm_head_lr": 5.0}, 2.0, 2.0, 5.0),
        ({"scalar_lr": 0.0}, 0.0, 0.0, 1.0),
    ],
)
def test_fall_backs(given: dict[str, Any], scalar: float, embed: float, head: float) -> None:
    """embed_lr falls back to scalar_lr, then lr; lm_head_lr to lr, not to lr / sqrt(width)."""
    found = by_name(groups_of(MuownConfig(lr=1.0, **given)))
    rates = [found[name]["lr"] for name in ("norm.weight", "embed_tokens.weight", "lm_head.weight")]
    assert rates == [scalar, embed, head]


def test_scalar_options_reach_scalar_groups_only() -> None:
    found = by_name(groups_of(MuownConfig(scalar_opt="lion", scalar_betas=(0.1, 0.2), scalar_eps=0.3)))
    scalar, matrix = found["norm.weight"], found["blocks.0.weight"]
    assert (scalar["algorithm"], scalar["beta1"], scalar["beta2"], scalar["epsilon"]) == ("lion", 0.1, 0.2, 0.3)
    assert {"beta1", "beta2", "epsilon"}.isdisjoint(matrix)


def test_a_tied_head_is_the_embedding() -> None:
    found = by_name(groups_of(MuownConfig(lr=1.0, embed_lr=3.0, lm_head_lr=4.0), Model(tied=True)))
    assert found["embed_tokens.weight"]["lr"] == 3.0
    assert "lm_head.weight" not in found


def test_flatten_takes_dense_convolutions_and_never_depthwise_ones() -> None:
    found = by_name(groups_of(MuonConfig(flatten=True)))
    assert (found["conv.weight"]["algorithm"], found["conv.weight"]["flatten"]) == ("muon", True)
    assert found["depthwise.weight"]["algorithm"] == "adamw"
    # The experts are a stack of matrices, which flattening would merge into one.
    assert (found["moe.experts.up"]["algorithm"], found["moe.experts.up"]["flatten"]) == ("muon", False)
    assert count_matrices(groups_of(MuonConfig(flatten=True))) == 2 + 3 + 1


class Fused(nn.Module):
    """A fused q/k/v of 4 + 2 + 2 heads, a query of its own, and an MLP with three times as many rows as columns."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=5)
        self.qkv_proj, self.q_proj, self.up_proj = (nn.Linear(8, rows, bias=False) for rows in (40, 20, 24))
        self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize("config", [MuownConfig, MuonConfig, DMuonConfig])
@pytest.mark.parametrize(
    ("section", "blocks"),
    [
        ("{}", ("", "", "")),
        ("auto_split: true", ("q 20, k 10, v 10", "", "")),
        ("{auto_split: true, per_head: true}", ("8 heads", "4 heads", "")),
        ("qkv_heuristic: true", ("", "", "3 x 8")),
        ("{auto_split: true, qkv_heuristic: true}", ("q 20, k 10, v 10", "", "3 x 8")),
        ("{auto_split: true, per_head: true, qkv_heuristic: true}", ("8 heads", "4 heads", "3 x 8")),
    ],
)
def test_weights_are_cut_as_the_yaml_says(
    config: type[MatrixOptimizerConfig], section: str, blocks: tuple[str, str, str]
) -> None:
    model, options = Fused(), config(**yaml.safe_load(section))
    (groups,) = build_param_groups([model], options.grouping_rules())
    optimizer: Any = options.optimizer_class()(groups, **options.optimizer_options())
    shown = {row.name.split(".")[0]: row.blocks for row in dmuown.summarize_param_groups(model, optimizer).parameters}
    assert tuple(shown[name] for name in ("qkv_proj", "q_proj", "up_proj")) == blocks
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counts = {"": 1, "q 20, k 10, v 10": 3, "8 heads": 8, "4 heads": 4, "3 x 8": 3}
    assert optimizer.orthogonalized == count_matrices(optimizer.param_groups) == sum(counts[text] for text in blocks)


def test_patterns_send_parameters_to_adamw_at_scalar_lr() -> None:
    config = MuownConfig(
        lr=1.0, scalar_lr=2.0, embed_lr=3.0, scalar_opt="lion", adamw_param_patterns=[r"blocks\.1", "^emb"]
    )
    found = by_name(groups_of(config))
    assert (found["blocks.1.weight"]["algorithm"], found["blocks.1.weight"]["lr"]) == ("adamw", 2.0)
    assert (found["embed_tokens.weight"]["algorithm"], found["embed_tokens.weight"]["lr"]) == ("adamw", 2.0)
    assert found["blocks.0.weight"]["algorithm"] == "muown"
    assert found["norm.weight"]["algorithm"] == "lion"


def test_overrides_that_earlier_ones_leave_nothing_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    """A pattern may match and yet have no effect: that is another mistake than a misspelled name."""
    model = nn.ModuleDict({name: nn.Linear(4, 3, bias=False) for name in ("only_a", "only_b", "only_c")})
    patterns = ["only_[ab]", "only_a", "only", "absent", "only_c", "_[ac]"]
    config = MuownConfig(param_group_overrides=[{"pattern": pattern, "lr_mult": 2.0} for pattern in patterns])
    build_param_groups([model], config.grouping_rules())
    told = [record.getMessage() for record in caplog.records if "pattern" in record.getMessage()]
    expected = [
        "pattern 'only_a' has no effect: all that it matches is taken by 'only_[ab]', earlier",
        "pattern 'absent' matches no trainable parameter",
        "pattern 'only_c' has no effect: all that it matches is taken by 'only', earlier",
        "pattern '_[ac]' has no effect: all that it matches is taken by 'only_[ab]' and 'only', earlier",
    ]
    assert len(told) == len(expected)
    for message, part in zip(told, expected, strict=True):
        assert part in message


def test_the_first_matching_override_counts() -> None:
    overrides = [
        {"pattern": "blocks.1", "lr_mult": 0.5, "wd_mult": 0.0},
        {"pattern": "blocks", "lr_mult": 0.25},
        {"pattern": "embed", "lr_mult": 2.0},
    ]
    config = MuownConfig(lr=1.0, weight_decay=0.1, embed_lr=3.0, param_group_overrides=overrides)
    found = by_name(groups_of(config))
    assert (found["blocks.1.weight"]["lr"], found["blocks.1.weight"]["weight_decay"]) == (0.5, 0.0)
    assert (found["blocks.0.weight"]["lr"], found["blocks.0.weight"]["weight_decay"]) == (0.25, 0.1)
    assert (found["moe.experts.up"]["lr"], found["moe.experts.up"]["weight_decay"]) == (1.0, 0.1)
    # Factors of the role's own values: embeddings keep their rate and stay without decay.
    assert (found["embed_tokens.weight"]["lr"], found["embed_tokens.weight"]["weight_decay"]) == (6.0, 0.0)


def test_patterns_that_match_nothing_warn_once_for_all_parts(caplog: pytest.LogCaptureFixture) -> None:
    config = MuownConfig(adamw_param_patterns=["nowhere", "only_b"], param_group_overrides=[{"pattern": "absent"}])
    first, second = nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"only_b": nn.Linear(2, 2)})
    with caplog.at_level(logging.WARNING):
        build_param_groups([first, second], config.grouping_rules())
    unmatched = [text for text in caplog.messages if "matches no" in text]
    assert [("nowhere" in text, "absent" in text) for text in unmatched] == [(True, False), (False, True)]


SCHEDULES: list[tuple[type[MatrixOptimizerConfig], dict[str, Any]]] = [
    (MuownConfig, {"lr": 1e-3, "weight_decay": 0.1, "scalar_lr": 4e-3, "lm_head_lr": 2e-4}),
    (MuownConfig, {"lr": 1e-3, "weight_decay": 0.0, "embed_lr": 0.0}),
    (MuownConfig, {"lr": 0.0, "weight_decay": 0.1, "scalar_lr": 1e-3}),
    (
        MuonConfig,
        {"lr": 1e-3, "weight_decay": 0.1, "param_group_overrides": [{"pattern": ".", "lr_mult": 3.0, "wd_mult": 0.5}]},
    ),
    (MuonConfig, {"lr": 1e-3, "weight_decay": 0.2, "param_group_overrides": [{"pattern": "blocks", "wd_mult": 0.0}]}),
    (AngularMuownConfig, {"lr": 1e-2, "weight_decay": 0.1, "scalar_lr": 1e-3}),
]


@pytest.mark.parametrize("config, given", SCHEDULES)
def test_the_hosts_scheduler_keeps_every_groups_rate_and_decay(
    config: type[MatrixOptimizerConfig], given: dict[str, Any]
) -> None:
    """The scheduler rewrites all groups from group 0; at the peak of the schedule they must be what they were."""
    from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler

    (optimizer,) = config(**given).build(Model())
    before = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    base = optimizer.param_groups[0]
    assert base["lr"] > 0
    assert base["weight_decay"] > 0 or all(decay == 0 or lr == 0 for lr, decay in before)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=base["lr"],
        min_lr=0.0,
        lr_warmup_steps=2,
        lr_decay_steps=10,
        lr_decay_style="constant",
        start_wd=base["weight_decay"],
        end_wd=base["weight_decay"],
        wd_incr_steps=10,
        wd_incr_style="constant",
    )
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    scheduler.step(1)
    halfway = [group["lr"] for group in optimizer.param_groups]
    scheduler.step(4)
    after = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for (lr, decay), (lr_after, decay_after), half in zip(before, after, halfway, strict=True):
        assert lr_after == pytest.approx(lr, rel=1e-12)
        assert decay_after == pytest.approx(decay, rel=1e-12)
        assert half == pytest.approx(lr / 2, rel=1e-12)


def test_a_decay_that_only_the_scheduler_brings_spares_embeddings_and_heads() -> None:
    found = by_name(groups_of(MuownConfig(weight_decay=0.0)))
    factors = {name: group["wd_mult"] for name, group in found.items()}
    assert factors["embed_tokens.weight"] == factors["lm_head.weight"] == 0.0
    assert factors["blocks.0.weight"] == factors["norm.weight"] == 1.0
    # Also where group 0 itself takes no decay: matrices on the sphere have none.
    found = by_name(groups_of(AngularMuownConfig(weight_decay=0.0)))
    factors = {name: group["wd_mult"] for name, group in found.items()}
    assert factors["embed_tokens.weight"] == factors["blocks.0.weight"] == 0.0
    assert factors["norm.weight"] == 1.0


def test_no_group_is_empty_and_every_part_has_its_optimizer() -> None:
    model = Model()
    model.requires_grad_(False)
    model.blocks[1].requires_grad_(True)
    (group,) = groups_of(MuownConfig(), model)
    assert [name for name, _ in group["params"]] == ["blocks.1.weight"]

    class Pipeline(nn.Module):
        parts = (nn.Linear(4, 4), nn.Linear(4, 3))

    optimizers = MuownConfig().build(Pipeline())
    assert [[tuple(p.shape) for g in o.param_groups for p in g["params"]] for o in optimizers] == [
        [(4, 4), (4,)],
        [(3, 4), (3,)],
    ]


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ParameterError, match="has no trainable parameter"):
        MuownConfig().build(nn.Linear(2, 2).requires_grad_(False))


def test_a_model_without_matrices_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        MuownConfig().build(nn.LayerNorm(4))
    assert "no trainable matrix" in caplog.text


def test_algorithms_without_matrices_are_those_of_the_registry() -> None:
    from dmuown.algorithms import ElementwiseAlgorithm
    from dmuown.algorithms.base import loaded_algorithms
    from dmuown.policy.splits import ELEMENTWISE

    own = [entry for entry in loaded_algorithms() if type(entry).__module__.startswith("dmuown.")]
    assert {entry.name for entry in own if isinstance(entry, ElementwiseAlgorithm)} == set(ELEMENTWISE)
