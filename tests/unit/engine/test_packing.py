"""What is copied around the exchange: any rows and columns, in any dtype, and nothing where nothing has to be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmuown.engine.exchange import _in_words, _packed, _put, _take

ROWS = [slice(2, 6), slice(0, 8), torch.tensor([0, 3, 5, 6])]
COLUMNS = [slice(0, 12), slice(4, 8), slice(1, 6), slice(3, 12), torch.tensor([1, 2, 9])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", COLUMNS, ids=str)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_pieces_go_where_they_belong(rows: slice | Tensor, columns: slice | Tensor, dtype: torch.dtype) -> None:
    row_numbers, column_numbers = torch.arange(8)[rows], torch.arange(12)[columns]
    piece = torch.randn(3, len(row_numbers), len(column_numbers)).to(dtype)
    whole = torch.full((3, 8, 12), 7.0, dtype=dtype)
    expected = whole.clone()
    for i, row in enumerate(row_numbers):
        for j, column in enumerate(column_numbers):
            expected[:, row, column] = piece[:, i, j]
    _put(whole, rows, columns, piece)
    assert torch.equal(whole, expected)
    assert torch.equal(_take(whole, rows, columns), piece)


def test_copies_go_by_words_where_rows_allow_it() -> None:
    whole = torch.randn(3, 8, 12).to(torch.bfloat16)
    words = _in_words(whole[:, 2:6])
    assert words is not None
    assert words.shape == (3, 4, 3)
    for narrow in (whole[:, :, 1:5], whole[:, :, :6], whole.mT, whole[:, :, :10][:, :, ::2], whole[:0]):
        assert _in_words(narrow) is None
    assert _in_words(torch.randn(2, 3, 4, dtype=torch.float64)) is None  # they are words already


def test_matrices_side_by_side_are_sent_as_they_are() -> None:
    stack = torch.randn(4, 6, 5).to(torch.bfloat16)
    message = _packed([stack[1], stack[2], stack[3]], torch.bfloat16)
    assert message.data_ptr() == stack[1].data_ptr()
    assert torch.equal(message, stack[1:].reshape(-1))
    for matrices in (
        [stack[2], stack[1]],
        [stack[0], stack[2]],
        [torch.empty(5, 6, dtype=torch.bfloat16).copy_(stack[0].mT).mT, stack[1]],
        [matrix.mT.contiguous().mT for matrix in stack],
        list(stack.float()),
    ):
        message = _packed(matrices, torch.bfloat16)
        assert torch.equal(message, torch.cat([matrix.to(torch.bfloat16).reshape(-1) for matrix in matrices]))
    assert _packed([torch.empty(0, 5)], torch.float32).shape == (0,)
