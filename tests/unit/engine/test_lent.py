"""What is lent to a collective on the CPU is given back before anything else happens to it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from dmuown.engine import lent
from dmuown.engine.lent import Loan, on_loan
from dmuown.ownership.link import InFlight


def test_an_alias_is_lent() -> None:
    loan, tensor = Loan(), torch.zeros(3)
    alias = loan.lend(tensor)
    assert alias is not tensor
    alias.fill_(2)
    assert tensor.tolist() == [2, 2, 2]
    elsewhere = torch.zeros(3, device="meta")
    assert loan.lend(elsewhere) is elsewhere
    reference = weakref.ref(alias)
    del alias
    loan.settle()
    assert reference() is None


@pytest.mark.parametrize("holder", ["C++", "Python"])
def test_settling_waits_for_whoever_holds_an_alias(holder: str) -> None:
    """As a thread of gloo does: first the tensor itself, then the object that Python knows it by."""
    loan = Loan()
    held: Any = nn.Parameter(torch.zeros(3)) if holder == "C++" else nn.Module()
    held.grad = loan.lend(torch.zeros(3))
    loan.lend(torch.zeros(2))
    settling = threading.Thread(target=loan.settle)
    settling.start()
    settling.join(0.1)
    assert settling.is_alive()
    held.grad = None
    settling.join(10)
    assert not settling.is_alive()


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent, "_PATIENCE", 0.01)
    loan = Loan()
    kept = loan.lend(torch.zeros(3))
    loan.settle()
    assert kept.tolist() == [0, 0, 0]


def test_a_collective_that_returns_when_it_is_done() -> None:
    given: list[weakref.ref[torch.Tensor]] = []

    def double(tensor: torch.Tensor, other: torch.Tensor, *, factor: int) -> None:
        given.extend((weakref.ref(tensor), weakref.ref(other)))
        tensor.mul_(factor).add_(other)

    one, two = torch.ones(2), torch.full((2,), 3.0)
    on_loan(double, one, two, factor=2)
    assert one.tolist() == [5, 5]
    assert [reference() for reference in given] == [None, None]


def test_a_collective_under_way_is_over_when_its_handle_is_dropped_and_nothing_is_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Work:
        """Holds what it works on, as the handles of torch do."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def wait(self) -> None:
            events.append("waited for")

    settle = Loan.settle

    def settled(loan: Loan) -> None:
        events.append("handle kept" if handle() is not None else "handle dropped")
        settle(loan)
        events.append("settled")

    monkeypatch.setattr(Loan, "settle", settled)
    events: list[str] = []
    pending, tensor = InFlight(), torch.zeros(2)
    pending.work = Work(pending.hold(tensor))
    handle = weakref.ref(pending.work)
    assert pending.held == [tensor]
    pending.wait()
    assert events == ["waited for", "handle dropped", "settled"]
