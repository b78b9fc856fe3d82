"""A batch larger than its bound is taken a part at a time: the same numbers, in the bound and the result's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.errors import OptionError
from dmuown.orthogonalize import Orthogonalizer
from dmuown.orthogonalize.blocks import blocks_from_split_sizes, temporary_bytes
from tests.memory import Held

SHAPES = [(7, 128, 300), (7, 300, 128), (7, 64, 64), (5, 9, 40), (4, 1, 7), (0, 4, 6), (3, 0, 5)]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("stored", ["rows", "columns"])
@pytest.mark.parametrize("most", [1, 2, 3, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_equal_the_whole(shape: tuple[int, int, int], most: int, stored: str, overwrite: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    x = x if stored == "rows" else x.mT.contiguous().mT
    options: dict[str, Any] = {"dtype": torch.float64, "backend": "torch"}
    whole = Orthogonalizer(**options)
    parts = Orthogonalizer(**options, in_place=True, most_bytes=max(1, most * whole.temporary_bytes(*shape[1:])))
    given = x.clone(memory_format=torch.preserve_format)
    result = parts(given, overwrite=overwrite)
    torch.testing.assert_close(result, whole(x), rtol=1e-10, atol=1e-12)
    assert overwrite or torch.equal(given, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_than_the_inputs(dtype: torch.dtype) -> None:
    x = torch.randn(5, 130, 300)
    options: dict[str, Any] = {"dtype": dtype, "backend": "torch", "in_place": True}
    result = Orthogonalizer(**options, most_bytes=1)(x, overwrite=True)
    assert result.dtype == dtype
    torch.testing.assert_close(result, Orthogonalizer(**options)(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_memory_is_that_of_a_part_and_of_the_result(most: int) -> None:
    orthogonalizer = Orthogonalizer(dtype=torch.float32, backend="torch", in_place=True)
    one = orthogonalizer.temporary_bytes(128, 512)
    bounded = Orthogonalizer(dtype=torch.float32, backend="torch", in_place=True, most_bytes=most * one)
    x = torch.randn(12, 128, 512)
    with Held() as held:
        bounded(x)
    assert held.most <= 2 * x.numel() * 4 + most * one + 4096  # the input, the result, a part
    with Held() as reused:
        bounded(x, overwrite=True)
    assert reused.most <= x.numel() * 4 + most * one + 4096


def test_a_batch_beyond_its_bound_is_counted_as_results_and_a_part() -> None:
    one = 4 * (128 * 512 + 4 * 128 * 128)
    bounded = Orthogonalizer(dtype=torch.float32, in_place=True, most_bytes=2 * one)
    assert bounded.temporary_bytes(128, 512, 2) == 2 * one
    assert bounded.temporary_bytes(128, 512, 12) == 12 * 4 * 128 * 512 + 2 * one
    heads = blocks_from_split_sizes([128] * 12, 12 * 128)
    assert temporary_bytes(bounded, heads, 12 * 128, 512) == 12 * 4 * 128 * 512 + 2 * one
    assert temporary_bytes(bounded, heads, 12 * 128, 512, 3) == 36 * 4 * 128 * 512 + 2 * one


def test_a_matrix_of_nan_stays_in_its_place() -> None:
    x = torch.randn(5, 16, 40)
    x[3, 2, 1] = float("nan")
    result = Orthogonalizer(dtype=torch.float32, backend="torch", most_bytes=1)(x)
    assert [bool(matrix.isfinite().all()) for matrix in result] == [True, True, True, False, True]


def test_a_stack_of_experts_is_taken_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = Orthogonalizer._orthogonalize

    def counted(self: Orthogonalizer, x: Tensor, overwrite: bool) -> Tensor:
        sizes.append(len(x))
        return real(self, x, overwrite)

    monkeypatch.setattr(Orthogonalizer, "_orthogonalize", counted)
    one = 4 * (2 * 64 * 256 + 4 * 64 * 64)
    results = []
    for budget, expected in ((None, [6]), (2 * one, [2, 2, 2]), (one, [1] * 6)):
        generator = torch.Generator().manual_seed(5)
        experts = torch.nn.Parameter(torch.randn(6, 64, 256, generator=generator))
        experts.grad = torch.randn(6, 64, 256, generator=generator)
        sizes.clear()
        dmuown.Muown([experts], lr=0.1, ns_dtype=torch.float32, batch_bytes=budget).step()
        assert sizes == expected
        results.append(experts.detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_bad_bounds_are_named(value: Any) -> None:
    with pytest.raises(OptionError, match="most_bytes"):
        Orthogonalizer(most_bytes=value)
