"""The route table: parameters that differ in their layer's number only share a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dmuown.policy.fused import FusedSplit
from dmuown.policy.roles import ParameterRole

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class RouteRow:
    """Parameters that differ in their layer's number only.

    Attributes:
        pattern: Their name, numbers as `*`.
        count: How many.
        shape: Their shape.
        role: Their role.
        route: Route of the policy; empty without one.
        algorithm: What steps them; `frozen` for none.
        lr: Learning rate; None if frozen.
        weight_decay: Decay; None if frozen.
        blocks: What its matrices are cut into, such as `gate 64, up 64`; empty for whole ones.
        split: How one lies on the ranks.
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

    def to_dict(self) -> dict[str, Any]:
        """The row as data that JSON can hold."""
        return {**vars(self), "shape": list(self.shape)}


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
    rows: dict[tuple[Any, ...], int] = {}
    for entry in entries:
        group, tensor = group_of.get(entry.name), placed[entry.name]
        route = routes.get(entry.name, "")
        split = split_text(tensor)
        if owned:
            tensor_parallel = [part for part in split.split(", ") if part.startswith("tp ") and "cuts" in part]
            split = ", ".join(["shards" if route == "sharded_adamw" else "one owner", *tensor_parallel])
        cut = group is not None and bool(group.get("split_sizes"))
        key = (
            _LAYER_NUMBER.sub("*", entry.name),
            tuple(entry.parameter.shape),
            entry.role.value,
            route,
            group["algorithm"] if group else "frozen",
            group["lr"] if group else None,
            group["weight_decay"] if group else None,
            str(splits[entry.name]) if cut else "",
            split,
        )
        rows[key] = rows.get(key, 0) + 1
    return [
        RouteRow(pattern, count, shape, role, route, algorithm, lr, decay, blocks, split)
        for (pattern, shape, role, route, algorithm, lr, decay, blocks, split), count in rows.items()
    ]


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
