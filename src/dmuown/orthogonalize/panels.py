"""x <- q x in x's own memory, for groups that trade a little time for memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from dmuown.orthogonalize.backends import Operations

# Where no kernel does all panels at once, each is a product of its own: many for what is short and takes little memory.
_LEAST_ROWS = 128
_MOST_PANELS = 32
_ROWS_THAT_PAY = 1024  # for any number of panels

TOWARDS_START, TOWARDS_END, IN_PLACE = -1, 1, 0


def works_in_place(m: int, n: int) -> bool:
    """Whether it pays for an m x n matrix: there is memory to spare, and not in many small products."""
    return m >= _LEAST_ROWS and n >= 2 * m and (m >= _ROWS_THAT_PAY or n <= _MOST_PANELS * m)


def turns(runs: int) -> list[int]:
    """How each of so many products turns the columns, so that they end where they began."""
    return [TOWARDS_START, TOWARDS_END] * (runs // 2) + [IN_PLACE] * (runs % 2)


def multiply_by_panels(q: Tensor, x: Tensor, free: Tensor, ops: Operations, turn: int) -> None:
    """x <- q x, the columns turned by m towards the start, towards the end, or not at all.

    A column of q x needs that column of x alone. So the result of a panel of m columns goes where the panel beside it
    was, which nobody needs any more; the first result waits in `free` for the place of the last panel. That moves every
    column by m, and copies m of the n columns; without a turn all of them are copied. Operations that do the same in
    one kernel choose their own width.

    Args:
        q: [B, m, m].
        x: [B, m, n] with n >= m, rows or columns contiguous. Changed in place.
        free: [B, m, m], contiguous, overwritten.
        ops: Who multiplies.
        turn: `TOWARDS_START`, `TOWARDS_END` (its inverse) or `IN_PLACE`.
    """
    m, n = x.shape[-2:]
    if turn != IN_PLACE and ops.product_in_place(q, x, free, turn):
        return
    if x.stride(-2) == 1:
        free = free.mT  # stored as x, so that the copy reads and writes contiguous memory
    if turn == IN_PLACE:
        for start in range(0, n, m):
            panel = x[..., start : start + m]
            panel.copy_(ops.product(q, panel, out=free[..., : panel.size(-1)]))
    elif turn == TOWARDS_START:
        ops.product(q, x[..., :m], out=free)
        for start in range(m, n, m):
            stop = min(start + m, n)
            ops.product(q, x[..., start:stop], out=x[..., start - m : stop - m])
        x[..., n - m :].copy_(free)
    else:
        ops.product(q, x[..., n - m :], out=free)
        for stop in range(n - m, 0, -m):
            start = max(stop - m, 0)
            ops.product(q, x[..., start:stop], out=x[..., start + m : stop + m])
        x[..., :m].copy_(free)
