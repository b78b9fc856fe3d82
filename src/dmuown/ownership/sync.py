"""`no_sync` and `gathered`: passes without reductions, and whole parameters outside of passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuown.engine.collectives import all_gather
from dmuown.engine.lent import on_loan
from dmuown.errors import OwnershipError
from dmuown.ownership.link import Link
from dmuown.ownership.plan import shard_rows
from dmuown.ownership.record import Record
from dmuown.ownership.registry import find_runtime, runtime_of
from dmuown.ownership.runtime import OwnershipRuntime


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication, in the model's dedicated and FSDP2 parameters.

    Each rank keeps its own gradients, whole, in `grad_dtype`, until the first backward pass outside the
    context reduces the sum of all. All ranks must use it alike.
    """
    from torch.distributed.fsdp import FSDPModule

    runtime = find_runtime(model)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with contextlib.ExitStack() as stack:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())
        before = runtime.sync if runtime is not None else True
        if runtime is not None:
            runtime.sync = False
        for module in sharded:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            if runtime is not None:
                runtime.sync = before
            for module in sharded:
                module.set_requires_gradient_sync(True, recurse=False)


@contextlib.contextmanager
def gathered(model: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Make all dedicated parameters whole, in their master dtype, on every rank. Collective.

    For initialization after `to_empty`, for exports, and for code that reads parameters outside their
    boundaries. Every rank holds the whole model meanwhile.

    Args:
        model: A dedicated model.
        writeback: Whether owners keep what was changed in the context; other ranks' changes are lost.

    Raises:
        OwnershipError: The model is not dedicated, or a pass is under way.
    """
    runtime = runtime_of(model)
    _check_idle(runtime)
    whole: list[tuple[Record, nn.Parameter]] = []
    for record in runtime.records.values():
        param = nn.Parameter(gather_whole(record, record.home, runtime.link), requires_grad=record.home.requires_grad)
        whole.append((record, param))
    try:
        for record, param in whole:
            record.install(param)
        yield
    finally:
        for record, param in whole:
            if writeback and record.owned:
                _write_back(record, param, runtime.link)
            record.install(record.home)


def _check_idle(runtime: OwnershipRuntime) -> None:
    if runtime.busy:
        raise OwnershipError("gathered", "needs the model to be between passes", "Use it outside forward and backward")
    runtime.reset()  # what a forward without a backward may have left whole


@torch.no_grad()
def gather_whole(record: Record, value: Tensor, link: Link) -> Tensor:
    """Return the whole of a tensor that lies as the parameter does: its data, gradient or state. Collective.

    Args:
        record: The parameter.
        value: On the owner the whole; on `sharded_adamw` the DTensor; elsewhere only dtype and device count.
        link: The runtime's group.

    Returns:
        A new tensor of the parameter's shape; a DTensor over the tensor-parallel mesh if it is cut there.
    """
    device, dtype = value.device, value.dtype
    if record.owner is None:
        assert isinstance(value, DTensor)
        rows = shard_rows(record.local_shape[0], link.world_size)
        padded = torch.zeros(rows, *record.local_shape[1:], dtype=dtype, device=device)
        local = value.to_local()
        padded[: local.shape[0]].copy_(local)
        whole = padded
        if link.group is not None:
            whole = torch.empty(rows * link.world_size, *record.local_shape[1:], dtype=dtype, device=device)
            on_loan(all_gather, whole, padded, group=link.group)
        whole = whole[: record.local_shape[0]].contiguous()
    elif record.owned:
        local = value.to_local() if isinstance(value, DTensor) else value
        whole = local.detach().clone(memory_format=torch.contiguous_format)
    else:
        whole = torch.empty(record.local_shape, dtype=dtype, device=device)
    if record.owner is not None and link.group is not None:
        on_loan(dist.broadcast, whole, src=link.ranks[record.owner], group=link.group)
    if record.tensor_parallel is None:
        return whole
    mesh, placements = record.tensor_parallel
    stride = torch.empty(record.shape, device="meta").stride()
    return DTensor.from_local(
        whole, mesh, placements, run_check=False, shape=torch.Size(record.shape), stride=tuple(stride)
    )


@torch.no_grad()
def _write_back(record: Record, param: nn.Parameter, link: Link) -> None:
    home = record.local_home()
    data = param.detach()
    if isinstance(data, DTensor):
        data = data.to_local()
    if record.owner is None:
        start = min(link.rank * shard_rows(data.shape[0], link.world_size), data.shape[0])
        data = data[start : start + home.shape[0]]
    home.copy_(data)
