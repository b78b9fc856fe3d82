"""Invariant 1 on real models: FSDP2, HSDP, TP, EP, DDP and their combinations, with their own backward passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel

import dmuown
from tests.distributed.harness import RankPool
from tests.distributed.sharding import Layout, local

STEPS = 3


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6)
        self.unused = nn.Linear(6, 4)  # never in the graph: no gradient on any rank

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.convolution = nn.Conv1d(3, 5, 2)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        out: Tensor = self.convolution(x.reshape(-1, 3, 2)).square().mean() + x.square().mean()
        return out


def build(hidden: int) -> Model:
    torch.manual_seed(1)
    return Model(hidden)


def optimizer_of(model: nn.Module) -> dmuown.Muown:
    """Every matrix algorithm on some weight, AdamW on the rest."""
    by_name = {name.replace("_orig_mod.", "").removeprefix("module."): p for name, p in model.named_parameters()}
    taken: dict[str, str] = {
        "blocks.0.up.weight": "muown",
        "blocks.0.down.weight": "normuown",
        "blocks.1.up.weight": "normuon",
        "blocks.1.down.weight": "muon",
        "blocks.0.unused.weight": "muown",
        "convolution.weight": "angular_muown",
    }
    groups: list[dict[str, Any]] = [
        {"params": [(name, by_name[name])], "algorithm": algorithm, "flatten": name == "convolution.weight"}
        for name, algorithm in taken.items()
    ]
    rest = [(name, param) for name, param in by_name.items() if name not in taken]
    groups.append({"params": rest, "algorithm": "adamw"})
    # In fp32, rounding of near-singular matrices alone moves weights by 1e-4 of their way.
    return dmuown.Muown(groups, lr=0.02, ns_dtype=torch.float64)


def train(model: nn.Module, *, accumulate: int = 1, clip: float | None = None) -> tuple[dmuown.Muown, list[int]]:
    optimizer = optimizer_of(model)
    data = torch.randn(STEPS, accumulate, 4, 6, generator=torch.Generator().manual_seed(2))
    orthogonalized = []
    for batches in data:
        for x in batches:
            (model(x) / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        orthogonalized.append(optimizer.orthogonalized)
    return optimizer, orthogonalized


def layout_of(param: DTensor) -> Layout:
    return Layout(tuple(param.shape), param.device_mesh.mesh.tolist(), tuple(map(text, param.placements)))


def text(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"SS{placement.dim}:{placement.split_factor}"
    return f"S{placement.dim}" if isinstance(placement, Shard) else "R"


def local_parameters(model: nn.Module) -> dict[str, tuple[Layout | None, list[int], Tensor]]:
    result: dict[str, tuple[Layout | None, list[int], Tensor]] = {}
    for name, param in model.named_parameters():
        name = name.replace("_orig_mod.", "").removeprefix("module.")
        if isinstance(param, DTensor):
            coordinate = param.device_mesh.get_coordinate()
            assert coordinate is not None
            result[name] = layout_of(param), list(coordinate), param.to_local()
        else:
            result[name] = None, [], param.detach()
    return result


def assert_equals_one_process(
    results: list[dict[str, tuple[Layout | None, list[int], Tensor]]], hidden: int, **options: Any
) -> None:
    whole = build(hidden)
    _, counts = train(whole, **options)
    assert counts == [5] * STEPS  # one orthogonalization a matrix and step, however many backward passes
    start = dict(build(hidden).named_parameters())
    for rank, result in enumerate(results):
        assert result.keys() == dict(whole.named_parameters()).keys()
        for name, expected in whole.named_parameters():
            layout, coordinate, got = result[name]
            part = expected.detach() if layout is None else layout.cut(expected.detach(), coordinate)
            assert got.shape == part.shape, (rank, name, got.shape)
            error = float((got - part).norm())
            assert error <= 1e-5 * float(expected.norm()), (rank, name, error)
            if "unused" in name:
                assert torch.equal(got, part), name
            else:
                moved = float((expected - start[name]).norm())
                assert moved > 0.01, name
                assert error <= 5e-5 * moved, (rank, name, error / moved)


def wrapped(kind: str, world_size: int, hidden: int) -> nn.Module:
    """The model, parallelized."""
    model: nn.Module = build(hidden)
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    tensor_parallel = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
        for block in model.get_submodule("blocks").children():
            parallelize_module(block, mesh, dict(tensor_parallel))
        return model
    if kind == "fsdp x tp":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.get_submodule("blocks").children():
            parallelize_module(block, grid["tp"], dict(tensor_parallel))
        mesh = grid["dp"]
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    by_columns = (lambda param: Shard(1) if param.ndim == 2 else Shard(0)) if kind == "fsdp by columns" else None
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, shard_placement_fn=by_columns)
    fully_shard(model, mesh=mesh, shard_placement_fn=by_columns)
    return model


def train_wrapped(
    rank: int, world_size: int, kind: str, hidden: int, options: dict[str, Any]
) -> dict[str, tuple[Layout | None, list[int], Tensor]]:
    model = wrapped(kind, world_size, hidden)
    _, counts = train(model, **options)
    assert counts == [5] * STEPS
    return local_parameters(model)


@pytest.mark.parametrize("kind", ["fsdp", "fsdp by columns", "ddp", "tp"])
def test_a_model_on_two_ranks_equals_one_process(ranks2: RankPool, kind: str) -> None:
    """Invariant 1. 13 hidden units on two ranks are uneven; TP's layers and FSDP2 by columns need an even number."""
    hidden = 10 if kind in ("tp", "fsdp by columns") else 13
    assert_equals_one_process(ranks2.run(train_wrapped, kind, hidden, {}), hidden)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp x tp"])
def test_a_model_on_four_ranks_equals_one_process(ranks4: RankPool, kind: str) -> None:
    """Invariant 1. Convolution, biases and norms have fewer rows than four ranks; some shards are empty."""
    hidden = 10 if kind == "fsdp x tp" else 13
    assert_equals_one_process(ranks4.run(train_wrapped, kind, hidden, {}), hidden)


def test_accumulation_orthogonalizes_once_a_step(ranks2: RankPool) -> None:
    options = {"accumulate": 3}
    assert_equals_one_process(ranks2.run(train_wrapped, "fsdp", 13, options), 13, **options)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_clipping_before_the_step_equals_one_process(ranks4: RankPool, kind: str) -> None:
    options = {"clip": 0.05}
    assert_equals_one_process(ranks4.run(train_wrapped, kind, 13, options), 13, **options)


# ---------------------------------------------------------------------- experts


def expert_placements(rank: int, world_size: int, axis: int) -> list[tuple[Layout, dict[str, Tensor]]]:
    """Experts as FSDP2 lays them out on top of EP: placements are its own, gradients are cut to them."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    experts = nn.Module()
    whole = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(3))
    experts.weight = nn.Parameter(distribute_tensor(whole, grid["ep"], [Shard(0)], src_data_rank=None))
    fully_shard(experts, mesh=grid["dp"], shard_placement_fn=lambda param: Shard(axis))
    assert isinstance(experts, FSDPModule)
    param = next(experts.parameters())
    assert isinstance(param, DTensor)
    layout = layout_of(param)
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None
    assert torch.equal(param.to_local(), layout.cut(whole, coordinate))
    optimizer = dmuown.NorMuown([param], lr=0.02, ns_dtype=torch.float32)
    for step in range(STEPS):
        grad = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(step))
        param.grad = layout.distribute(grad)
        optimizer.step()
    return [(layout, {"weight": param.to_local(), "coordinate": torch.tensor(coordinate)})]


@pytest.mark.parametrize("axis, placements", [(0, ("SS0:2", "S0")), (1, ("S1", "S0")), (2, ("S2", "S0"))])
def test_experts_under_ep_and_fsdp_equal_one_process(ranks4: RankPool, axis: int, placements: tuple[str, ...]) -> None:
    """Invariant 1; torchtitan#4122 and #1561: `Shard(1) + Shard(0)` and `_StridedShard` of (8, 32, 16) on 2 x 2."""
    whole = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(3))
    alone = nn.Parameter(whole.clone())
    optimizer = dmuown.NorMuown([alone], lr=0.02, ns_dtype=torch.float32)
    for step in range(STEPS):
        alone.grad = torch.randn(8, 32, 16, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    for ((layout, got),) in ranks4.run(expert_placements, axis):
        assert layout.placements == placements
        part = layout.cut(alone.detach(), got["coordinate"].tolist())
        torch.testing.assert_close(got["weight"], part, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- the rest of a training loop


def compiled(rank: int, world_size: int) -> float:
    """torch.compile on a sharded model: names carry `_orig_mod.`, and the result is the eager one."""
    model = wrapped("fsdp", world_size, 13)
    twin = wrapped("fsdp", world_size, 13)
    train(twin)
    train(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max(float((a.to_local() - b.to_local()).abs().max()) for a, b in pairs if a.to_local().numel())  # type: ignore[attr-defined]


def test_a_compiled_model_trains_like_an_eager_one(ranks2: RankPool) -> None:
    assert max(ranks2.run(compiled, timeout=240)) < 1e-5


def mixed_precision(rank: int, world_size: int) -> tuple[str, float]:
    """bf16 compute and reduction over fp32 shards, as most runs train."""
    model = build(13)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    twin = copy.deepcopy(build(13))
    train(model)
    train(twin)
    first = next(model.parameters())
    assert isinstance(first, DTensor)
    expected = dict(twin.named_parameters())
    errors = [
        float((param.full_tensor() - expected[name]).norm() / expected[name].norm())
        for name, param in model.named_parameters()
        if isinstance(param, DTensor) and param.ndim == 2
    ]
    return str(first.dtype), max(errors)


def test_mixed_precision_keeps_fp32_shards(ranks2: RankPool) -> None:
    for dtype, error in ranks2.run(mixed_precision):
        assert dtype == "torch.float32"
        assert error < 0.1  # bf16 gradients


def replicate_on_tp(rank: int, world_size: int) -> None:
    """A router that TP replicates and FSDP shards."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(4))
    router = nn.Linear(5, 6, bias=False)
    router.weight = nn.Parameter(distribute_tensor(whole, grid["tp"], [Replicate()], src_data_rank=None))
    fully_shard(router, mesh=grid["dp"])
    optimizer = dmuown.Muon([router.weight], ns_dtype=torch.float32)
    assert isinstance(router.weight, DTensor)
    layout = layout_of(router.weight)
    assert layout.placements == ("S0", "R")
    router.weight.grad = layout.distribute(whole)
    optimizer.step()
    alone = nn.Parameter(whole.clone())
    alone.grad = whole.clone()
    dmuown.Muon([alone], ns_dtype=torch.float32).step()
    part = layout.cut(alone.detach(), grid.get_coordinate() or [])
    torch.testing.assert_close(local(router.weight), part, rtol=1e-5, atol=1e-6)


def test_a_router_replicated_by_tp_and_sharded_by_fsdp(ranks4: RankPool) -> None:
    ranks4.run(replicate_on_tp)
