"""State of other libraries: runs continued here equal theirs. torch's are the real ones, the others float64 oracles."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn

import dmuown
from dmuown.errors import CheckpointError, OptionError
from tests.reference.muon import Muon as MuonOracle
from tests.reference.muown import Muown as MuownOracle
from tests.reference.normuon import NorMuon as NorMuonOracle
from tests.reference.normuown import NorMuown as NorMuownOracle

SHAPES = [(6, 10), (9, 4)]


def gradients(step: int) -> list[Tensor]:
    """Of two matrices and a vector, correlated from step to step as in training."""
    fixed, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(step)
    shapes = [*SHAPES, (5,)]
    return [torch.randn(shape, generator=fixed) + torch.randn(shape, generator=own) / 2 for shape in shapes]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in SHAPES)
        self.c = nn.Parameter(torch.randn(5))


def take_steps(model: nn.Module, optimizers: list[Any], steps: range) -> None:
    for step in steps:
        for param, grad in zip(model.parameters(), gradients(step), strict=True):
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()


def ours(model: Net, algorithm: str = "muon", other: str = "adamw", **options: Any) -> Any:
    groups = [
        {"params": [("a", model.a), ("b", model.b)], "algorithm": algorithm, **options},
        {"params": [("c", model.c)], "algorithm": other},
    ]
    return dmuown.Muown(groups, lr=0.5)


# ------------------------------------------------------------------------------ torch


def torchs(model: Net, adam: type[torch.optim.Adam] = torch.optim.AdamW, **options: Any) -> list[Any]:
    return [
        torch.optim.Muon([("a", model.a), ("b", model.b)], lr=0.02, weight_decay=0.3, momentum=0.9, **options),
        adam([("c", model.c)], lr=3e-3, betas=(0.8, 0.98), eps=1e-6, weight_decay=0.1, fused=True),
    ]


def relative_error(found: Tensor, expected: Tensor, start: Tensor) -> float:
    """Of what was learned since `start`."""
    return float((found - expected).norm() / (expected - start).norm())


@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "ns_steps": 4}])
@pytest.mark.parametrize("form", ["sum", "ema"])
def test_torch_muon_and_adamw(form: str, options: dict[str, Any]) -> None:
    theirs = Net()
    optimizers = torchs(theirs, **options)
    take_steps(theirs, optimizers, range(5))
    start, model = copy.deepcopy(theirs), copy.deepcopy(theirs)
    new = ours(model, ns_dtype="bfloat16", momentum_form=form)
    converted = dmuown.convert_optimizer_state(
        [optimizer.state_dict() for optimizer in optimizers], source="torch", model_or_optimizer=new
    )
    new.load_state_dict(converted)
    unscaled, control = copy.deepcopy((model, new))
    for param in (unscaled.a, unscaled.b):
        control.state[param]["momentum"].mul_(1 - 0.9)
    take_steps(theirs, optimizers, range(5, 8))
    take_steps(model, [new], range(5, 8))
    take_steps(unscaled, [control], range(5, 8))
    assert torch.equal(model.c, theirs.c)
    # Both iterate in bf16, which rounds otherwise at other scales: 1e-2; a wrong scale is far off.
    for name in ("a", "b"):
        expected, since = getattr(theirs, name), getattr(start, name)
        assert relative_error(getattr(model, name), expected, since) < 2e-2
        assert relative_error(getattr(unscaled, name), expected, since) > 4 * 2e-2
        buffer = optimizers[0].state[expected]["momentum_buffer"]
        momentum = new.state[getattr(model, name)]["momentum"]
        torch.testing.assert_close(momentum * (1 if form == "ema" else 1 - 0.9), buffer, rtol=1e-5, atol=1e-6)
    assert new.param_groups[0]["momentum_form"] == form
    assert new.param_groups[1]["lr"] == 3e-3


@pytest.mark.parametrize("adam", [torch.optim.AdamW, torch.optim.Adam])
def test_torch_state_by_name_loads_through_the_model(adam: type[torch.optim.Adam]) -> None:
    theirs = Net()
    optimizers = torchs(theirs, adam)
    take_steps(theirs, optimizers, range(3))
    state: Any = torch_state_dict.get_optimizer_state_dict(theirs, optimizers)
    model = copy.deepcopy(theirs)
    new = ours(model, other="adam" if adam is torch.optim.Adam else "adamw", ns_dtype="bfloat16")
    converted = dmuown.convert_optimizer_state(state, source="torch", model_or_optimizer=model)
    dmuown.set_optimizer_state_dict(model, new, converted)
    torch.testing.assert_close(
        new.state[model.a]["momentum"], optimizers[0].state[theirs.a]["momentum_buffer"] * 10, rtol=1e-6, atol=0
    )
    take_steps(theirs, optimizers, range(3, 6))
    take_steps(model, [new], range(3, 6))
    assert torch.equal(model.c, theirs.c)


def test_parameters_without_state_start_afresh() -> None:
    theirs = Net()
    optimizers = torchs(theirs)
    theirs.a.grad = gradients(0)[0]
    for optimizer in optimizers:
        optimizer.step()
    assert theirs.c not in optimizers[1].state
    model = copy.deepcopy(theirs)
    new = ours(model, ns_dtype="bfloat16")
    for buffer in new.state[model.c].values():
        buffer.fill_(3)
    states = [optimizer.state_dict() for optimizer in optimizers]
    new.load_state_dict(dmuown.convert_optimizer_state(states, source="torch", model_or_optimizer=new))
    assert all(not buffer.any() for buffer in (*new.state[model.c].values(), new.state[model.b]["momentum"]))
    assert new.state[model.a]["momentum"].any()


# ------------------------------------------------------------------------------ AutoModel and the authors


def muown_rows(oracle: Any) -> dict[str, Any]:
    state = {"g": oracle.g, "v_norm": oracle.v_norm, "m_g": oracle.adam.first, "v_g": oracle.adam.second}
    return {key: value.float() for key, value in state.items()}


AUTOMODEL_GROUP = {
    "algorithm": "muon",
    "lr": 0.02,
    "mu": 0.9,
    "beta1": 0.85,
    "beta2": 0.9,
    "weight_decay": 0.1,
    "epsilon": 1e-8,
    "nesterov": True,
    "ns_steps": 5,
    "ns_epsilon": 1e-7,
    "muon_update_scale": 1.0,
    "cautious_wd": False,
    "flatten": False,
    "adjust_lr": "spectral_norm",
    "step": 4,
    "initial_lr": 0.04,
}


def continued(oracles: list[Any], model: Net, new: Any, bound: float = 1e-5) -> None:
    """Steps here equal the oracles'."""
    for step in range(4, 8):
        for param, grad in zip(model.parameters(), gradients(step), strict=True):
            param.grad = grad
        for oracle, grad in zip(oracles, gradients(step), strict=False):
            oracle.step(grad)
        new.step()
    for oracle, param in zip(oracles, (model.a, model.b), strict=True):
        assert float((param - oracle.weight).norm() / oracle.weight.norm()) < bound


def trained_oracles(kind: Any, model: Net, **options: Any) -> list[Any]:
    """Four steps in float64; the model takes their weights."""
    oracles = [kind(param.detach(), **options) for param in (model.a, model.b)]
    for step in range(4):
        for oracle, grad in zip(oracles, gradients(step), strict=False):
            oracle.step(grad)
    for oracle, param in zip(oracles, (model.a, model.b), strict=True):
        param.detach().copy_(oracle.weight)
    return oracles


@pytest.mark.parametrize("cast", [False, True])
def test_automodels_muown(cast: bool) -> None:
    """Its groups call the algorithm `muon`; a host may have cast the counter to bf16."""
    model = Net()
    new = ours(model, "muown", ns_dtype="float32")
    oracles = trained_oracles(MuownOracle, model, lr=0.02, mu=0.9, betas=(0.85, 0.9), weight_decay=0.1, epsilon=1e-8)
    steps = torch.tensor(4.0, dtype=torch.bfloat16 if cast else torch.float32)
    state: dict[Any, Any] = {
        index: {"momentum": oracle.momentum.float(), **muown_rows(oracle), "muown_step": steps}
        for index, oracle in enumerate(oracles)
    }
    state[2] = {"momentum": torch.ones(5), "variance": torch.ones(5), "step": torch.tensor(9.0)}
    saved = {
        "state": state,
        "param_groups": [
            {**AUTOMODEL_GROUP, "params": [0, 1]},
            {**AUTOMODEL_GROUP, "algorithm": "adamw", "lr": 0.001, "params": [2]},
        ],
    }
    original = copy.deepcopy(saved)
    converted = dmuown.convert_optimizer_state(saved, source="automodel", model_or_optimizer=new)
    assert str(saved) == str(original)
    assert {group["algorithm"] for group in converted["param_groups"]} == {"muown", "adamw"}
    new.load_state_dict(converted)
    assert float(new.state[model.c]["step"]) == 9
    assert new.param_groups[0]["initial_lr"] == 0.04
    continued(oracles, model, new)


@pytest.mark.parametrize("kind, algorithm", [(MuownOracle, "muown"), (NorMuownOracle, "normuown")])
def test_the_authors_muown(kind: Any, algorithm: str) -> None:
    model = Net()
    new = dmuown.NorMuown([{"params": [model.a, model.b], "algorithm": algorithm}], ns_dtype="float32")
    oracles = trained_oracles(kind, model, lr=0.02, mu=0.9, betas=(0.85, 0.9), weight_decay=0.1)
    state: dict[Any, Any] = {
        index: {"m_v": oracle.momentum.float(), **muown_rows(oracle), "step": 4} for index, oracle in enumerate(oracles)
    }
    if algorithm == "normuown":
        for index, oracle in enumerate(oracles):
            state[index]["v_normuon"] = oracle.variance.float()
    group = {"lr": 0.02, "momentum": 0.9, "betas": (0.85, 0.9), "weight_decay": 0.1, "nesterov": True, "ns_steps": 5}
    saved = {"state": state, "param_groups": [{**group, "params": [0, 1]}]}
    new.load_state_dict(dmuown.convert_optimizer_state(saved, source="muown", model_or_optimizer=new))
    continued(oracles, model, new)


# ------------------------------------------------------------------------------ muonium


def muonium_state(kind: Any, algorithm: str, model: Net, *, cautious: bool) -> tuple[list[Any], dict[str, Any]]:
    """Oracles that trained the model's matrices, and what muonium would have saved then; all of its keys."""
    oracles = trained_oracles(kind, model, lr=0.02, mu=0.9, weight_decay=0.0, nesterov=True, adjust_lr="keller")
    group = {
        "algorithm": algorithm,
        "use_muon": True,
        "lr": torch.tensor(0.02),
        "wd": 0.0,
        "use_cautious_wd": cautious,
        "momentum": 0.9,
        "nesterov": True,
        "ns_steps": 5,
        "orthogonalization_strategy": "newton_schulz",
        "maximize": False,
        "flatten": False,
        "split_sizes": None,
        "foreach": False,
    }
    adam = {
        "algorithm": "adamw",
        "use_muon": False,
        "lr": 1e-3,
        "wd": 0.1,
        "amsgrad": False,
        "betas": (0.9, 0.95),
        "eps": 1e-7,
        "decoupled_weight_decay": True,
        "fused": None,
        "foreach": None,
        "maximize": False,
        "has_complex": False,
    }
    step = torch.tensor(4.0)
    state: dict[Any, Any] = {
        index: {"momentum_buffer": oracle.momentum.float(), "step": step, "lr_ratio": torch.tensor(1.0)}
        for index, oracle in enumerate(oracles)
    }
    if algorithm == "normuon":
        group["muon_beta2"] = 0.95
        for index, oracle in enumerate(oracles):
            state[index]["variance_neuron"] = oracle.variance.float()
    state[2] = {"exp_avg": torch.ones(5), "exp_avg_sq": torch.full((5,), 2.0), "step": torch.tensor(9.0)}
    return oracles, {"state": state, "param_groups": [{**group, "params": [0, 1]}, {**adam, "params": [2]}]}


@pytest.mark.parametrize("kind, algorithm", [(MuonOracle, "muon"), (NorMuonOracle, "normuon")])
def test_muonium(kind: Any, algorithm: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    epsilon: dict[str, Any] = {"normalization_epsilon": 1e-8} if algorithm == "normuon" else {}
    new = ours(model, algorithm, ns_dtype="float32", **epsilon)
    oracles, saved = muonium_state(kind, algorithm, model, cautious=True)
    new.load_state_dict(dmuown.convert_optimizer_state(saved, source="muonium", model_or_optimizer=new))
    assert new.param_groups[0]["lr"] == pytest.approx(0.02)
    assert new.param_groups[1]["epsilon"] == 1e-7
    assert (float(new.state[model.c]["step"]), float(new.state[model.c]["variance"][0])) == (9, 2)
    continued(oracles, model, new)
    assert not caplog.records
    saved["param_groups"][0]["wd"] = 0.1
    with caplog.at_level(logging.WARNING):
        dmuown.convert_optimizer_state(saved, source="muonium", model_or_optimizer=new)
    assert "muonium decays b by more" in caplog.text


class Quantized(torch.Tensor):
    """Stands in for a low-bit tensor."""

    def dequantize(self) -> Tensor:
        return torch.full((6, 10), 3.0)


def test_low_bit_momentum_is_dequantized() -> None:
    model = Net()
    new = dmuown.Muon([model.a])
    group = {"algorithm": "muon", "lr": 0.1, "wd": 0.0, "momentum": 0.9, "params": [0]}
    state = {"momentum_buffer": torch.zeros(6, 10).as_subclass(Quantized), "step": 1}
    saved = {"state": {0: state}, "param_groups": [group]}
    new.load_state_dict(dmuown.convert_optimizer_state(saved, source="muonium", model_or_optimizer=new))
    assert bool((new.state[model.a]["momentum"] == 3).all())


# ------------------------------------------------------------------------------ what cannot map


def dion_state(algorithm: str = "muon", **options: Any) -> dict[str, Any]:
    group = {**AUTOMODEL_GROUP, "algorithm": algorithm, **options}
    buffers = {"momentum": torch.zeros(6, 10)}
    return {"state": {0: buffers}, "param_groups": [{**group, "params": [0]}]}


def torch_adamw(**options: Any) -> dict[str, Any]:
    param = nn.Parameter(torch.zeros(6, 10))
    optimizer = torch.optim.AdamW([param], **options)
    param.grad = torch.ones(6, 10)
    optimizer.step()
    return optimizer.state_dict()


def torch_muon(**options: Any) -> dict[str, Any]:
    param = nn.Parameter(torch.zeros(6, 10))
    optimizer = torch.optim.Muon([param])
    param.grad = torch.ones(6, 10)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    return state


def renamed(state: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    state["state"][0][new] = state["state"][0].pop(old)
    return state


@pytest.mark.parametrize(
    "source, state, message",
    [
        ("dion", lambda: dion_state("dion2"), r"param group 0: algorithm: 'dion2' has no counterpart here; known are"),
        ("dion", lambda: dion_state("normuon"), r"parameter 0: has no 'variance_neuron' in the checkpoint, only"),
        ("dion", lambda: renamed(dion_state(), "momentum", "Q"), r"parameter 0: has no 'momentum' in the .*, only Q"),
        ("automodel", lambda: dion_state(), r"parameter 0: has no 'g' in the checkpoint"),
        ("muonium", lambda: dion_state(), r"parameter 0: has no 'momentum_buffer' in the checkpoint, only momentum"),
        ("torch", lambda: torch_adamw(amsgrad=True), r"param group 0: amsgrad: is True in the checkpoint"),
        ("torch", lambda: torch_adamw(maximize=True), r"param group 0: maximize: is True in .*\. Pass maximize"),
        ("torch", lambda: dion_state(), r"param group 0: is of neither torch\.optim\.Muon, AdamW nor Adam"),
        ("torch", lambda: torch_muon(adjust_lr_fn="own"), r"adjust_lr_fn: 'own' has no counterpart"),
        ("torch", lambda: renamed(torch_muon(), "momentum_buffer", "buf"), r"has no 'momentum_buffer' in the"),
        ("muown", lambda: torch_muon(), r"param group 0: is for Muown or NorMuown, here it runs muon"),
        ("torch", lambda: [torch_muon(), torch_adamw()], r"the checkpoint has 2 parameters, this optimizer has 1"),
        ("torch", lambda: {"state": {}}, r"state.*|param_groups"),
    ],
)  # fmt: skip
def test_what_cannot_map_is_refused(source: str, state: Any, message: str) -> None:
    optimizer = dmuown.Muon([nn.Parameter(torch.zeros(6, 10))])
    with pytest.raises(CheckpointError, match=message):
        dmuown.convert_optimizer_state(state(), source=source, model_or_optimizer=optimizer)


def test_extra_buffers_are_refused() -> None:
    state = dion_state()
    state["state"][0]["variance"] = torch.zeros(6, 10)
    optimizer = dmuown.Muon([("w", nn.Parameter(torch.zeros(6, 10)))])
    with pytest.raises(CheckpointError, match=r"^w: has 'variance' in the checkpoint, which has no counterpart"):
        dmuown.convert_optimizer_state(state, source="dion", model_or_optimizer=optimizer)


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(OptionError, match="source: must be one of 'automodel', 'dion', 'muonium', 'muown', 'torch'"):
        dmuown.convert_optimizer_state({}, source="torchtitan", model_or_optimizer=nn.Linear(2, 2))


def test_names_are_checked_against_the_model() -> None:
    theirs = Net()
    optimizers = torchs(theirs)
    take_steps(theirs, optimizers, range(1))
    states = [optimizer.state_dict() for optimizer in optimizers]
    with pytest.raises(CheckpointError, match=r"^[abc]: is in the checkpoint and not here"):
        dmuown.convert_optimizer_state(states, source="torch", model_or_optimizer=nn.Linear(2, 2))
    for state in states:
        del state["param_groups"][0]["param_names"]
    with pytest.raises(CheckpointError, match="needs the optimizer that will load it"):
        dmuown.convert_optimizer_state(states, source="torch", model_or_optimizer=theirs)


def test_another_algorithm_is_refused_at_loading() -> None:
    theirs = Net()
    optimizers = torchs(theirs)
    take_steps(theirs, optimizers, range(1))
    new = ours(theirs, "normuon")
    states = [optimizer.state_dict() for optimizer in optimizers]
    converted = dmuown.convert_optimizer_state(states, source="torch", model_or_optimizer=new)
    with pytest.raises(CheckpointError, match="algorithm 'muon', this group runs 'normuon'"):
        new.load_state_dict(converted)


def test_state_of_other_libraries_is_not_taken_unconverted() -> None:
    theirs = Net()
    optimizers = torchs(theirs)
    take_steps(theirs, optimizers, range(1))
    new = dmuown.Muon([("a", theirs.a), ("b", theirs.b)])
    with pytest.raises(CheckpointError, match=r"written by algorithm None.*convert_optimizer_state"):
        new.load_state_dict(optimizers[0].state_dict())
    state = dion_state()
    state["state"][0]["g"] = torch.zeros(6, 1)
    alone = dmuown.Muon([("a", theirs.a)])
    with pytest.raises(CheckpointError, match=r"^a: the checkpoint has 'g' for it, .*convert_optimizer_state"):
        alone.load_state_dict(state)
