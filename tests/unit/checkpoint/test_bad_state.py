"""State that does not fit: each case is refused with the parameter's name, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dmuown
from dmuown.engine import state_version
from dmuown.engine.options import RUN_LEVEL_OPTIONS
from dmuown.errors import CheckpointError
from tests.unit.checkpoint.training import Net, assert_same, build, optimizer_of, tensors, train


def saved_state(algorithm: str = "muown", **options: Any) -> dict[str, Any]:
    model, optimizer, scheduler = build(algorithm, **options)
    train(model, optimizer, scheduler, range(2))
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    return state


def refused(state: dict[str, Any], message: str, algorithm: str = "muown", **options: Any) -> None:
    model, optimizer, scheduler = build(algorithm, seed=1, **options)
    train(model, optimizer, scheduler, range(1))
    before = tensors(model, optimizer)
    groups = [{k: copy.copy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    with pytest.raises(CheckpointError, match=message):
        optimizer.load_state_dict(state)
    assert_same(before, tensors(model, optimizer))
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def drop_buffer(state: dict[str, Any]) -> None:
    del state["state"][1]["direction_norm"]


def add_buffer(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg"] = torch.zeros(5, 10)


def drop_state(state: dict[str, Any]) -> None:
    del state["state"][2]


def drop_parameter(state: dict[str, Any]) -> None:
    del state["state"][4]
    state["param_groups"][1]["params"].remove(4)
    state["param_groups"][1]["param_names"].remove("inner.1.weight")


def add_parameter(state: dict[str, Any]) -> None:
    state["param_groups"][1]["params"].append(9)
    state["param_groups"][1]["param_names"].append("inner.2.bias")
    state["state"][9] = state["state"][5]


def add_stray_state(state: dict[str, Any]) -> None:
    state["state"][9] = state["state"][5]


def widen(state: dict[str, Any]) -> None:
    state["state"][0]["momentum"] = torch.zeros(10, 7)


def transpose_rows(state: dict[str, Any]) -> None:
    state["state"][2]["magnitude"] = state["state"][2]["magnitude"].mT


def put_text(state: dict[str, Any]) -> None:
    state["state"][0]["momentum"] = "zeros"


def duplicate_name(state: dict[str, Any]) -> None:
    state["param_groups"][0]["param_names"][0] = "inner.0.weight"


def rename_algorithm(state: dict[str, Any]) -> None:
    state["param_groups"][0]["algorithm"] = "normuown"


def transpose_storage(state: dict[str, Any]) -> None:
    state["param_groups"][0]["matrix_transposed"] = True


def spoil_option(state: dict[str, Any]) -> None:
    state["param_groups"][1]["beta2"] = 1.5


def split_wrongly(state: dict[str, Any]) -> None:
    state["param_groups"][0]["split_sizes"] = (3, 4)


def split_options(state: dict[str, Any]) -> None:
    """Parameters of one group come from groups of different lr."""
    first = state["param_groups"][0]
    second = {**first, "params": [first["params"].pop()], "param_names": [first["param_names"].pop()], "lr": 0.5}
    state["param_groups"].insert(1, second)


def drop_groups(state: dict[str, Any]) -> None:
    del state["param_groups"]


def flatten_whole(state: dict[str, Any]) -> None:
    state.clear()
    state["state.outer.weight.momentum"] = torch.zeros(5, 10)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (drop_buffer, r"^inner\.0\.weight: the checkpoint has no 'direction_norm'"),
        (add_buffer, r"^inner\.0\.weight: the checkpoint has 'exp_avg' for it, which muown does not keep"),
        (drop_state, r"^outer\.weight: the checkpoint has no 'momentum'"),
        (drop_parameter, r"^inner\.1\.weight: is not in the checkpoint"),
        (add_parameter, r"^inner\.2\.bias: is in the checkpoint and not in this optimizer"),
        (add_stray_state, r"^state of '9': belongs to no parameter"),
        (widen, r"^experts: 'momentum' has shape \(10, 7\) in the checkpoint and \(3, 5, 4\) here"),
        (transpose_rows, r"^outer\.weight: 'magnitude' has shape \(1, 5\) in the checkpoint and \(5, 1\) here"),
        (put_text, r"'momentum' is a str in the checkpoint"),
        (duplicate_name, r"^inner\.0\.weight: appears twice"),
        (rename_algorithm, r"param group 0 \(.*algorithm 'normuown', this group runs 'muown'"),
        (transpose_storage, r"^param group 0: matrix_transposed: is True in the checkpoint and False here"),
        (spoil_option, r"^param group 1: beta2: in the checkpoint: must be in \[0, 1\), got 1.5"),
        (split_wrongly, r"^experts: split_sizes: in the checkpoint: must sum to the 5"),
        (split_options, r"its 'lr' is .* in the checkpoint and that of"),
        (drop_groups, r"^state_dict: has no 'param_groups'"),
        (flatten_whole, r"^state_dict: has no 'state'.*set_optimizer_state_dict"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_state_that_does_not_fit_is_refused(spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    state = saved_state()
    spoil(state)
    refused(state, message)


@pytest.mark.parametrize("spoil", [drop_buffer, widen, rename_algorithm])
def test_state_is_refused_by_position_too(spoil: Callable[[dict[str, Any]], None]) -> None:
    state = saved_state(named=False)
    spoil(state)
    refused(state, "the checkpoint", named=False)


def test_another_number_of_parameters_is_refused_by_position() -> None:
    state = saved_state(named=False)
    del state["state"][5]
    state["param_groups"][1]["params"].remove(5)
    refused(state, r"param group 1: the checkpoint has 2 parameters in it, this optimizer 3", named=False)
    del state["param_groups"][1]
    state["state"] = {key: value for key, value in state["state"].items() if key < 3}
    refused(state, r"param_groups: the checkpoint has 1 groups, this optimizer has 2", named=False)


def test_a_newer_version_is_refused() -> None:
    state = saved_state()
    for group in state["param_groups"]:
        group["state_version"] = state_version.STATE_VERSION + 1
    refused(state, r"state_version: the checkpoint has version 2, this dmuown reads up to 1\. Upgrade dmuown")


@pytest.mark.parametrize("value", ["1", -1, True, None])
def test_a_version_that_is_none_is_refused(value: object) -> None:
    state = saved_state()
    state["param_groups"][1]["state_version"] = value
    refused(state, r"param group 1: state_version: must be an integer")


def test_groups_of_several_versions_are_refused() -> None:
    state = saved_state()
    del state["param_groups"][1]["state_version"]
    refused(state, r"state_version: differs between groups of the checkpoint: \[0, 1\]")


def test_state_from_before_versions_is_read() -> None:
    model, optimizer, scheduler = build("muown")
    train(model, optimizer, scheduler, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["state_version"]
    _, other, _ = build("muown", seed=1)
    other.load_state_dict(state)
    assert_same(tensors(model, optimizer)[6:], tensors(model, other)[6:])
    assert [group["state_version"] for group in other.param_groups] == [state_version.STATE_VERSION] * 2


def test_older_versions_are_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two versions more, each of which renamed a buffer."""

    def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def step(state: dict[str, Any]) -> dict[str, Any]:
            buffers = {
                key: {new if name == old else name: value for name, value in saved.items()}
                for key, saved in state["state"].items()
            }
            return {**state, "state": buffers}

        return step

    state = saved_state()
    expected = [buffers["momentum"] for buffers in state["state"].values()]
    state = renamed("momentum", "oldest")(state)
    monkeypatch.setattr(state_version, "STATE_VERSION", 3)
    steps = {1: renamed("oldest", "older"), 2: renamed("older", "momentum")}
    monkeypatch.setattr(state_version, "UPGRADES", steps)
    _, optimizer, _ = build("muown", seed=1)
    optimizer.load_state_dict(state)
    loaded = [optimizer.state[param]["momentum"] for group in optimizer.param_groups for param in group["params"]]
    assert_same(expected, loaded)
    del steps[1]
    with pytest.raises(CheckpointError, match="version 1 can no longer be read"):
        optimizer.load_state_dict(state)


def test_run_level_settings_stay_as_configured() -> None:
    state = saved_state(muon_update_scale=0.5, batch_size=2, ns_dtype="float32")
    assert state["param_groups"][0]["muon_update_scale"] == 0.5
    _, optimizer, _ = build("muown", muon_update_scale=2.0)
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["muon_update_scale"], group["batch_size"], group["ns_dtype"]) == (2.0, None, "auto")
    assert {"muon_update_scale", "batch_size", "backend", "use_triton", "maximize"} <= set(RUN_LEVEL_OPTIONS)


def test_other_options_come_from_the_checkpoint_and_take_effect() -> None:
    """The number of iterations is part of the plan, which is made anew."""
    models = [build("muown", ns_steps=3), build("muown", seed=1, ns_steps=5)]
    train(*models[0], range(2))
    models[1][0].load_state_dict(models[0][0].state_dict())
    models[1][1].load_state_dict(models[0][1].state_dict())
    assert models[1][1].param_groups[0]["ns_steps"] == 3
    for model, optimizer, scheduler in models:
        scheduler.last_epoch = 2
        train(model, optimizer, scheduler, range(2, 4))
    assert_same(tensors(*models[0][:2]), tensors(*models[1][:2]))


def test_live_tensors_among_options_stay_the_same_tensors() -> None:
    state = saved_state()
    _, optimizer, _ = build("muown", seed=1)
    lr = torch.tensor(0.7)
    optimizer.param_groups[0]["lr"] = lr
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(state["param_groups"][0]["lr"])
    state["param_groups"][1]["lr"] = torch.tensor(0.25)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[1]["lr"] == 0.25
    assert isinstance(optimizer.param_groups[1]["lr"], float)


def test_hooks_see_and_replace_the_state_dict() -> None:
    state = saved_state()
    original = copy.deepcopy(state)
    _, optimizer, _ = build("muown", seed=1)
    calls: list[str] = []

    def halve(opt: Any, given: dict[str, Any]) -> dict[str, Any]:
        calls.append("pre")
        assert opt is optimizer
        groups = [{**group, "lr": group["lr"] / 2} for group in given["param_groups"]]
        return {**given, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("post"))
    optimizer.load_state_dict(state_dict=state)
    assert calls == ["pre", "post"]
    assert optimizer.param_groups[0]["lr"] == state["param_groups"][0]["lr"] / 2
    assert state["param_groups"] == original["param_groups"]


def test_names_match_across_wrappers_order_and_groups() -> None:
    """Saved from a compiled model whose matrices were cut into two groups, in another order."""
    torch.manual_seed(0)
    model = Net()
    options = {"algorithm": "muown", "weight_decay": 0.1}
    named = [(f"_orig_mod.{name}", param) for name, param in model.named_parameters()]
    matrices = [item for item in named if item[1].ndim > 1]
    rest = [item for item in named if item[1].ndim < 2]
    groups = [
        {"params": rest[::-1], "algorithm": "adamw", "lr": 3e-3},
        {"params": matrices[2:], **options},
        {"params": matrices[:2], **options},
    ]
    old = dmuown.Muown(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(old, 1.0)
    train(model, old, scheduler, range(2))
    copied = copy.deepcopy(model)
    new = optimizer_of(copied, "muown")
    new.load_state_dict(old.state_dict())
    for param, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert_same(list(old.state[param].values()), list(new.state[other].values()))
    assert new.param_groups[0]["param_names"] == ["experts", "inner.0.weight", "outer.weight"]
