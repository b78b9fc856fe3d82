"""State dicts by canonical name: wrappers, frozen parameters, regrouping, other optimizers beside."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions

import dmuown
from dmuown.checkpoint.names import canonical_fqn, parameter_fqns
from dmuown.errors import CheckpointError, ParameterError
from tests.unit.checkpoint.training import Net, assert_same, build, optimizer_of, tensors, train

NAMES = ["experts", "inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias", "outer.weight"]


def compiled(model: Any) -> Any:
    return torch.compile(model)


def compiled_inside(model: Any) -> Any:
    model.inner[0] = torch.compile(model.inner[0])
    return model


def checkpointed(model: Any) -> Any:
    model.inner = checkpoint_wrapper(model.inner)
    return model


def both(model: Any) -> Any:
    model.outer = checkpoint_wrapper(compiled(model.outer))
    return torch.compile(model)


def data_parallel(model: Any) -> Any:
    return nn.DataParallel(model)


WRAPPERS = [compiled, compiled_inside, checkpointed, both, data_parallel]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_are_those_of_the_bare_model(wrap: Any) -> None:
    model = wrap(Net())
    assert sorted(parameter_fqns(model).values()) == sorted(NAMES)


def test_a_submodule_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert canonical_fqn(Holder(), "module.weight") == "module.weight"
    assert canonical_fqn(nn.DataParallel(Holder()), "module.module.weight") == "module.weight"


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_state_moves_between_wrapped_and_bare_models(wrap: Any) -> None:
    bare, optimizer, scheduler = build("muown")
    train(bare, optimizer, scheduler, range(2))
    wrapped = wrap(Net())
    new = optimizer_of(wrapped, "muown")
    assert list(dmuown.get_optimizer_state_dict(wrapped, new)["state"]) == [
        "experts",
        "inner.0.weight",
        "outer.weight",
        "inner.0.bias",
        "inner.1.weight",
        "inner.1.bias",
    ]
    if wrap is not data_parallel:  # torch's functions for models do not know it
        dmuown.set_model_state_dict(wrapped, dmuown.get_model_state_dict(bare))
        assert sorted(dmuown.get_model_state_dict(wrapped)) == sorted(NAMES)
        assert_same([p.detach() for p in bare.parameters()], [p.detach() for p in wrapped.parameters()])
    dmuown.set_optimizer_state_dict(wrapped, new, dmuown.get_optimizer_state_dict(bare, optimizer))
    for param, other in zip(bare.parameters(), wrapped.parameters(), strict=True):
        assert_same(list(optimizer.state[param].values()), list(new.state[other].values()))
    back = optimizer_of(bare, "muown")
    dmuown.set_optimizer_state_dict(bare, back, dmuown.get_optimizer_state_dict(wrapped, new))
    assert_same(tensors(bare, optimizer), tensors(bare, back))


def test_keys_with_wrappers_prefixes_are_taken() -> None:
    model, optimizer, _ = build("muon")
    new, other, _ = build("muon", seed=1)
    prefixed = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    dmuown.set_model_state_dict(new, prefixed)
    state = dmuown.get_optimizer_state_dict(model, optimizer)
    state["state"] = {f"_orig_mod.{name}": buffers for name, buffers in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [f"_orig_mod.{name}" for name in group["params"]]
    dmuown.set_optimizer_state_dict(new, other, state)
    assert_same(tensors(model, optimizer), tensors(new, other))


@pytest.mark.parametrize("flat", [False, True])
def test_frozen_parameters_keep_their_state(flat: bool) -> None:
    """torch's functions leave it out when they load."""
    model, optimizer, scheduler = build("muown")
    train(model, optimizer, scheduler, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=True)
    saved = dmuown.get_optimizer_state_dict(model, optimizer, options=options)
    new, other, _ = build("muown", seed=1)
    new.outer.requires_grad_(False)
    dmuown.set_optimizer_state_dict(new, other, saved)
    assert_same(list(optimizer.state[model.outer.weight].values()), list(other.state[new.outer.weight].values()))
    torch_state_dict.set_optimizer_state_dict(new, other, saved, options=options)


def test_copies_do_not_alias_and_live_tensors_do() -> None:
    model, optimizer, _ = build("muon")
    momentum = optimizer.state[model.outer.weight]["momentum"]
    live = dmuown.get_optimizer_state_dict(model, optimizer)
    assert live["state"]["outer.weight"]["momentum"] is momentum
    for options in (StateDictOptions(full_state_dict=True), StateDictOptions(cpu_offload=True)):
        copied = dmuown.get_optimizer_state_dict(model, optimizer, options=options)
        assert copied["state"]["outer.weight"]["momentum"].data_ptr() != momentum.data_ptr()


def test_the_flattened_form_is_torchs() -> None:
    model, optimizer, _ = build("normuown", named=False)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    ours = dmuown.get_optimizer_state_dict(model, optimizer, options=options)
    theirs = torch_state_dict.get_optimizer_state_dict(model, optimizer, options=options)
    assert ours.keys() == theirs.keys()
    assert all(ours[key] is theirs[key] or ours[key] == theirs[key] for key in ours)


def test_groups_may_be_cut_differently() -> None:
    model, optimizer, scheduler = build("muown")
    train(model, optimizer, scheduler, range(2))
    saved = dmuown.get_optimizer_state_dict(model, optimizer)
    new = copy.deepcopy(model)
    options: dict[str, Any] = {"algorithm": "muown", "weight_decay": 0.1}
    groups: list[dict[str, Any]] = [
        {"params": [param for param in new.parameters() if param.ndim < 2], "algorithm": "adamw", "lr": 3e-3},
        {"params": [new.outer.weight], **options},
        {"params": [new.inner[0].weight, new.experts], **options},
    ]
    other = dmuown.Muown(groups)
    dmuown.set_optimizer_state_dict(new, other, saved)
    for param, twin in zip(model.parameters(), new.parameters(), strict=True):
        assert_same(list(optimizer.state[param].values()), list(other.state[twin].values()))
    assert [group["lr"] for group in other.param_groups[1:]] == [optimizer.param_groups[0]["lr"]] * 2


def test_several_optimizers_of_several_packages() -> None:
    def halves(model: Any) -> list[torch.optim.Optimizer]:
        matrices = [param for param in model.parameters() if param.ndim > 1]
        return [
            dmuown.Muown(matrices, lr=1e-2),
            torch.optim.AdamW([param for param in model.parameters() if param.ndim < 2], lr=1e-3),
        ]

    torch.manual_seed(0)
    model, new = Net(), Net()
    optimizers, others = halves(model), halves(new)
    for step in range(2):
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    saved = dmuown.get_optimizer_state_dict(model, optimizers)
    assert sorted(saved["state"]) == sorted(NAMES)
    dmuown.set_optimizer_state_dict(new, others, saved)
    for param, twin in zip(model.parameters(), new.parameters(), strict=True):
        for optimizer, other in zip(optimizers, others, strict=True):
            if param in optimizer.state:
                assert_same(list(optimizer.state[param].values()), list(other.state[twin].values()))


@pytest.mark.parametrize("flat", [False, True])
def test_missing_and_extra_parameters_are_named(flat: bool) -> None:
    model, optimizer, _ = build("muown")
    get = functools.partial(
        dmuown.get_optimizer_state_dict, options=StateDictOptions(flatten_optimizer_state_dict=flat)
    )
    saved = get(model, optimizer)
    partial = dmuown.Muown([model.experts, model.outer.weight])
    with pytest.raises(CheckpointError, match=r"^inner\.0\.bias: is in the checkpoint and in no optimizer here"):
        dmuown.set_optimizer_state_dict(model, partial, saved)
    with pytest.raises(CheckpointError, match=r"^inner\.0\.(weight|bias): is not in the checkpoint"):
        dmuown.set_optimizer_state_dict(model, optimizer, get(model, partial))
    optimizer.state[model.outer.weight]["momentum"].fill_(3)
    if not flat:  # the groups of the rest are another algorithm's
        saved["param_groups"][0]["weight_decay"] = 0.25
    dmuown.set_optimizer_state_dict(model, partial, saved, options=StateDictOptions(strict=False))
    assert float(partial.state[model.outer.weight]["momentum"].mean()) == 3


def test_an_optimizer_of_another_model_is_refused() -> None:
    _, optimizer, _ = build("muown")
    with pytest.raises(ParameterError, match=r"^experts: is in the optimizer and not in the model"):
        dmuown.get_optimizer_state_dict(Net(), optimizer)


def test_shapes_of_models_are_checked_before_loading() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=r"^outer\.weight: has shape \(5, 9\) in the checkpoint and \(5, 10\)"):
        dmuown.set_model_state_dict(
            model, {**before, "outer.weight": torch.zeros(5, 9), "experts": before["experts"] + 1}
        )
    with pytest.raises(CheckpointError, match=r"^outter: is in the checkpoint and not in the model. Did you mean"):
        dmuown.set_model_state_dict(model, {**before, "outter": torch.zeros(5, 9)})
    assert_same(list(before.values()), list(model.state_dict().values()))
    keys = dmuown.set_model_state_dict(model, {"experts": before["experts"]}, options=StateDictOptions(strict=False))
    assert len(keys.missing_keys) == 5


def test_state_without_names_and_empty_state_are_refused() -> None:
    model, optimizer, _ = build("muown", named=False)
    with pytest.raises(CheckpointError, match="has no parameter names"):
        dmuown.set_optimizer_state_dict(model, optimizer, optimizer.state_dict())
    with pytest.raises(CheckpointError, match="is empty"):
        dmuown.set_optimizer_state_dict(model, optimizer, {})
    with pytest.raises(CheckpointError, match="momentum: is no key of an optimizer state dict"):
        dmuown.set_optimizer_state_dict(model, optimizer, {"momentum": torch.zeros(2)})


def test_tied_weights_go_by_their_first_name() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer = dmuown.Muown(model.named_parameters())
    state = dmuown.get_optimizer_state_dict(model, optimizer)
    assert list(state["state"]) == ["0.weight"]
    dmuown.set_optimizer_state_dict(model, optimizer, state)
    dmuown.set_model_state_dict(model, dmuown.get_model_state_dict(model))
