"""Row blocks of fused weights: each block of output rows is a logical matrix of its own.

A fused q/k/v or gate/up weight [m, n] is one tensor for the GEMM and several matrices for the
optimizer. A block is a `slice` of output rows with explicit start, stop and step (a step above 1
means interleaved rows), or `GroupedRows` where every head or query group holds its part of all
blocks. The blocks of one weight are disjoint and cover all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmuown.errors import OptionError

if TYPE_CHECKING:
    from dmuown.orthogonalize.orthogonalizer import Orthogonalizer


@dataclass(frozen=True)
class GroupedRows:
    """`rows` consecutive rows from `start` on in each of `groups` groups of `period` rows."""

    start: int
    rows: int
    period: int
    groups: int


Block = slice | GroupedRows
Blocks = tuple[Block, ...]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def blocks_from_split_sizes(split_sizes: Sequence[int], m: int) -> Blocks:
    """Contiguous blocks of the given numbers of rows, in order.

    Args:
        split_sizes: Positive ints that sum to `m`.
        m: Output rows of the whole weight.

    Raises:
        OptionError: Empty, not positive ints (bool and float are refused), or another sum.
    """
    if not _is_sequence(split_sizes) or not split_sizes:
        raise OptionError("split_sizes", f"must be a non-empty sequence of ints, got {split_sizes!r}")
    sizes = tuple(split_sizes)
    for size in sizes:
        if not _is_count(size):
            raise OptionError("split_sizes", f"must hold ints of at least 1, got {size!r} in {sizes!r}")
    if sum(sizes) != m:
        rule = f"must sum to the {m} output rows of the weight, but {sizes!r} sums to {sum(sizes)}"
        raise OptionError("split_sizes", rule)
    stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(slice(stop - size, stop, 1) for size, stop in zip(sizes, stops, strict=True))


def blocks_from_heads(num_heads: int, m: int) -> Blocks:
    """`num_heads` contiguous blocks of m / num_heads rows.

    Raises:
        OptionError: Not an int of at least 1, or it does not divide `m`.
    """
    if not _is_count(num_heads):
        raise OptionError("num_heads", f"must be an int of at least 1, got {num_heads!r}")
    if m % num_heads:
        raise OptionError("num_heads", f"must divide the {m} output rows of the weight, got {num_heads}")
    return blocks_from_split_sizes((m // num_heads,) * num_heads, m)


def interleaved_blocks(count: int, m: int) -> Blocks:
    """`count` blocks that take the rows in turn (row i belongs to block i modulo count), as interleaved gate/up.

    Raises:
        OptionError: Not an int of at least 1, or it does not divide `m`.
    """
    if not _is_count(count) or m % count:
        raise OptionError("split_sizes", f"must interleave a divisor of the {m} output rows, got {count!r}")
    return tuple(slice(index, m, count) for index in range(count))


def grouped_blocks(split_sizes: Sequence[int], groups: int, m: int) -> Blocks:
    """Blocks of the given numbers of rows, spread evenly over groups that each hold a part of every block, in order.

    GPT-NeoX's `query_key_value` is (heads x [q, k, v]): sizes (n, n, n) in as many groups as there are heads.

    Args:
        split_sizes: Rows of each block over all groups; multiples of `groups` that sum to `m`.
        groups: Number of groups; 1 is `blocks_from_split_sizes`.
        m: Output rows of the whole weight.

    Raises:
        OptionError: As `blocks_from_split_sizes`, or a size that `groups` does not divide.
    """
    blocks = blocks_from_split_sizes(split_sizes, m)
    if not _is_count(groups):
        raise OptionError("split_groups", f"must be an int of at least 1, got {groups!r}")
    for size in split_sizes:
        if size % groups:
            raise OptionError("split_groups", f"must divide every block's rows, but {groups} does not divide {size}")
    if groups == 1:
        return blocks
    starts = [sum(split_sizes[:index]) // groups for index in range(len(split_sizes))]
    return tuple(
        GroupedRows(start, size // groups, m // groups, groups) for start, size in zip(starts, split_sizes, strict=True)
    )


def block_rows(block: Block) -> int:
    """Number of rows of a block."""
    return len(row_indices(block))


def row_indices(block: Block) -> Sequence[int]:
    """The rows of a block, ascending."""
    if isinstance(block, GroupedRows):
        return [
            group * block.period + row
            for group in range(block.groups)
            for row in range(block.start, block.start + block.rows)
        ]
    return range(block.start, block.stop, block.step or 1)


def _taken(x: Tensor, block: Block) -> Tensor:
    """The rows of a block of x: [B, m, n]; a view for a slice."""
    if isinstance(block, GroupedRows):
        grouped = x.unflatten(1, (block.groups, block.period))
        taken: Tensor = grouped[:, :, block.start : block.start + block.rows].flatten(1, 2)
        return taken
    return x[:, block]


def _put(x: Tensor, block: Block, value: Tensor) -> None:
    if isinstance(block, GroupedRows):
        grouped = x.unflatten(1, (block.groups, block.period))
        grouped[:, :, block.start : block.start + block.rows] = value.unflatten(1, (block.groups, block.rows))
    else:
        x[:, block] = value


def check_blocks(blocks: Blocks, m: int) -> None:
    """Check that blocks are disjoint and cover all `m` rows.

    Raises:
        OptionError: Otherwise.
    """
    rows = sorted(row for block in blocks for row in row_indices(block))
    if rows != list(range(m)):
        raise OptionError("split_sizes", f"must cover each of the {m} output rows exactly once, got blocks {blocks!r}")


def temporary_bytes(orthogonalizer: Orthogonalizer, blocks: Blocks, m: int, n: int, count: int = 1) -> int:
    """Bytes that `orthogonalize_blocks` takes at most for m x n matrices: see `Orthogonalizer.temporary_bytes`.

    Blocks of unlike rows are gathered by their rows, one kind after another, into a result of their own.
    """
    if len(blocks) <= 1:
        return orthogonalizer.temporary_bytes(m, n, count)
    if _uniform(blocks, m):
        return orthogonalizer.temporary_bytes(m // len(blocks), n, count * len(blocks))
    kinds = Counter(block_rows(block) for block in blocks)
    most = max(orthogonalizer.temporary_bytes(rows, n, count * alike) for rows, alike in kinds.items())
    return most + 2 * count * m * n * orthogonalizer.dtype.itemsize


def _uniform(blocks: Blocks, m: int) -> bool:
    rows, rest = divmod(m, len(blocks))
    return rest == 0 and all(
        isinstance(block, slice) and (block.start, block.stop, block.step or 1) == (index * rows, (index + 1) * rows, 1)
        for index, block in enumerate(blocks)
    )


def orthogonalize_blocks(x: Tensor, blocks: Blocks, orthogonalizer: Callable[..., Tensor], **options: bool) -> Tensor:
    """Orthogonalize each block of rows on its own, equal shapes in one batch.

    Args:
        x: [B, m, n] or [m, n] whole matrices, any strides; not changed without `overwrite`.
        blocks: Disjoint, covering the m rows; empty or a single full block is the whole matrix.
        orthogonalizer: Maps [B', rows, n] to the same shape.
        options: Handed to it: `overwrite` of `Orthogonalizer`.

    Returns:
        A tensor of x's shape in the orthogonalizer's dtype; a new one without `overwrite`.

    Raises:
        OptionError: The blocks do not cover the rows exactly once.
    """
    m, n = x.shape[-2:]
    if len(blocks) <= 1:
        if blocks:
            check_blocks(blocks, m)
        return orthogonalizer(x, **options)
    if _uniform(blocks, m):
        # Heads of equal size: splitting a row axis is a view whatever the strides, and so is going back.
        whole = x.reshape(-1, m // len(blocks), n)
        return orthogonalizer(whole, **options).reshape(x.shape)
    check_blocks(blocks, m)
    if x.dim() == 2:
        return orthogonalize_blocks(x.unsqueeze(0), blocks, orthogonalizer, **options).squeeze(0)
    by_rows: dict[int, list[Block]] = {}
    for block in blocks:
        by_rows.setdefault(block_rows(block), []).append(block)
    result: Tensor | None = None
    for rows, same in by_rows.items():
        parts = [_taken(x, block) for block in same]
        # A lone block needs no gathering copy.
        done = orthogonalizer(parts[0] if len(parts) == 1 else torch.stack(parts, 1).view(-1, rows, n), **options)
        if result is None:
            result = torch.empty(x.shape, dtype=done.dtype, device=x.device)
        pieces = done.reshape(x.size(0), len(same), rows, n).unbind(1)
        for block, piece in zip(same, pieces, strict=True):
            _put(result, block, piece)
    assert result is not None
    return result
