"""What an algorithm sees of a bucket: logical local matrices, their state, and reductions over shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dmuown.errors import OptionError

T = TypeVar("T")

#: A phase of an algorithm: yields exactly where a collective is in flight, and returns a value.
Work = Generator[None, None, T]


class DeclaredState(dict[str, T]):
    """State by buffer name; names that the algorithm did not declare are refused.

    Args:
        algorithm: Name of the algorithm, for errors.
        values: One entry per declared buffer.
    """

    def __init__(self, algorithm: str, values: Mapping[str, T]) -> None:
        super().__init__(values)
        self._algorithm = algorithm

    def _refuse(self, key: str) -> NoReturn:
        raise OptionError(
            f"{self._algorithm}.state_spec",
            f"declares no buffer {key!r}, only {', '.join(map(repr, self)) or 'none'}",
            "Declare it, so that it is allocated, sharded, saved and loaded",
        )

    def __missing__(self, key: str) -> T:
        self._refuse(key)

    def __setitem__(self, key: str, value: T) -> None:
        if key not in self:
            self._refuse(key)
        super().__setitem__(key, value)


@dataclass
class MatrixBatch:
    """Parameters of one bucket: equal shape, placements, mesh, dtype and hyper-parameters.

    Every list has one entry per parameter. Matrices are views `[batch, m_local, n_local]` of this
    rank's storage, output rows first whatever the storage order; a rank may hold an empty shard.

    Attributes:
        names: Parameter names, for errors.
        weights: The weights, updated in place.
        gradients: The gradients; never written. Zeros stand in for one that is absent here but
            present on another rank.
        state: By buffer name: `"grad"` buffers as the weights are, `"grad_rows"` as `[batch, m_local, 1]`,
            scalars as 0-d tensors.
        options: The group's options, complete and validated.
        m: Output neurons of a whole logical matrix.
        n: Input features of a whole logical matrix.
        block_rows: Rows of each block of a fused weight, or None where the matrix is one block.
        block_of_row: For each local row, the index of its block, int64 `[m_local]`, or None.
        scratch: What the first half of an algorithm keeps for the second.
        input_group: Ranks that share the rows of these matrices; None where rows are whole.
        output_group: Ranks that share the columns; None where columns are whole.
    """

    names: list[str]
    weights: list[Tensor]
    gradients: list[Tensor]
    state: Mapping[str, list[Tensor]]
    options: Mapping[str, Any]
    m: int
    n: int
    block_rows: tuple[int, ...] | None = None
    block_of_row: Tensor | None = None
    scratch: dict[str, Any] = field(default_factory=dict)
    input_group: dist.ProcessGroup | None = None
    output_group: dist.ProcessGroup | None = None

    def sum_rows(self, partial: Sequence[Tensor]) -> Work[list[Tensor]]:
        """Complete sums over the input axis: `[..., m_local, 1]` partial on every rank that shares the rows."""
        return (yield from _all_reduce(partial, self.input_group))

    def sum_blocks(self, rows: Sequence[Tensor]) -> Work[list[Tensor]]:
        """Sum complete per-row numbers over each logical matrix (expert, block or head).

        Args:
            rows: `[..., m_local, 1]` tensors, complete along the input axis; all in one collective.

        Returns:
            Tensors that broadcast against the rows, each row reading its own matrix's sum.
        """
        if self.block_of_row is None or self.block_rows is None:
            return (yield from _all_reduce([row.sum(dim=-2, keepdim=True) for row in rows], self.output_group))
        blocks = torch.arange(len(self.block_rows), device=self.block_of_row.device)
        member = self.block_of_row == blocks[:, None]
        # A selection, not a product with zeros: a non-finite block leaves its neighbours alone.
        partial = [torch.where(member, row.mT, 0).sum(dim=-1, keepdim=True) for row in rows]
        whole = yield from _all_reduce(partial, self.output_group)
        return [total.index_select(-2, self.block_of_row) for total in whole]

    def row_scale(self, scale: Callable[[int, int], float]) -> float | Tensor:
        """Evaluate a shape-dependent factor `scale(rows, cols)` for the logical matrix of each row.

        Returns:
            A float where all blocks agree, else an fp32 tensor `[m_local, 1]`.
        """
        if self.block_of_row is None or self.block_rows is None:
            return scale(self.m, self.n)
        factors = [scale(rows, self.n) for rows in self.block_rows]
        if len(set(factors)) == 1:
            return factors[0]
        # Filled on the device: a table from the host would be copied in every step, and not at all under capture.
        per_row = torch.zeros_like(self.block_of_row, dtype=torch.float32)
        for block, factor in enumerate(factors):
            per_row.masked_fill_(self.block_of_row == block, factor)
        return per_row[:, None]

    def check_returned(self, algorithm: str, phase: str, values: Sequence[Tensor]) -> None:
        """Check that a phase returned one tensor per parameter, of the weights' local shape.

        Raises:
            OptionError: It did not.
        """
        wanted = self.weights[0].shape
        if len(values) != len(self.weights):
            raise OptionError(f"{algorithm}.{phase}", f"must return {len(self.weights)} tensors, got {len(values)}")
        for value, name in zip(values, self.names, strict=True):
            if value.shape != wanted:
                raise OptionError(
                    f"{algorithm}.{phase}",
                    f"must return a tensor of shape {tuple(wanted)} for {name}, got {tuple(value.shape)}",
                    "Each phase works on this rank's shards, [batch, m_local, n_local]",
                )

    def __len__(self) -> int:
        return len(self.weights)


def _all_reduce(values: Sequence[Tensor], group: dist.ProcessGroup | None) -> Work[list[Tensor]]:
    """Sum lists of tensors over a group, in one collective for the whole list."""
    if group is None or not values:
        return list(values)
    flat = torch.cat([value.reshape(-1) for value in values])
    # Empty on all ranks that share these rows, or on none. They yield all the same: see `engine.exchange`.
    work = dist.all_reduce(flat, group=group, async_op=True) if flat.numel() else None
    yield
    if work is not None:
        work.wait()
    pieces = flat.split([value.numel() for value in values])
    return [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]
