"""Every test of a dedicated model asserts, by storage sizes, that a rank holds nothing of what it does not own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from dmuown.ownership import dedicated_records
from tests.distributed.harness import RankPool
from tests.distributed.ownership.models import batch, build, loss_of
from tests.distributed.ownership.training import assert_nothing_but_homes, dedicated, mesh_of

_DEDICATES = {"dedicated", "dedicate_params", "_make"}
_ASSERTS = {"assert_nothing_but_homes"}
# Here every dedication is refused, or the model has no data anywhere.
_WITHOUT = {"_selection", "_meshes", "_disagreeing", "_still_meta"}


def _called(function: ast.FunctionDef) -> set[str]:
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            names.add(node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", ""))
    return names


def test_every_test_asserts_it() -> None:
    bare = []
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for function in ast.parse(file.read_text()).body:
            if (
                not isinstance(function, ast.FunctionDef)
                or not function.args.args
                or function.name in {"_make", *_WITHOUT}
            ):
                continue
            called = _called(function)
            if function.args.args[0].arg == "rank" and called & _DEDICATES and not called & _ASSERTS:
                bare.append(f"{file.name}: {function.name}")
    assert not bare, bare


def _kept(rank: int, world_size: int, what: str) -> None:
    model = build()
    dedicated(model, mesh_of(world_size))
    loss_of(model, batch(0, rank)).backward()
    assert_nothing_but_homes(model)
    record = next(record for record in dedicated_records(model).values() if not record.owned)
    if what == "data":
        record.home.untyped_storage().resize_(4)
    elif what == "gradient":
        record.home.grad = torch.zeros(record.shape, dtype=record.home.dtype)
    else:
        assert record.compute is not None
        record.compute.untyped_storage().resize_(4)
    with pytest.raises(AssertionError, match=record.name):
        assert_nothing_but_homes(model)


@pytest.mark.parametrize("what", ["data", "gradient", "compute"])
def test_the_assertion_sees_what_is_kept(ranks2: RankPool, what: str) -> None:
    ranks2.run(_kept, what, timeout=60)
