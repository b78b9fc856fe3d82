"""Shards on `sharded_adamw`: of plain parameters, and of the parts that tensor parallelism had made of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuown.engine.layout import local_part
from dmuown.errors import LayoutError
from dmuown.ownership.group import OwnerGroup
from dmuown.ownership.plan import shard_rows
from dmuown.ownership.record import Record


def cut_into_shards(param: nn.Parameter, dtype: torch.dtype, group: OwnerGroup) -> DTensor:
    """Return this rank's shard of a parameter: rows of it, or of its tensor-parallel part.

    Args:
        param: Whole and plain, or a DTensor over tensor-parallel mesh dimensions.
        dtype: Of the result.
        group: The ranks that share it out.

    Returns:
        A DTensor of the parameter's shape, `Shard(0)` over the group. Of a tensor-parallel parameter, over the group
        and its own mesh, the group's ranks first; a `_StridedShard` where both cut the first axis, as FSDP2 makes.
    """
    local = (param.to_local() if isinstance(param, DTensor) else param).detach()
    rows = shard_rows(local.shape[0], len(group.ranks))
    start = min(group.rank * rows, local.shape[0])
    # A copy: a view would keep the whole parameter's memory.
    part = local[start : start + rows].to(dtype, copy=True).contiguous()
    mesh, placements = _layout(param, group)
    stride = torch.empty(param.shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=param.shape, stride=stride)


def part_of(record: Record, whole: Tensor) -> Tensor:
    """Return what this rank's home, a DTensor, has of a whole plain tensor of its shape; without communication."""
    home = record.home
    assert isinstance(home, DTensor)
    if record.tensor_parallel is not None:
        whole = local_part(whole, *record.tensor_parallel)
    if record.owner is not None:
        return whole
    size = home.to_local().shape[0]
    group_size, rank = home.device_mesh.size(0), home.device_mesh.get_local_rank(0)
    start = min(rank * shard_rows(whole.shape[0], group_size), whole.shape[0])
    return whole[start : start + size]


def _layout(param: nn.Parameter, group: OwnerGroup) -> tuple[DeviceMesh, Sequence[Placement]]:
    if not isinstance(param, DTensor):
        return group.shard_mesh, [Shard(0)]
    own = param.device_mesh
    cuts = 1
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim % param.ndim == 0:
            cuts *= own.size(dim)
    first = _StridedShard(0, split_factor=cuts) if cuts > 1 else Shard(0)
    return _combined_mesh(own, group), [first, *param.placements]


def _combined_mesh(own: DeviceMesh, group: OwnerGroup) -> DeviceMesh:
    """The group's ranks and a parameter's own mesh as one, of the groups that there are."""
    for known, combined in group.combined:
        if known == own:
            return combined
    names = tuple(own.mesh_dim_names or ())
    root_names = group.root_names
    dims = [root_names.index(name) for name in (*group.names, *names)]
    coordinate = group.root.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(group.root.ndim))
    kept = [dim for dim in range(group.root.ndim) if dim in dims]
    grid = group.root.mesh[index].permute([kept.index(dim) for dim in dims])
    grid = grid.reshape(len(group.ranks), *own.mesh.shape)
    # A process group orders its ranks by number, whatever the mesh does: every column must agree with that.
    order = grid.reshape(len(group.ranks), -1)
    if not torch.equal(order, order.sort(dim=0).values):
        raise LayoutError(
            "mesh",
            f"has ranks {order.tolist()} that do not ascend along {group.names}, beside dimensions {names}",
            "Make the mesh with init_device_mesh, or keep tensor-parallel parameters off route 'sharded_adamw'",
        )
    groups = [group.shard_mesh.get_group(0), *(own.get_group(dim) for dim in range(own.ndim))]
    combined = DeviceMesh.from_group(groups, own.device_type, grid, mesh_dim_names=("_".join(group.names), *names))
    group.combined.append((own, combined))
    return combined
