"""Who orthogonalizes what: balance within a team, and teams no larger than their gathers bear."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dmuown.engine.owners import MOST_PADDING, Block, Division, Place, assign_owners


@dataclass
class Layout:
    """Ranks of a mesh [replicas, shards], numbered along rows."""

    replicas: int
    shards: int
    m: int = 8
    n: int = 4
    mesh: object = field(default=True)

    def block_at(self, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(range(start, start + self.shards)) for start in range(0, self.replicas * self.shards, self.shards)
        )


@dataclass
class Bucket:
    """As much of a bucket as owners depend on."""

    layout: Layout
    count: int
    flops_per_unit: float = 1.0

    def units_at(self, coordinate: tuple[int, ...]) -> int:
        return self.count


@pytest.fixture(autouse=True)
def _inside_every_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmuown.engine.owners.coordinate_of", lambda bucket, rank: ())


def gathered(buckets: list[Bucket], rank: int) -> float:
    """Elements that a team's gathers carry, over those that are needed."""
    carried = needed = 0
    for bucket, owners in zip(buckets, assign_owners(buckets, rank), strict=True):  # type: ignore[arg-type]
        each = [sum(place.replica == replica for place in owners.places) for replica in range(len(owners.team))]
        carried += len(owners.team) * max(each) * bucket.layout.m * bucket.layout.n
        needed += bucket.count * bucket.layout.m * bucket.layout.n
    return carried / needed


@pytest.mark.parametrize(
    "replicas, counts, team",
    [
        (2, [1], 2),  # half of it is padding: the most that is borne
        (4, [1], 2),
        (4, [2], 4),
        (3, [1], 1),  # no divisor but 1 and 3
        (512, [12, 12, 12, 6], 16),  # the benchmark's layers: 32 replicas would gather 128 for 42
        (64, [64, 64, 64, 32], 64),
        (6, [0], 6),  # nothing to gather
    ],
)
def test_teams_are_as_large_as_padding_allows(replicas: int, counts: list[int], team: int) -> None:
    buckets = [Bucket(Layout(replicas, 8), count) for count in counts]
    owners = assign_owners(buckets, 0)  # type: ignore[arg-type]
    assert {len(one.team) for one in owners} == {team}
    assert sum(counts) == 0 or gathered(buckets, 0) <= MOST_PADDING


def test_every_rank_is_in_one_team_and_teams_divide_alike() -> None:
    buckets = [Bucket(Layout(8, 2), 2, 4.0), Bucket(Layout(8, 2), 1, 1.0)]
    teams: dict[Block, set[int]] = {}
    for rank in range(16):
        owners = assign_owners(buckets, rank)  # type: ignore[arg-type]
        teams[owners[0].team] = teams.get(owners[0].team, set()) | {rank}
        assert any(rank in ranks for ranks in owners[0].team)
        assert owners[0].places == (Place(0, 0), Place(1, 0))
        assert owners[1].places == (Place(0, 1),)
    assert all({rank for ranks in team for rank in ranks} == members for team, members in teams.items())
    assert sorted(len(team) for team in teams) == [2, 2, 2, 2]


def test_known_divisions_change_nothing() -> None:
    buckets = [Bucket(Layout(8, 2), 5, 3.0), Bucket(Layout(8, 2), 3)]
    known: dict[object, Division] = {}
    for rank in range(16):
        assert assign_owners(buckets, rank, known) == assign_owners(buckets, rank)  # type: ignore[arg-type]
    assert len(known) == 1
