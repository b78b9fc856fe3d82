"""The table of transfers under the ownership runtime: those that differ in their layer's number only share a row."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from dmuown.automodel.planned.routes import name_layers
from dmuown.ownership.plan import Kind, OwnershipPlan, Transfer

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class TransferRow:
    """Transfers of equal content at the boundaries of layers, each with the bytes of its buffers.

    A buffer is what one collective carries as a whole, padding included; of each, every rank receives, or gives, all
    but its own part.

    Attributes:
        boundary: Where they are fetched and reduced; the layer's number as `*`, or as `0-11,24` where not all layers
            have these parameters together. Several, of tied weights, are joined by `and`.
        parameters: Names of the parameters below the boundary.
        owners: Who has them, as places among the data-parallel ranks, ascending; none where all ranks have shards.
        count: How many.
        fetch_bytes: Bytes of one fetch of one of them, in `param_dtype`.
        param_dtype: Dtype of the parameters in it.
        reduce_bytes: Bytes of one reduction of one of them, in `grad_dtype`, with one flag a parameter; 0 if frozen.
        grad_dtype: Dtype of the gradients in it.
        kind: `owner`: a broadcast fetches one, a reduce brings its gradients home. `shards`: an all-gather, a
            reduce-scatter.
    """

    boundary: str
    parameters: tuple[str, ...]
    owners: tuple[int, ...]
    count: int
    fetch_bytes: int
    param_dtype: torch.dtype
    reduce_bytes: int
    grad_dtype: torch.dtype
    kind: Kind


def transfer_rows(plan: OwnershipPlan) -> list[TransferRow]:
    """Return the table of a plan, in the order of its transfers; empty for one rank, which transfers nothing."""
    if plan.world_size == 1:
        return []
    rows: dict[TransferRow, list[Transfer]] = defaultdict(list)
    for transfer in plan.transfers:
        rows[_row(plan, transfer)].append(transfer)
    numbers = {row: [_numbers(plan, transfer) for transfer in found] for row, found in rows.items()}
    patterns: dict[str, list[list[tuple[int, ...]]]] = defaultdict(list)
    for row, layers in numbers.items():
        patterns[row.boundary].append(layers)
    return [
        replace(
            row,
            boundary=name_layers(row.boundary, numbers[row], patterns[row.boundary]),
            owners=tuple(sorted({transfer.owner for transfer in found if transfer.kind == "owner"})),
            count=len(found),
        )
        for row, found in rows.items()
    ]


def _row(plan: OwnershipPlan, transfer: Transfer) -> TransferRow:
    """What transfers have in common that share a row."""
    names = [plan.boundaries[index].name for index in transfer.boundaries]
    return TransferRow(
        boundary=_LAYER_NUMBER.sub("*", _place(plan, transfer)),
        parameters=tuple(_below(names, member.name) for member in transfer.members),
        owners=(),
        count=0,
        fetch_bytes=transfer.fetch_bytes,
        param_dtype=transfer.param_dtype,
        reduce_bytes=transfer.reduce_bytes if transfer.trainable else 0,
        grad_dtype=transfer.grad_dtype,
        kind=transfer.kind,
    )


def _place(plan: OwnershipPlan, transfer: Transfer) -> str:
    return " and ".join(plan.boundaries[index].label for index in transfer.boundaries)


def _numbers(plan: OwnershipPlan, transfer: Transfer) -> tuple[int, ...]:
    return tuple(map(int, _LAYER_NUMBER.findall(_place(plan, transfer))))


def _below(boundaries: Iterable[str], name: str) -> str:
    """The name of a parameter without that of its boundary."""
    for boundary in boundaries:
        if name.startswith(f"{boundary}."):
            return name.removeprefix(f"{boundary}.")
    return name
