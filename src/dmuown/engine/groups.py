"""Process groups over some dimensions of a parameter's own mesh.

A collective follows the mesh of the parameter, never a guess. One mesh dimension already has its
group; several together (tensor parallel x FSDP) need one more, made once and shared.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_made: dict[tuple[object, ...], dist.ProcessGroup] = {}


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
    return _group_of(mesh_ranks(mesh, dims), backend=None)


def control_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return a gloo group over the whole mesh, for small host-side messages; None on a mesh of one rank.

    Gloo, so that ranks can agree on something without waiting for the accelerator.
    """
    if mesh.size() == 1:
        return None
    if mesh.ndim == 1 and dist.get_backend(mesh.get_group(0)) == "gloo":
        return mesh.get_group(0)
    return _group_of(mesh_ranks(mesh, tuple(range(mesh.ndim))), backend="gloo")


def mesh_ranks(mesh: DeviceMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the global ranks that differ from this one only in `dims`, in mesh order."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "checked when the layout was read"
    index = tuple(slice(None) if dim in dims else position for dim, position in enumerate(coordinate))
    return tuple(int(rank) for rank in mesh.mesh[index].reshape(-1).tolist())


def coordinates_in_group(mesh: DeviceMesh, group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """Return the mesh coordinate of every member of `group`, in the group's own rank order."""
    by_rank = {
        int(mesh.mesh[index]): index
        for index in ((tuple(int(i) for i in position)) for position in (mesh.mesh >= 0).nonzero().tolist())
    }
    return [by_rank[rank] for rank in dist.get_process_group_ranks(group)]


def _group_of(ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup:
    # The default group is part of the key: after it is destroyed, groups made under it are dead.
    key = (id(dist.distributed_c10d._get_default_group()), backend, ranks)
    if key not in _made:
        made = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        _made[key] = made
    return _made[key]
