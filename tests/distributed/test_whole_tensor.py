"""Algorithms in the whole-tensor form on shards: sharded equals whole, and ranks without gradients enter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import dmuown
from dmuown.algorithms import orthogonalize_single
from dmuown.algorithms import whole as whole_module
from tests.distributed.harness import RankPool
from tests.distributed.sharding import (
    Layout,
    Run,
    assert_sharded_equals_whole,
    train_sharded,
    train_whole,
)
from tests.distributed.test_layouts import GRID, LINE, on
from tests.unit.algorithms import variants as variants  # registers them

NAMES = ("my_variant", "my_batched_variant")


@dataclass
class VariantRun(Run):
    """Training of the specification's variants; their row state goes by a name that `Layout.row_axes` knows."""

    algorithms: tuple[str, ...] = NAMES

    def group(self, algorithm: str, params: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
        group = super().group(algorithm, list(params), list(names))
        return {**group, **self.layout.options, "ns_dtype": torch.float32, "foreach": "batched" in algorithm}


def _train(rank: int, world_size: int, runs: list[VariantRun]) -> list[Any]:
    return [_renamed(train_sharded(rank, world_size, run)) for run in runs]


def _renamed(result: Any) -> Any:
    coordinate, states = result
    return coordinate, [_rename(state) for state in states]


def _rename(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"variance_neuron" if key == "row_sizes" else key: value for key, value in state.items()}


def check(pool: RankPool, layouts: list[Layout], **settings: Any) -> None:
    runs = [VariantRun(layout, **settings) for layout in layouts]
    results = pool.run(_train, runs)
    for index, run in enumerate(runs):
        expected = [_rename(state) for state in train_whole(replace(run, absent={}))]
        assert_sharded_equals_whole(run, [result[index] for result in results], expected, rtol=2e-5)


def refused(layout: Layout) -> bool:
    """`flatten` with a sharded input axis suits no whole-tensor algorithm; strided and block-cut ones do."""
    return bool(layout.options.get("flatten")) and any(axis != 0 for _, axis in layout.cuts)


def fits(layout: Layout) -> bool:
    # Blocks of this form are `split_sizes` of 2D weights; heads and interleaving belong to the two-halves form.
    return not refused(layout) and not {"num_heads", "interleaved"} & layout.options.keys()


def test_a_line_of_two_ranks(ranks2: RankPool) -> None:
    check(ranks2, [laid for layout in LINE.values() if fits(laid := on(layout, 2))], per_group=2)


#: One of each kind; the slow test takes all.
KINDS = (
    "HSDP by rows",
    "FSDP x column-wise TP",
    "FSDP x row-wise TP, empty corner",
    "TP x FSDP, fused blocks",
    "EP x FSDP by rows",
    "EP x FSDP by experts, uneven",
    "permuted TP x FSDP on two axes",
)


def test_kinds_of_grids_of_four_ranks(ranks4: RankPool) -> None:
    check(ranks4, [GRID[name] for name in KINDS])


@pytest.mark.slow
def test_every_grid_of_four_ranks(ranks4: RankPool) -> None:
    check(ranks4, [layout for layout in GRID.values() if fits(layout)])


def _refusal(rank: int, world_size: int, layout: Layout) -> str:
    try:
        VariantRun(layout).optimizer(layout.distribute)
    except dmuown.errors.LayoutError as error:
        return str(error)
    return "accepted"


def test_flattened_inner_shards_are_refused(ranks2: RankPool) -> None:
    layout = on(LINE["convolution by inputs"], 2)
    for message in ranks2.run(_refusal, layout):
        assert "suits no algorithm in the whole-tensor form" in message


def test_a_gradient_missing_on_one_rank(ranks2: RankPool) -> None:
    """Invariant 5: every rank enters the gather; the missing shard counts as zeros."""
    layout = on(LINE["rows"], 2)
    run = VariantRun(layout, absent={(1, 0): (1,), (2, 1): (0,)})

    def zeroed(step: int, index: int) -> torch.Tensor:
        grad = run.whole(step + 1, index)
        missing = run.absent.get((step, index), ())
        for rank in missing:
            grad[6 * rank : 6 * (rank + 1)] = 0
        return grad

    results = ranks2.run(_train, [run])
    expected = [_rename(state) for state in train_whole(run, zeroed)]
    assert_sharded_equals_whole(run, [result[0] for result in results], expected, rtol=2e-5)


def _gather_log(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dmuown.algorithms.whole")
    logger.addHandler(handler)
    whole_module._logged.clear()
    try:
        experts = VariantRun(on(LINE["experts"], world_size))
        train_sharded(rank, world_size, experts)
        without = list(records)
        train_sharded(rank, world_size, VariantRun(on(LINE["rows"], world_size)))
    finally:
        logger.removeHandler(handler)
    return without, records


def test_the_gather_is_logged_once_with_its_reason(ranks2: RankPool) -> None:
    """Invariant 6: no full gather without a logged reason; matrices that lie whole on a rank are not gathered."""
    for without, records in ranks2.run(_gather_log):
        assert without == []
        assert len(records) == 1
        assert "gathers matrices" in records[0]
        assert "two-halves form" in records[0]


def _partial(rank: int, world_size: int) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Partial

    layout = on(LINE["rows"], world_size)
    value = DTensor.from_local(torch.full((4, 6), float(rank + 1)).tril_(), layout.build_mesh(), [Partial()])
    result = orthogonalize_single(value, ns_steps=5, strategy="polar_express")
    assert isinstance(result, DTensor)
    return result.full_tensor()


def test_partial_sums_are_reduced_first(ranks2: RankPool) -> None:
    expected = orthogonalize_single(torch.full((4, 6), 3.0).tril_(), ns_steps=5, strategy="polar_express")
    for result in ranks2.run(_partial):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
