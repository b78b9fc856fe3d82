"""The route table: parameters that differ in their layer's number only share a row.

Where layers of one name are treated differently, as below a frozen part, each row names its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dmuown.policy.fused import FusedSplit
from dmuown.policy.roles import ParameterRole
from dmuown.policy.splits import blocks_text

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class RouteRow:
    """Parameters that differ in their layer's number only.

    Attributes:
        pattern: Their name, numbers as `*`, or as `0-11,24` where another row has the same name with other numbers.
        count: How many.
        shape: Their shape.
        role: Their role.
        route: Route of the policy; empty without one.
        algorithm: What steps them; `frozen` for none.
        lr: Learning rate; None if frozen.
        weight_decay: Decay; None if frozen.
        blocks: What its matrices are cut into, such as `gate 64, up 64` or `8 heads`; empty for whole ones.
        split: How one lies on the ranks.
        numbers: The numbers in their names, of each parameter.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    role: str
    route: str
    algorithm: str
    lr: float | None
    weight_decay: float | None
    blocks: str
    split: str
    numbers: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The row as data that JSON can hold."""
        return {key: value for key, value in vars(self).items() if key != "numbers"} | {"shape": list(self.shape)}


def route_rows(
    entries: Sequence[ParameterRole],
    placed: Mapping[str, Tensor],
    group_of: Mapping[str, Mapping[str, Any]],
    routes: Mapping[str, str],
    splits: Mapping[str, FusedSplit],
    *,
    owned: bool,
) -> list[RouteRow]:
    """Return the table of a stage.

    Args:
        entries: Its parameters.
        placed: Each as it lies on the ranks.
        group_of: Param group of those that are trained.
        routes: Routes of the policy; empty without one.
        splits: Fused weights.
        owned: Whether the ownership runtime holds the parameters.
    """
    rows: dict[tuple[Any, ...], list[tuple[int, ...]]] = defaultdict(list)
    for entry in entries:
        group, tensor = group_of.get(entry.name), placed[entry.name]
        route = routes.get(entry.name, "")
        split = split_text(tensor)
        if owned:
            tensor_parallel = [part for part in split.split(", ") if part.startswith("tp ") and "cuts" in part]
            split = ", ".join(["shards" if route == "sharded_adamw" else "one owner", *tensor_parallel])
        key = (
            _LAYER_NUMBER.sub("*", entry.name),
            tuple(entry.parameter.shape),
            entry.role.value,
            route,
            group["algorithm"] if group else "frozen",
            group["lr"] if group else None,
            group["weight_decay"] if group else None,
            blocks_text(group, entry.parameter.shape, splits.get(entry.name)) if group else "",
            split,
        )
        rows[key].append(tuple(map(int, _LAYER_NUMBER.findall(entry.name))))
    return [
        RouteRow(pattern, len(numbers), shape, role, route, algorithm, lr, decay, blocks, split, tuple(numbers))
        for (pattern, shape, role, route, algorithm, lr, decay, blocks, split), numbers in rows.items()
    ]


def with_layers(rows: Iterable[RouteRow]) -> list[RouteRow]:
    """Join rows that differ in their numbers only, as those of pipeline stages; tell apart those of one pattern."""
    joined: dict[RouteRow, list[tuple[int, ...]]] = defaultdict(list)
    for row in rows:
        joined[replace(row, count=0, numbers=())] += row.numbers
    patterns: dict[str, list[list[tuple[int, ...]]]] = defaultdict(list)
    for row, numbers in joined.items():
        patterns[row.pattern].append(numbers)
    return [
        replace(row, pattern=name_layers(row.pattern, numbers, patterns[row.pattern]), count=len(numbers))
        for row, numbers in joined.items()
    ]


def name_layers(pattern: str, numbers: Sequence[tuple[int, ...]], all_rows: Sequence[Sequence[tuple[int, ...]]]) -> str:
    """Return a pattern with the numbers that tell a row from the others of its pattern.

    Args:
        pattern: A name with `*` for numbers.
        numbers: Those of the row's members, one tuple each, in the order of the stars.
        all_rows: The same of every row of the pattern, this one among them.
    """
    if len(all_rows) == 1:
        return pattern
    first, *rest = pattern.split("*")
    for place, text in enumerate(rest):
        own = {entry[place] for entry in numbers}
        alike = all({entry[place] for entry in row} == own for row in all_rows)
        first += ("*" if alike else _ranges(own)) + text
    return first


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers as text: `0-11,24`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def split_text(tensor: Tensor) -> str:
    """How a parameter is cut: `shard x8 cuts axis 0, tp x2 cuts axis 1`."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return "whole"
    names = mesh.mesh_dim_names or ()
    parts = []
    for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if mesh.size(dim) == 1:
            continue
        axis = getattr(placement, "dim", None)
        parts.append(f"{names[dim]} x{mesh.size(dim)}" + ("" if axis is None else f" cuts axis {axis}"))
    return ", ".join(parts) or "whole"
