"""Bad input ends in one error that names the parameter or key, before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dmuown
from dmuown.errors import DmuownError, GradientError, OptionError, OptionTypeError, ParameterError

OPTIMIZERS = [dmuown.Muon, dmuown.NorMuon, dmuown.Muown, dmuown.NorMuown, dmuown.AngularMuown]


def matrix(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 3), **options))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("lr", value) for value in (-1.0, math.nan, math.inf, "fast", True, [1e-3])],
        *[("mu", value) for value in (-0.1, 1.0, math.nan, 2)],
        *[("betas", value) for value in ((1.0, 0.95), (0.9, -0.1), (0.9, math.nan), (0.9,), 0.9)],
        *[("epsilon", value) for value in (0, -1e-8, math.nan, math.inf)],
        *[("ns_epsilon", value) for value in (0.0, -1.0)],
        *[("ns_steps", value) for value in (0, -1, 2.5, True, "5")],
        *[("weight_decay", value) for value in (-0.1, math.nan, "much")],
        ("batch_size", 0),
        *[("batch_bytes", value) for value in (0, -1, 1.5, True, "256 MiB")],
        ("nesterov", 1),
        ("scheme", "newton_shulz"),
        ("backend", "cuda"),
        ("ns_dtype", "int8"),
    ],
)
def test_hyper_parameters(optimizer: Callable[..., Any], option: str, value: object) -> None:
    with pytest.raises((OptionError, OptionTypeError)) as caught:
        optimizer([("layer.weight", matrix())], **{option: value})
    named = {"betas": "beta"}.get(option, option)
    assert named in str(caught.value)
    with pytest.raises((OptionError, OptionTypeError)) as caught:
        optimizer([{"params": [("layer.weight", matrix())], option: value}])
    assert named in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "big"])
def test_muon_update_scale(value: object) -> None:
    with pytest.raises(OptionError, match="muon_update_scale"):
        dmuown.Muown([matrix()], muon_update_scale=value)  # type: ignore[arg-type]


def test_a_number_in_a_string_is_a_number() -> None:
    optimizer = dmuown.Muown([matrix()], lr="1e-4")  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["lr"] == 1e-4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_unknown_options_suggest_the_nearest(optimizer: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match=r"ns_step.*Did you mean 'ns_steps'"):
        optimizer([{"params": [matrix()], "ns_step": 5}])
    with pytest.raises(OptionError, match=r"nesterow.*Did you mean 'nesterov'"):
        optimizer([matrix()], nesterow=True)
    with pytest.raises(OptionError, match=r"'muownn'.*Did you mean 'muown'"):
        optimizer([{"params": [matrix()], "algorithm": "muownn"}])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("parameter", "rule"),
    [
        (nn.Parameter(torch.ones(4)), "at least 2 axes"),
        (nn.Parameter(torch.tensor(1.0)), "at least 2 axes"),
        (nn.Parameter(torch.ones(4, 3, device="meta")), "meta device"),
        (nn.Parameter(torch.ones(4, 3, dtype=torch.int64), requires_grad=False), "floating-point"),
        (nn.Parameter(torch.ones(4, 3, dtype=torch.complex64)), "floating-point"),
        (torch.ones(4, 3, requires_grad=True) * 2, "leaf"),
    ],
)
def test_parameters(optimizer: Callable[..., Any], parameter: torch.Tensor, rule: str) -> None:
    with pytest.raises(ParameterError, match=rf"(?s)model\.thing: .*{rule}"):
        optimizer([("model.thing", parameter)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_parameter_twice(optimizer: Callable[..., Any]) -> None:
    weight = matrix()
    with pytest.raises(ParameterError, match=r"b: appears twice: also as 'a' in param group 0"):
        optimizer([{"params": [("a", weight)]}, {"params": [("b", weight)]}])
    with pytest.raises(ParameterError, match="appears twice"):
        optimizer([weight, weight])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("params", [[], iter(()), [{"params": []}], [{"params": [matrix()]}, {"params": []}]])
def test_nothing_to_optimize(optimizer: Callable[..., Any], params: Any) -> None:
    with pytest.raises(ParameterError, match=r"params.*is empty"):
        optimizer(params)


@pytest.mark.parametrize("params", [matrix(), {"params": [matrix()]}, {matrix()}, [1.0], [{"params": ["x"]}]])
def test_containers_that_torch_would_not_take(params: Any) -> None:
    with pytest.raises(OptionTypeError, match="params"):
        dmuown.Muown(params)


def test_a_group_without_params() -> None:
    with pytest.raises(OptionError, match="param group 0: params: is missing"):
        dmuown.Muown([{"lr": 0.1}])


@pytest.mark.parametrize("mesh", ["cuda", 2, object()])
def test_distributed_mesh_is_type_checked(mesh: Any) -> None:
    with pytest.raises(OptionTypeError, match="distributed_mesh"):
        dmuown.Muown([matrix()], distributed_mesh=mesh)


def test_sparse_gradient_is_refused_before_any_change() -> None:
    weight, other = matrix(4, 3), matrix(4, 3)
    optimizer = dmuown.Muown([("first", other), ("table", weight)], lr=0.1)
    other.grad = torch.ones_like(other)
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (4, 3))
    with pytest.raises(GradientError, match="table: its gradient is sparse"):
        optimizer.step()
    assert torch.equal(other, torch.ones(4, 3))
    assert optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"mu": 3},
        {"mu": None},
        {"scheme": "newton_shulz"},
        {"coefficients": "kellar"},
        {"ns_norm": "none"},
        {"backend": "quack"},
        {"shape_scaling_type": "none"},
        {"params": [("v", nn.Parameter(torch.ones(3)))]},
    ],
)
def test_failed_add_param_group_changes_nothing(options: dict[str, Any]) -> None:
    optimizer = dmuown.Muown([("a", matrix())])
    before = len(optimizer.param_groups), len(optimizer.state)
    with pytest.raises(DmuownError, match=r"param group 1: |^v: |^backend='quack'"):
        optimizer.add_param_group({"params": [("b", matrix())], **options})
    assert (len(optimizer.param_groups), len(optimizer.state)) == before
    optimizer.add_param_group({"params": [("b", matrix())]})
    assert len(optimizer.param_groups) == 2


def test_angular_muown_refuses_weight_decay() -> None:
    with pytest.raises(OptionError, match=r"weight_decay.*angular_muown"):
        dmuown.AngularMuown([matrix()], weight_decay=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_sizes": (2, 1)}, r"w: split_sizes.*sum to the 4 output rows"),
        ({"split_sizes": (2, True)}, "split_sizes.*ints"),
        ({"split_sizes": (2.0, 2.0)}, "split_sizes.*ints"),
        ({"split_sizes": (2, 2), "num_heads": 2}, "split_sizes.*excludes num_heads"),
        ({"split_sizes": (2, 2), "flatten": True}, "split_sizes.*excludes flatten"),
        ({"num_heads": 3}, "w: num_heads.*must divide the 4 output rows"),
        ({"num_heads": 2, "flatten": True}, "num_heads.*excludes flatten"),
        ({"num_heads": True}, "num_heads"),
    ],
)
def test_fused_blocks(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dmuown.Muon([{"params": [("w", matrix(4, 3))], **options}])


def test_triton_must_be_there_when_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuown.kernels.available", lambda: False)
    for optimizer in OPTIMIZERS:
        with pytest.raises(ImportError, match=f"^{optimizer.__qualname__}: use_triton: needs Triton"):
            optimizer([matrix()], use_triton=True)
        with pytest.raises(ImportError, match=r"^param group 0: use_triton: needs Triton"):
            optimizer([{"params": [matrix()], "use_triton": True}])


def test_what_triton_does_not_cover_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dmuown.kernels.available", lambda: True)
    weight = matrix()
    quiet, loud = dmuown.Muown([matrix()]), dmuown.Muown([("only.here", weight)], use_triton=True)
    for optimizer in (quiet, loud, loud):
        for param in optimizer.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
    (message,) = [record.getMessage() for record in caplog.records if "use_triton" in record.getMessage()]
    assert "only.here" in message
    assert "there are none for cpu" in message


@pytest.mark.parametrize("value", [torch.tensor(-1.0), torch.tensor(math.nan), torch.tensor([0.1, 0.2])])
def test_live_numbers_obey_the_rules_too(value: torch.Tensor) -> None:
    with pytest.raises(OptionError, match=r"^Muown: lr: must be"):
        dmuown.Muown([matrix()], lr=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["differentiable"])
def test_what_torch_offers_and_we_do_not_is_refused(option: str) -> None:
    dmuown.Muown([{"params": [matrix()], option: False}])
    with pytest.raises(OptionError, match=f"^param group 0: {option}: "):
        dmuown.Muown([{"params": [matrix()], option: True}])


@pytest.mark.parametrize("option", ["warmup_steps", "decay_scale", "decay_degree"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "soon", True])
def test_the_angular_schedule(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"^AngularMuown: {option}: must be"):
        dmuown.AngularMuown([matrix()], **{option: value})  # type: ignore[arg-type]
    assert dmuown.AngularMuown([matrix()], **{option: "1e0"}).param_groups[0][option] == 1.0  # type: ignore[arg-type]


def test_names_are_given_once() -> None:
    """A checkpoint of two parameters of one name could not be loaded."""
    with pytest.raises(ParameterError, match="w: names two parameters"):
        dmuown.Muon([("w", matrix()), ("w", matrix())])
    optimizer = dmuown.Muon([("w", matrix())])
    with pytest.raises(ParameterError, match="w: names two parameters"):
        optimizer.add_param_group({"params": [("w", matrix())]})
    assert len(optimizer.param_groups) == 1


def test_a_function_that_works_in_place_leaves_the_momentum_alone() -> None:
    def halve(x: torch.Tensor, epsilon: float) -> torch.Tensor:
        return x.mul_(0.5)

    weight = matrix()
    optimizer = dmuown.Muon([weight], lr=0.1, mu=0.5, newton_schulz_func=halve)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum"], weight.grad)
