"""How one weight is cut into blocks that are matrices of their own: as data, as group options, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Algorithms that orthogonalize nothing.
ELEMENTWISE = ("adam", "adamw", "lion")


@dataclass(frozen=True)
class FusedSplit:
    """How one fused weight is cut into blocks of output rows.

    Attributes:
        sizes: Rows of each block.
        groups: Groups that each hold their part of every block; 1 where blocks are contiguous.
        interleaved: Whether blocks take rows in turn.
        parts: What the blocks are, for tables.
        heads: Rows of one head in each block; empty where blocks have no heads.
    """

    sizes: tuple[int, ...]
    groups: int = 1
    interleaved: bool = False
    parts: tuple[str, ...] = ()
    heads: tuple[int, ...] = field(default=(), compare=False)

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Rows of every head in the order of the weight's rows; empty where blocks have no heads."""
        if not self.heads:
            return ()
        one_group: list[int] = []
        for size, head in zip(self.sizes, self.heads, strict=True):
            one_group += [head] * (size // self.groups // head)
        sizes = tuple(one_group * self.groups)
        return sizes if sum(sizes) == sum(self.sizes) else ()

    def group_options(self, *, per_head: bool = False) -> dict[str, Any]:
        """The same as options of a param group, {} for one block; `per_head` cuts into heads where there are any."""
        heads = self.head_sizes if per_head else ()
        if heads:
            return {"num_heads": len(heads)} if len(set(heads)) == 1 else {"split_sizes": heads}
        if len(self.sizes) == 1:
            return {}
        options: dict[str, Any] = {"split_sizes": self.sizes}
        if self.interleaved:
            options["interleaved"] = True
        elif self.groups > 1:
            options["split_groups"] = self.groups
        return options

    def __str__(self) -> str:
        arrangement = "interleaved" if self.interleaved else f"in {self.groups} groups" if self.groups > 1 else ""
        if not self.parts and len(set(self.sizes)) == 1:
            named = f"{len(self.sizes)} x {self.sizes[0]}"
        elif not self.parts:
            named = " + ".join(map(str, self.sizes))
        else:
            named = ", ".join(f"{part} {size}" for part, size in zip(self.parts, self.sizes, strict=True))
        return f"{named} {arrangement}".strip()


def block_sizes(group: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, ...]:
    """Rows of each block that a group cuts a parameter into; () where it cuts into heads, or not at all.

    Args:
        group: A matrix group, complete or not.
        shape: Global shape of the parameter, as it is stored.
    """
    if group.get("split_sizes") is not None:
        return tuple(group["split_sizes"])
    if group.get("qkv_heuristic") and group.get("num_heads") is None and len(shape) == 2:
        # As the authors' Muown (arXiv 2605.10797) guesses; it takes MLPs of three times the width as well.
        columns, rows = shape if group.get("matrix_transposed") else reversed(shape)
        return (columns,) * 3 if rows == 3 * columns else ()
    return ()


def blocks_text(group: Mapping[str, Any], shape: Sequence[int], split: FusedSplit | None = None) -> str:
    """What blocks a group's matrices are cut into, for tables: `q 32, k 16, v 16`, `8 heads`; empty for none.

    Args:
        group: A param group, complete or not.
        shape: Global shape of the parameter.
        split: What `fused_splits` says of the weight; names the blocks, where the group cuts it so.
    """
    if group.get("algorithm") in ELEMENTWISE:
        return ""
    if (group.get("num_heads") or 1) > 1:
        return f"{group['num_heads']} heads"
    sizes = block_sizes(group, shape)
    if not sizes:
        return ""
    found = FusedSplit(sizes, group.get("split_groups") or 1, bool(group.get("interleaved")))
    if split is not None and split.group_options() == found.group_options():
        return str(split)
    return str(found)


def block_count(group: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Logical matrices that a group makes of each matrix of a parameter of this shape."""
    return len(block_sizes(group, shape)) or group.get("num_heads") or 1


__all__ = ["ELEMENTWISE", "FusedSplit", "block_count", "block_sizes", "blocks_text"]
