"""What every algorithm must do, third-party ones included: one list, run over all, none of them edited for it.

A new algorithm joins by its name in `NAMES`. The layouts are a sample of `tests/distributed/test_layouts.py`.
"""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dmuown
from dmuown.algorithms import MuonAlgorithm, get_algorithm
from dmuown.errors import OptionError
from dmuown.state.lowbit import decoded, is_low_bit, storage_bytes
from tests.distributed import sharding
from tests.distributed.harness import RankPool
from tests.distributed.sharding import Layout, Run, train_whole
from tests.unit.algorithms import variants as variants  # registers the specification's algorithm
from tests.unit.algorithms.oracles import initial

EXAMPLE = Path(__file__).parents[2] / "docs/examples/damped_muon/src/damped_muon/__init__.py"
if "damped_muon" not in sys.modules:
    spec = importlib.util.spec_from_file_location("damped_muon", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["damped_muon"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["damped_muon"])

MATRIX = ("muon", "normuon", "muown", "normuown", "angular_muown", "my_variant", "damped_muon")
NAMES = (*MATRIX, "adamw", "adam", "lion")
PRECISIONS = (None, "bf16", "int8", "int4", "fp8")


def decay(name: str) -> float:
    return 0.0 if name == "angular_muown" else 0.1


def make(name: str, *params: Tensor, **options: Any) -> dmuown.Muon:
    if name in MATRIX:
        options.setdefault("ns_dtype", "float32")
    options.setdefault("weight_decay", decay(name))
    return dmuown.Muon([{"params": list(params), "algorithm": name, **options}], lr=0.05)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(initial(*shape, dtype=dtype, seed=seed))


def gradient(like: Tensor, step: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(step)).to(like.dtype)


def steps(optimizer: torch.optim.Optimizer, *params: Tensor, count: int = 3, first: int = 0) -> None:
    for step in range(first, first + count):
        for index, param in enumerate(params):
            param.grad = gradient(param, 100 * index + step)
        optimizer.step()


# ------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("name", NAMES)
def test_state_is_complete_symmetric_and_in_place(name: str) -> None:
    """Invariants 3 and 7: all state from construction, with or without gradients; tensors keep their identity."""
    used, idle = parameter(6, 8), parameter(6, 8, seed=1)
    optimizer = make(name, used, idle)
    declared = get_algorithm(name).state_spec
    before = {param: dict(optimizer.state[param]) for param in (used, idle)}
    assert all(values.keys() == declared.keys() for values in before.values())
    addresses = {id(value): value.data_ptr() for values in before.values() for value in values.values()}
    idle_values = {key: value.clone() for key, value in before[idle].items()}
    storage, kept = used.data_ptr(), idle.detach().clone()
    for step in range(3):
        grad = gradient(used, step)
        used.grad = grad.clone()
        optimizer.step()
        assert torch.equal(used.grad, grad)
    assert used.data_ptr() == storage
    for param in (used, idle):
        for key, value in optimizer.state[param].items():
            assert value is before[param][key]
            assert value.data_ptr() == addresses[id(value)]
    assert torch.equal(idle, kept)
    assert all(torch.equal(optimizer.state[idle][key], value) for key, value in idle_values.items())


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_state(name: str) -> None:
    """fp32 momentum (two moments for Adam), at most 5 numbers a row, a counter; nothing else is kept."""
    param = parameter(64, 128)
    optimizer = make(name, param)
    steps(optimizer, param)
    moments = 2 if name in ("adamw", "adam") else 1
    held = sum(storage_bytes(value) for value in optimizer.state[param].values())
    assert moments * 4 * param.numel() <= held <= moments * 4 * param.numel() + 4 * (5 * 64 + 1)
    tensors = [value for value in vars(optimizer).values() if isinstance(value, Tensor)]
    assert not tensors
    assert optimizer._gradients == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """Every floating dtype trains, stays finite and near the float64 run, and keeps its dtype."""
    param, exact = parameter(6, 8, dtype=dtype), parameter(6, 8, dtype=torch.float64)
    with torch.no_grad():
        exact.copy_(param)
    start = exact.detach().clone()
    epsilon = 1e-4 if dtype == torch.float16 and name in ("adamw", "adam") else 1e-8
    one, other = make(name, param, epsilon=epsilon), make(name, exact, epsilon=epsilon)
    for step in range(3):
        grad = gradient(param, step)
        param.grad, exact.grad = grad, grad.double()
        one.step()
        other.step()
    assert param.dtype == dtype
    assert param.isfinite().all()
    error = float((param.detach().double() - exact.detach()).norm() / (exact.detach() - start).norm())
    assert error <= {torch.float64: 1e-12, torch.float32: 1e-3}.get(dtype, 0.25)


@pytest.mark.parametrize("name", NAMES)
def test_zero_gradients_and_decay(name: str) -> None:
    """100 zero gradients at lr wd = 0.01 leave 0.99^100 of a weight; AngularMuown refuses decay and stands still."""
    param = parameter(6, 8)
    before = param.detach().clone()
    if name == "angular_muown":
        with pytest.raises(OptionError, match="takes no weight decay"):
            make(name, param, weight_decay=0.1)
    kept = 1.0 if name == "angular_muown" else 0.99**100
    if name == "adam":
        kept = 1.0  # its decay is a gradient: it is tested against torch
    optimizer = make(name, param, lr=0.1, weight_decay=0.0 if kept == 1.0 else 0.1)
    for _ in range(100):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    torch.testing.assert_close(param.detach(), before * kept, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MATRIX)
def test_zero_rows(name: str) -> None:
    """Rows without weight and gradient stay zero; rows without weight learn from a gradient; nothing is non-finite."""
    param = parameter(6, 8)
    with torch.no_grad():
        param[1] = param[4] = 0
    optimizer = make(name, param)
    for step in range(5):
        param.grad = gradient(param, step)
        param.grad[4] = 0
        optimizer.step()
    assert (param[4] == 0).all()
    assert (param[1] != 0).all()
    assert param.isfinite().all()
    assert all(value.isfinite().all() for value in optimizer.state[param].values())


@pytest.mark.parametrize("name", NAMES)
def test_foreach_and_batches_change_nothing(name: str) -> None:
    """Invariant 2: one at a time, in batches, all at once."""
    results = []
    for options in ({}, {"foreach": False}, {"foreach": True}, {"batch_size": 2}):
        if name not in MATRIX and "batch_size" in options:
            continue
        params = [parameter(6, 8, seed=i) for i in range(5)]
        steps(make(name, *params, **options), *params)
        results.append(torch.stack([param.detach() for param in params]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_low_bit_offloaded_state_resumes(name: str, precision: str | None) -> None:
    """Invariant 4 at any precision, with offload: stopped, saved, loaded and gone on is bit-identical to going on."""
    options: dict[str, Any] = {"state_precision": precision, "offload_state": True}
    param = parameter(16, 64)
    optimizer = make(name, param, **options)
    steps(optimizer, param)
    file = io.BytesIO()
    torch.save([param.detach(), optimizer.state_dict()], file)
    file.seek(0)
    weight, state = torch.load(file, weights_only=True)
    assert state["param_groups"][0]["algorithm"] == name
    resumed = torch.nn.Parameter(weight)
    other = make(name, resumed, **options)
    other.load_state_dict(state)
    steps(optimizer, param, first=3)
    steps(other, resumed, first=3)
    assert torch.equal(param, resumed)
    if precision in ("int8", "int4", "fp8"):
        assert any(is_low_bit(value) for value in optimizer.state[param].values())


# ------------------------------------------------------------------------------------ ranks


@dataclass
class Conformance(Run):
    """Every algorithm at once, one group each; row state is told by its shape."""

    algorithms: tuple[str, ...] = NAMES
    extra: tuple[tuple[str, Any], ...] = ()

    def group(self, algorithm: str, params: Sequence[Tensor], names: Sequence[str]) -> dict[str, Any]:
        pairs = list(zip(names, params, strict=True))
        group: dict[str, Any] = {"params": pairs, "algorithm": algorithm, "weight_decay": decay(algorithm)}
        if isinstance(get_algorithm(algorithm), MuonAlgorithm):
            group |= {"ns_dtype": torch.float32, **self.layout.options}
        return {**group, **dict(self.extra)}


LAYOUTS = {
    "rows": Layout((16, 64), (0, 1), ("S0",)),
    "columns": Layout((12, 20), (0, 1), ("S1",)),
    "rows, uneven": Layout((7, 10), (0, 1), ("S0",)),
    "rows, empty": Layout((1, 16), (0, 1), ("S0",)),
    "transposed": Layout((12, 20), (0, 1), ("S1",), {"matrix_transposed": True}),
    "replicated": Layout((6, 10), (0, 1), ("R",)),
    "experts": Layout((4, 6, 10), (0, 1), ("S0",)),
    "blocks": Layout((12, 8), (0, 1), ("S0",), {"split_sizes": (7, 5)}),
}


def _train(rank: int, world_size: int, runs: list[Conformance]) -> list[Any]:
    return [sharding.train_sharded(rank, world_size, run) for run in runs]


def check(run: Conformance, results: Sequence[Any], whole: Sequence[Mapping[str, Tensor]], rtol: float = 2e-5) -> None:
    for rank, (coordinate, states) in enumerate(results):
        for name, state, expected in zip(run.algorithms, states, whole, strict=True):
            assert state.keys() == expected.keys(), name
            for key, value in expected.items():
                axes = None if value.shape == run.layout.shape else run.layout.row_axes
                part = run.layout.cut(value, coordinate, axes) if value.dim() else value
                assert state[key].shape == part.shape, (name, key, rank)
                error = float((state[key].double() - part.double()).norm())
                assert error <= rtol * max(float(value.double().norm()), 1e-30), (name, key, rank, error)


def test_sharded_equals_whole(ranks2: RankPool) -> None:
    """Invariant 1."""
    runs = [Conformance(layout) for layout in LAYOUTS.values()]
    results = ranks2.run(_train, runs)
    for index, run in enumerate(runs):
        check(run, [result[index] for result in results], train_whole(run))


def test_missing_gradients(ranks2: RankPool) -> None:
    """Invariant 5: a gradient missing on one rank counts as zeros there; one missing everywhere leaves all alone."""
    layout = LAYOUTS["rows"]
    absent: dict[tuple[int, int], tuple[int, ...]] = {(1, index): (1,) for index in range(len(NAMES))}
    absent |= {(2, index): (0, 1) for index in range(len(NAMES))}
    run = Conformance(layout, absent=absent)

    def zeroed(step: int, index: int) -> Tensor | None:
        if step == 2:
            return None
        grad = run.whole(step + 1, index)
        if step == 1:
            grad[8:] = 0
        return grad

    results = ranks2.run(_train, [run])
    check(run, [result[0] for result in results], train_whole(replace(run, absent={}), zeroed))


def _storage(rank: int, world_size: int, run: Conformance) -> list[dict[str, tuple[str, tuple[int, ...], int]]]:
    """Kind, shape and bytes of every buffer, from construction."""
    optimizer = run.optimizer(run.layout.distribute)
    return [
        {
            key: (type(sharding.local(value)).__name__, tuple(sharding.local(value).shape), storage_bytes(value))
            for key, value in optimizer.state[param].items()
        }
        for param in sharding.parameters(optimizer)
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_is_stored_alike_on_all_ranks(ranks2: RankPool, precision: str | None) -> None:
    """Invariant 3, low-bit included; a third of the bytes of two ranks' shards is on neither alone."""
    run = Conformance(LAYOUTS["rows"], extra=(("state_precision", precision),))
    first, second = ranks2.run(_storage, run)
    assert first == second
    if precision in ("int8", "int4", "fp8"):
        assert all(any("OptimState" in kind for kind, _, _ in values.values()) for values in first)
    # Rows that two ranks cut unevenly divide into no common blocks: both fall back.
    uneven = Conformance(LAYOUTS["rows, uneven"], extra=(("state_precision", precision),))
    first, second = ranks2.run(_storage, uneven)
    assert [{key: kind for key, (kind, _, _) in values.items()} for values in first] == [
        {key: kind for key, (kind, _, _) in values.items()} for values in second
    ]


def _resume(rank: int, world_size: int, run: Conformance, folder: str | None) -> list[dict[str, Tensor]]:
    """Train 4 steps; or 2, a checkpoint by torch's own DCP, and 2 more in a new optimizer."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    optimizer = run.optimizer(run.layout.distribute)
    for step in range(4):
        if step == 2 and folder is not None:
            params = sharding.parameters(optimizer)
            fresh = run.optimizer(run.layout.distribute)

            def tree(one: Any) -> dict[str, Any]:
                return {
                    f"{index}.{key}": value
                    for index, param in enumerate(sharding.parameters(one))
                    for key, value in {"weight": param.detach(), **one.state[param]}.items()
                }

            state_dict_saver.save(tree(optimizer), checkpoint_id=folder)
            target = tree(fresh)
            state_dict_loader.load(target, checkpoint_id=folder)
            state = optimizer.state_dict()
            state["state"] = {
                index: {key: target[f"{index}.{key}"] for key in fresh.state[param]}
                for index, param in enumerate(sharding.parameters(fresh))
            }
            fresh.load_state_dict(state)
            del params
            optimizer = fresh
        for index, param in enumerate(sharding.parameters(optimizer)):
            param.grad = run.layout.distribute(run.whole(step + 1, index))
        optimizer.step()
    return [
        {"weight": sharding.local(param).detach().clone()}
        | {key: decoded(sharding.local(value)).clone() for key, value in optimizer.state[param].items()}
        for param in sharding.parameters(optimizer)
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sharded_checkpoints_resume(ranks2: RankPool, precision: str | None, tmp_path: Path) -> None:
    """Invariant 4 through torch.distributed.checkpoint on the same ranks: bit-identical, low-bit codes included."""
    run = Conformance(LAYOUTS["rows"], extra=(("state_precision", precision),))
    straight = ranks2.run(_resume, run, None)
    resumed = ranks2.run(_resume, run, str(tmp_path / "checkpoint"))
    for one, other in zip(straight, resumed, strict=True):
        for name, expected, got in zip(NAMES, one, other, strict=True):
            for key, value in expected.items():
                assert torch.equal(got[key], value), (name, key)
