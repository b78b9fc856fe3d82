"""Process groups over some dimensions of a parameter's own mesh.

A collective follows the mesh of the parameter, never a guess. One mesh dimension already has its
group; several together (tensor parallel x FSDP) need one more, made once and shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuown.engine.collectives import all_gather


class _Made:
    """Groups made under one default group; once that is destroyed, they are dead and forgotten."""

    def __init__(self) -> None:
        self.world: weakref.ref[dist.ProcessGroup] | None = None
        self.groups: dict[tuple[str | None, tuple[int, ...]], dist.ProcessGroup] = {}
        self.warm: set[tuple[dist.ProcessGroup, torch.device, str]] = set()

    def now(self) -> _Made:
        world = dist.distributed_c10d._get_default_group()
        if self.world is None or self.world() is not world:
            self.world, self.groups, self.warm = weakref.ref(world), {}, set()
        return self


_made = _Made()


def mesh_group(mesh: DeviceMesh, dims: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the group of ranks that differ from this one only in `dims`; None when that is this rank alone.

    Collective on first use for several dimensions: all ranks of the group must call it, in the same
    order of groups.
    """
    dims = tuple(dim for dim in dims if mesh.size(dim) > 1)
    if not dims:
        return None
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    return group_of(mesh_ranks(mesh, dims))


def group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return a group of ranks, this one among them, on the default backend. Collective over them on first use."""
    return _group_of(ranks, backend=None)


def mesh_ranks(mesh: DeviceMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one only in `dims`, in mesh order."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "checked when the layout was read"
    index = tuple(slice(None) if dim in dims else position for dim, position in enumerate(coordinate))
    return tuple(int(rank) for rank in mesh.mesh[index].reshape(-1).tolist())


#: Meshes do not change, and summaries ask for each rank of each bucket.
_coordinates: weakref.WeakKeyDictionary[DeviceMesh, Mapping[int, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def mesh_coordinates(mesh: DeviceMesh) -> Mapping[int, tuple[int, ...]]:
    """Return the mesh coordinate of every global rank of a mesh."""
    found = _coordinates.get(mesh)
    if found is None:
        positions = (mesh.mesh >= 0).nonzero().tolist()
        found = {int(rank): tuple(at) for rank, at in zip(mesh.mesh.reshape(-1).tolist(), positions, strict=True)}
        _coordinates[mesh] = found
    return found


def audience_of(param: Tensor) -> tuple[int, ...]:
    """Return the sorted global ranks that hold parts of a parameter; () for a tensor of this rank alone.

    Parameters of equal audience, whatever their meshes, are agreed on in one message.
    """
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return ()
    return tuple(sorted(int(rank) for rank in param.device_mesh.mesh.reshape(-1).tolist()))


def audiences(params: Iterable[Tensor]) -> dict[tuple[int, ...], list[int]]:
    """Return indices of parameters by audience; the one of this rank alone comes first, where there is one."""
    known: dict[DeviceMesh | None, tuple[int, ...]] = {}
    indices: dict[tuple[int, ...], list[int]] = {}
    for index, param in enumerate(params):
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        if mesh not in known:
            known[mesh] = audience_of(param)
        indices.setdefault(known[mesh], []).append(index)
    return dict(sorted(indices.items(), key=lambda item: item[0] != ()))


def control_group(audience: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return a gloo group of an audience, for small host-side messages; None for this rank alone.

    Gloo, so that ranks can agree on something without waiting for the accelerator. Collective on
    first use.
    """
    if not audience:
        return None
    if len(audience) == dist.get_world_size() and dist.get_backend() == "gloo":
        return dist.distributed_c10d._get_default_group()
    return _group_of(audience, backend="gloo")


def warm_up(group: dist.ProcessGroup | None, device: torch.device, kind: str) -> None:
    """Run one tiny collective of a kind (`all_to_all`, `all_gather`, `all_reduce`), once per group and device.

    The first one sets up connections between machines, which can take long and needs all ranks at
    once: better at construction than in the middle of a step.
    """
    made = _made.now()
    if group is None or (group, device, kind) in made.warm:
        return
    made.warm.add((group, device, kind))
    size = dist.get_world_size(group)
    source, gathered = torch.zeros(size, device=device), torch.zeros(size, device=device)
    if kind == "all_to_all":
        dist.all_to_all_single(gathered, source, group=group)
    elif kind == "all_gather":
        all_gather(gathered, source[:1], group=group)
    else:
        dist.all_reduce(source[:1], group=group)


def _group_of(ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup:
    groups = _made.now().groups
    key = (backend, tuple(sorted(ranks)))
    if key not in groups:
        with same_name_on(key[1], str(backend)):
            made = dist.new_group(list(key[1]), backend=backend, timeout=_timeout(), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        groups[key] = made
    return groups[key]


@contextlib.contextmanager
def same_name_on(ranks: tuple[int, ...], label: str) -> Iterator[None]:
    """Let the ranks of a new group give it one name, whatever other groups each of them has.

    Torch names a group that only its members make after its ranks and the number of groups that the
    member knows. Members of unlike numbers (pipeline stages, groups of somebody else's) would each
    wait for a group of another name. So they tell their numbers through the store, and all count up
    to the largest.
    """
    known: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    store = dist.distributed_c10d._get_default_store()
    prefix = f"dmuown/groups/{label}/{hashlib.sha256(repr(ranks).encode()).hexdigest()}"
    store.set(f"{prefix}/{dist.get_rank()}", str(len(known)))
    if dist.get_rank() == ranks[0]:  # one rank reads them all: thousands would ask the store for millions
        store.set(f"{prefix}/largest", str(max(int(store.get(f"{prefix}/{rank}")) for rank in ranks)))
    most = int(store.get(f"{prefix}/largest"))
    placeholders = [object() for _ in range(most - len(known))]
    for number, placeholder in enumerate(placeholders):
        known[placeholder] = f"{prefix}/{number}"
    try:
        yield
    finally:
        for placeholder in placeholders:
            del known[placeholder]


def _timeout() -> timedelta | None:
    """The default group's timeout, which new groups do not inherit by themselves."""
    world = dist.distributed_c10d._get_default_group()
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return None
