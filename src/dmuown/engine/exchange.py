"""Exchange: make sharded matrices whole on their owners, orthogonalize, and bring the update back.

    pack -> all-to-all -> orthogonalize -> all-to-all -> (replicas: all-gather) -> unpack

At most two all-to-alls a bucket. Buffers live in this generator's frame until their collective
has been waited for. Shards may be uneven or empty; element counts follow from the layout, so
nothing is padded in the shard group.

Every rank of a bucket's mesh yields and asks equally often, also one that holds nothing and sends nothing:
the yields decide how tasks interleave, and so the order of the collectives of all tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from dmuown.algorithms.fused import stack_of
from dmuown.engine.collectives import all_gather
from dmuown.engine.joint import Asking, Whole
from dmuown.engine.layout import Shards
from dmuown.engine.owners import Place
from dmuown.engine.plan import Bucket


@dataclass
class ExchangeCount:
    """What exchanges did on this rank since the optimizer was built.

    Attributes:
        all_to_alls: Calls of all-to-all.
        all_gathers: Calls of all-gather.
        bytes_sent: Bytes this rank handed to other ranks.
        matrices: Logical matrices orthogonalized on this rank, a fused weight's blocks counted singly.
        observe: `(bucket, results [count, m, n])`, called with what this rank orthogonalized; None for nothing.
    """

    all_to_alls: int = 0
    all_gathers: int = 0
    bytes_sent: int = 0
    matrices: int = 0
    observe: Callable[[Bucket, Tensor], None] | None = field(default=None, repr=False, compare=False)

    def since(self, before: ExchangeCount) -> ExchangeCount:
        """What was counted after `before` was copied from this."""
        return ExchangeCount(*(getattr(self, name) - getattr(before, name) for name in _COUNTED))

    def add(self, other: ExchangeCount, times: int = 1) -> None:
        """Count so many times what another one counted."""
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


_COUNTED = ("all_to_alls", "all_gathers", "bytes_sent", "matrices")


def wire_dtype(compute: torch.dtype) -> torch.dtype:
    """Dtype in which matrices travel to their owner: bf16 for 16-bit compute, else the compute dtype.

    fp16 would overflow before normalization. The unsharded path rounds the same way, so that the
    result does not depend on the layout.
    """
    return torch.bfloat16 if compute in (torch.bfloat16, torch.float16) else compute


def orthogonalize(
    bucket: Bucket,
    momentum: Sequence[Tensor],
    count: ExchangeCount,
    *,
    first: int = 0,
    disposable: bool = False,
) -> Asking[list[Tensor]]:
    """Orthogonalize the momentum of some parameters of a bucket.

    Args:
        bucket: The bucket.
        momentum: That of the parameters that step now, the same ones on every rank, `[batch, m_local, n_local]` each;
            changed only if `disposable`.
        count: Counters to add to.
        first: How many parameters of the bucket step before these.
        disposable: The momentum given here may be overwritten: nothing else reads its memory.

    Returns:
        Updates shaped as `momentum`, in the orthogonalizer's dtype.
    """
    if not momentum:
        return []
    per_param = bucket.units_per_param
    dtype = wire_dtype(bucket.orthogonalizer.dtype)
    units = [matrix[b] for matrix in momentum for b in range(per_param)]
    if not bucket.exchanges:
        whole = yield from _orthogonalize_whole(bucket, *_stack(units, dtype, disposable))
        if bucket.layout.replicate_dims:
            yield None  # in other places of the mesh, replicas may gather
        return _by_parameter(whole, momentum) if units else [_nothing(bucket, matrix) for matrix in momentum]
    places = bucket.places(first, len(momentum))
    mine = [unit for unit, place in enumerate(places) if place.replica == bucket.replica_rank]
    if bucket.shard_group is None:
        own = yield from _orthogonalize_whole(bucket, *_stack([units[unit] for unit in mine], dtype, disposable))
        shards = {unit: own[position] for position, unit in enumerate(mine)}
    else:
        shards = yield from _through_owners(bucket, units, places, mine, dtype, count)
    if bucket.replica_group is not None:
        shards = yield from _share_with_replicas(bucket, shards, places, momentum[0], count)
    elif bucket.layout.replicate_dims:
        yield None
    if not units:
        return [_nothing(bucket, matrix) for matrix in momentum]
    return [
        shards[index * per_param][None]
        if per_param == 1
        else torch.stack([shards[index * per_param + b] for b in range(per_param)])
        for index in range(len(momentum))
    ]


def _nothing(bucket: Bucket, matrix: Tensor) -> Tensor:
    return torch.zeros_like(matrix, dtype=bucket.orthogonalizer.dtype)


def _by_parameter(whole: Tensor, momentum: Sequence[Tensor]) -> list[Tensor]:
    return list(whole.split([len(matrix) for matrix in momentum]))


def _stack(matrices: Sequence[Tensor], dtype: torch.dtype, disposable: bool) -> tuple[Tensor | None, bool]:
    """(One `[count, m, n]` tensor of a dtype, or None for nothing; whether it may be overwritten)."""
    if not matrices:
        return None, False
    if len(matrices) == 1:
        lone = matrices[0][None].to(dtype)
        return lone, disposable or matrices[0].dtype != dtype
    whole = stack_of(matrices) if matrices[0].dtype == dtype else None
    if whole is not None:
        return whole, disposable  # the row kernels wrote them next to each other
    stacked = torch.empty((len(matrices), *matrices[0].shape), dtype=dtype, device=matrices[0].device)
    torch._foreach_copy_(list(stacked.unbind(0)), list(matrices))
    return stacked, True


def _orthogonalize_whole(bucket: Bucket, whole: Tensor | None, overwrite: bool) -> Asking[Tensor]:
    """Ask the runner, which may do it together with what other tasks ask for."""
    asked = Whole(bucket, whole, overwrite)
    yield asked
    return asked.take()


def _through_owners(
    bucket: Bucket,
    units: Sequence[Tensor],
    places: Sequence[Place],
    mine: Sequence[int],
    dtype: torch.dtype,
    count: ExchangeCount,
) -> Asking[dict[int, Tensor]]:
    """Two all-to-alls around orthogonalization; `mine` are the units of this replica."""
    group, layout = bucket.shard_group, bucket.layout
    assert group is not None
    if not mine:  # nor has any other rank of the group
        yield None
        yield Whole(bucket, None, False)
        yield None
        return {}
    here = bucket.members[bucket.shard_rank]
    by_owner: list[list[int]] = [[] for _ in bucket.members]
    for unit in mine:
        by_owner[places[unit].owner].append(unit)
    owned = len(by_owner[bucket.shard_rank])
    device, compute = bucket.device, bucket.orthogonalizer.dtype

    outward_sizes = [len(sent) * here.numel for sent in by_owner]
    inward_sizes = [owned * member.numel for member in bucket.members]
    outward = _packed([units[unit] for sent in by_owner for unit in sent], dtype)
    inward = torch.empty(sum(inward_sizes), dtype=dtype, device=device)
    work = _all_to_all(inward, outward, inward_sizes, outward_sizes, group, count)
    yield None
    if work is not None:
        work.wait()
    del outward, work  # which may hold what it has sent and received

    whole = torch.empty((owned, layout.m, layout.n), dtype=dtype, device=device) if owned else None
    if whole is not None:
        _unpack(bucket, inward, whole)
    del inward
    result = yield from _orthogonalize_whole(bucket, whole, True)
    del whole

    back = torch.empty(sum(inward_sizes), dtype=compute, device=device)
    if owned:
        _pack(bucket, result, back)
    del result
    received = torch.empty(sum(outward_sizes), dtype=compute, device=device)
    work = _all_to_all(received, back, outward_sizes, inward_sizes, group, count)
    yield None
    if work is not None:
        work.wait()
    del back, work
    shards: dict[int, Tensor] = {}
    for sent, piece in zip(by_owner, received.split(outward_sizes), strict=True):
        for unit, shard in zip(sent, piece.view(len(sent), here.row_count, here.col_count), strict=True):
            shards[unit] = shard
    return shards


def _unpack(bucket: Bucket, message: Tensor, whole: Tensor) -> None:
    """Put what the members of the shard group have sent into whole matrices.

    A function of its own, so that no view is left behind, which would keep the message in memory; `_pack` likewise.
    """
    for member, piece in _pieces(bucket, message, len(whole)):
        _put(whole, member.rows, member.cols, piece)


def _pack(bucket: Bucket, whole: Tensor, message: Tensor) -> None:
    """Write every member's part of whole matrices, one after another."""
    for member, piece in _pieces(bucket, message, len(whole)):
        _copy(piece, _take(whole, member.rows, member.cols))


def _pieces(bucket: Bucket, message: Tensor, count: int) -> Iterator[tuple[Shards, Tensor]]:
    """Each member of the shard group, and its part of a message about so many matrices."""
    sizes = [count * member.numel for member in bucket.members]
    for member, piece in zip(bucket.members, message.split(sizes), strict=True):
        if member.numel:
            yield member, piece.view(count, member.row_count, member.col_count)


def _share_with_replicas(
    bucket: Bucket, shards: dict[int, Tensor], places: Sequence[Place], like: Tensor, count: ExchangeCount
) -> Asking[dict[int, Tensor]]:
    """Every replica did its part of the units: gather the parts, padded to the longest."""
    dtype = bucket.orthogonalizer.dtype
    shape = like.shape[1:]
    by_replica: list[list[int]] = [[] for _ in range(bucket.replica_count)]
    for unit, place in enumerate(places):
        by_replica[place.replica].append(unit)
    longest = max(len(part) for part in by_replica)
    if longest * shape.numel() == 0:  # the same for all replicas, which hold the same shards
        yield None
        return {unit: like.new_empty(shape, dtype=dtype) for unit in range(len(places))}
    own = torch.empty((longest, *shape), dtype=dtype, device=like.device)
    parts = by_replica[bucket.replica_rank]
    if parts:
        torch._foreach_copy_(list(own[: len(parts)].unbind(0)), [shards[unit] for unit in parts])
    own[len(parts) :].zero_()
    gathered = torch.empty((bucket.replica_count, longest, *shape), dtype=dtype, device=like.device)
    count.all_gathers += 1
    count.bytes_sent += own.numel() * own.element_size() * (bucket.replica_count - 1)
    work = all_gather(gathered.view(-1, *shape), own, group=bucket.replica_group, async_op=True)
    yield None
    if work is not None:
        work.wait()
    del own, work
    return {
        unit: gathered[position, slot]
        for position, replica in enumerate(bucket.replicas)
        for slot, unit in enumerate(by_replica[replica])
    }


def _all_to_all(
    output: Tensor,
    source: Tensor,
    output_sizes: list[int],
    source_sizes: list[int],
    group: dist.ProcessGroup,
    count: ExchangeCount,
) -> dist.Work | None:
    rank = dist.get_rank(group)
    count.all_to_alls += 1
    count.bytes_sent += (sum(source_sizes) - source_sizes[rank]) * source.element_size()
    work: dist.Work | None = dist.all_to_all_single(
        output, source, output_sizes, source_sizes, group=group, async_op=True
    )
    return work


def _packed(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One message of these `[m, n]` matrices, row by row; their own memory where they lie so already."""
    whole = stack_of(matrices) if matrices[0].dtype == dtype and matrices[0].is_contiguous() else None
    if whole is not None and whole.is_contiguous():
        return whole.view(-1)
    message = torch.empty((len(matrices), *matrices[0].shape), dtype=dtype, device=matrices[0].device)
    if message.numel():
        torch._foreach_copy_(list(message.unbind(0)), list(matrices))
    return message.view(-1)


def _put(whole: Tensor, rows: slice | Tensor, cols: slice | Tensor, piece: Tensor) -> None:
    """whole[:, rows, cols] = piece, for any mixture of slices and index tensors."""
    if isinstance(rows, slice) and isinstance(cols, slice):
        _copy(whole[:, rows, cols], piece)
    elif isinstance(rows, slice):
        whole[:, rows][..., cols] = piece
    elif isinstance(cols, slice):
        whole[..., cols][:, rows] = piece
    else:
        whole[:, rows[:, None], cols] = piece


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy between views of one shape, in words of 8 bytes where rows allow it: a copy costs by elements, too."""
    words = _in_words(target), _in_words(source)
    if words[0] is not None and words[1] is not None and target.dtype == source.dtype:
        words[0].copy_(words[1])
    else:
        target.copy_(source)


def _in_words(x: Tensor) -> Tensor | None:
    count = 8 // x.element_size()
    places = (x.storage_offset(), x.shape[-1], *x.stride()[:-1])
    if count > 1 and x.stride(-1) == 1 and x.numel() and all(place % count == 0 for place in places):
        return x.view(torch.int64)
    return None


def _take(whole: Tensor, rows: slice | Tensor, cols: slice | Tensor) -> Tensor:
    return whole[:, rows][..., cols]
