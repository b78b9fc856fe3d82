"""Small matrices of unlike shapes are orthogonalized in one batch, and get what each would get alone."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.engine import joint
from dmuown.engine.exchange import ExchangeCount
from dmuown.engine.joint import Joint, Whole
from dmuown.orthogonalize import Orthogonalizer

SHAPES = [(12, 20), (20, 12), (12, 12), (11, 19), (3, 13, 17), (16, 16), (9, 15), (12, 20)]
KINDS = ["Muon", "NorMuon", "Muown", "NorMuown", "AngularMuown"]


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def build(kind: str, **options: Any) -> tuple[dmuown.Muon, list[torch.nn.Parameter]]:
    params = parameters()
    made: dmuown.Muon = getattr(dmuown, kind)(params, lr=0.02, ns_dtype=torch.float32, **options)
    return made, params


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], without: int | None = None) -> None:
    for step in range(3):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + index)
            grad = torch.randn(param.shape, generator=generator)
            param.grad = None if index == without else grad
        optimizer.step()


def joints(optimizer: dmuown.Muon) -> list[Joint]:
    return [found for part in optimizer.plan.parts for found in part]


@pytest.mark.parametrize("scheme", ["newton_schulz", "polar_express", "gram"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_matrix_gets_what_it_would_get_alone(kind: str, scheme: str) -> None:
    together, params = build(kind, scheme=scheme)
    alone, others = build(kind, scheme=scheme, batch_size=100)  # a bound keeps buckets apart
    assert max(len(found.buckets) for found in joints(together)) >= 3
    assert all(len(found.buckets) == 1 for found in joints(alone))
    train(together, params)
    train(alone, others)
    for one, other in zip(params, others, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert together.orthogonalized == alone.orthogonalized == 10
    assert together.exchange_count.matrices == alone.exchange_count.matrices == 30


def test_one_batch_is_orthogonalized_for_a_joint(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    real = Orthogonalizer.__call__

    def counted(self: Orthogonalizer, x: Tensor, **options: bool) -> Tensor:
        sizes.append(tuple(x.shape))
        return real(self, x, **options)

    monkeypatch.setattr(Orthogonalizer, "__call__", counted)
    optimizer, params = build("Muown")
    train(optimizer, params)
    expected = []
    for found in joints(optimizer):
        sides = [sorted((bucket.layout.m, bucket.layout.n)) for bucket in found.buckets]
        count = sum(bucket.units_per_param * len(bucket.params) for bucket in found.buckets)
        if len(sides) > 1:
            expected.append((count, max(rows for rows, _ in sides), max(columns for _, columns in sides)))
        else:
            expected.append((count, found.buckets[0].layout.m, found.buckets[0].layout.n))
    assert len(expected) < len({tuple(sorted(shape[-2:])) for shape in SHAPES})
    assert sizes == expected * 3


def test_a_matrix_without_gradient_or_not_finite_leaves_its_neighbours_alone() -> None:
    optimizer, params = build("Muon")
    others, same = build("Muon")
    before = params[3].detach().clone()
    train(optimizer, params, without=3)
    train(others, same)
    assert torch.equal(params[3], before)
    for index, (one, other) in enumerate(zip(params, same, strict=True)):
        if index != 3:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert params[0].grad is not None
    params[0].grad[2, 3] = float("nan")
    optimizer.step()
    assert params[0].isnan().any()
    assert all(param.isfinite().all() for param in params[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_bytes": 1 << 20},
        {"foreach": False},
        {"offload_state": True},
        {"newton_schulz_func": lambda x, epsilon: x / (x.norm(dim=(-2, -1), keepdim=True) + epsilon)},
    ],
    ids=["batch_size", "batch_bytes", "foreach", "offload", "function"],
)
def test_bounds_and_functions_keep_buckets_apart(options: dict[str, Any]) -> None:
    optimizer, _ = build("Muown", **options)
    assert all(len(found.buckets) == 1 for found in joints(optimizer))


def test_large_or_unlike_buckets_stay_apart() -> None:
    shapes = [(400, 300), (300, 400), (8, 8), (8, 100), (9, 9)]
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    found = joints(dmuown.Muon(params))
    together = {frozenset(tuple(bucket.params[0].shape) for bucket in one.buckets) for one in found}
    assert together == {
        frozenset({(400, 300)}),
        frozenset({(300, 400)}),
        frozenset({(8, 8), (9, 9)}),
        frozenset({(8, 100)}),
    }


def test_buckets_of_unlike_orthogonalizers_algorithms_and_moments_stay_apart() -> None:
    """One batch has one table and one number of steps; an algorithm's own reductions come before it asks."""
    shapes = [(12, 20), (11, 19)]
    groups = [
        {"params": [torch.nn.Parameter(torch.randn(shape)) for shape in shapes], **options}
        for options in ({}, {"ns_steps": 3}, {"scheme": "gram"}, {"ns_epsilon": 1e-3}, {"algorithm": "normuon"})
    ]
    optimizer = dmuown.Muon(groups, lr=0.02, ns_dtype=torch.float32)
    found = joints(optimizer)
    assert [len(one.buckets) for one in found] == [2] * len(groups)
    assert all(len({bucket.group_index for bucket in one.buckets}) == 1 for one in found)


def test_what_a_matrix_gets_does_not_depend_on_its_neighbours_gradients() -> None:
    shapes = ((12, 20), (11, 19), (11, 18))
    results = []
    for stepping in ((1,), (1, 2), (0, 1, 2)):
        generator = torch.Generator().manual_seed(1)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        optimizer = dmuown.Muon(params, ns_dtype=torch.float32)
        assert len(joints(optimizer)) == 1
        for index in stepping:
            params[index].grad = torch.randn(shapes[index], generator=torch.Generator().manual_seed(index))
        optimizer.step()
        results.append(params[1].detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_changes_no_form(dtype: torch.dtype) -> None:
    """A square matrix beside a rectangular one would be iterated on its Gram matrix, which squares its condition."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((64, 64), (60, 70))
    results = []
    for bound in (None, 100):
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = dmuown.Muon(params, scheme="gram", ns_dtype=dtype, batch_size=bound, lr=1.0, weight_decay=0.0)
        generator.manual_seed(1)
        for param in params:
            u, _, v = torch.linalg.svd(torch.randn(param.shape, generator=generator), full_matrices=False)
            param.grad = u @ torch.diag(torch.logspace(0, -3, len(v))) @ v
        optimizer.step()
        results.append(params[0].detach())
    assert float((results[0] - results[1]).norm() / results[1].norm()) < 1e-5


def test_a_phase_may_yield_what_it_waits_for() -> None:
    def work() -> Generator[Any, None, None]:
        yield object()

    assert len(list(joint.run(Joint((), 0, 0), [work()], ExchangeCount()))) == 1


def test_a_bound_set_later_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of live groups count, as in torch."""
    sizes: list[int] = []
    real = Orthogonalizer.__call__

    def counted(self: Orthogonalizer, x: Tensor, **options: bool) -> Tensor:
        sizes.append(len(x))
        return real(self, x, **options)

    monkeypatch.setattr(Orthogonalizer, "__call__", counted)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(12, 20)] * 5 + [(11, 19)]]
    optimizer = dmuown.Muon(params, ns_dtype=torch.float32)
    for param in params:
        param.grad = torch.randn_like(param)
    for option, value, expected in (
        ("batch_size", None, [6]),
        ("batch_size", 2, [2, 2, 1, 1]),
        ("foreach", False, [1] * 6),
    ):
        optimizer.param_groups[0][option] = value
        sizes.clear()
        optimizer.step()
        assert sizes == expected


def test_tasks_that_wait_and_tasks_that_ask_keep_in_step() -> None:
    """What two tasks ask for at once is one batch; while any waits for a collective, other tasks have their turn."""
    optimizer, _ = build("Muon")
    found = next(one for one in joints(optimizer) if len(one.buckets) > 1)
    log: list[str] = []

    def work(name: str, bucket: Any, waits: int) -> Generator[Whole | None, None, None]:
        for _ in range(waits):
            log.append(f"{name} waits")
            yield None
        matrices = torch.eye(bucket.layout.m, bucket.layout.n)[None]
        asked = Whole(bucket, matrices, False)
        yield asked
        log.append(f"{name} has {tuple(asked.take().shape)}")
        yield None

    first, second = found.buckets[:2]
    task = joint.run(found, [work("one", first, 1), work("two", second, 1)], ExchangeCount())
    shapes = [(1, bucket.layout.m, bucket.layout.n) for bucket in (first, second)]
    next(task)
    assert log == ["one waits", "two waits"]
    next(task)
    assert log[2:] == [f"one has {shapes[0]}", f"two has {shapes[1]}"]
    assert list(task) == []


def test_what_was_asked_for_is_let_go() -> None:
    """Matrices on their way to an owner would else stay in memory beside their update."""
    optimizer, _ = build("Muon", batch_size=100)
    (found, *_) = joints(optimizer)
    alive: list[bool] = []

    def work() -> Generator[Whole | None, None, None]:
        matrices = torch.eye(found.buckets[0].layout.m, found.buckets[0].layout.n)[None]
        given = weakref.ref(matrices)
        asked = Whole(found.buckets[0], matrices, False)
        del matrices
        yield asked
        alive.append(given() is not None)
        result = asked.take()
        taken = weakref.ref(result)
        del result
        alive.append(taken() is not None)

    list(joint.run(found, [work()], ExchangeCount()))
    assert alive == [False, False]
