"""Tensors lent to a collective on the CPU, and when they are given back.

A thread of gloo says that a collective is done, and lets go of its tensors a moment later. Had Python dropped one in
between, that thread would free it, for which it needs the interpreter's lock. An interpreter that is shutting down ends
threads that ask for it, and C++ makes that the end of the process: `terminate called without an active exception`
(pytorch/pytorch#190489). So what was lent is kept until it has been given back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from torch import Tensor

#: Seconds after which to go on all the same: something else has come to hold the tensors.
_PATIENCE = 1.0


class Loan:
    """Tensors, and how many references C++ has to each of them before the collective.

    Args:
        tensors: What the collective reads or writes; it is to be issued afterwards.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._lent: list[tuple[Tensor, int]] = []
        self.add(*tensors)

    def add(self, *tensors: Tensor) -> None:
        """Lend more; those on devices are left out, since no thread holds them."""
        self._lent += [(tensor, _references(tensor)) for tensor in tensors if tensor.device.type == "cpu"]

    def settle(self) -> None:
        """Wait until all are given back. The collective is done, and the caller has dropped its handle of it."""
        pause, waited = 1e-5, 0.0
        for tensor, before in self._lent:
            while _references(tensor) > before and waited < _PATIENCE:
                time.sleep(pause)  # which also lets go of the interpreter's lock
                waited, pause = waited + pause, min(2 * pause, 1e-3)
        self._lent.clear()


@contextlib.contextmanager
def lent(*tensors: Tensor) -> Iterator[None]:
    """Run a collective that is waited for in the body; its tensors are given back at the end."""
    loan = Loan(tensors)
    yield
    loan.settle()


def _references(tensor: Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count
