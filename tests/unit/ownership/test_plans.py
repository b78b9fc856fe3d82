"""Assignment, boundaries, transfers and schedules: pure functions."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch
from torch import nn

from dmuown.errors import OwnershipError
from dmuown.ownership.assignment import Item, assign_owners, step_cost
from dmuown.ownership.boundaries import find_boundaries
from dmuown.ownership.plan import Entry, OwnershipPlan, build_plan
from dmuown.ownership.schedule import Schedule, backward_schedule, forward_schedule


def _llama(layers: int, width: int = 64, hidden: int = 172, kv: int = 16) -> list[Item]:
    items = []
    for layer in range(layers):
        shapes = {
            "q": (width, width),
            "k": (kv, width),
            "v": (kv, width),
            "o": (width, width),
            "gate": (hidden, width),
            "up": (hidden, width),
            "down": (width, hidden),
        }
        items += [Item(f"layers.{layer}.{name}", shape, layer, matrix=True) for name, shape in shapes.items()]
        items += [Item(f"layers.{layer}.norm{index}", (width,), layer, matrix=False) for index in range(2)]
    return items


def _loads(items: list[Item], owners: dict[str, int], slots: int) -> list[int]:
    loads = [0] * slots
    for item in items:
        loads[owners[item.name]] += step_cost(item.shape, item.matrix)
    return loads


def test_cost_counts_the_products_of_newton_schulz() -> None:
    # 5 steps of 2mmn + 2mmn + 2mmm operations for m = 3 <= n = 5, and 6000 an element; experts add up.
    assert step_cost((3, 5), matrix=True) == 5 * (4 * 9 * 5 + 2 * 27) + 6000 * 15
    assert step_cost((5, 3), matrix=True) == step_cost((3, 5), matrix=True)
    assert step_cost((7, 3, 5), matrix=True) == 7 * step_cost((3, 5), matrix=True)
    assert step_cost((3, 5), matrix=False) == 6000 * 15
    assert step_cost((5,), matrix=True) == 6000 * 5
    assert step_cost((0, 5), matrix=True) == 0


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_owners_are_balanced_and_spread_within_a_boundary(slots: int) -> None:
    items = _llama(24)
    owners = assign_owners(items, slots)
    assert list(owners) == [item.name for item in items]
    loads = _loads(items, owners, slots)
    assert max(loads) <= 1.15 * sum(loads) / slots
    for layer in range(24):
        large = [owners[f"layers.{layer}.{name}"] for name in ("gate", "up", "down")]
        # Owners of a layer differ as far as there are owners.
        assert max(large.count(owner) for owner in large) == -(-3 // slots)
        senders = {owners[item.name] for item in items if item.boundary == layer and item.matrix}
        for index in range(2):
            assert owners[f"layers.{layer}.norm{index}"] in senders  # no collective of its own


def test_small_parameters_stay_together() -> None:
    items = [Item(f"norm.{index}", (8,), 0, matrix=False) for index in range(40)]
    items.append(Item("matrix", (64, 64), 0, matrix=True))
    owners = assign_owners(items, 4)
    assert len(set(owners.values())) == 1


def test_assignment_is_deterministic() -> None:
    items = _llama(5)
    expected = assign_owners(items, 4)
    for _ in range(3):
        assert assign_owners(list(items), 4) == expected
    assert set(assign_owners(_llama(1), 64).values()) <= set(range(64))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])) for _ in range(2))
        self.mixer = Mixer()
        self.head = nn.Linear(8, 4, bias=False)


def _uses(model: nn.Module) -> dict[str, list[str]]:
    return {name: [name] for name, _ in model.named_parameters()}


def test_default_boundaries() -> None:
    model = Model()
    found = find_boundaries(model, _uses(model))
    names = [boundary.name for boundary in found.entries]
    # Blocks, elements of lists inside them, and else the module itself; containers and MultiheadAttention's
    # out_proj are never called, so that what holds them is.
    assert names == [
        "embed",
        "layers.0",
        "layers.0.1.0",
        "layers.1",
        "layers.1.1.0",
        "mixer",
        "mixer.attention",
        "head",
    ]
    assert found.of["layers.0.0.weight"] == (1,)
    assert found.of["layers.0.1.0.weight"] == (2,)
    assert found.of["mixer.scales.0"] == (5,)
    assert found.of["mixer.attention.in_proj_weight"] == (6,)
    assert found.of["mixer.attention.out_proj.weight"] == (6,)
    # Backward enters later modules first, and a module before those inside it.
    order = sorted(found.entries, key=lambda boundary: boundary.backward)
    assert [boundary.name for boundary in order] == [
        "head",
        "mixer",
        "mixer.attention",
        "layers.1",
        "layers.1.1.0",
        "layers.0",
        "layers.0.1.0",
        "embed",
    ]
    ends = {boundary.name: boundary.backward_end for boundary in found.entries}
    assert ends == {
        "head": 0,
        "mixer": 2,
        "mixer.attention": 2,
        "layers.1": 4,
        "layers.1.1.0": 4,
        "layers.0": 6,
        "layers.0.1.0": 6,
        "embed": 7,
    }


def test_given_boundaries() -> None:
    model = Model()
    found = find_boundaries(model, _uses(model), lambda module: isinstance(module, (nn.Sequential, Model)))
    assert [boundary.name for boundary in found.entries] == ["", "layers.0", "layers.1"]
    assert found.entries[0].label == "(the model itself)"
    assert found.of["layers.1.1.0.weight"] == (2,)
    with pytest.raises(OwnershipError, match=r"embed\.weight: no module that contains it matches"):
        find_boundaries(model, _uses(model), lambda module: isinstance(module, nn.Sequential))


def test_tied_uses_have_all_their_boundaries() -> None:
    model = Model()
    found = find_boundaries(model, {"embed.weight": ["embed.weight", "head.weight"]})
    assert [boundary.name for boundary in found.entries] == ["embed", "head"]
    assert found.of == {"embed.weight": (0, 1)}


def test_wrapped_names_are_canonical() -> None:
    model = Model()
    model.layers[0] = torch.compile(model.layers[0])  # type: ignore[assignment]
    found = find_boundaries(model, {name: [name] for name, _ in model.named_parameters() if "layers.0" in name})
    assert [boundary.name for boundary in found.entries] == ["layers.0", "layers.0.1.0"]


BF16, FP32 = torch.bfloat16, torch.float32


def _make_plan(world_size: int, reshard: bool) -> OwnershipPlan:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    found = find_boundaries(model, _uses(model))
    entries = [
        Entry("a", (5, 3), "muon", 1, (0,), BF16, FP32),
        Entry("b", (7,), "adamw", 1, (0,), BF16, FP32),
        Entry("c", (5, 3), "muon", 0, (0,), BF16, FP32),
        Entry("d", (5, 3), "muon", 1, (1,), BF16, BF16),
        Entry("frozen", (4,), "adamw", 1, (1,), BF16, BF16, trainable=False),
        Entry("e", (10, 3), "sharded_adamw", None, (2,), FP32, FP32),
        Entry("f", (3, 2), "sharded_adamw", None, (2,), FP32, FP32),
        Entry("tied", (10, 3), "sharded_adamw", None, (0, 2), FP32, FP32),
    ]
    return build_plan(entries, found.entries, world_size=world_size, reshard_after_forward=reshard)


def test_one_transfer_per_owner_and_boundary() -> None:
    plan = _make_plan(4, True)
    assert [(t.kind, t.owner, t.boundaries, [m.name for m in t.members]) for t in plan.transfers] == [
        ("owner", 0, (0,), ["c"]),
        ("owner", 1, (0,), ["a", "b"]),
        ("shards", -1, (0, 2), ["tied"]),
        ("owner", 1, (1,), ["frozen"]),
        ("owner", 1, (1,), ["d"]),
        ("shards", -1, (2,), ["e", "f"]),
    ]
    assert plan.owners["a"] == 1
    assert plan.owners["tied"] is None


def test_bytes_and_collectives() -> None:
    plan = _make_plan(4, True)
    one, packed, tied, frozen, d, two = plan.transfers
    # A lone member is not padded; packed ones start at multiples of 16 bytes: 15 -> 16 elements, 7 -> 8.
    assert (one.fetch_numel, one.fetch_bytes, one.reduce_bytes) == (15, 30, (15 + 1) * 4)
    assert [(member.offset, member.span) for member in packed.members] == [(0, 15), (16, 7)]
    assert (packed.fetch_bytes, packed.reduce_bytes) == (24 * 2, (24 + 2) * 4)
    # Shards: ceil(10 / 4) = 3 rows of 3, ceil(3 / 4) = 1 row of 2, each padded to 4 floats, times 4 ranks.
    assert (tied.segment, tied.fetch_bytes, tied.reduce_bytes) == (9, 9 * 4 * 4, (9 + 1) * 4 * 4)
    assert [(member.offset, member.span) for member in two.members] == [(0, 9), (12, 2)]
    assert (two.fetch_bytes, two.reduce_bytes) == (16 * 4 * 4, (16 + 2) * 4 * 4)
    assert (frozen.fetch_bytes, d.reduce_bytes) == (8, 16 * 2)
    assert plan.per_step() == {
        "broadcast": {"collectives": 8, "bytes": 2 * (30 + 48 + 8 + 30)},
        "all_gather": {"collectives": 4, "bytes": 2 * (144 + 256)},
        "reduce": {"collectives": 3, "bytes": 64 + 104 + 32},
        "reduce_scatter": {"collectives": 2, "bytes": 160 + 288},
    }
    kept = _make_plan(4, False).per_step(microbatches=3, deferred=True)
    assert kept["broadcast"] == {"collectives": 12, "bytes": 3 * 116}
    assert kept["reduce"] == {"collectives": 3, "bytes": 200}
    assert _make_plan(4, True).per_step(microbatches=3)["reduce"]["collectives"] == 9
    assert _make_plan(1, True).per_step() == {}


def test_plans_print_and_differ_where_they_do() -> None:
    plan = _make_plan(4, True)
    text = str(plan)
    # a takes 15 elements and one to align, b 7 and one; each of the two a flag with the gradients: 24 * 2, 26 * 4.
    assert "\ntransfer 1 at [0] from 1, fetch 48 B bfloat16, reduce 104 B float32: a[5, 3], b[7]\n" in text
    # Four ranks have 3 rows of 3 each, and a flag: 4 * 9 * 4, 4 * 10 * 4.
    assert "\ntransfer 2 at [0, 2] from shards, fetch 144 B float32, reduce 160 B float32: tied[10, 3]\n" in text
    assert "\ntransfer 3 at [1] from 1, fetch 8 B bfloat16, frozen, reduce 0 B bfloat16: frozen[4]\n" in text
    assert "a micro-batch fetches each twice, before forward and before backward, and reduces it once\n" in text
    assert "fetches each once and reduces it once\n" in str(_make_plan(4, False))
    assert "8 broadcast of 232 B together" in text
    assert str(_make_plan(1, True)).endswith("no communication")
    assert plan.lines() == _make_plan(4, True).lines()
    assert plan.lines() != _make_plan(2, True).lines()
    data = plan.to_dict()
    assert data["transfers"][1]["params"] == ["a", "b"]
    assert data["owners"]["e"] is None


def _kinds(schedule: Schedule) -> list[tuple[str, int]]:
    return [(operation.kind, operation.transfer) for operation in schedule.operations]


def test_schedules() -> None:
    plan = _make_plan(4, True)
    forward = forward_schedule(plan, prefetch=1)
    assert _kinds(forward) == [("fetch", index) for index in range(6)]
    assert (forward.entered, forward.ahead) == ({0: 3, 1: 5, 2: 6}, {0: 5, 1: 6, 2: 6})
    backward = backward_schedule(plan, prefetch=1)
    # Boundaries 2, 1, 0: the tied transfer is fetched with the first of its two and reduced with the last.
    assert _kinds(backward) == [
        ("fetch", 2),
        ("fetch", 5),
        ("fetch", 3),
        ("fetch", 4),
        ("fetch", 0),
        ("fetch", 1),
        ("reduce", 5),
        ("reduce", 4),
        ("reduce", 3),  # frozen: passed over, unless it is unfrozen later
        ("reduce", 2),
        ("reduce", 1),
        ("reduce", 0),
    ]
    kept = backward_schedule(_make_plan(4, False), prefetch=1)
    assert [kind for kind, _ in _kinds(kept)] == ["reduce"] * 6
    assert set(kept.entered.values()) == {0}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_reduction_never_waits_for_a_boundary_that_waits_for_it(prefetch: int) -> None:
    """The fetch of every boundary comes before the reductions of those entered at the same time or later."""
    rng = random.Random(prefetch)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])) for _ in range(4)))
    found = find_boundaries(model, _uses(model), lambda module: isinstance(module, (nn.Sequential, nn.Linear)))
    entries = [
        Entry(
            f"p{index}",
            (4, 4),
            "muon",
            rng.randrange(3),
            tuple(sorted(set(rng.choices(range(8), k=2)))),
            FP32,
            FP32,
        )
        for index in range(20)
    ]
    plan = build_plan(entries, found.entries, world_size=3)
    schedule = backward_schedule(plan, prefetch)
    kinds = _kinds(schedule)
    assert sorted(kinds) == sorted(itertools.product(("fetch", "reduce"), range(len(plan.transfers))))
    for boundary in plan.boundaries:
        due = schedule.entered[boundary.index]
        for place, (kind, index) in enumerate(kinds):
            transfer = plan.transfers[index]
            if kind == "fetch" and boundary.index in transfer.boundaries:
                assert place < due
            last = max(plan.boundaries[use].backward_end for use in transfer.boundaries)
            if kind == "reduce" and last >= boundary.backward:
                assert place >= due  # not forced by entering a boundary before its own backward is over
        assert due <= schedule.ahead[boundary.index]


def test_a_boundary_that_is_never_called_is_refused() -> None:
    """Containers have no forward, and attention reads the weight of its out_proj without calling it."""
    blocks = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)]), "attention": nn.MultiheadAttention(2, 1)})
    for kind, match in (
        (nn.ModuleList, r"list\.0\.weight: has its boundary, by hook_boundary_predicate, at list, a ModuleList"),
        (nn.modules.linear.NonDynamicallyQuantizableLinear, r"attention\.out_proj\.weight: .* at attention\.out_proj"),
        (
            nn.ModuleDict,
            r"has its boundary, by hook_boundary_predicate, at the model, a ModuleDict that is never called",
        ),
    ):
        uses = {name: [name] for name, _ in blocks.named_parameters()}
        if kind is nn.ModuleList:
            uses = {name: raw for name, raw in uses.items() if name.startswith("list")}
        elif kind is not nn.ModuleDict:
            uses = {name: raw for name, raw in uses.items() if "out_proj" in name}
        with pytest.raises(OwnershipError, match=match):
            find_boundaries(blocks, uses, partial(_is, kind))


def _is(kind: type[nn.Module], module: nn.Module) -> bool:
    return isinstance(module, kind)


class Called(nn.ModuleList):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self:
            hidden = layer(hidden)
        return hidden


def test_a_container_with_a_forward_may_be_a_boundary() -> None:
    model = nn.Sequential(Called([nn.Linear(2, 2)]))
    found = find_boundaries(model, _uses(model), lambda module: isinstance(module, Called))
    assert [boundary.name for boundary in found.entries] == ["0"]
