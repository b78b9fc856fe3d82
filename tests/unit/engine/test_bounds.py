"""What a group lets a task take at once: counted by hand, in tasks of equal size, without a change of results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.engine.bounds import is_bounded, params_at_once
from dmuown.engine.owners import Owners
from dmuown.orthogonalize import Orthogonalizer

# fp32, 64 x 256 in place: x, and four matrices of 64 x 64.
WIDE = 4 * (64 * 256 + 4 * 64 * 64)
# 64 x 64, plain: x, its successor, R and P.
SQUARE = 4 * (4 * 64 * 64)


def build(**options: Any) -> tuple[dmuown.Muon, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(64, 256)] * 5 + [(64, 64)] * 5 + [(3, 64, 256)]
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return dmuown.Muon(params, ns_dtype=torch.float32, lr=0.1, **options), params


@pytest.mark.parametrize(
    ("options", "wide", "square"),
    [
        ({"batch_bytes": 1}, [1] * 5, [1] * 5),
        ({"batch_bytes": 2 * WIDE - 1}, [1] * 5, [3, 2]),
        ({"batch_bytes": 2 * WIDE}, [2, 2, 1], [3, 2]),
        ({"batch_bytes": 4 * WIDE}, [3, 2], [5]),
        ({"batch_bytes": 5 * WIDE}, [5], [5]),
        ({"batch_bytes": 4 * SQUARE}, [2, 2, 1], [3, 2]),
        ({"batch_bytes": 5 * WIDE, "batch_size": 2}, [2, 2, 1], [2, 2, 1]),
        ({"batch_bytes": 2 * WIDE, "batch_size": 4}, [2, 2, 1], [3, 2]),
        ({"batch_bytes": 5 * WIDE, "foreach": False}, [1] * 5, [1] * 5),
        ({"batch_size": 4}, [3, 2], [3, 2]),
    ],
    ids=str,
)
def test_tasks_hold_what_the_group_allows(
    options: dict[str, Any], wide: list[int], square: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[tuple[int, ...], list[int]] = {}
    real = Orthogonalizer.__call__

    def counted(self: Orthogonalizer, x: Tensor, **others: bool) -> Tensor:
        taken.setdefault(tuple(x.shape[1:]), []).append(len(x))
        return real(self, x, **others)

    bounded, params = build(**options)
    whole, others = build(batch_size=100)
    monkeypatch.setattr(Orthogonalizer, "__call__", counted)
    bounded.step()
    experts = taken[64, 256].pop()  # three matrices of one parameter are one task, whatever is allowed
    assert (taken, experts) == ({(64, 256): wide, (64, 64): square}, 3)
    whole.step()
    for one, other in zip(params, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 4, 7, 8])
def test_ranks_share_what_is_taken_at_once(count: int) -> None:
    """Four ranks: each holds its matrix, and a quarter of what all get and send back, eight matrices at a time."""
    optimizer, _ = build()
    bucket = next(bucket for bucket in optimizer.plan.buckets if bucket.layout.n == 256 and len(bucket.params) == 5)
    owners = Owners(team=((0, 1, 2, 3),))
    apart = 4 * (2 * 64 * 256 + 4 * 64 * 64)  # the group bounds nothing, so that x has a successor
    held = apart + 4 * 2 * 64 * 256
    assert params_at_once(bucket, owners, {"batch_bytes": 1}, count) == min(count, 4)
    assert params_at_once(bucket, owners, {"batch_bytes": held}, count) == min(count, 4)
    assert params_at_once(bucket, owners, {"batch_bytes": 2 * held - 1}, count) == min(count, 4)
    assert params_at_once(bucket, owners, {"batch_bytes": 2 * held}, count) == count
    replicas = Owners(team=((0, 1), (2, 3)))
    wider = apart + 4 * 2 * 2 * 64 * 256  # two ranks share a matrix, so that each holds half of it
    assert params_at_once(bucket, replicas, {"batch_bytes": 2 * wider - 1}, count) == min(count, 4)
    assert params_at_once(bucket, replicas, {"batch_bytes": 2 * wider}, count) == count


def test_tasks_are_even_over_the_ranks_that_divide_them() -> None:
    """Six matrices, at most five at once, for two ranks: four and two, not three and three or five and one."""
    optimizer, _ = build()
    bucket = next(bucket for bucket in optimizer.plan.buckets if bucket.layout.n == 256 and len(bucket.params) == 5)
    assert params_at_once(bucket, Owners(team=((0, 1),)), {"batch_size": 5}, 6) == 4
    assert params_at_once(bucket, Owners(team=((0,),)), {"batch_size": 5}, 6) == 3
    assert params_at_once(bucket, Owners(team=((0, 1),)), {"batch_size": 3}, 6) == 3  # never more than asked for


def test_which_groups_are_bounded() -> None:
    assert not is_bounded({"batch_size": None, "batch_bytes": None, "foreach": None})
    for options in ({"batch_size": 2}, {"batch_bytes": 1}, {"foreach": False}, {"offload_state": True}):
        assert is_bounded(options)
