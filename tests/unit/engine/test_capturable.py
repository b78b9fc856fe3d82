"""`capturable=True`: the rate lives on the device, and trains as a number does. Graphs themselves: tests/gpu."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.errors import GradientError, OptionError

CLASSES: dict[str, dict[str, Any]] = {
    "Muon": {},
    "NorMuon": {},
    "Muown": {},
    "NorMuown": {},
    "AngularMuown": {"decay_degree": 0},
}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (5,), (3,))]


def build(name: str, params: list[torch.nn.Parameter], **options: Any) -> Any:
    weight, bias, scale = params
    groups = [
        {"params": [weight]},
        {"params": [bias], "algorithm": "adamw", "weight_decay": 0.1, "lr": 0.02},
        {"params": [scale], "algorithm": "lion"},
    ]
    return getattr(dmuown, name)(groups, **{"lr": 2.0**-5, **CLASSES[name], **options})


def train(params: list[torch.nn.Parameter], optimizer: Any, steps: range, scheduler: Any = None) -> None:
    for step in steps:
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(10 * step + index)
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("name", CLASSES)
def test_rates_are_tensors_that_schedulers_fill_and_train_as_numbers_do(name: str) -> None:
    results = []
    for on in (False, True):
        params = parameters()
        optimizer = build(name, params, capturable=on)
        held = [group["lr"] for group in optimizer.param_groups]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        train(params, optimizer, range(4), scheduler)
        for group, before in zip(optimizer.param_groups, held, strict=True):
            if on:
                assert group["lr"] is before  # the address that a graph reads
                assert (group["lr"].dtype, group["lr"].shape, group["lr"].device) == (
                    torch.float32,
                    (),
                    torch.device("cpu"),
                )
            else:
                assert type(group["lr"]) is float
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == pytest.approx([2.0**-9, 0.02 / 16, 2.0**-9], rel=1e-6)
        results.append(params)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lr", [3e-4, torch.tensor(3e-4)], ids=["number", "tensor"])
def test_adamw_has_the_bits_of_torch(lr: Any) -> None:
    mine, theirs = parameters(), parameters()
    group = {"params": mine, "algorithm": "adamw", "weight_decay": 0.1}
    optimizer = dmuown.Muown([group], lr=lr, betas=(0.9, 0.95), capturable=True)
    rate = lr if isinstance(lr, Tensor) else torch.tensor(lr)
    reference = torch.optim.AdamW(
        theirs, lr=rate.clone(), betas=(0.9, 0.95), weight_decay=0.1, capturable=True, fused=True
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in (optimizer, reference)]
    train(mine, optimizer, range(10), schedulers[0])
    train(theirs, reference, range(10), schedulers[1])
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other)
    if isinstance(lr, Tensor):
        assert optimizer.param_groups[0]["lr"] is lr  # the caller's own


@pytest.mark.parametrize("algorithm", ["adamw", "adam"])
@pytest.mark.parametrize("form", [{"foreach_adam": True}, {"foreach_adam": False}, {"fused_adam": True}], ids=str)
def test_every_form_of_adam_takes_the_tensor(form: dict[str, bool], algorithm: str) -> None:
    results = []
    for on in (False, True):
        params = parameters()
        group = {"params": params, "algorithm": algorithm, "weight_decay": 0.1, "lr": 2.0**-5, **form}
        train(params, dmuown.Muown([group], capturable=on), range(3))
        results.append(params)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_numbers_that_schedulers_write_go_into_the_tensor() -> None:
    """AutoModel's scheduler, and code of one's own, replace the value in the group."""
    results = []
    for on in (False, True):
        params = parameters()
        optimizer = build("Muown", params, capturable=on)
        train(params, optimizer, range(1))
        held = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 2.0**-7
        train(params, optimizer, range(1, 3))
        if on:
            assert all(group["lr"] is before for group, before in zip(optimizer.param_groups, held, strict=True))
            assert [float(group["lr"]) for group in optimizer.param_groups] == [2.0**-7] * 3
        results.append(params)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("saved_on", [False, True])
@pytest.mark.parametrize("loaded_on", [False, True])
def test_checkpoints_resume_with_and_without(saved_on: bool, loaded_on: bool) -> None:
    """The option is the configuration's, as `foreach` is; the rate is the checkpoint's, in the form that is in use."""
    params = parameters()
    optimizer = build("Muown", params, capturable=saved_on)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(params, optimizer, range(3), scheduler)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), params], file)
    train(params, optimizer, range(3, 5))
    file.seek(0)
    state, resumed = torch.load(file, weights_only=False)
    other = build("Muown", resumed, capturable=loaded_on)
    held = [group["lr"] for group in other.param_groups]
    other.load_state_dict(state)
    for group, before in zip(other.param_groups, held, strict=True):
        assert group["capturable"] is loaded_on
        assert isinstance(group["lr"], Tensor) is loaded_on
        assert not loaded_on or group["lr"] is before
    assert float(other.param_groups[0]["lr"]) == 2.0**-8
    train(resumed, other, range(3, 5))
    for one, two in zip(params, resumed, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
        assert saved_on is not loaded_on or torch.equal(one, two)


def test_copies_and_pickles_have_tensors_of_their_own() -> None:
    params = parameters()
    optimizer = build("Muown", params, capturable=True)
    train(params, optimizer, range(2))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert float(other.param_groups[0]["lr"]) == 2.0**-5
        optimizer.param_groups[0]["lr"].fill_(1.0)
        assert float(other.param_groups[0]["lr"]) == 2.0**-5
        other.step()
        optimizer.param_groups[0]["lr"].fill_(2.0**-5)


def test_a_group_may_have_it_alone_and_groups_join_later() -> None:
    params = parameters()
    optimizer = dmuown.Muown([{"params": [params[0]], "capturable": True}], lr=0.1)
    optimizer.add_param_group({"params": [params[1]], "algorithm": "adamw"})
    optimizer.add_param_group({"params": [params[2]], "algorithm": "adamw", "capturable": True, "lr": "1e-3"})
    assert [isinstance(group["lr"], Tensor) for group in optimizer.param_groups] == [True, False, True]
    assert float(optimizer.param_groups[2]["lr"]) == pytest.approx(1e-3)
    train(params, optimizer, range(2))


def test_what_a_replay_would_repeat_wrongly_is_refused() -> None:
    params = parameters()
    with pytest.raises(OptionError, match=r"^AngularMuown: decay_degree: makes the angular rate follow the step count"):
        dmuown.AngularMuown(params[:1], capturable=True)
    with pytest.raises(OptionError, match=r"^param group 0: offload_state: moves state through the host"):
        dmuown.Muown([{"params": params[:1], "offload_state": True, "capturable": True}])
    for value in (1, "yes", None):
        with pytest.raises(OptionError, match=r"^param group 0: capturable: must be True or False"):
            dmuown.Muown([{"params": params[:1], "capturable": value}])


def test_a_number_cannot_be_recorded_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    params = parameters()
    optimizer = build("Muown", params)
    with pytest.raises(OptionError, match=r"^param group 0: lr: is the number 0.03125, .* Set capturable=True"):
        train(params, optimizer, range(1))
    params = parameters()
    held = build("Muown", params, capturable=True)
    train(params, held, range(1))
    held.param_groups[1]["lr"] = 0.5  # as a scheduler writes it
    with pytest.raises(OptionError, match=r"^param group 1: lr: is the number 0.5, .* Step once before recording"):
        held.step()


def test_what_a_graph_would_leave_out_or_wait_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = build("Muown", params, capturable=True)
    skipping = build("Muown", parameters(), capturable=True, nonfinite="skip")
    train(params, optimizer, range(1))
    params[1].grad = None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        GradientError, match=r"^param group 1, parameter 0: it has no gradient on some rank, and a recorded step"
    ):
        optimizer.step()
    with pytest.raises(OptionError, match=r"^nonfinite: must be 'propagate' in a graph, got 'skip'"):
        skipping.step()


@pytest.mark.parametrize("form", ["pairs", "groups of pairs", "param_groups"])
def test_named_parameters_have_it_too(form: str) -> None:
    """The rate's device was looked for in the pairs."""
    results = []
    for on in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 6, bias=form == "param_groups")
        groups: Any = model.named_parameters()
        if form == "groups of pairs":
            groups = [{"params": groups}]
        elif form == "param_groups":
            groups = dmuown.param_groups(model)
        optimizer = dmuown.Muown(groups, lr=2.0**-5, capturable=on)
        assert all(isinstance(group["lr"], Tensor) is on for group in optimizer.param_groups)
        train(list(model.parameters()), optimizer, range(2))
        results.append(list(model.parameters()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_hooks_of_dions_graph_wrapper_keep_rate_and_count() -> None:
    """Its `CudaGraphOptimizer` calls them around a replay, which runs no step on the host."""
    params = parameters()
    optimizer = build("Muown", params, capturable=True)
    train(params, optimizer, range(1))
    held = [group["lr"] for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer._sync_hyperparam_tensors()
    optimizer._advance_host_step_counters()
    assert optimizer.param_groups[0]["lr"] is held[0]
    assert float(held[0]) == 0.25
    assert [group["step"] for group in optimizer.param_groups] == [2, 2, 2]
