"""Products in their operand's own memory: the same numbers, columns back where they began, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dmuown.orthogonalize import Orthogonalizer, panels
from dmuown.orthogonalize.backends import TORCH
from dmuown.orthogonalize.blocks import blocks_from_split_sizes, orthogonalize_blocks, temporary_bytes
from dmuown.orthogonalize.panels import IN_PLACE, TOWARDS_END, TOWARDS_START, multiply_by_panels, turns, works_in_place
from tests.memory import Held

SHAPES = [(2, 4, 8), (1, 4, 12), (3, 5, 12), (2, 4, 11), (1, 1, 7), (2, 3, 6)]


@pytest.mark.parametrize("stored", ["rows", "columns"])
@pytest.mark.parametrize("turn", [TOWARDS_START, TOWARDS_END, IN_PLACE])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_in_its_own_memory(shape: tuple[int, int, int], turn: int, stored: str) -> None:
    batch, m, _ = shape
    x = torch.randn(shape, dtype=torch.float64)
    x = x if stored == "rows" else x.mT.contiguous().mT
    q = torch.randn(batch, m, m, dtype=torch.float64)
    expected = torch.roll(q @ x, turn * m, dims=-1)
    memory = x.data_ptr()
    multiply_by_panels(q, x, torch.full((batch, m, m), float("nan"), dtype=torch.float64), TORCH, turn)
    torch.testing.assert_close(x, expected, rtol=1e-13, atol=1e-13)
    assert x.data_ptr() == memory


@pytest.mark.parametrize("runs", range(1, 6))
def test_columns_end_where_they_began(runs: int) -> None:
    assert len(turns(runs)) == runs
    assert sum(turns(runs)) == 0


@pytest.mark.parametrize("options", [{"steps": steps} for steps in (1, 2, 3, 5, 8)] + [{"form": "plain"}], ids=str)
@pytest.mark.parametrize("shape", [(2, 128, 256), (1, 128, 300), (2, 530, 130), (1, 1, 9), (2, 64, 130)], ids=str)
def test_orthogonalized_in_place_as_apart(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    options = {"scheme": "polar_express", "dtype": torch.float64, "backend": "torch", **options}
    given = x.clone()
    within = Orthogonalizer(**options, in_place=True)(given)
    torch.testing.assert_close(within, Orthogonalizer(**options)(x), rtol=1e-10, atol=1e-12)
    assert torch.equal(given, x)  # without `overwrite` the input stays


def test_no_second_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is as large as x, one tensor: x itself, normalized."""
    made: list[int] = []
    wide = [(2, 128, 384), (2, 384, 128)]
    real_like, real_empty = torch.empty_like, torch.empty

    def like(x: Tensor, **options: Any) -> Tensor:
        made.append(x.numel())
        return real_like(x, **options)

    def empty(*size: Any, **options: Any) -> Tensor:
        result: Tensor = real_empty(*size, **options)
        made.append(result.numel())
        return result

    monkeypatch.setattr(torch, "empty_like", like)
    monkeypatch.setattr(torch, "empty", empty)
    for shape in wide:
        for in_place, copies in ((True, 1), (False, 2)):
            made.clear()
            Orthogonalizer(dtype=torch.float32, backend="torch", in_place=in_place)(torch.randn(shape))
            assert sum(size == 2 * 128 * 384 for size in made) == copies


def test_temporary_bytes_by_hand() -> None:
    """x and q x, or x alone; R, P, Q and one more to multiply into, or R and P where every step starts afresh."""
    mib = 2**20
    half: dict[str, Any] = {"dtype": torch.float16}
    assert Orthogonalizer(**half).temporary_bytes(8192, 2048) == (2 * 32 + 4 * 8) * mib
    assert Orthogonalizer(**half, in_place=True).temporary_bytes(2048, 8192) == (32 + 4 * 8) * mib
    assert Orthogonalizer(**half, in_place=True).temporary_bytes(2048, 2048) == (2 * 8 + 2 * 8) * mib
    assert Orthogonalizer(**half, form="plain", in_place=True).temporary_bytes(2048, 8192) == (32 + 2 * 8) * mib
    assert Orthogonalizer(dtype=torch.float32).temporary_bytes(8192, 2048) == 2 * 96 * mib
    sizes = [(128, 255), (128, 256), (128, 4096), (128, 4097), (127, 512), (1024, 99_999)]
    assert [works_in_place(*size) for size in sizes] == [False, True, True, False, False, True]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("options", [{}, {"form": "plain"}, {"form": "gram"}, {"steps": 1}, {"steps": 2}], ids=str)
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((128, 512), ()),
        ((512, 128), ()),
        ((64, 64), ()),
        ((96, 128), ()),
        ((384, 128), (128, 128, 128)),
        ((64, 512), (8,) * 8),
        ((384, 512), (256, 64, 64)),
        ((160, 512), (128, 32)),
    ],
    ids=str,
)
def test_temporary_bytes_are_those_made(
    shape: tuple[int, int],
    sizes: tuple[int, ...],
    options: dict[str, Any],
    in_place: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never fewer, and not many more: blocks of unlike rows are counted as if all of one kind were there at once."""
    orthogonalizer = Orthogonalizer(dtype=torch.float32, backend="torch", in_place=in_place, **options)
    blocks = blocks_from_split_sizes(sizes, shape[0]) if sizes else ()
    with Held() as held:
        orthogonalize_blocks(torch.randn(2, *shape), blocks, orthogonalizer)
    counted = 2 * temporary_bytes(orthogonalizer, blocks, *shape)
    assert held.most - 2 * 4 * shape[0] * shape[1] <= counted + 4096  # but the input, and norms
    assert counted <= 2.1 * held.most


def test_operations_with_a_kernel_for_it_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def product_in_place(a: Tensor, x: Tensor, free: Tensor, turn: int) -> bool:
        asked.append(turn)
        x.copy_(torch.roll(a @ x, 3 * turn, dims=-1))  # a width of its own
        return True

    monkeypatch.setattr(TORCH, "product_in_place", product_in_place, raising=False)
    x = torch.randn(2, 128, 500, dtype=torch.float64)
    options: dict[str, Any] = {"dtype": torch.float64, "backend": "torch"}
    torch.testing.assert_close(Orthogonalizer(**options, in_place=True)(x), Orthogonalizer(**options)(x))
    assert asked == [panels.TOWARDS_START, panels.TOWARDS_END]
