"""Products in their operand's own memory: against float64, over edges, beside others on the card, and to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dmuown.kernels import panels
from dmuown.kernels.triton_operations import operations
from dmuown.orthogonalize import Orthogonalizer
from dmuown.orthogonalize.panels import IN_PLACE, TOWARDS_END, TOWARDS_START, multiply_by_panels
from tests.gpu.test_kernels import error, unit

pytestmark = pytest.mark.gpu

# Whole panels, a last one that is partial, rows that fill no tile, many matrices, few programs' worth of tiles.
SIZES = [(3, 2048, 8192), (2, 256, 1000), (5, 264, 712), (1, 1032, 2200), (40, 256, 512), (1, 512, 100_008)]


def case(size: tuple[int, int, int], dtype: torch.dtype, tall: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    """q, x stored by rows or columns, a buffer of NaN, and the width of the kernel's panels."""
    batch, m, _ = size
    generator = torch.Generator(device="cuda").manual_seed(4)
    q = torch.randn(batch, m, m, device="cuda", generator=generator).to(dtype) / m**0.5
    x = unit(*size, torch.float32, tall).mul_(30.0).to(dtype)
    return q, x, torch.full_like(q, float("nan")), 128 if tall else 256


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tall", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_turns_by_a_panel_and_back(size: tuple[int, int, int], tall: bool, dtype: torch.dtype) -> None:
    q, x, free, width = case(size, dtype, tall)
    for turn in (TOWARDS_START, TOWARDS_END):
        results = []
        for _ in range(4):
            value = x.clone()
            free.fill_(float("nan"))
            assert panels.multiply(q, value, free, turn)
            results.append(value)
        exact = torch.roll(q.double() @ x.double(), turn * width, dims=-1)
        assert error(results[0], exact) < (6e-4 if dtype == torch.float16 else 5e-3), turn
        assert all(torch.equal(value, results[0]) for value in results), turn


@pytest.mark.parametrize("tall", [False, True], ids=["rows", "columns"])
def test_a_matrix_of_nan_leaves_its_neighbours_alone(tall: bool) -> None:
    q, x, free, _ = case((4, 264, 712), torch.float16, tall)
    clean, spoilt = x.clone(), x.clone()
    spoilt[2, 5, 300] = float("nan")
    for value in (clean, spoilt):
        assert panels.multiply(q, value, free, TOWARDS_START)
    assert torch.equal(clean[[0, 1, 3]], spoilt[[0, 1, 3]])
    assert spoilt[2].isnan().any()


def test_two_streams_share_a_card() -> None:
    """Neither has all its programs on the card at once; a tile must not wait for a program that cannot start."""
    cases = [case((6, 1024, 4096), torch.float16, tall) for tall in (False, True)]
    alone = []
    for q, x, free, _ in cases:
        alone.append(x.clone())
        assert panels.multiply(q, alone[-1], free, TOWARDS_END)
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(20):
        together = [x.clone() for _, x, _, _ in cases]
        torch.cuda.synchronize()
        for (q, _, free, _), value, stream in zip(cases, together, streams, strict=True):
            with torch.cuda.stream(stream):
                assert panels.multiply(q, value, free, TOWARDS_END)
        torch.cuda.synchronize()
        assert all(torch.equal(value, reference) for value, reference in zip(together, alone, strict=True))


@pytest.mark.parametrize("tall", [False, True], ids=["rows", "columns"])
def test_panel_by_panel_without_a_turn(tall: bool) -> None:
    q, x, free, _ = case((2, 256, 1000), torch.float16, tall)
    exact = q.double() @ x.double()
    multiply_by_panels(q, x, free, operations(), IN_PLACE)
    assert error(x, exact) < 6e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 512, 2048), (3, 2048, 512), (2, 264, 712), (2, 1032, 264), (4, 33, 70)], ids=str)
def test_orthogonalized_in_place_as_apart(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"scheme": "polar_express", "form": "gram", "backend": "triton", "dtype": dtype}
    x = torch.randn(*shape, device="cuda")
    exact = Orthogonalizer(scheme="polar_express", backend="torch", dtype=torch.float64)(x)
    apart = Orthogonalizer(**common)(x)
    ran: list[bool] = []
    real = panels.multiply

    def watched(q: Tensor, x: Tensor, free: Tensor, turn: int) -> bool:
        ran.append(real(q, x, free, turn))
        return ran[-1]

    monkeypatch.setattr(panels, "multiply", watched)
    within = Orthogonalizer(**common, in_place=True)(x)
    assert error(within, exact) < 1.2 * error(apart, exact) + 1e-5
    # There and back; the third run of bf16 is made without a turn.
    assert ran == ([] if min(shape[1:]) < 128 else [dtype.itemsize == 2] * 2)


def test_in_place_spares_what_it_says() -> None:
    batch, m, n = 3, 512, 4096
    x = torch.randn(batch, m, n, device="cuda").half()
    for in_place in (False, True):
        orthogonalizer = Orthogonalizer(backend="triton", dtype=torch.float16, in_place=in_place)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        orthogonalizer(x)
        taken = torch.cuda.max_memory_allocated() - before
        counted = batch * orthogonalizer.temporary_bytes(m, n)
        assert counted <= taken < 1.02 * counted
