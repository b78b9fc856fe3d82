"""State bytes of every algorithm at every precision, odd shapes included: what is said is what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dmuown
from dmuown.algorithms.base import get_algorithm
from dmuown.state.lowbit import is_low_bit, storage_bytes
from tests.unit.algorithms import variants as variants

MATRIX = ("muon", "normuon", "muown", "normuown", "angular_muown", "my_variant")
ELEMENTWISE = {"adamw": 2, "adam": 2, "lion": 1}

#: Bytes an element, and those of an fp32 scale for the elements that share one.
CODES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
BLOCKS = {"int8": (256, 128, 64), "fp8": (256, 128, 64), "int4": (128, 64)}

#: Matrices whose elements divide into blocks of 64, 128 and 256 or do not; stacks; one row; one column.
SHAPES = [(64, 96), (5, 64), (3, 128), (7, 9), (1, 256), (256, 1), (3, 5, 7), (2, 8, 32), (33, 17)]


def bytes_per_buffer(shape: tuple[int, ...], precision: str) -> tuple[float, bool]:
    """Bytes of one buffer shaped like the gradient, and whether it is low-bit."""
    elements = torch.Size(shape).numel()
    if precision in BLOCKS:
        block = next((size for size in BLOCKS[precision] if elements % size == 0), None)
        if block is None:
            return 4.0 * elements, False  # stays in the parameter's dtype
        return CODES[precision] * elements + 4 * (elements // block), True
    return CODES[precision] * elements, False


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", CODES)
def test_state_bytes(precision: str, shape: tuple[int, ...]) -> None:
    """4, 2, about 1 or about 0.5 bytes an element and buffer; at most 5 fp32 numbers a row, and a counter."""
    each, low_bit = bytes_per_buffer(shape, precision)
    rows = torch.Size(shape[:-1]).numel()
    for algorithm in (*MATRIX, *ELEMENTWISE):
        param = torch.nn.Parameter(torch.randn(shape))
        group: dict[str, Any] = {"params": [param], "algorithm": algorithm, "state_precision": precision}
        state = dmuown.Muon([group], weight_decay=0.0).state[param]
        spec = get_algorithm(algorithm).state_spec
        shaped = [key for key, buffer in spec.items() if buffer.like == "grad"]
        per_row = [key for key, buffer in spec.items() if buffer.like == "grad_rows"]
        scalars = [key for key, buffer in spec.items() if buffer.like == "scalar"]
        assert set(state) == {*shaped, *per_row, *scalars}
        assert len(shaped) == ELEMENTWISE.get(algorithm, 1)
        assert len(per_row) <= 5
        for key in shaped:
            assert storage_bytes(state[key]) == each, (algorithm, key)
            assert is_low_bit(state[key]) == low_bit
        total = sum(storage_bytes(value) for value in state.values())
        assert total == len(shaped) * each + 4 * (len(per_row) * rows + len(scalars)), algorithm


def test_the_guide_says_so() -> None:
    """The figures of docs/guides/low-memory.md, at the block sizes that wide matrices get."""
    for precision, said in {"fp32": 4, "bf16": 2, "int8": 1.02, "fp8": 1.02, "int4": 0.53}.items():
        assert round(bytes_per_buffer((512, 512), precision)[0] / 512**2, 2) == said


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_without_a_precision_state_has_the_parameters_dtype(dtype: torch.dtype) -> None:
    for algorithm in (*MATRIX, *ELEMENTWISE):
        param = torch.nn.Parameter(torch.randn(6, 4).to(dtype))
        state = dmuown.Muon([{"params": [param], "algorithm": algorithm}], weight_decay=0.0).state[param]
        spec = get_algorithm(algorithm).state_spec
        for key, value in state.items():
            assert value.dtype == (dtype if spec[key].like == "grad" and spec[key].dtype is None else torch.float32)
