"""Tensors lent to a collective on the CPU, kept until it has let go of them.

A thread of gloo says that a collective is done, and drops its tensors a moment later. For one that Python knows it asks
for the interpreter's lock; an interpreter that is shutting down ends threads that ask, and in a C++ destructor that
ends the process: `terminate called without an active exception` (pytorch/pytorch#190489). So a collective gets aliases
of its tensors that nothing else refers to, and is over when nothing refers to them any more.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

#: Seconds after which to go on all the same.
_PATIENCE = 1.0


class Loan:
    """Aliases of what one collective reads or writes."""

    def __init__(self) -> None:
        self._aliases: list[Tensor] = []
        self._before: list[tuple[int, int]] = []

    def lend(self, tensor: Tensor) -> Tensor:
        """Return an alias for the collective, not to be kept; on a device, which no thread holds, the tensor itself."""
        if tensor.device.type != "cpu":
            return tensor
        alias = tensor.detach()
        self._aliases.append(alias)
        self._before.append(_references(alias))
        return alias

    def settle(self) -> None:
        """Wait until nothing else holds the aliases. The collective is done, and its handle dropped."""
        pause, waited = 1e-5, 0.0
        for index, before in enumerate(self._before):
            alias = self._aliases[index]
            while _references(alias) > before and waited < _PATIENCE:
                time.sleep(pause)  # gives up the interpreter's lock
                waited, pause = waited + pause, min(2 * pause, 1e-3)
        self._aliases.clear()
        self._before.clear()


def on_loan(collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> None:
    """Run a collective of `torch.distributed` that returns when it is done, with aliases of its tensors."""
    loan = Loan()
    collective(*map(loan.lend, tensors), **options)
    loan.settle()


def _references(alias: Tensor) -> tuple[int, int]:
    """References to a tensor from C++ and from Python, the second of which are dropped later."""
    return alias._use_count(), sys.getrefcount(alias)  # type: ignore[attr-defined]
