"""No thread of gloo holds a tensor that Python knows once a collective of the runtime is over, so none asks for the
interpreter's lock while the program ends."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import dmuown
from dmuown.diagnostics.traffic import TrafficCounter
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import batch, build, loss_of
from tests.distributed.ownership.training import assert_nothing_but_homes, dedicated, mesh_of


class Borrowers(TrafficCounter):
    """Notes every tensor that is given to a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, weakref.ref[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            leaves = tree_leaves((args, kwargs))
            self.given += [(name, weakref.ref(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def kept(self) -> list[str]:
        """Kinds of collectives whose tensors are still known to somebody."""
        return [name for name, reference in self.given if reference() is not None]


def _train(rank: int, world_size: int, replicate: int) -> set[str]:
    model = build(layers=2)
    dedicated(model, mesh_of(world_size, replicate=replicate))
    optimizer = dmuown.Muown(model, lr=0.01)
    with Borrowers() as borrowers:
        for step in range(2):
            loss_of(model, batch(step, rank)).backward()
            assert borrowers.kept() == []
            dmuown.clip_grad_norm_(model, 1.0)
            dmuown.clip_grad_norm_(model, 1.0, torch.inf)
            assert borrowers.kept() == []
            optimizer.step()
            optimizer.zero_grad()
        with dmuown.gathered(model):
            assert borrowers.kept() == []
    assert_nothing_but_homes(model)
    return set(borrowers.kinds)


def test_nothing_is_held_after_a_collective(ranks2: RankPool, ranks4: RankPool) -> None:
    kinds = {"broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce"}
    assert ranks2.run(_train, 1) == [kinds] * 2
    assert ranks4.run(_train, 2) == [kinds] * 4
