"""The fused halves of a step against the algorithms' own phases, through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuown.algorithms import MatrixBatch, MuonAlgorithm, fused, get_algorithm
from tests.unit.kernels.interpreted.inputs import relative_error

ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown")
Shape = tuple[int, int, int]


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_available", lambda device_type: True)


def finish(work: Generator[None, None, Any]) -> Any:
    """Run a phase to its value."""
    try:
        while True:
            next(work)
    except StopIteration as stop:
        return stop.value


def make(
    name: str,
    shape: Shape,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    **options: Any,
) -> tuple[MuonAlgorithm, MatrixBatch]:
    """A bucket of three parameters, equal for equal arguments; a row of zeros stays, another is born."""
    depth, m, n = shape
    generator = torch.Generator().manual_seed(5)

    def matrix() -> Tensor:
        x = torch.randn(depth, *((n, m) if transposed else (m, n)), generator=generator).mul_(scale).to(dtype)
        return x.mT if transposed else x

    def rows() -> Tensor:
        return torch.rand(depth, m, 1, generator=generator) + 0.1

    algorithm = get_algorithm(name)
    assert isinstance(algorithm, MuonAlgorithm)
    complete = {
        "lr": 0.02,
        "weight_decay": 0.0,
        "mu": 0.95,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "step": 3,
        "use_triton": False,
        **algorithm.all_options(),
        **options,
    }
    weights, gradients, momenta = ([matrix() for _ in range(3)] for _ in range(3))
    state: dict[str, list[Tensor]] = {"momentum": momenta}
    for key, spec in algorithm.state_spec.items():
        if spec.like == "grad_rows":
            state[key] = [rows() for _ in range(3)]
    if "magnitude" in state:
        state["step"] = [torch.tensor(2.0) for _ in range(3)]
        state["magnitude"][1] *= -1
        for row in (1, 2):
            for values in (
                weights[0],
                momenta[0],
                state["magnitude"][0],
                state.get("direction_norm", state["magnitude"])[0],
            ):
                values[0, row] = 0
        gradients[0][0, 1] = 0
    return algorithm, MatrixBatch([f"p{i}" for i in range(3)], weights, gradients, state, complete, m, n)


def update_of(shape: Shape) -> list[Tensor]:
    """Stands for the orthogonalized update: 16 bits, one row of zeros, one stacked tensor."""
    whole = torch.randn(3, *shape, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    whole[0, 0, 1] = 0
    return list(whole)


def compare(
    name: str, shape: Shape, tolerance: float, blocks: tuple[int, ...] | None = None, **arguments: Any
) -> MatrixBatch:
    """Both ways from the same start; returns the fused one's bucket."""
    algorithm, expected = make(name, shape, **arguments)
    _, batch = make(name, shape, **arguments)
    if blocks is not None:
        for bucket in (expected, batch):
            bucket.block_rows = blocks
            bucket.block_of_row = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(blocks))
    gradient = finish(algorithm.prepare_gradient(expected))
    directions = algorithm.update_momentum(expected, gradient)
    own = fused.before(algorithm, batch, torch.float32)
    assert own is not None
    for value, reference in zip(own, directions, strict=True):
        assert relative_error(value, reference) < tolerance
    shaped = finish(algorithm.shape_update(expected, update_of(shape)))
    finish(algorithm.apply(expected, shaped))
    assert finish(fused.after(algorithm, batch, update_of(shape)))
    for value, reference in zip(batch.weights, expected.weights, strict=True):
        assert relative_error(value, reference) < tolerance
    for key, values in expected.state.items():
        for value, reference in zip(batch.state[key], values, strict=True):
            assert relative_error(value, reference) < tolerance, key
    for value, reference in zip(batch.gradients, expected.gradients, strict=True):
        assert torch.equal(value, reference)
    return batch


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_halves_equal_the_phases(name: str, transposed: bool) -> None:
    compare(name, (2, 5, 12), 3e-6, transposed=transposed)


@pytest.mark.parametrize("name", ["normuon", "normuown"])
def test_neurons_of_several_blocks(name: str) -> None:
    compare(name, (2, 5, 12), 3e-6, blocks=(2, 3))
    compare(name, (2, 5, 12), 3e-6, blocks=(1, 4), transposed=True)


@pytest.mark.parametrize("name", ["muon", "normuon", "muown", "normuown"])
def test_decay(name: str) -> None:
    compare(name, (1, 7, 20), 3e-6, weight_decay=0.3)


def test_options_of_muon() -> None:
    compare("muon", (1, 7, 20), 3e-6, nesterov=True, momentum_form="ema")
    compare("muon", (1, 7, 20), 3e-6, nesterov=False, cautious_wd=True, weight_decay=0.3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_storage(dtype: torch.dtype) -> None:
    compare("muown", (1, 6, 24), 2e-2, dtype=dtype)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("name", ["muown", "angular_muown"])
def test_tiny_and_huge(name: str, scale: float) -> None:
    compare(name, (1, 6, 24), 3e-6, scale=scale)


def test_rows_of_zeros_stay_or_are_born() -> None:
    batch = compare("muown", (2, 5, 12), 3e-6)
    assert not batch.weights[0][0, 1].any()
    born = float(batch.weights[0][0, 2].norm())
    assert born == pytest.approx(0.02, rel=1e-4)  # the length lr


def test_rows_longer_than_registers_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    from dmuown.kernels import rows

    monkeypatch.setattr(rows, "_LONGEST_ROW", 16)
    compare("muown", (1, 3, 5000), 3e-6, weight_decay=0.1)
    compare("muon", (1, 3, 5000), 3e-6, weight_decay=0.1)


def test_a_non_finite_gradient_stays_in_its_rows() -> None:
    algorithm, batch = make("muown", (1, 6, 24))
    batch.gradients[1][0, 3, 4] = float("nan")
    assert fused.before(algorithm, batch, torch.float32) is not None
    bad = [momentum.isnan().any(dim=-1).flatten().tolist() for momentum in batch.state["momentum"]]
    assert bad == [[False] * 6, [False, False, False, True, False, False], [False] * 6]


def test_directions_are_slices_of_one_tensor() -> None:
    algorithm, batch = make("muon", (2, 4, 6), transposed=True)
    directions = fused.before(algorithm, batch, torch.bfloat16)
    assert directions is not None
    whole = fused.stack_of(directions)
    assert whole is not None
    assert whole.shape == (6, 4, 6)
    assert whole.data_ptr() == directions[0].data_ptr()
    assert torch.equal(whole[3], directions[1][1])


def test_strangers_are_not_one_tensor() -> None:
    first, second = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    assert fused.stack_of([first, second]) is None
    both = torch.zeros(2, 3, 4)
    assert fused.stack_of([both[1:], both[:1]]) is None


def test_what_no_kernel_covers_is_left_to_the_phases() -> None:
    algorithm, batch = make("muown", (1, 4, 6), dtype=torch.float64)
    assert fused.before(algorithm, batch, torch.float32) is None
    assert not finish(fused.after(algorithm, batch, update_of((1, 4, 6))))
    algorithm, batch = make("muown", (1, 4, 6))
    batch.gradients[1] = batch.gradients[1].mT.contiguous().mT
    assert fused.before(algorithm, batch, torch.float32) is None


class Wrapped(Tensor):
    """A tensor whose storage is its own affair, as an MXFP8 wrapper's is."""


@pytest.mark.parametrize("operand", ["weights", "gradients", "momentum", "magnitude"])
def test_the_storage_of_a_subclass_is_left_to_its_own_operations(operand: str) -> None:
    """dion#84: a kernel on raw pointers read a wrapper's storage as if it were the tensor's own, and wrote there."""
    algorithm, batch = make("muown", (1, 4, 6))
    tensors = getattr(batch, operand, None) or batch.state[operand]
    tensors[1] = tensors[1].as_subclass(Wrapped)
    assert fused.before(algorithm, batch, torch.float32) is None


def test_a_row_of_one_element_has_no_direction_to_learn() -> None:
    """Torch does it, exactly; Muon has directions in one column as in many."""
    for name in ("muown", "normuown", "angular_muown"):
        algorithm, batch = make(name, (1, 6, 1))
        assert fused.before(algorithm, batch, torch.float32) is None
    algorithm, batch = make("muon", (1, 6, 1))
    assert fused.before(algorithm, batch, torch.float32) is not None
