"""Where the logical matrices of one parameter lie: a pure description, read off its DTensor.

A parameter of global shape `[..., output, input]` is a stack of logical matrices `[m, n]`. Its
placements may shard the leading axes (whole matrices are spread over ranks: nothing to exchange),
the matrix axes (a matrix must be made whole), or nothing. This module answers, for every rank that
shares a matrix, which of its rows and columns that rank holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuown.errors import LayoutError, ParameterError

Index = slice | Tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's plain tensor: the local shard of a DTensor, or the tensor itself.

    A shard that a collective is still filling (tensor parallelism leaves such gradients) is waited for.
    """
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return tensor


@dataclass(frozen=True)
class Shards:
    """Rows and columns of a logical matrix held by one rank.

    Attributes:
        rows: Global row (output) indices: a slice where contiguous, else an int64 tensor.
        cols: Global column (input) indices, likewise.
        row_count: Number of rows.
        col_count: Number of columns.
    """

    rows: Index
    cols: Index
    row_count: int
    col_count: int

    @property
    def numel(self) -> int:
        """Elements of one matrix on this rank; 0 for an empty shard."""
        return self.row_count * self.col_count

    def on(self, device: torch.device) -> Shards:
        """The same shards with their indices on a device, so that using them copies nothing there."""
        rows, cols = (index.to(device) if isinstance(index, Tensor) else index for index in (self.rows, self.cols))
        return replace(self, rows=rows, cols=cols)


class MatrixLayout:
    """The layout of one matrix parameter.

    Args:
        param: Tensor or DTensor of at least two axes.
        name: Its name, for errors.
        transposed: Whether the last two axes are stored `[input, output]`.
        flatten: Whether all axes after the first form one input axis (convolutions).

    Attributes:
        shape: Global shape of the parameter.
        m: Output neurons (rows) of a logical matrix.
        n: Input features (columns) of a logical matrix.
        mesh: The parameter's mesh, or None for a plain tensor.
        placements: Its placements, or () for a plain tensor.
        row_dims: Mesh dimensions that shard the output axis.
        col_dims: Mesh dimensions that shard the input axis.
        batch_dims: Mesh dimensions that shard a leading axis.
        replicate_dims: Mesh dimensions over which the parameter is replicated.

    Raises:
        ParameterError: Fewer than two axes.
        LayoutError: Partial placements, or shards that match no known rule.
    """

    def __init__(self, param: Tensor, name: str, *, transposed: bool = False, flatten: bool = False) -> None:
        if param.ndim < 2:
            raise ParameterError(
                name,
                f"a matrix group takes parameters of at least 2 axes, got shape {tuple(param.shape)}",
                'Move it to a group with algorithm="adamw", or pass dmuown.param_groups(model), which does; in '
                "AutoModel's YAML, a configuration does: _target_: dmuown.automodel.MuonConfig",
            )
        self.name = name
        self.shape = tuple(param.shape)
        self.transposed = transposed
        self.flatten = flatten and param.ndim > 2
        if transposed and self.flatten:
            raise ParameterError(name, "matrix_transposed and flatten exclude each other", "Set only one of them")
        self.row_axis = 0 if self.flatten else param.ndim - (1 if transposed else 2)
        if self.flatten:
            self.m, self.n = self.shape[0], math.prod(self.shape[1:])
            self.leading_shape: tuple[int, ...] = ()
        else:
            last_two = self.shape[-2:]
            self.m, self.n = (last_two[1], last_two[0]) if transposed else last_two
            self.leading_shape = self.shape[:-2]
        self._shards: dict[tuple[int, ...], Shards] = {}
        self._blocks: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self.mesh: DeviceMesh | None = None
        self.placements: tuple[Placement, ...] = ()
        self.row_dims: tuple[int, ...] = ()
        self.col_dims: tuple[int, ...] = ()
        self.batch_dims: tuple[int, ...] = ()
        self.replicate_dims: tuple[int, ...] = ()
        local = local_tensor(param)
        if isinstance(param, DTensor):
            self.mesh = param.device_mesh
            self.placements = tuple(param.placements)
            self._classify_mesh_dims()
        self.local_shape = tuple(local.shape)
        self.local_batch = 1 if self.flatten else math.prod(self.local_shape[:-2])
        self._check_local_shape()
        self._check_viewable(local)

    def _classify_mesh_dims(self) -> None:
        assert self.mesh is not None
        dims: dict[str, list[int]] = {"row": [], "col": [], "batch": [], "replicate": []}
        for mesh_dim, placement in enumerate(self.placements):
            if placement.is_partial():
                raise LayoutError(
                    self.name,
                    f"placement {placement} on mesh dimension {mesh_dim} holds unreduced partial sums",
                    "Redistribute the parameter to Shard or Replicate before building the optimizer",
                )
            if self.mesh.size(mesh_dim) == 1:
                continue
            dims[self._kind(placement)].append(mesh_dim)
        self.row_dims, self.col_dims = tuple(dims["row"]), tuple(dims["col"])
        self.batch_dims, self.replicate_dims = tuple(dims["batch"]), tuple(dims["replicate"])

    def _kind(self, placement: Placement) -> str:
        if not isinstance(placement, (Shard, _StridedShard)):
            return "replicate"
        axis = placement.dim % len(self.shape)
        if axis == self.row_axis:
            return "row"
        if self.flatten or axis >= len(self.shape) - 2:
            return "col"
        return "batch"

    @property
    def matrix_dims(self) -> tuple[int, ...]:
        """Mesh dimensions that shard a matrix axis, ascending: those an exchange spans."""
        return tuple(sorted((*self.row_dims, *self.col_dims)))

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's mesh coordinate; () for a plain tensor."""
        if self.mesh is None:
            return ()
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise LayoutError(self.name, "this rank is not in the parameter's mesh", "Build the optimizer on its ranks")
        return tuple(coordinate)

    @cached_property
    def own(self) -> Shards:
        """This rank's shards."""
        return self.shards_at(self.coordinate)

    def block_at(self, coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the global ranks that hold the same matrices as the rank at a mesh coordinate (pure).

        Returns:
            One tuple a replica, in the order of the mesh: the ranks that share a matrix, ascending.
        """
        free = (*self.replicate_dims, *self.matrix_dims)
        key = tuple(at for dim, at in enumerate(coordinate) if dim not in free)
        if key not in self._blocks:
            self._blocks[key] = self._block_at(coordinate, free)
        return self._blocks[key]

    def _block_at(self, coordinate: tuple[int, ...], free: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        assert self.mesh is not None
        index = tuple(slice(None) if dim in free else at for dim, at in enumerate(coordinate))
        left = sorted(free)
        block = self.mesh.mesh[index].permute([left.index(dim) for dim in free])
        replicas = block.reshape(math.prod(self.mesh.size(dim) for dim in self.replicate_dims), -1).tolist()
        return tuple(tuple(sorted(int(rank) for rank in ranks)) for ranks in replicas)

    def shards_at(self, coordinate: tuple[int, ...]) -> Shards:
        """Return the rows and columns held at a mesh coordinate (pure; any rank can ask for any)."""
        key = tuple(coordinate[dim] for dim in self.matrix_dims)
        if key not in self._shards:
            self._shards[key] = self._shards_at(coordinate)
        return self._shards[key]

    def _shards_at(self, coordinate: tuple[int, ...]) -> Shards:
        rows = self._cut(torch.arange(self.m), 0, self.row_axis, coordinate)
        if self.flatten:
            columns = torch.arange(self.n).reshape(self.shape[1:])
            for axis in range(1, len(self.shape)):
                columns = self._cut(columns, axis - 1, axis, coordinate)
        else:
            col_axis = 2 * len(self.shape) - 3 - self.row_axis
            columns = self._cut(torch.arange(self.n), 0, col_axis, coordinate)
        columns = columns.reshape(-1)
        return Shards(_as_slice(rows), _as_slice(columns), rows.numel(), columns.numel())

    def batch_at(self, coordinate: tuple[int, ...]) -> int:
        """Return the number of logical matrices held at a mesh coordinate (pure)."""
        if self.flatten:
            return 1
        counts = [
            self._cut(torch.arange(size), 0, axis, coordinate).numel() for axis, size in enumerate(self.leading_shape)
        ]
        return math.prod(counts)

    def _cut(self, index: Tensor, dim: int, axis: int, coordinate: tuple[int, ...]) -> Tensor:
        """Cut dimension `dim` of an index tensor as the placements cut the parameter's `axis`."""
        if self.mesh is None:
            return index
        return _cut_axis(index, dim, axis, len(self.shape), self.placements, tuple(self.mesh.shape), coordinate)

    def logical(self, local: Tensor) -> Tensor:
        """View a local tensor of this parameter's shape as logical matrices `[batch, m_local, n_local]`.

        Shares storage. Works for the parameter, its gradient and its `"grad"` state.
        """
        if self.flatten:
            return local.view(1, local.shape[0], math.prod(local.shape[1:]))
        if local.ndim != 3:
            local = local.view(self.local_batch, *local.shape[-2:])
        return local.mT if self.transposed else local

    def logical_rows(self, local: Tensor) -> Tensor:
        """View local `"grad_rows"` state as `[batch, m_local, 1]`. Shares storage."""
        if self.flatten:
            return local.view(1, local.shape[0], 1)
        local = local.view(self.local_batch, *local.shape[-2:])
        return local.mT if self.transposed else local

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Global shape of `"grad_rows"` state."""
        if self.flatten:
            return (self.m, *([1] * (len(self.shape) - 1)))
        return (*self.leading_shape, 1, self.m) if self.transposed else (*self.leading_shape, self.m, 1)

    @property
    def local_rows_shape(self) -> tuple[int, ...]:
        """Shape of `"grad_rows"` state on this rank."""
        if self.flatten:
            return (self.own.row_count, *([1] * (len(self.shape) - 1)))
        leading, rows = self.local_shape[:-2], self.own.row_count
        return (*leading, 1, rows) if self.transposed else (*leading, rows, 1)

    @property
    def key(self) -> tuple[object, ...]:
        """What two parameters must share to be updated as one bucket."""
        return (self.shape, self.transposed, self.flatten, self.placements, self.mesh)

    def _check_local_shape(self) -> None:
        own = self.own
        held: tuple[int, ...]
        if self.flatten:
            held = (self.local_shape[0], math.prod(self.local_shape[1:]))
        else:
            held = self.local_shape[-2:] if not self.transposed else (self.local_shape[-1], self.local_shape[-2])
        if held != (own.row_count, own.col_count) or self.local_batch != self.batch_at(self.coordinate):
            raise LayoutError(
                self.name,
                f"the local shard {self.local_shape} of global shape {self.shape} does not follow from placements "
                f"{self.placements} on a mesh of shape {None if self.mesh is None else tuple(self.mesh.shape)}",
                "Pad the sharded axis to a multiple of the mesh sizes, or shard another axis",
            )

    def _check_viewable(self, local: Tensor) -> None:
        try:
            self.logical(local.detach())
        except RuntimeError:
            raise ParameterError(
                self.name,
                f"its storage (shape {tuple(local.shape)}, strides {local.stride()}) cannot be viewed as matrices, "
                "and parameters are updated in place",
                "Store it contiguously: parameter.data = parameter.data.contiguous()",
            ) from None


def local_part(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's part of a tensor that every rank has whole; nothing is sent.

    Args:
        whole: Any shape and device.
        mesh: Mesh of the DTensor to cut for.
        placements: Its placements, Shard or Replicate; strided and uneven shards included.

    Returns:
        A view where the part is contiguous, else a copy; of 0 elements on a rank outside the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole.new_empty(0)
    for axis, index in enumerate(_positions_at(whole.shape, placements, mesh, coordinate)):
        held = _as_slice(index)
        if isinstance(held, slice):
            whole = whole.narrow(axis, held.start, held.stop - held.start)
        else:
            whole = whole.index_select(axis, held.to(whole.device))
    return whole


def held_positions(param: Tensor) -> list[Tensor]:
    """Return, for each axis, which indices of the whole parameter this rank holds: int64, on the host."""
    if not isinstance(param, DTensor):
        return [torch.arange(size) for size in param.shape]
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None, "checked when the record was made"
    return _positions_at(param.shape, param.placements, param.device_mesh, coordinate)


def _positions_at(
    shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh, coordinate: Sequence[int]
) -> list[Tensor]:
    return [
        _cut_axis(torch.arange(size), 0, axis, len(shape), placements, tuple(mesh.shape), tuple(coordinate))
        for axis, size in enumerate(shape)
    ]


def _cut_axis(
    index: Tensor,
    dim: int,
    axis: int,
    ndim: int,
    placements: Sequence[Placement],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Tensor:
    """Cut dimension `dim` of an index tensor by all placements that shard a tensor's `axis`.

    Mesh dimensions cut from left to right, except those of `_StridedShard`: it tells how many pieces
    there were before its own cut, so it comes after the dimensions to its right that made them, as
    FSDP2 cuts what tensor parallelism has cut. (DTensor's own left-to-right reading of it agrees
    where shards are even.)
    """
    cuts = [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim % ndim == axis
    ]
    order = _cut_order(cuts, sizes)
    if order is not None:
        for mesh_dim in order:
            index = _chunk(index, sizes[mesh_dim], dim, coordinate[mesh_dim])
        return index
    for mesh_dim, placement in cuts:
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        pieces = [_chunk(index, factor, dim, piece) for piece in range(factor)]
        index = torch.cat([_chunk(piece, sizes[mesh_dim], dim, coordinate[mesh_dim]) for piece in pieces], dim=dim)
    return index


def _cut_order(cuts: Sequence[tuple[int, Placement]], sizes: tuple[int, ...]) -> list[int] | None:
    """Mesh dimensions in the order in which they cut one axis; None where a stride comes from no mesh dimension."""
    order: list[int] = []
    for mesh_dim, placement in reversed(cuts):
        pieces = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        position = 0
        while math.prod(sizes[before] for before in order[:position]) < pieces and position < len(order):
            position += 1
        if math.prod(sizes[before] for before in order[:position]) != pieces:
            return None
        order.insert(position, mesh_dim)
    return order


def _chunk(index: Tensor, parts: int, dim: int, position: int) -> Tensor:
    """The piece at `position` of torch.chunk, empty where that makes fewer pieces."""
    size = -(-index.shape[dim] // parts)
    start = min(position * size, index.shape[dim])
    return index.narrow(dim, start, min(size, index.shape[dim] - start))


def _as_slice(index: Tensor) -> Index:
    """Return a slice for a contiguous ascending run of indices, else the tensor itself."""
    if index.numel() == 0:
        return slice(0, 0)
    first = int(index[0])
    if torch.equal(index, torch.arange(first, first + index.numel())):
        return slice(first, first + index.numel())
    return index
