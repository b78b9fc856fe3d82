"""The ranks that share dedicated parameters: a (replicate x) shard mesh as one process group.

Owners are spread over all ranks of the mesh, so that every rank that is not the owner holds nothing
between boundaries: a replicate dimension adds owners, not copies.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuown.engine.groups import same_name_on
from dmuown.errors import LayoutError, OptionTypeError


@dataclass(frozen=True)
class Stages:
    """The two dimensions of a (replicate x) shard mesh, for transfers that cross between nodes once.

    Attributes:
        replicate: Group of the ranks at this one's place in their shard groups.
        shard: Group of the ranks of this one's replica.
        size: Ranks of a shard group.
    """

    replicate: dist.ProcessGroup
    shard: dist.ProcessGroup
    size: int


@dataclass(frozen=True)
class OwnerGroup:
    """The runtime's process group.

    Attributes:
        group: A group of its own, so that its collectives never interleave with others'; None for one rank.
        rank: This rank within it.
        ranks: Global ranks in its order.
        shard_mesh: The group as a 1-D mesh, for parameters on `sharded_adamw`.
        tensor_parallel: Names of the mesh dimensions that are neither replicate nor shard.
        stages: Groups of its two dimensions, where it has two of more than one rank.
        names: Names of the dimensions that it is made of; empty for a mesh without names.
        root: The mesh that they are dimensions of.
        combined: Meshes of tensor-parallel parameters, each with the mesh of the group and it.
    """

    group: dist.ProcessGroup | None
    rank: int
    ranks: tuple[int, ...]
    shard_mesh: DeviceMesh
    tensor_parallel: tuple[str, ...]
    stages: Stages | None
    names: tuple[str, ...]
    root: DeviceMesh
    combined: list[tuple[DeviceMesh, DeviceMesh]] = field(default_factory=list)

    @property
    def root_names(self) -> tuple[str, ...]:
        """Names of the root mesh's dimensions."""
        return tuple(self.root.mesh_dim_names or ())


def owner_group(
    mesh: DeviceMesh, replicate_mesh: DeviceMesh | None = None, *, tensor_parallel: bool = False
) -> OwnerGroup:
    """Make the group of a mesh. Collective over its ranks.

    Args:
        mesh: The shard dimension, or `(replicate, shard)`.
        replicate_mesh: The replicate dimension, if `mesh` does not hold it.
        tensor_parallel: Whether parameters are cut over further dimensions of the same root mesh.

    Raises:
        OptionTypeError: Not device meshes.
        LayoutError: Dimensions without names where they are needed, in the wrong order, or of the wrong
            number or size.
    """
    ranks = _ranks(mesh, replicate_mesh, tensor_parallel)
    me = dist.get_rank()
    if me not in ranks:
        raise LayoutError("mesh", f"does not hold this rank, {me}: it has ranks {list(ranks)}", "Pass this rank's mesh")
    rest = _other_dims(mesh, replicate_mesh)
    names = (*((replicate_mesh.mesh_dim_names or ()) if replicate_mesh else ()), *(mesh.mesh_dim_names or ()))
    if len(ranks) == 1:
        return OwnerGroup(
            None, 0, ranks, mesh if mesh.ndim == 1 else _flat_mesh(mesh, None), rest, None, names, _root(mesh)
        )
    group = _new_group(ranks, mesh)
    # The group's own order: new_group sorts ranks.
    ordered = tuple(dist.get_process_group_ranks(group))
    same = mesh.ndim == 1 and replicate_mesh is None and ordered == ranks
    flat = mesh if same else _flat_mesh(mesh, group)
    # Without a process group's own order there are no rows and columns. NCCL's own chains follow the machines, and
    # cross to each replica once as they are; two stages would only make every transfer wait for another.
    in_stages = ordered == ranks and dist.get_backend(group) == "gloo"
    stages = _stages(ranks, mesh, me) if in_stages else None
    return OwnerGroup(group, ordered.index(me), ordered, flat, rest, stages, names, _root(mesh))


def _stages(ranks: tuple[int, ...], mesh: DeviceMesh, me: int) -> Stages | None:
    size = mesh.size(mesh.ndim - 1)
    if size == 1 or size == len(ranks):
        return None
    place = ranks.index(me)
    start = place - place % size
    # In this order on every rank: each makes the two that it is in.
    replicate = _new_group(ranks[place % size :: size], mesh)
    return Stages(replicate, _new_group(ranks[start : start + size], mesh), size)


_made: Counter[tuple[int, ...]] = Counter()


def _new_group(ranks: tuple[int, ...], mesh: DeviceMesh) -> dist.ProcessGroup:
    _made[ranks] += 1
    with same_name_on(tuple(sorted(ranks)), f"owners {_made[ranks]}"):
        group = dist.new_group(list(ranks), timeout=_timeout(mesh), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _ranks(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None, tensor_parallel: bool) -> tuple[int, ...]:
    if not isinstance(mesh, DeviceMesh):
        raise OptionTypeError(
            "mesh", f"must be a DeviceMesh, got {type(mesh).__name__}", "Make one by init_device_mesh"
        )
    if replicate_mesh is not None and not isinstance(replicate_mesh, DeviceMesh):
        raise OptionTypeError("replicate_mesh", f"must be a DeviceMesh, got {type(replicate_mesh).__name__}")
    names = tuple(mesh.mesh_dim_names or ())
    root = _root(mesh)
    if tensor_parallel and not names:
        raise LayoutError(
            "mesh",
            "needs dimension names where parameters are tensor-parallel, to tell the dimensions apart",
            "Use init_device_mesh(..., mesh_dim_names=('shard', 'tp')) and pass mesh['shard']",
        )
    if replicate_mesh is not None:
        _check_pair(mesh, replicate_mesh)
        pair = (*(replicate_mesh.mesh_dim_names or ()), *names)
        flat = root[pair].mesh.flatten()
    else:
        if mesh.ndim > 2:
            raise LayoutError(
                "mesh", f"has {mesh.ndim} dimensions {names}; it takes (replicate,) shard", "Pass a slice"
            )
        if mesh.ndim == 2:
            _check_order(names, root)
        flat = mesh.mesh.flatten()
    _check_size(mesh, root, tensor_parallel)
    return tuple(int(rank) for rank in flat.tolist())


def _check_pair(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> None:
    for key, value in (("mesh", mesh), ("replicate_mesh", replicate_mesh)):
        if value.ndim != 1 or not value.mesh_dim_names:
            raise LayoutError(
                key,
                f"must be a named 1-D slice of one mesh where both are given, got {value.ndim} dimensions "
                f"{value.mesh_dim_names or 'without names'}",
                "Use init_device_mesh(..., mesh_dim_names=('replicate', 'shard')) and pass its slices",
            )
    root, other = _root(mesh), _root(replicate_mesh)
    names = tuple(root.mesh_dim_names or ())
    if root != other:
        raise LayoutError("replicate_mesh", "is not a slice of the mesh that `mesh` is a slice of", "Slice one mesh")
    _check_order((*(replicate_mesh.mesh_dim_names or ()), *(mesh.mesh_dim_names or ())), root)
    assert names


def _check_order(names: tuple[str, ...], root: DeviceMesh) -> None:
    """Refuse swapped axes: the replicate dimension is the outer one, as FSDP2 has it."""
    order = [tuple(root.mesh_dim_names or ()).index(name) for name in names if name in (root.mesh_dim_names or ())]
    lower = [name.lower() for name in names]
    named_wrong = len(lower) == 2 and ("shard" in lower[0] and "repl" in lower[1])
    if named_wrong or order != sorted(order) or len(set(order)) != len(order):
        raise LayoutError(
            "mesh",
            f"has dimensions {names} in this order; the replicate dimension comes first, then the shard dimension",
            "Swap them",
        )


def _check_size(mesh: DeviceMesh, root: DeviceMesh, tensor_parallel: bool) -> None:
    world = dist.get_world_size()
    if root.size() != world:
        raise LayoutError(
            "mesh",
            f"has {root.size()} ranks of a world of {world}: the ranks left out would train other parameters",
            "Make the mesh over all ranks, and pass the slice that is data-parallel",
        )
    if tensor_parallel and root.size() == mesh.size():
        raise LayoutError(
            "mesh",
            "holds all ranks, so that none are left for the tensor-parallel dimension",
            "Pass the data-parallel slice of one mesh, for example mesh['shard']",
        )


def _root(mesh: DeviceMesh) -> DeviceMesh:
    found: Any = getattr(mesh, "_get_root_mesh", lambda: mesh)()
    return found if isinstance(found, DeviceMesh) else mesh


def _other_dims(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> tuple[str, ...]:
    mine = {*(mesh.mesh_dim_names or ()), *((replicate_mesh.mesh_dim_names or ()) if replicate_mesh else ())}
    return tuple(name for name in (_root(mesh).mesh_dim_names or ()) if name not in mine)


def _flat_mesh(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> DeviceMesh:
    if group is None:
        return DeviceMesh(mesh.device_type, [dist.get_rank()])
    return DeviceMesh.from_group(group, mesh.device_type)


def _timeout(mesh: DeviceMesh) -> timedelta | None:
    """The timeout of the mesh's own group, which new_group would not inherit."""
    group: Any = mesh.get_group(mesh.ndim - 1)
    try:
        options: Any = group._get_backend(torch.device(mesh.device_type)).options
    except (AttributeError, RuntimeError):
        return None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None
