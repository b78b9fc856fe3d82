"""What a group lets a task take at once: counted by hand, in tasks of equal size, without a change of results."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.automodel.planned.exchange import plan_exchange
from dmuown.engine.bounds import is_bounded, params_at_once, params_within
from dmuown.engine.owners import Owners, Place, _spread
from dmuown.engine.plan import Bucket
from dmuown.orthogonalize import Orthogonalizer

# fp32, 128 x 512 in place: x, and four matrices of 128 x 128.
WIDE = 4 * (128 * 512 + 4 * 128 * 128)
# 128 x 128, plain: x, its successor, R and P.
SQUARE = 4 * (4 * 128 * 128)
# 64 x 256, too short to be worked on in place.
EXPERT = 4 * (2 * 64 * 256 + 4 * 64 * 64)


def build(**options: Any) -> tuple[dmuown.Muon, list[torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(128, 512)] * 5 + [(128, 128)] * 5 + [(3, 64, 256)] * 5
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return dmuown.Muon(params, ns_dtype=torch.float32, lr=0.1, **options), params


def bucket_of(shape: tuple[int, ...], **options: Any) -> Bucket:
    optimizer, _ = build(**options)
    return next(bucket for bucket in optimizer.plan.buckets if tuple(bucket.params[0].shape) == shape)


@pytest.mark.parametrize(
    ("options", "wide", "square", "experts"),
    [
        ({"batch_bytes": 1}, [1] * 5, [1] * 5, [3] * 5),
        ({"batch_bytes": 2 * WIDE - 1}, [1] * 5, [3, 2], [3] * 5),
        ({"batch_bytes": 2 * WIDE}, [2, 2, 1], [3, 2], [3] * 5),
        ({"batch_bytes": 4 * WIDE}, [3, 2], [5], [9, 6]),
        ({"batch_bytes": 5 * WIDE}, [5], [5], [9, 6]),
        ({"batch_bytes": 15 * EXPERT}, [5], [5], [15]),
        ({"batch_bytes": 4 * SQUARE}, [2, 2, 1], [3, 2], [3] * 5),
        ({"batch_bytes": 5 * WIDE, "batch_size": 2}, [2, 2, 1], [2, 2, 1], [3] * 5),
        ({"batch_bytes": 2 * WIDE, "batch_size": 4}, [2, 2, 1], [3, 2], [3] * 5),
        ({"batch_bytes": 5 * WIDE, "foreach": False}, [1] * 5, [1] * 5, [3] * 5),
        ({"batch_size": 4}, [3, 2], [3, 2], [3] * 5),
        ({"batch_size": 7}, [5], [5], [6, 6, 3]),
    ],
    ids=str,
)
def test_tasks_hold_what_the_group_allows(
    options: dict[str, Any],
    wide: list[int],
    square: list[int],
    experts: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The three experts of a parameter stay together."""
    taken: dict[tuple[int, ...], list[int]] = {}
    real = Orthogonalizer.__call__

    def counted(self: Orthogonalizer, x: Tensor, **others: bool) -> Tensor:
        taken.setdefault(tuple(x.shape[1:]), []).append(len(x))
        return real(self, x, **others)

    bounded, params = build(**options)
    whole, others = build(batch_size=100)
    monkeypatch.setattr(Orthogonalizer, "__call__", counted)
    bounded.step()
    assert taken == {(128, 512): wide, (128, 128): square, (64, 256): experts}
    whole.step()
    for one, other in zip(params, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_hold_what_they_own_and_their_part_of_the_rest(ranks: int) -> None:
    """Each its own matrix, and its part of all that are on their way to owners and back: all, without a mesh."""
    bucket = bucket_of((128, 512), batch_bytes=1)
    held = WIDE + (0 if ranks == 1 else ranks * 4 * 2 * 128 * 512)
    bucket.params = bucket.params * 3
    owners = Owners((tuple(range(ranks)),), tuple(Place(0, unit % ranks) for unit in range(15)))
    for most in (1, 2, 3):
        assert params_within(bucket, owners, most * held) == min(most * ranks, 15)
        assert params_within(bucket, owners, (most + 1) * held - 1) == min(most * ranks, 15)
    assert params_within(bucket, owners, 1) == ranks
    assert params_within(bucket, Owners(owners.team), 1) == 15  # nothing here


def test_replicas_that_divide_the_work_count_too() -> None:
    """Two of two ranks each: gathering takes more than orthogonalizing, a replica's results and a copy of them."""
    bucket = bucket_of((128, 512), batch_bytes=1)
    team = ((0, 1), (2, 3))
    owners = Owners(team, tuple(Place(unit % 2, unit // 2 % 2) for unit in range(5)))
    held = 4 * 128 * 512 * (2 * 2 + 2 * 4)
    assert params_within(bucket, owners, held) == 4
    assert params_within(bucket, owners, 2 * held - 1) == 4
    assert params_within(bucket, owners, 2 * held) == 5


def test_an_owner_of_many_in_a_row_is_counted_so() -> None:
    """Cheap buckets are dealt to those with little to do: seven of rank 1's matrices may come one after another."""
    bucket = bucket_of((128, 512), batch_bytes=1)
    bucket.params = bucket.params * 2
    places = [0, 1, 0, 1, 1, 1, 1, 1, 1, 0]
    owners = Owners(((0, 1),), tuple(Place(0, owner) for owner in places))
    held = WIDE + 2 * 4 * 2 * 128 * 512
    assert params_within(bucket, owners, held) == 1
    assert params_within(bucket, owners, 2 * held) == 2
    assert params_within(bucket, owners, 6 * held) == 7
    assert params_within(bucket, owners, 7 * held) == 10


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_most_together_by_trying_all(most: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        places = tuple(Place(0, int(owner)) for owner in torch.randint(0, 3, (12,), generator=generator))
        expected = max(
            length
            for length in range(1, 13)
            if all(max(Counter(places[at : at + length]).values()) <= most for at in range(13 - length))
        )
        assert Owners((), places).most_together(most) == expected


def test_owners_of_a_bucket_are_spread_over_it() -> None:
    """Not first all of one rank's: a task with a part of them would leave the others idle."""
    places = [Place(0, owner) for owner in [0] * 6 + [1] * 3 + [2] * 3]
    spread = _spread(places)
    assert Counter(spread) == Counter(places)
    for length in range(1, 13):
        for at in range(13 - length):
            held = Counter(place.owner for place in spread[at : at + length])
            assert held[0] <= math.ceil(length / 2) + 1
            assert max(held[1], held[2]) <= length // 4 + 1
    assert [place.owner for place in _spread([Place(0, unit % 3) for unit in range(7)])] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_alternate(replicas: int) -> None:
    """What they gather is padded to the one that has most of a task."""
    spread = _spread([Place(unit % replicas, unit // replicas % 2) for unit in range(4 * replicas)])
    assert [place.replica for place in spread] == list(range(replicas)) * 4


def test_tasks_are_even_over_the_ranks_that_divide_them() -> None:
    """Six matrices, at most five at once, for two ranks: four and two, not three and three or five and one."""
    bucket = bucket_of((128, 512))
    two, one = Owners(team=((0, 1),)), Owners(team=((0,),))
    assert params_at_once(bucket, two, {"batch_size": 5}, 6) == 4
    assert params_at_once(bucket, one, {"batch_size": 5}, 6) == 3
    assert params_at_once(bucket, two, {"batch_size": 3}, 6) == 3  # never more than asked for
    assert params_at_once(bucket, two, {}, 6) == 6
    assert params_at_once(bucket, two, {}, 0) == 1
    experts = bucket_of((3, 64, 256))
    three = Owners(team=((0, 1, 2),))
    assert params_at_once(experts, three, {"batch_size": 12}, 5) == 3  # any number of them has three experts a rank


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("limit", range(1, 12))
def test_the_number_of_tasks_does_not_depend_on_the_team(ranks: int, limit: int) -> None:
    """Teams of one mesh may be unlike, and the order of collectives follows from the tasks."""
    for shape in ((128, 512), (3, 64, 256)):
        bucket = bucket_of(shape)
        bucket.params_within = limit
        for count in range(1, 14):
            size = params_at_once(bucket, Owners(team=(tuple(range(ranks)),)), {}, count)
            assert size <= max(1, limit)
            assert -(-count // size) == -(-count // limit)


def test_a_plan_shows_what_a_task_takes() -> None:
    for budget, most in ((2 * WIDE, 2), (1, 1), (1 << 40, 5)):
        bucket = bucket_of((128, 512), batch_bytes=budget)
        (plan,) = plan_exchange([bucket], 1, {"batch_bytes": budget})
        assert plan.buffers == [most * WIDE]
    stack = bucket_of((3, 64, 256), batch_bytes=EXPERT)
    (plan,) = plan_exchange([stack], 1, {"batch_bytes": EXPERT})
    assert plan.buffers == [3 * 4 * 64 * 256 + EXPERT]  # the stack's gradients, and one expert at a time


def test_which_groups_are_bounded() -> None:
    bucket = bucket_of((128, 128))
    assert not is_bounded(bucket, {"batch_size": None, "batch_bytes": None, "foreach": None})
    for options in ({"batch_size": 2}, {"foreach": False}, {"offload_state": True}):
        assert is_bounded(bucket, options)
    assert is_bounded(bucket_of((128, 128), batch_bytes=1 << 40), {})
