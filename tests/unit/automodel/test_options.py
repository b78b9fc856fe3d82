"""Bad values of every configuration: named, explained, before any work."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from dmuown.automodel import (
    SHORT_NAMES,
    AngularMuownConfig,
    MuonConfig,
    MuownConfig,
    NorMuonConfig,
    NorMuownConfig,
)
from dmuown.automodel.configs import MatrixOptimizerConfig
from dmuown.errors import DmuownError, OptionError

ALL: list[type[Any]] = [MuonConfig, MuownConfig, NorMuonConfig, NorMuownConfig, AngularMuownConfig]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.__name__)
@pytest.mark.parametrize(
    "key, values",
    [
        ("lr", [-1e-4, NAN, INF, "fast", True, None, "nan"]),
        ("scalar_lr", [-1.0, NAN, "slow"]),
        ("embed_lr", [-1.0]),
        ("lm_head_lr", [INF]),
        ("weight_decay", [-0.1, NAN]),
        ("mu", [1.0, -0.1, NAN, "x"]),
        ("betas", [[0.9, 1.0], [-0.1, 0.9], [0.9], 0.9, "0.9", [0.9, NAN]]),
        ("scalar_betas", [[0.9, 1.0]]),
        ("epsilon", [0, -1e-8, NAN]),
        ("scalar_eps", [0.0]),
        ("ns_epsilon", [0.0, -1.0, NAN]),
        ("ns_steps", [0, -1, 2.5, True, "2.5", "--5", "²"]),
        ("batch_bytes", [0, -1, 1.5, True, "256 MiB", "--5", "²", NAN]),
        ("scalar_opt", ["sgd", None]),
        ("nesterov", [1, "yes"]),
        ("flatten", ["true"]),
        ("auto_split", [1]),
        ("per_head", ["yes", True]),
        ("qkv_heuristic", [1]),
        ("use_triton", [1]),
        ("adamw_param_patterns", ["x", ["("], [3]]),
        ("param_group_overrides", [[{"patern": "x"}], [{}], ["x"], [{"pattern": "x", "lr_mult": -1}]]),
        ("scheme", ["svd"]),
        ("ns_dtype", ["int8"]),
        ("backend", ["cuda"]),
        ("nonfinite", ["ignore"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_values_name_their_key(config: type[MatrixOptimizerConfig], key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(DmuownError) as caught:
            config(**{key: value})
        assert key in str(caught.value) or (key == "param_group_overrides" and "patern" in str(caught.value)), value


@pytest.mark.parametrize(
    "config, key, value",
    [
        (MuownConfig, "muon_update_scale", -1.0),
        (MuownConfig, "muon_update_scale", NAN),
        (MuownConfig, "muon_update_scale", INF),
        (MuonConfig, "adjust_lr", "frobenius"),
        (MuonConfig, "cautious_wd", 1),
        (NorMuonConfig, "muon_beta2", 1.0),
        (NorMuownConfig, "normalization_epsilon", 0.0),
        (AngularMuownConfig, "adjust_lr_fn", "other"),
        (AngularMuownConfig, "decay_degree", -1.0),
    ],
)
def test_bad_values_of_own_options(config: type[MatrixOptimizerConfig], key: str, value: Any) -> None:
    with pytest.raises(OptionError, match=key):
        config(**{key: value})


def test_unknown_keys_come_with_the_nearest_name() -> None:
    with pytest.raises(
        OptionError, match=r"^weight_deacy: is no option of MuownConfig\. Did you mean 'weight_decay'\?"
    ):
        MuownConfig(weight_deacy=0.1)
    with pytest.raises(OptionError, match=r"muon_update_scale: is no option of MuonConfig"):
        MuonConfig(muon_update_scale=1.0)


def test_numbers_may_be_strings_as_yaml_reads_them() -> None:
    config = MuownConfig(lr="1e-4", scalar_lr="3", ns_steps="6", betas=["0.8", 0.9])  # type: ignore[arg-type]
    assert (config.lr, config.scalar_lr, config.ns_steps, config.betas) == (1e-4, 3.0, 6, (0.8, 0.9))


def test_defaults_are_those_of_the_later_host_and_of_its_muon_config() -> None:
    config = MuownConfig()
    assert (config.lr, config.mu, config.betas, config.epsilon, config.nesterov) == (
        3e-4,
        0.95,
        (0.9, 0.95),
        1e-8,
        True,
    )
    assert (config.ns_steps, config.ns_epsilon, config.muon_update_scale, config.use_triton) == (5, 1e-7, 1.0, False)
    assert (config.weight_decay, config.scalar_opt, config.scalar_betas, config.scalar_eps) == (
        0.0,
        "adamw",
        (0.9, 0.999),
        1e-8,
    )
    assert (config.scalar_lr, config.embed_lr, config.lm_head_lr) == (None, None, None)
    from nemo_automodel.components.optim.optimizer import MuonConfig as HostMuonConfig

    ours, theirs = MuonConfig(), HostMuonConfig()
    for key in vars(theirs):
        assert getattr(ours, key) == getattr(theirs, key), key


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.__name__)
def test_configurations_copy_and_pickle(config: type[MatrixOptimizerConfig]) -> None:
    made = config(lr=0.5, param_group_overrides=[{"pattern": "x", "lr_mult": 2.0}])
    assert copy.deepcopy(made) == made
    assert pickle.loads(pickle.dumps(made)) == made


def test_short_names_are_registered_beside_the_hosts() -> None:
    from nemo_automodel.components.optim import optimizer as host

    assert {name: host.OPTIMIZER_CONFIG_REGISTRY[name] for name in SHORT_NAMES} == SHORT_NAMES
    assert host.OPTIMIZER_CONFIG_REGISTRY["muon"] is host.MuonConfig
    assert host.OPTIMIZER_CONFIG_REGISTRY["normuon"] is host.NorMuonConfig
    assert isinstance(host.build_optimizer_config("dmuown_muown", {"lr": 1e-3}), MuownConfig)


@pytest.mark.parametrize("name", ["Muon", "NorMuon"])
def test_the_host_never_takes_our_classes_for_dions(name: str) -> None:
    """It hands every class whose `__name__` is Muon or NorMuon to Dion's."""
    from nemo_automodel.components.optim import optimizer as host
    from nemo_automodel.components.optim.dion import is_dion_optimizer
    from torch import nn

    from dmuown.engine import optimizers

    ours = getattr(optimizers, name)
    assert not is_dion_optimizer(ours)
    config = host.build_optimizer_config(ours, {"lr": 1e-3})
    assert isinstance(config, host.OptimizerFromFactoryConfig)
    # Matrices alone work as ours; a model with vectors is refused with the right _target_.
    (optimizer,) = config.build(nn.Linear(4, 3, bias=False))
    assert type(optimizer) is ours
    with pytest.raises(DmuownError, match=r"_target_: dmuown\.automodel\.MuonConfig"):
        config.build(nn.Linear(4, 3))
    assert pickle.loads(pickle.dumps(ours)) is ours
