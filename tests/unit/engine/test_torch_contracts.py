"""What torch's optimizers promise: closures, groups, hooks, copies, schedulers, names, in-place updates."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dmuown
from dmuown.errors import CheckpointError, ParameterError

OPTIMIZERS = [dmuown.Muon, dmuown.NorMuon, dmuown.Muown, dmuown.NorMuown, dmuown.AngularMuown]


def build(optimizer: Callable[..., Any], seed: int = 0, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    named = list(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in named if p.ndim == 2]},
        {"params": [(name, p) for name, p in named if p.ndim == 1], "algorithm": "adamw", "weight_decay": 0.0},
    ]
    return model, optimizer(groups, **{"lr": 0.02, "ns_dtype": torch.float32, **options})


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(16, 6, generator=generator)).square().mean()


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_closure_is_evaluated_with_gradients_and_its_value_returned(optimizer: Callable[..., Any]) -> None:
    model, by_closure = build(optimizer)
    twin, plain = build(optimizer)

    def closure() -> torch.Tensor:
        by_closure.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    returned = by_closure.step(closure)
    expected = train(twin, plain, range(1))
    assert returned.item() == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_alike_and_apart(optimizer: Callable[..., Any], duplicate: Callable[[Any], Any]) -> None:
    model, original = build(optimizer, weight_decay=0.0)
    train(model, original, range(3))
    twin, copied = duplicate((model, original))
    assert train(twin, copied, range(3, 6)) == train(model, original, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))
    assert type(copied) is type(original)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stop_and_resume_is_bit_identical(optimizer: Callable[..., Any]) -> None:
    """Invariant 4."""
    model, original = build(optimizer)
    train(model, original, range(3))
    saved = pickle.loads(pickle.dumps((model.state_dict(), original.state_dict())))
    expected = train(model, original, range(3, 6))
    twin, resumed = build(optimizer, seed=1)
    twin.load_state_dict(saved[0])
    resumed.load_state_dict(state_dict=saved[1])
    assert train(twin, resumed, range(3, 6)) == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_hooks_run(optimizer: Callable[..., Any]) -> None:
    model, hooked = build(optimizer)
    seen: list[str] = []
    hooked.register_step_pre_hook(lambda *_: seen.append("before"))
    hooked.register_step_post_hook(lambda *_: seen.append("after"))
    hooked.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    hooked.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    hooked.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    train(model, hooked, range(1))
    hooked.load_state_dict(hooked.state_dict())
    assert seen == ["before", "after", "saved", "loading", "loaded"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_maximize_is_descent_on_the_negated_gradient(optimizer: Callable[..., Any]) -> None:
    model, ascending = build(optimizer, maximize=True)
    twin, descending = build(optimizer)
    for step in range(3):
        for network, sign, stepper in ((model, 1, ascending), (twin, -1, descending)):
            stepper.zero_grad()
            (sign * loss_of(network, step)).backward()
            given = [p.grad.clone() for p in network.parameters()]
            stepper.step()
            # Invariant 7: the caller's gradients are left as they were.
            assert all(torch.equal(p.grad, g) for p, g in zip(network.parameters(), given, strict=True))
    for a, b in zip(weights(model), weights(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_and_state_change_in_place(optimizer: Callable[..., Any]) -> None:
    """Invariant 7."""
    model, stepper = build(optimizer)
    places = [p.data_ptr() for p in model.parameters()]
    state = [{key: value.data_ptr() for key, value in stepper.state[p].items()} for p in model.parameters()]
    train(model, stepper, range(2))
    stepper.load_state_dict(stepper.state_dict())
    assert [p.data_ptr() for p in model.parameters()] == places
    assert [{k: v.data_ptr() for k, v in stepper.state[p].items()} for p in model.parameters()] == state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedulers_write_lr_and_initial_lr(optimizer: Callable[..., Any]) -> None:
    model, scheduled = build(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(scheduled, T_max=4)
    rates = []
    for step in range(4):
        train(model, scheduled, range(step, step + 1))
        scheduler.step()
        rates.append(scheduled.param_groups[0]["lr"])
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert scheduled.param_groups[0]["initial_lr"] == 0.02
    assert all(type(rate) is float for rate in rates)
    before = weights(model)[0]
    train(model, scheduled, range(1))
    assert torch.allclose(weights(model)[0], before, atol=1e-6)


def test_generators_and_named_parameters_are_accepted() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)
    assert len(dmuown.Muon(model.parameters()).param_groups) == 1
    named = dmuown.Muown(model.named_parameters())
    assert named.param_groups[0]["param_names"] == ["weight"]
    assert dmuown.Muown(p for p in model.parameters()).state[model.weight]


def test_everything_after_params_is_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        dmuown.Muown([nn.Parameter(torch.ones(2, 2))], None)  # type: ignore[call-arg]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_complete_from_construction(optimizer: Callable[..., Any]) -> None:
    """Invariant 3: also for a parameter that never had a gradient, and for groups added later."""
    model, stepper = build(optimizer)
    late = nn.Parameter(torch.ones(3, 2))
    stepper.add_param_group({"params": [("late", late)]})
    keys = {p: sorted(stepper.state[p]) for p in (*model.parameters(), late)}
    assert all(keys.values())
    train(model, stepper, range(2))
    assert {p: sorted(stepper.state[p]) for p in keys} == keys
    assert torch.equal(late, torch.ones(3, 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_frozen_then_unfrozen(optimizer: Callable[..., Any]) -> None:
    model, stepper = build(optimizer)
    model[2].weight.requires_grad_(False)
    frozen = model[2].weight.detach().clone()
    train(model, stepper, range(2))
    assert torch.equal(model[2].weight, frozen)
    model[2].weight.requires_grad_(True)
    train(model, stepper, range(1))
    assert not torch.equal(model[2].weight, frozen)


@pytest.mark.parametrize("optimizer", [dmuown.Muown, dmuown.NorMuown, dmuown.AngularMuown])
def test_weights_loaded_before_the_first_step_are_noticed(
    optimizer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, stepper = build(optimizer)
    twin, expected = build(optimizer)
    with torch.no_grad():
        for network in (model, twin):
            network[0].weight.mul_(3)
    expected.resync_magnitudes()
    with caplog.at_level(logging.WARNING):
        losses = train(model, stepper, range(3))
    assert "0.weight" in caplog.text
    assert "taken anew" in caplog.text
    assert losses == train(twin, expected, range(3))


@pytest.mark.parametrize("optimizer", [dmuown.Muown, dmuown.NorMuown, dmuown.AngularMuown])
def test_state_of_another_model_is_refused_in_the_first_step(optimizer: Callable[..., Any]) -> None:
    model, stepper = build(optimizer)
    train(model, stepper, range(2))
    other, resumed = build(optimizer, seed=5)
    resumed.load_state_dict(stepper.state_dict())
    with pytest.raises(CheckpointError, match=r"0\.weight.*resync_magnitudes"):
        train(other, resumed, range(1))
    resumed.resync_magnitudes()
    train(other, resumed, range(1))


def test_muon_update_scale_is_read_from_the_configuration_on_resume() -> None:
    model, stepper = build(dmuown.Muown, muon_update_scale=0.5)
    train(model, stepper, range(2))
    twin, resumed = build(dmuown.Muown, muon_update_scale=0.25)
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(stepper.state_dict())
    assert resumed.param_groups[0]["muon_update_scale"] == 0.25


def test_narrow_storage_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        dmuown.Muown([("w", nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)))])
        dmuown.Muon([("w", nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)))])
    assert len(caplog.records) == 1
    assert "w: stored in torch.bfloat16, which rounds magnitudes away; muown recommends fp32 parameters" in caplog.text
    dmuown.Muown([("w", nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)))], master_weights=True)
    dmuown.Muown([("w", nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)))], stochastic_rounding=True)
    assert len(caplog.records) == 1
    optimizer = dmuown.Muown([("v", nn.Parameter(torch.ones(2, 2)))])
    assert len(caplog.records) == 1
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(2, 2, dtype=torch.float16)))]})
    assert "late: stored in torch.float16" in caplog.text


def test_groups_of_another_algorithm_keep_that_algorithms_defaults() -> None:
    weight, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = dmuown.Muon([{"params": [weight]}, {"params": [other], "algorithm": "muown"}], lr=0.5, cautious_wd=True)
    muon, muown = optimizer.param_groups
    assert (muon["nesterov"], muon["scheme"], muon["adjust_lr"]) == (False, "polar_express", "spectral_norm")
    assert (muown["nesterov"], muown["scheme"], muown["lr"]) == (True, "newton_schulz", 0.5)


@pytest.mark.parametrize("owner", OPTIMIZERS)
def test_an_algorithm_orthogonalizes_alike_in_every_optimizer(owner: Callable[..., Any]) -> None:
    """A `normuon` group of a Muon took Polar Express with 1.01 where NorMuon itself takes 1.02."""
    names = ["muon", "normuon", "muown", "normuown", "angular_muown"]
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": name, "weight_decay": 0} for name in names]
    mixed = owner(groups, lr=0.1)
    by_group = {bucket.group_index: bucket.orthogonalizer for bucket in mixed.plan.buckets}
    for own in OPTIMIZERS:
        single = own([nn.Parameter(torch.ones(2, 2))], lr=0.1)
        alone = single.plan.buckets[0].orthogonalizer
        found = by_group[names.index(single.param_groups[0]["algorithm"])]
        assert (found.scheme, found.coefficients, found.steps) == (alone.scheme, alone.coefficients, alone.steps)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_reset_parameter_goes_on_as_if_just_built(optimizer: Callable[..., Any], precision: str) -> None:
    """miles#1761: an adapter's slot given to a new use must not inherit the momentum of the old one."""
    model, used = build(optimizer, weight_decay=0.0, state_precision=precision)
    train(model, used, range(3))
    storage = [value.data_ptr() for state in used.state.values() for value in state.values()]
    twin = copy.deepcopy(model)
    names = [record.name for record in used.records]
    built = build(optimizer, weight_decay=0.0, state_precision=precision)[1].__class__(
        [
            {**group, "params": [(name, dict(twin.named_parameters())[name]) for name in group["param_names"]]}
            for group in used.state_dict()["param_groups"]
        ],
        lr=0.02,
    )
    kept = {name: used.state[dict(model.named_parameters())[name]] for name in names}
    before = {name: {key: value.clone() for key, value in state.items()} for name, state in kept.items()}
    used.reset_state([model[0].weight, model[0].bias])
    for key, value in kept["2.weight"].items():
        assert torch.equal(value, before["2.weight"][key])
    used.reset_state()
    assert train(model, used, range(3, 6)) == train(twin, built, range(3, 6))
    assert storage == [value.data_ptr() for state in used.state.values() for value in state.values()]


def test_a_groups_generator_is_read_once() -> None:
    """Several look at a group's parameters before torch does."""
    for extra in ({}, {"optim_dtype": torch.float32}, {"weight_decay": 0.0}):
        model = nn.Linear(3, 2, bias=False)
        optimizer = dmuown.Muon([{"params": model.parameters(), **extra}], lr=0.1)
        assert [record.param is model.weight for record in optimizer.records] == [True]
        optimizer = dmuown.Muon([{"params": model.named_parameters(), **extra}], lr=0.1)
        assert [record.name for record in optimizer.records] == ["weight"]


def test_resetting_a_stranger_is_refused_and_changes_nothing() -> None:
    model, optimizer = build(dmuown.Muown)
    train(model, optimizer, range(2))
    before = optimizer.state[model[0].weight]["momentum"].clone()
    with pytest.raises(ParameterError, match=r"params\[1\]: is not a parameter of this optimizer"):
        optimizer.reset_state([model[0].weight, nn.Parameter(torch.ones(2, 2))])
    assert torch.equal(optimizer.state[model[0].weight]["momentum"], before)
