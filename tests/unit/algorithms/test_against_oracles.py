"""Every matrix algorithm against its float64 oracle, over more than 20 steps, with every option that changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.engine.optimizer import MuonEngine
from tests.reference import angular_muown, muon, muown, normuon, normuown
from tests.unit.algorithms.oracles import assert_near, gradients, initial, only, orthogonalize_as, run_both

# Row state is fp32 by declaration, so that a float64 run of an algorithm with rows is exact to fp32 rounding only.
EXACT, ROWS = 1e-10, 2e-6

Case = tuple[Callable[..., MuonEngine], Any, dict[str, Any], dict[str, Any], float]
FP64 = {"ns_dtype": torch.float64}

#: What Muon and NorMuon orthogonalize with by default, as Dion does.
DION = {"orthogonalize": orthogonalize_as("polar_express", "polar_express_1.02", epsilon=1e-8)}

CASES: dict[str, Case] = {
    # Muon. Keyword arguments: the optimizer's, then the oracle's.
    "muon": (dmuown.Muon, muon.Muon, {}, DION, EXACT),
    "muon nesterov": (
        dmuown.Muon,
        muon.Muon,
        {"nesterov": True, "scheme": "newton_schulz", "mu": 0.9, "lr": 0.03},
        {"nesterov": True, "mu": 0.9, "lr": 0.03, "orthogonalize": orthogonalize_as(epsilon=1e-8)},
        EXACT,
    ),
    "muon ema": (
        dmuown.Muon,
        muon.Muon,
        {"momentum_form": "ema", "ns_norm": "clamp", "scheme": "newton_schulz", "ns_epsilon": 1e-3},
        {"momentum_form": "ema", "orthogonalize": orthogonalize_as(epsilon=1e-3, norm="clamp")},
        EXACT,
    ),
    "muon ema nesterov": (
        dmuown.Muon,
        muon.Muon,
        {"momentum_form": "ema", "nesterov": True, "scheme": "newton_schulz"},
        {"momentum_form": "ema", "nesterov": True, "orthogonalize": orthogonalize_as(epsilon=1e-8)},
        EXACT,
    ),
    **{
        f"muon scale {name}": (
            dmuown.Muon,
            muon.Muon,
            {"adjust_lr": name, "scheme": "newton_schulz"},
            {"adjust_lr": name, "orthogonalize": orthogonalize_as(epsilon=1e-8)},
            EXACT,
        )
        for name in ("spectral_norm", "rms_norm", "keller", "none", None)
    },
    "muon decay": (
        dmuown.Muon,
        muon.Muon,
        {"weight_decay": 0.5, "lr": 0.1, "scheme": "newton_schulz"},
        {"weight_decay": 0.5, "lr": 0.1, "orthogonalize": orthogonalize_as(epsilon=1e-8)},
        EXACT,
    ),
    "muon cautious": (
        dmuown.Muon,
        muon.Muon,
        {"weight_decay": 0.5, "lr": 0.1, "cautious_wd": True, "scheme": "newton_schulz"},
        {"weight_decay": 0.5, "lr": 0.1, "cautious_wd": True, "orthogonalize": orthogonalize_as(epsilon=1e-8)},
        EXACT,
    ),
    "muon you": (
        dmuown.Muon,
        muon.Muon,
        {"scheme": "newton_schulz", "coefficients": "you", "ns_steps": 3},
        {"orthogonalize": orthogonalize_as(coefficients="you", steps=3, epsilon=1e-8)},
        EXACT,
    ),
    "muon gram": (
        dmuown.Muon,
        muon.Muon,
        {"use_gram_newton_schulz": True},
        {"orthogonalize": orthogonalize_as("gram", "polar_express_1.05", epsilon=1e-8)},
        EXACT,
    ),
    "normuon": (
        dmuown.NorMuon,
        normuon.NorMuon,
        {"scheme": "newton_schulz"},
        {"orthogonalize": orthogonalize_as(epsilon=1e-8)},
        ROWS,
    ),
    "normuon options": (
        dmuown.NorMuon,
        normuon.NorMuon,
        {"muon_beta2": 0.8, "nesterov": True, "weight_decay": 0.2, "lr": 0.05, "cautious_wd": True, "mu": 0.8},
        {
            "muon_beta2": 0.8,
            "nesterov": True,
            "weight_decay": 0.2,
            "lr": 0.05,
            "cautious_wd": True,
            "mu": 0.8,
            **DION,
        },
        ROWS,
    ),
    "muown": (dmuown.Muown, muown.Muown, {}, {}, ROWS),
    "muown options": (
        dmuown.Muown,
        muown.Muown,
        {"lr": 0.02, "mu": 0.8, "betas": (0.8, 0.9), "nesterov": False, "epsilon": 1e-6, "muon_update_scale": 0.3},
        {"lr": 0.02, "mu": 0.8, "betas": (0.8, 0.9), "nesterov": False, "epsilon": 1e-6, "muon_update_scale": 0.3},
        ROWS,
    ),
    "muown decay": (
        dmuown.Muown,
        muown.Muown,
        {"lr": 0.02, "weight_decay": 0.5},
        {"lr": 0.02, "weight_decay": 0.5},
        ROWS,
    ),
    "muown normuon scale": (
        dmuown.Muown,
        muown.Muown,
        {"shape_scaling_type": "normuon", "ns_steps": 3, "scheme": "polar_express"},
        {"shape_scaling": "normuon", "orthogonalize": orthogonalize_as("polar_express", steps=3)},
        ROWS,
    ),
    # A step this long drives magnitudes through zero.
    "muown sign": (dmuown.Muown, muown.Muown, {"lr": 0.4}, {"lr": 0.4}, 1e-4),
    "normuown": (dmuown.NorMuown, normuown.NorMuown, {"lr": 0.01}, {"lr": 0.01}, ROWS),
    "normuown options": (
        dmuown.NorMuown,
        normuown.NorMuown,
        {"lr": 0.01, "muon_beta2": 0.8, "shape_scaling_type": "muon", "weight_decay": 0.3, "muon_update_scale": 2.0},
        {"lr": 0.01, "muon_beta2": 0.8, "shape_scaling_type": "muon", "weight_decay": 0.3, "muon_update_scale": 2.0},
        ROWS,
    ),
    "angular_muown": (dmuown.AngularMuown, angular_muown.AngularMuown, {}, {}, ROWS),
    "angular_muown options": (
        dmuown.AngularMuown,
        angular_muown.AngularMuown,
        {
            "lr": 0.02,
            "mu": 0.8,
            "nesterov": False,
            "betas": (0.8, 0.9),
            "epsilon": 1e-6,
            "adjust_lr_fn": "match_rms_adamw",
            "warmup_steps": 3,
            "decay_scale": 0.2,
            "decay_degree": 1.5,
        },
        {
            "lr": 0.02,
            "mu": 0.8,
            "nesterov": False,
            "betas": (0.8, 0.9),
            "epsilon": 1e-6,
            "adjust_lr_fn": "match_rms_adamw",
            "warmup_steps": 3,
            "decay_scale": 0.2,
            "decay_degree": 1.5,
        },
        ROWS,
    ),
    "angular_muown no decay of kappa": (
        dmuown.AngularMuown,
        angular_muown.AngularMuown,
        {"decay_degree": 0, "decay_scale": 5.0, "adjust_lr_fn": "original"},
        {"decay_degree": 0, "decay_scale": 5.0, "adjust_lr_fn": "original"},
        ROWS,
    ),
    # Directions are all but frozen, since angular steps this long would amplify rounding.
    "angular_muown sign": (
        dmuown.AngularMuown,
        angular_muown.AngularMuown,
        {"lr": 0.4, "decay_scale": 10.0, "decay_degree": 2.0},
        {"lr": 0.4, "decay_scale": 10.0, "decay_degree": 2.0},
        1e-4,
    ),
}

#: One case of each algorithm, for what does not depend on its other options.
ALGORITHMS = ("muon nesterov", "normuon options", "muown decay", "normuown options", "angular_muown options")


def build(case: Case, **group: Any) -> Any:
    optimizer, _, options, _, _ = case
    return lambda params: optimizer([{"params": params, **group}], **FP64, **options)


def oracle_of(case: Case, weight: Tensor, **more: Any) -> Any:
    return case[1](weight, **case[3], **more)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str, shape: tuple[int, int]) -> None:
    case = CASES[name]
    weight = initial(*shape)
    # In the cases of crossing signs, gradients keep pulling along the weight.
    pull = 5 * weight if name.endswith("sign") else 0 * weight
    grads = (grad + pull for grad in gradients(shape))
    optimizer, actual, expected = run_both(build(case), oracle_of(case, weight), weight, grads)
    assert_near(actual, expected, case[4])
    assert optimizer.orthogonalized == 1
    if name.endswith("sign"):
        assert (only(optimizer)["magnitude"] < 0).any(), "no magnitude crossed zero: the case tests nothing"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_matter(name: str) -> None:
    """A guard on the test above: with the oracle's default options instead, results differ."""
    case = CASES[name]
    weight = initial(6, 10)
    _, actual, expected = run_both(build(case), case[1](weight), weight, gradients((6, 10)))
    with pytest.raises(AssertionError, match="relative error"):
        assert_near(actual, expected, 1e-3)


@pytest.mark.parametrize("shape", [(8, 8), (1, 7), (7, 1), (1, 1), (3, 4, 6), (2, 2, 5, 3)], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_shapes_and_stacks(name: str, shape: tuple[int, ...]) -> None:
    case = CASES[name]
    weight = initial(*shape)
    _, actual, expected = run_both(build(case), oracle_of(case, weight), weight, gradients(shape))
    assert_near(actual, expected, 1e-5)


@pytest.mark.parametrize("shape", [(6, 10), (3, 4, 6)], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_transposed_storage(name: str, shape: tuple[int, ...]) -> None:
    case = CASES[name]
    weight = initial(*shape)
    optimizer, actual, expected = run_both(
        build(case, matrix_transposed=True), oracle_of(case, weight), weight, gradients(shape), transposed=True
    )
    assert_near(actual, expected, case[4])
    rows = [value for key, value in only(optimizer).items() if key not in ("momentum", "step")]
    assert all(value.shape == (*shape[:-2], 1, shape[-2]) for value in rows)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_flattened_convolutions(name: str) -> None:
    case = CASES[name]
    weight = initial(6, 3, 2, 2)
    flat = weight.flatten(1)
    _, actual, expected = run_both(
        build(case, flatten=True), oracle_of(case, flat), weight, gradients((6, 12)), flatten=True
    )
    assert_near(actual, expected, case[4])


BLOCKS: dict[str, tuple[dict[str, Any], list[slice]]] = {
    "split_sizes": ({"split_sizes": (6, 2, 4)}, [slice(0, 6), slice(6, 8), slice(8, 12)]),
    "num_heads": ({"num_heads": 3}, [slice(0, 4), slice(4, 8), slice(8, 12)]),
    "interleaved": ({"split_sizes": (6, 6), "interleaved": True}, [slice(0, 12, 2), slice(1, 12, 2)]),
}


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_blocks_of_fused_weights(name: str, blocks: str) -> None:
    case = CASES[name]
    group, slices = BLOCKS[blocks]
    weight = initial(12, 5)
    _, actual, expected = run_both(
        build(case, **group), oracle_of(case, weight, blocks=slices), weight, gradients((12, 5))
    )
    # Scales of unequal blocks are fp32 tensors.
    assert_near(actual, expected, max(case[4], 1e-6))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_blocks_equal_separate_parameters(name: str, blocks: str) -> None:
    optimizer, _, options, _, _ = CASES[name]
    group, slices = BLOCKS[blocks]
    weight = initial(12, 5)
    fused = torch.nn.Parameter(weight.clone())
    parts = [torch.nn.Parameter(weight[rows].clone()) for rows in slices]
    one = optimizer([{"params": [fused], **group}], **FP64, **options)
    many = optimizer(parts, **FP64, **options)
    for grad in gradients((12, 5)):
        fused.grad = grad
        for part, rows in zip(parts, slices, strict=True):
            part.grad = grad[rows]
        one.step()
        many.step()
    for part, rows in zip(parts, slices, strict=True):
        assert_near(fused.detach()[rows], part.detach(), 1e-6)
    assert one.orthogonalized == many.orthogonalized == len(slices)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fp32_parameters(name: str) -> None:
    optimizer, _, options, _, _ = CASES[name]
    weight = initial(9, 12, dtype=torch.float32)
    oracle = oracle_of(CASES[name], weight)
    _, actual, expected = run_both(
        lambda params: optimizer(params, ns_dtype="float32", **options), oracle, weight, gradients((9, 12))
    )
    assert_near(actual, expected, 2e-5)


@pytest.mark.parametrize("name", [*ALGORITHMS, "muown", "angular_muown"])
def test_zero_rows(name: str) -> None:
    """Rows that start at zero: with a gradient they move as the oracle's; without one they stay zero; all is finite."""
    case = CASES[name]
    weight = initial(6, 8)
    weight[1] = weight[4] = 0

    def grads() -> Any:
        for grad in gradients((6, 8)):
            grad[4] = 0
            yield grad

    optimizer, actual, expected = run_both(build(case), oracle_of(case, weight), weight, grads())
    assert_near(actual, expected, 1e-4)
    assert (actual[4] == 0).all()
    assert actual[1].abs().min() > 0
    assert all(torch.isfinite(value).all() for value in only(optimizer).values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_zero_gradients_are_finite(name: str) -> None:
    optimizer, _, options, _, _ = CASES[name]
    param = torch.nn.Parameter(initial(6, 8))
    instance = optimizer([param], **FP64, **{**options, "weight_decay": 0.0})
    before = param.detach().clone()
    for _ in range(3):
        param.grad = torch.zeros_like(param)
        instance.step()
    assert_near(param.detach(), before, 1e-6)
    assert all(torch.isfinite(value).all() for value in only(instance).values())


@pytest.mark.parametrize("optimizer", [dmuown.Muon, dmuown.NorMuon, dmuown.Muown, dmuown.NorMuown])
def test_decay_over_zero_gradients(optimizer: Callable[..., MuonEngine]) -> None:
    """100 steps of zero gradient at lr wd = 0.01 leave 0.99^100 = 0.366 of a weight."""
    param = torch.nn.Parameter(initial(6, 8))
    instance = optimizer([param], lr=0.1, weight_decay=0.1)
    before = param.detach().clone()
    for _ in range(100):
        param.grad = torch.zeros_like(param)
        instance.step()
    assert_near(param.detach(), before * 0.99**100, 1e-4)
    assert float(param.detach().norm() / before.norm()) == pytest.approx(0.366, abs=5e-4)
