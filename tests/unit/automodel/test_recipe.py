"""The extended recipe: extended once, and found by name without importing the host."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from dmuown.automodel import DMuonConfig, cpu, ownership, recipe
from dmuown.automodel.checks.targets import find_target
from dmuown.automodel.ownership import build_owned, whole_parameters
from dmuown.automodel.recipe import extend
from dmuown.errors import MissingDependencyError, OptionError


class Host:
    """Stands for a recipe of the host."""

    cfg: Any = None


def test_a_recipe_is_extended_once() -> None:
    """Twice, gradients would be clipped twice and the second norm logged."""
    extended = extend(Host)
    assert issubclass(extended, Host)
    assert extended is not Host
    assert extended.__name__ == "Host"
    assert extend(extended) is extended
    assert extend(type("Derived", (extended,), {})).__mro__.count(extended) == 1


def test_the_name_that_yaml_files_use_is_found_and_is_an_extended_recipe_of_the_host() -> None:
    assert find_target("dmuown.automodel.recipe.FinetuneRecipe").status == "found"
    assert find_target("dmuown.automodel.recipe.FinetuneRecipes").status == "missing"
    assert recipe.FinetuneRecipe.dmuown_extended
    assert recipe.FinetuneRecipe.__mro__[1].__name__ == "TrainFinetuneRecipeForNextTokenPrediction"
    with pytest.raises(AttributeError, match="FinetuneRecipes"):
        _ = recipe.FinetuneRecipes


def test_models_are_built_whole_and_the_hosts_default_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_automodel.components.distributed import model_parallelizer

    before = model_parallelizer._DEFAULT_PARALLELIZER
    options, module = DMuonConfig(lr=1e-3), nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), whole_parameters(options):
        inside = model_parallelizer.get_model_parallelizer(module)
        assert isinstance(inside, type(before))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        assert inside._fully_shard_module(module, mesh=None, mp_policy=policy) is module
        raise ZeroDivisionError
    assert model_parallelizer._DEFAULT_PARALLELIZER is before
    assert not isinstance(module, FSDPModule)
    assert options.mixed_precision == (torch.bfloat16, torch.float32)
    monkeypatch.setattr("dmuown.automodel.host.installed_version", lambda: "0.8.0")
    with pytest.raises(MissingDependencyError, match=r"0\.8\.0.*0\.7"), whole_parameters(options):
        pass
    assert model_parallelizer._DEFAULT_PARALLELIZER is before


def test_sharded_models_are_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(2, 2)
    linear.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})  # as fully_shard does
    model = nn.Sequential(linear)
    with pytest.raises(OptionError, match=r"recipe: has sharded the model.*FinetuneRecipe"):
        build_owned(DMuonConfig(lr=1e-3), model)
    monkeypatch.setattr(nn.Sequential, "parallelizer", object(), raising=False)
    with pytest.raises(OptionError, match=r"model: has a parallelizer of its own.*force_hf: true"):
        build_owned(DMuonConfig(lr=1e-3), model)


def test_every_replacement_is_listed_in_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/automodel.md").read_text()
    listed = guide.partition("## What it replaces in the host")[2].partition("\n## ")[0]
    # The functions of `cpu`, and what `ownership` assigns to objects of the host.
    source = Path(str(ownership.__file__)).read_text()
    assigned = re.findall(r"^ +(?:model_parallelizer|checkpointer)\.(\w+)(?:, checkpointer\.(\w+))? = ", source, re.M)
    replaced = {name for names in assigned for name in names if name}
    assert {"_DEFAULT_PARALLELIZER", "save_model", "load_optimizer"} <= replaced
    replaced |= set(re.findall(r"_replace\([\w.]+, \"(\w+)\"", Path(cpu.__file__).read_text())) | {cpu._FUNCTION}
    assert [name for name in sorted(replaced) if name not in listed] == []


def test_health_goes_where_the_hosts_metrics_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own method logs to its JSON file, wandb, mlflow and comet what the extended recipe adds to."""
    from nemo_automodel.components.loggers.metric_logger import MetricsSample
    from nemo_automodel.recipes.llm import train_ft

    told: dict[str, dict[str, Any]] = {}
    wandb = SimpleNamespace(run=object(), log=lambda metrics, step: told.update(wandb=metrics))
    mlflow = SimpleNamespace(active_run=object, log_metrics=lambda metrics, step: told.update(mlflow=metrics))
    for name, library in (("wandb", wandb), ("mlflow", mlflow)):
        monkeypatch.setattr(train_ft, name, library, raising=False)
        monkeypatch.setattr(train_ft, f"_HAS_{name.upper()}", True, raising=False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(recipe.FinetuneRecipe, "_log_moe_metrics", lambda *_: None)
    running = recipe.FinetuneRecipe.__new__(recipe.FinetuneRecipe)
    comet = SimpleNamespace(log_metrics=lambda metrics, step: told.update(comet=metrics))
    log = SimpleNamespace(log=lambda sample: told.update(json=sample.to_dict()))
    values = {
        "dist_env": SimpleNamespace(is_main=True),
        "step_scheduler": SimpleNamespace(is_remote_logging_step=True, step=3),
        "comet_logger": comet,
        "metric_logger_train": log,
        "dmuown_owned": True,
        "dmuown_norm": [torch.tensor(2.5)],
        "dmuown_health": SimpleNamespace(collect=lambda: {"dmuown/orthogonalized": 14.0}),
    }
    for name, value in values.items():
        object.__setattr__(running, name, value)
    given = dict.fromkeys(("loss", "grad_norm", "lr", "mem", "tps", "tps_per_gpu", "num_label_tokens"), 1.0)
    running.log_train_metrics(MetricsSample(step=3, epoch=0, metrics=given))
    assert set(told) == {"json", "wandb", "mlflow", "comet"}
    for logged in told.values():
        assert (logged["dmuown/orthogonalized"], logged["grad_norm"]) == (14.0, 2.5)
