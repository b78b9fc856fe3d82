"""Where every parameter went: a table by route, and a row per parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuown.errors import OwnershipError
from dmuown.ownership.plan import Transfer
from dmuown.ownership.record import Record, record_of
from dmuown.ownership.registry import find_runtime
from dmuown.ownership.runtime import OwnershipRuntime
from dmuown.policy.fused import fused_splits
from dmuown.policy.groups import model_resolution
from dmuown.policy.names import canonical_name
from dmuown.policy.resolve import ResolvedRoute, broad_routes
from dmuown.policy.splits import FusedSplit, blocks_text

_ROUTE_TITLES = {"": "(no route)"}


@dataclass(frozen=True)
class ParameterRow:
    """One parameter.

    Attributes:
        name: Canonical name.
        route: `muon`, `adamw`, `sharded_adamw`, or empty where no policy decided.
        algorithm: Algorithm of its param group; empty where the optimizer's groups name none.
        group: Index of its param group; None if it is in none.
        shape: Global shape.
        blocks: What its matrices are cut into, such as `q 32, k 16, v 16` or `8 heads`; empty for whole ones.
        owner: Global rank of its owner; `shards` for DTensor shards; None where every rank has it.
        owned: Whether this rank steps it (its shard, for `shards`).
        param_dtype: Dtype in forward and backward.
        grad_dtype: Dtype of the gradient's reduction.
        output_dtype: Dtype that its boundary casts outputs to; None leaves them.
        master_dtype: Dtype of what the optimizer steps.
        optim_dtype: Dtype of the optimizer's state, and the least precision of its update.
        boundary: Hook boundaries; empty outside the runtime.
        matched: Indices of the policy's overrides that matched.
        bytes: Size of the whole parameter in `master_dtype`.
        local_bytes: Bytes of it on this rank between boundaries.
        comm_bytes: Bytes that the runtime moves for it in a step of one microbatch, forward, backward and
            reduction; 0 outside the runtime, which does not know.
    """

    name: str
    route: str
    algorithm: str
    group: int | None
    shape: tuple[int, ...]
    blocks: str
    owner: int | str | None
    owned: bool
    param_dtype: str
    grad_dtype: str
    output_dtype: str | None
    master_dtype: str
    optim_dtype: str
    boundary: tuple[str, ...]
    matched: tuple[int, ...]
    bytes: int
    local_bytes: int
    comm_bytes: int


@dataclass(frozen=True)
class RouteRow:
    """All parameters of one route.

    Attributes:
        route: The route; empty where no policy decided.
        algorithms: Their algorithms.
        parameters: How many.
        owned: How many of them this rank steps.
        elements: Elements of all.
        bytes: Bytes of all.
        local_bytes: Bytes on this rank between boundaries.
        comm_bytes: Bytes moved in a step.
    """

    route: str
    algorithms: tuple[str, ...]
    parameters: int
    owned: int
    elements: int
    bytes: int
    local_bytes: int
    comm_bytes: int


@dataclass(frozen=True)
class ParamGroupSummary:
    """The summary; `str()` is a table, `to_dict()` the data, and rich consoles print it in colour.

    Attributes:
        routes: One row a route.
        parameters: One row a parameter, in the model's order.
        warnings: What looks unintended.
        per_step: Collectives and bytes by kind, of one step of one microbatch; empty outside the runtime.
    """

    routes: tuple[RouteRow, ...]
    parameters: tuple[ParameterRow, ...]
    warnings: tuple[str, ...]
    per_step: dict[str, dict[str, int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Data that JSON can hold."""
        return {
            "routes": [asdict(row) for row in self.routes],
            "parameters": [asdict(row) for row in self.parameters],
            "warnings": list(self.warnings),
            "per_step": self.per_step,
        }

    def _route_cells(self) -> tuple[list[str], list[list[str]]]:
        head = ["route", "algorithm", "parameters", "owned here", "elements", "bytes", "bytes here", "moved per step"]
        return head, [
            [
                _ROUTE_TITLES.get(row.route, row.route),
                ", ".join(row.algorithms),
                str(row.parameters),
                str(row.owned),
                f"{row.elements:,}",
                _size(row.bytes),
                _size(row.local_bytes),
                _size(row.comm_bytes),
            ]
            for row in self.routes
        ]

    def _parameter_cells(self) -> tuple[list[str], list[list[str]]]:
        head = [
            "parameter",
            "route",
            "group",
            "shape",
            "blocks",
            "owner",
            "param",
            "grad",
            "output",
            "overrides",
            "bytes",
            "moved",
        ]
        return head, [
            [
                row.name,
                _ROUTE_TITLES.get(row.route, row.route),
                "-" if row.group is None else str(row.group),
                "x".join(map(str, row.shape)) or "scalar",
                row.blocks or "-",
                "all" if row.owner is None else str(row.owner),
                row.param_dtype,
                row.grad_dtype,
                row.output_dtype or "-",
                ",".join(map(str, row.matched)) or "-",
                _size(row.bytes),
                _size(row.comm_bytes),
            ]
            for row in self.parameters
        ]

    def __str__(self) -> str:
        parts = [_columns(*self._route_cells()), "", _columns(*self._parameter_cells())]
        if self.per_step:
            kinds = [
                f"{total['collectives']} {kind} ({_size(total['bytes'])})" for kind, total in self.per_step.items()
            ]
            parts += ["", "per step: " + ", ".join(kinds)]
        parts += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(parts)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        tables: list[Any] = []
        for title, (head, rows) in (("Routes", self._route_cells()), ("Parameters", self._parameter_cells())):
            table = Table(*head, title=title)
            for row in rows:
                table.add_row(*row)
            tables.append(table)
        return Group(*tables, *(Text(f"warning: {warning}", style="yellow") for warning in self.warnings))


def summarize_param_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> ParamGroupSummary:
    """Summarize the route, group, owner, precision and traffic of every trainable parameter.

    No communication, no device synchronization; what it says of this rank differs between ranks.

    Args:
        model: Dedicated, sharded by FSDP2, or plain.
        optimizer: Any optimizer of its parameters.

    Raises:
        OwnershipError: A dedicated parameter that takes gradients is in none of the optimizer's groups.
    """
    runtime = find_runtime(model)
    in_group = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    resolution = model_resolution(model)
    traffic = _traffic(runtime) if runtime is not None else {}
    cut = any(group.get("split_sizes") for group in optimizer.param_groups)
    splits = fused_splits(model) if cut else {}
    rows = []
    for raw, param in model.named_parameters():
        if not param.requires_grad:
            continue
        name, record, index = canonical_name(raw), record_of(param), in_group.get(id(param))
        if record is not None and index is None:
            raise OwnershipError(
                name,
                "is dedicated and takes gradients, but is in none of the optimizer's param groups: it would never be "
                "stepped",
                "Build the optimizer from the model, after dedicate_params",
            )
        group = optimizer.param_groups[index] if index is not None else {}
        route = record.route if record is not None else resolution.routes.get(name) if resolution else None
        rows.append(_row(name, param, record, route, index, group, runtime, traffic.get(name, 0), splits.get(name)))
    warnings = list(runtime.warnings if runtime is not None else resolution.warnings if resolution else [])
    if runtime is None and resolution is None:
        routed = {row.name: ResolvedRoute(route="sharded_adamw") for row in rows if row.route == "sharded_adamw"}
        warnings += broad_routes(dict(model.named_parameters()), routed)
    outside = [row.name for row in rows if row.group is None]
    if outside:
        warnings.append(f"{len(outside)} trainable parameters are in no param group: {', '.join(outside[:3])}, ...")
    warnings += _precision_warnings(rows, {name: record_of(param) for name, param in model.named_parameters()})
    return ParamGroupSummary(
        routes=tuple(_by_route(rows)),
        parameters=tuple(rows),
        warnings=tuple(warnings),
        per_step=runtime.plan.per_step() if runtime is not None else {},
    )


def _row(
    name: str,
    param: Tensor,
    record: Record | None,
    route: ResolvedRoute | None,
    index: int | None,
    group: dict[str, Any],
    runtime: OwnershipRuntime | None,
    comm_bytes: int,
    split: FusedSplit | None,
) -> ParameterRow:
    local = param.to_local() if isinstance(param, DTensor) else param
    param_dtype = record.compute_dtype if record is not None else param.dtype
    sharded = isinstance(param, DTensor) and (record is None or record.owner is None)
    output = route.output_dtype if route is not None and record is not None else None
    return ParameterRow(
        name=name,
        route=str(group.get("dmuon_route", route.route if route is not None else "")),
        algorithm=str(group.get("algorithm", "")),
        group=index,
        shape=tuple(param.shape),
        blocks=blocks_text(group, param.shape, split),
        owner="shards" if sharded else record.owner_global if record is not None else None,
        owned=record is None or record.owned,
        param_dtype=_short(param_dtype),
        grad_dtype=_short(record.grad_dtype if record is not None else param.dtype),
        output_dtype=_short(output) if output is not None else None,
        master_dtype=_short(param.dtype),
        optim_dtype=str(group.get("optim_dtype") or _short(param.dtype)),
        boundary=_boundaries(record, runtime),
        matched=route.matched if route is not None else (),
        bytes=math.prod(param.shape) * param.dtype.itemsize,
        local_bytes=0 if record is not None and not record.owned else local.numel() * local.dtype.itemsize,
        comm_bytes=comm_bytes,
    )


def _precision_warnings(rows: Sequence[ParameterRow], records: Mapping[str, Record | None]) -> list[str]:
    """Say where an optimizer (torch's own know no `optim_dtype`) steps in another precision than the policy says."""
    by_name = {canonical_name(raw): record for raw, record in records.items()}
    other = [
        row.name
        for row in rows
        if (record := by_name.get(row.name)) is not None
        and _short(record.optim_dtype or record.home_dtype) != row.optim_dtype
    ]
    if not other:
        return []
    return [
        f"{len(other)} parameters ({other[0]}, ...) have another optim_dtype in the policy than in their param group: "
        "use an optimizer of this package, built from the model, or set master_dtype and optim_dtype alike"
    ]


def _boundaries(record: Record | None, runtime: OwnershipRuntime | None) -> tuple[str, ...]:
    if record is None or runtime is None:
        return ()
    return tuple(runtime.plan.boundaries[index].label for index in runtime.plan.entries[record.name].boundaries)


def _traffic(runtime: OwnershipRuntime) -> dict[str, int]:
    """Bytes by parameter of one step: its part of each buffer, padding of shards included."""
    if runtime.plan.world_size == 1:
        return {}
    fetches = 2 if runtime.plan.reshard_after_forward else 1
    result = {}
    for transfer in runtime.plan.transfers:
        for member in transfer.members:
            elements = member.span * _copies(transfer)
            fetched = fetches * elements * transfer.param_dtype.itemsize
            reduced = elements * transfer.grad_dtype.itemsize if transfer.trainable else 0
            result[member.name] = fetched + reduced
    return result


def _copies(transfer: Transfer) -> int:
    return transfer.world_size if transfer.kind == "shards" else 1


def _by_route(rows: Sequence[ParameterRow]) -> Iterable[RouteRow]:
    for route in ("muon", "adamw", "sharded_adamw", ""):
        members = [row for row in rows if row.route == route]
        if members:
            yield RouteRow(
                route=route,
                algorithms=tuple(sorted({row.algorithm for row in members if row.algorithm})),
                parameters=len(members),
                owned=sum(row.owned for row in members),
                elements=sum(math.prod(row.shape) for row in members),
                bytes=sum(row.bytes for row in members),
                local_bytes=sum(row.local_bytes for row in members),
                comm_bytes=sum(row.comm_bytes for row in members),
            )


def _columns(head: list[str], rows: list[list[str]]) -> str:
    """Plain text that a log file keeps as it is."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
