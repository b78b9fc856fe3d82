"""The ranks of a job, and how each parameter would lie on them: FSDP2, tensor and expert parallelism of the host.

The meshes are torch's own, described without process groups; the parameters are DTensors on the meta device. So
the engine's layouts and its choice of owners apply to them as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuown.errors import OptionError
from dmuown.policy.roles import ParameterRole, Role

# The host's plans of tensor parallelism: outputs of these are split over ranks (colwise), inputs of those (rowwise).
# Adapters are cut on the axis of the weight they stand beside.
_COLWISE = re.compile(
    r"(q_proj|k_proj|v_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|lm_head)"
    r"\.(weight|bias|lora_magnitude|lora_[AB]\.weight)$"
)
_ROWWISE = re.compile(r"(o_proj|down_proj)\.(lora_[AB]\.)?weight$")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Cluster:
    """The sizes of a job.

    Attributes:
        world_size: Processes.
        replicas: Copies of every shard (HSDP), `dp_replicate_size`.
        tp: Ranks of tensor parallelism.
        ep: Ranks of expert parallelism.
        pp: Stages of pipeline parallelism.
        cp: Ranks of context parallelism; they shard parameters as data-parallel ranks do.

    Raises:
        OptionError: The sizes do not divide.
    """

    world_size: int
    replicas: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("--tp", self.tp), ("--pp", self.pp), ("--replicas", self.replicas)):
            if value < 1:
                raise OptionError(name, f"must be at least 1, got {value}")
        if self.world_size % (self.tp * self.pp * self.cp):
            raise OptionError(
                "--world-size", f"{self.world_size} is no multiple of tp x pp x cp = {self.tp * self.pp * self.cp}"
            )
        ranks = self.data_parallel // self.cp
        if ranks % self.replicas:
            raise OptionError("--replicas", f"{self.replicas} does not divide {ranks} data-parallel ranks")
        if self.replicas == ranks > 1:
            raise OptionError(
                "--replicas",
                f"must be less than the {ranks} data-parallel ranks, got {self.replicas}: FSDP2 needs two shards",
                "Lower it",
            )
        if self.stage_size % self.ep:
            raise OptionError("--ep", f"{self.ep} does not divide the {self.stage_size} ranks of a stage")

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp

    @property
    def data_parallel(self) -> int:
        """Ranks over which parameters are sharded or replicated, context parallelism included."""
        return self.stage_size // self.tp

    @cached_property
    def dense_mesh(self) -> DeviceMesh | None:
        """Mesh of a stage: (replicate, shard, tp); None for a single rank."""
        return _mesh((self.replicas, self.data_parallel // self.replicas, self.tp), ("replicate", "shard", "tp"))

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        """Mesh of experts of a stage: (shard, ep) over all of its ranks, tensor-parallel ones included."""
        return _mesh((self.stage_size // self.ep, self.ep), ("shard", "ep"))

    @cached_property
    def tensor_parallel_mesh(self) -> DeviceMesh | None:
        """Mesh of the tensor-parallel ranks alone; None for a single one."""
        return _mesh((self.tp,), ("tp",))

    def describe(self) -> str:
        """The sizes in words."""
        shard = self.data_parallel // self.replicas
        parts = [f"{self.pp} stages of"] if self.pp > 1 else []
        parts.append(f"{self.replicas} replicas x {shard} shards" if self.replicas > 1 else f"{shard} shards")
        parts += [f"x {self.tp} tensor-parallel"] if self.tp > 1 else []
        parts += [f"(experts over {self.ep})"] if self.ep > 1 else []
        return " ".join(parts)


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh | None:
    if math.prod(sizes) == 1:
        return None
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    # Neither backend nor process group: a description of ranks, seen from rank 0.
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def place(entry: ParameterRole, cluster: Cluster, dtype: torch.dtype) -> Tensor:
    """Return a parameter as the host would lay it out, on the meta device, seen from rank 0 of its stage."""
    shape = tuple(entry.parameter.shape)
    if entry.role is Role.EXPERT and cluster.ep > 1:
        # The host shards experts over ep, and over the rest on the axis after it.
        return _distribute(shape, cluster.expert_mesh, (Shard(1), Shard(0)), dtype)
    split = tensor_parallel_axis(entry) if cluster.tp > 1 else None
    tensor: Placement = Replicate() if split is None else Shard(split)
    # What tensor parallelism cut along axis 0 before, FSDP2 cuts again.
    fsdp: Placement = _StridedShard(0, split_factor=cluster.tp) if split == 0 else Shard(0)
    return _distribute(shape, cluster.dense_mesh, (Replicate(), fsdp, tensor), dtype)


def place_tensor_parallel(entry: ParameterRole, cluster: Cluster, dtype: torch.dtype) -> Tensor:
    """Return a parameter as tensor parallelism alone cuts it: what an owner holds, seen from the first of its ranks."""
    split = tensor_parallel_axis(entry)
    shape = tuple(entry.parameter.shape)
    if cluster.tp == 1 or split is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return _distribute(shape, cluster.tensor_parallel_mesh, (Shard(split),), dtype)


def tensor_parallel_axis(entry: ParameterRole) -> int | None:
    """The axis on which the host's plans of tensor parallelism cut a parameter; None where each rank has it whole."""
    if entry.role in (Role.EMBEDDING, Role.HEAD) or _COLWISE.search(entry.name):
        return 0
    return 1 if _ROWWISE.search(entry.name) else None


def _distribute(
    shape: tuple[int, ...], mesh: DeviceMesh | None, placements: tuple[Placement, ...], dtype: torch.dtype
) -> Tensor:
    if mesh is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    local = local_shape(shape, mesh, placements, (0,) * len(placements))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        torch.empty(local, dtype=dtype, device="meta"),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def local_shape(
    shape: Sequence[int], mesh: DeviceMesh | None, placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape that a rank holds. An axis cut by tensor parallelism is cut by it first, as FSDP2 finds it."""
    if mesh is None:
        return tuple(shape)
    held = list(shape)
    plain = [dim for dim, placement in enumerate(placements) if not isinstance(placement, _StridedShard)]
    strided = [dim for dim, placement in enumerate(placements) if isinstance(placement, _StridedShard)]
    for dim in (*plain, *strided):
        placement = placements[dim]
        if isinstance(placement, (Shard, _StridedShard)):
            part = -(-held[placement.dim] // mesh.size(dim))
            held[placement.dim] = max(0, min(part, held[placement.dim] - part * coordinate[dim]))
    return tuple(held)


def stages(entries: Sequence[ParameterRole], count: int) -> list[list[ParameterRole]]:
    """Split parameters over pipeline stages, as the host does where its section `pipeline` says nothing else.

    Layers evenly, the first stages one more where they do not divide; what precedes them first, what follows last.

    Raises:
        OptionError: More stages than layers.
    """
    layers = [int(match.group(2)) for entry in entries if (match := _LAYER.search(entry.name))]
    depth = max(layers, default=-1) + 1
    if count > max(1, depth):
        raise OptionError("--pp", f"{count} stages are more than the {depth} layers", "Lower it")
    fewest, longer = divmod(depth, count)
    stage_of = [stage for stage in range(count) for _ in range(fewest + (stage < longer))]
    found: list[list[ParameterRole]] = [[] for _ in range(count)]
    for entry in entries:
        match = _LAYER.search(entry.name)
        stage = stage_of[int(match.group(2))] if match else 0 if entry.role is Role.EMBEDDING else count - 1
        found[stage].append(entry)
    return found
