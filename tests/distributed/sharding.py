"""Cut whole tensors onto ranks by a rule written down here, apart from the package, and train both sides.

A layout names a mesh (ranks in any order), one placement a mesh dimension, and the order in which dimensions cut:
left to right as DTensor does, except for `_StridedShard`, whose dimension cuts after those to its right.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dmuown

#: Where tensors live: the card too, when `tests/gpu/nccl_layouts.py` runs the same layouts through NCCL.
DEVICE = os.environ.get("DMUOWN_TEST_DEVICE", "cpu")

MATRIX_ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown")
ROW_STATE = ("magnitude", "magnitude_momentum", "magnitude_variance", "direction_norm", "variance_neuron")
ALGORITHMS = (*MATRIX_ALGORITHMS, "adamw", "adam", "lion")


@dataclass(frozen=True)
class Layout:
    """One way to lay one parameter over ranks.

    Attributes:
        shape: Global shape.
        mesh: Nested ranks.
        placements: `"R"`, `"S<axis>"`, or `"SS<axis>:<split factor>"`, one a mesh dimension; none for a plain tensor.
        options: Group options that belong to the shape: `matrix_transposed`, `flatten`, `split_sizes`, ...
        names: Names of mesh dimensions, or None.
    """

    shape: tuple[int, ...]
    mesh: Any = None
    placements: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """(mesh dimension, tensor axis) in the order in which they cut."""
        order: list[tuple[int, int, int]] = []
        sizes = torch.tensor(self.mesh).shape if self.placements else ()
        for dim in reversed(range(len(self.placements))):
            text = self.placements[dim]
            if text == "R":
                continue
            axis = int(text.removeprefix("SS").removeprefix("S").partition(":")[0]) % len(self.shape)
            behind = int(text.partition(":")[2] or 1)  # how many pieces exist before this dimension cuts
            position, pieces = 0, 1
            while pieces < behind:
                pieces *= order[position][2] if order[position][1] == axis else 1
                position += 1
            order.insert(position, (dim, axis, sizes[dim]))
        return [(dim, axis) for dim, axis, _ in order]

    def cut(self, whole: Tensor, coordinate: Sequence[int], axes: set[int] | None = None) -> Tensor:
        """What the rank at `coordinate` holds of a whole tensor; only cuts along `axes`, where given."""
        sizes = torch.tensor(self.mesh).shape if self.placements else ()
        for dim, axis in self.cuts:
            if axes is None or axis in axes:
                chunks = torch.chunk(whole, sizes[dim], dim=axis)
                position = coordinate[dim]
                whole = chunks[position] if position < len(chunks) else whole.narrow(axis, 0, 0)
        return whole

    @property
    def row_axes(self) -> set[int]:
        """Axes that row state is sharded along: all but the input's."""
        if self.options.get("flatten") and len(self.shape) > 2:
            return {0}
        last = len(self.shape) - 1
        return set(range(len(self.shape))) - {last - 1 if self.options.get("matrix_transposed") else last}

    def build_mesh(self) -> DeviceMesh:
        return build_mesh(_tuples(self.mesh), self.names)

    def distribute(self, whole: Tensor) -> Tensor:
        """The DTensor of this layout, made of this rank's own cut; or a plain copy."""
        if not self.placements:
            return whole.clone()
        mesh = self.build_mesh()
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        local = self.cut(whole, coordinate).clone(memory_format=torch.contiguous_format)
        return DTensor.from_local(
            local,
            mesh,
            [placement(text) for text in self.placements],
            run_check=False,
            shape=whole.shape,
            stride=whole.contiguous().stride(),
        )


def placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    if text.startswith("SS"):
        axis, _, factor = text[2:].partition(":")
        strided: Placement = _StridedShard(int(axis), split_factor=int(factor))
        return strided
    return Shard(int(text[1:]))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def build_mesh(ranks: Any, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of given ranks; kept, since every new one makes process groups that are never freed.

    Torch makes those groups with all ranks of the world, in one order: a mesh over a part of them, too, is built by
    every rank.
    """
    return _kept_mesh(ranks, names)


@functools.lru_cache
def _kept_mesh(ranks: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh(DEVICE, torch.tensor(ranks), mesh_dim_names=names)


@dataclass
class Run:
    """Training of one layout by several algorithms at once: one param group and one parameter each.

    Attributes:
        layout: The layout.
        algorithms: One group each.
        steps: Optimizer steps.
        dtype: Parameter dtype.
        absent: (step, algorithm index) -> ranks without a gradient there.
        options: Group options for all.
        per_group: How many parameters each group has.
        seed: Of weights and gradients.
    """

    layout: Layout
    algorithms: tuple[str, ...] = ALGORITHMS
    steps: int = 3
    dtype: torch.dtype = torch.float32
    absent: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    per_group: int = 1
    seed: int = 0

    def whole(self, kind: int, index: int) -> Tensor:
        """Weights (kind 0) or the gradients of step kind - 1, of the parameter `index`."""
        generator = torch.Generator().manual_seed(1_000_000 * self.seed + 1000 * index + kind)
        return torch.randn(self.layout.shape, generator=generator, dtype=torch.float64).to(DEVICE, self.dtype)

    def group(self, algorithm: str, params: Sequence[Tensor], names: list[str]) -> dict[str, Any]:
        group: dict[str, Any] = {
            "params": list(zip(names, params, strict=True)),
            "algorithm": algorithm,
            **self.options,
        }
        group.setdefault("weight_decay", 0.1)
        if algorithm in MATRIX_ALGORITHMS:
            group |= {"ns_dtype": torch.float32, **self.layout.options}
        if algorithm == "muon":
            group.setdefault("nesterov", True)
        if algorithm == "angular_muown":
            group["weight_decay"] = 0.0
        return group

    def optimizer(self, make: Callable[[Tensor], Tensor]) -> dmuown.Muon:
        groups = []
        for index, algorithm in enumerate(self.algorithms):
            params = [
                torch.nn.Parameter(make(self.whole(0, index * self.per_group + i))) for i in range(self.per_group)
            ]
            groups.append(self.group(algorithm, params, [f"{algorithm}.{i}" for i in range(self.per_group)]))
        return dmuown.Muon(groups, lr=0.05)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def snapshot(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """This rank's weights and state, copied."""
    return [
        {"weight": local(param).detach().clone()}
        | {key: local(value).clone() for key, value in sorted(optimizer.state[param].items())}
        for param in parameters(optimizer)
    ]


def train_sharded(rank: int, world_size: int, run: Run) -> tuple[list[int], list[dict[str, Tensor]]]:
    """On one rank: mesh coordinate, and weights and state after the last step."""
    optimizer = run.optimizer(run.layout.distribute)
    for step in range(run.steps):
        for index, param in enumerate(parameters(optimizer)):
            if rank in run.absent.get((step, index), ()):
                param.grad = None
            else:
                param.grad = run.layout.distribute(run.whole(step + 1, index))
        optimizer.step()
    coordinate = run.layout.build_mesh().get_coordinate() if run.layout.placements else ()
    assert coordinate is not None
    return list(coordinate), snapshot(optimizer)


def train_whole(run: Run, gradient: Callable[[int, int], Tensor | None] | None = None) -> list[dict[str, Tensor]]:
    """In this process, on plain tensors."""
    optimizer = run.optimizer(torch.clone)
    for step in range(run.steps):
        for index, param in enumerate(parameters(optimizer)):
            param.grad = run.whole(step + 1, index) if gradient is None else gradient(step, index)
        optimizer.step()
    return snapshot(optimizer)


def zero_where_absent(run: Run, step: int, index: int) -> Tensor | None:
    """The whole gradient that gradients missing on some ranks amount to, or None where no rank has one.

    What a rank without a gradient holds counts as zero, unless a replica has it.
    """
    ranks = run.absent.get((step, index), ())
    whole = run.whole(step + 1, index)
    grid = torch.tensor(run.layout.mesh)
    present = [rank for rank in grid.reshape(-1).tolist() if rank not in ranks]
    if not present:
        return None
    held = torch.zeros_like(whole)
    places = torch.arange(whole.numel()).reshape(whole.shape)
    for rank in present:
        here = run.layout.cut(places, (grid == rank).nonzero()[0].tolist()).reshape(-1)
        held.view(-1)[here] = whole.view(-1)[here]
    return held


def assert_sharded_equals_whole(
    run: Run,
    results: Sequence[tuple[list[int], list[dict[str, Tensor]]]],
    whole: list[dict[str, Tensor]],
    rtol: float,
    movement: float = 4,
) -> None:
    """Compare every rank's shards with cuts of the whole, relative to its norm; weights also to their movement.

    State that happens to be small counts as a twentieth in root mean square: sums cancel.
    """
    names = [f"{algorithm}.{i}" for algorithm in run.algorithms for i in range(run.per_group)]
    for rank, (coordinate, states) in enumerate(results):
        for index, (name, state, expected) in enumerate(zip(names, states, whole, strict=True)):
            assert state.keys() == expected.keys(), name
            for key, value in expected.items():
                got = state[key]
                if value.dim() == 0:
                    assert torch.equal(got, value), (name, key)
                    continue
                axes = run.layout.row_axes if key in ROW_STATE else None
                part = run.layout.cut(value, coordinate, axes)
                assert got.shape == part.shape, (name, key, rank, got.shape, part.shape)
                assert got.isfinite().all(), (name, key, rank)
                error = float((got.double() - part.double()).norm())
                size = float(value.double().norm())
                relative = error / max(size, 1e-30 if key == "weight" else 0.05 * value.numel() ** 0.5)
                assert relative <= rtol, f"{name}: {key} on rank {rank} is off by {relative:.2e}"
                if key == "weight":
                    moved = float((value.double() - run.whole(0, index).double()).norm())
                    relative = error / max(moved, 1e-3 * size, 1e-30)  # recomposing alone rounds
                    assert relative <= movement * rtol, f"{name}: its movement on rank {rank} is off by {relative:.2e}"
