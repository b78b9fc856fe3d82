"""Buckets of the engine for parameters on the meta device, and what one rank holds of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuown.engine.layout import MatrixLayout
from dmuown.engine.plan import Bucket
from dmuown.orthogonalize import Blocks, resolve_orthogonalizer
from dmuown.orthogonalize.blocks import grouped_blocks, interleaved_blocks
from dmuown.policy.fused import FusedSplit, regrouped
from dmuown.policy.splits import ELEMENTWISE


def split_groups(
    groups: Sequence[Mapping[str, Any]], splits: Mapping[str, FusedSplit], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Give fused weights param groups of their own that carry their blocks, as `split_param_groups` does.

    Args:
        groups: Param groups.
        splits: Fused weights by name.
        names: Names by parameter's id.
    """

    def options(tensor: Tensor) -> tuple[tuple[str, Any], ...]:
        split = splits.get(names[id(tensor)])
        return () if split is None else tuple(split.group_options().items())

    result: list[dict[str, Any]] = []
    for group in groups:
        if group["algorithm"] in ELEMENTWISE:
            result.append(dict(group))
            continue
        result += [{**part, **dict(cut)} for cut, part in regrouped(group, options)]
    return result


def make_buckets(
    groups: Sequence[Mapping[str, Any]],
    placed: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    names: Collection[str] | None = None,
) -> list[Bucket]:
    """Return the buckets of the matrices in `groups`, by falling cost as the engine orders them.

    Args:
        groups: Param groups.
        placed: Parameters as they lie on the ranks that exchange them, by name.
        settings: Options of the optimizer.
        names: Parameters to take; None takes all.
    """
    orthogonalizer = resolve_orthogonalizer(settings, torch.device("cuda"))
    made: dict[tuple[object, ...], Bucket] = {}
    for index, group in enumerate(groups):
        if group["algorithm"] in ELEMENTWISE:
            continue
        for name, _ in group["params"]:
            if names is not None and name not in names:
                continue
            tensor = placed[name]
            key = (index, tuple(tensor.shape), tensor.dtype, getattr(tensor, "placements", ()))
            if key not in made:
                layout = MatrixLayout(tensor, name, transposed=group["matrix_transposed"], flatten=group["flatten"])
                blocks = _row_blocks(group, layout.m)
                made[key] = Bucket(index, [], [], layout, blocks, orthogonalizer, None, None, None, None, [layout.own])
            made[key].params.append(tensor)
            made[key].names.append(name)
    return sorted(made.values(), key=lambda bucket: -bucket.flops_per_unit * len(bucket.params))


def _row_blocks(group: Mapping[str, Any], rows: int) -> Blocks:
    sizes = group.get("split_sizes")
    if not sizes:
        return ()
    if group.get("interleaved"):
        return interleaved_blocks(len(sizes), rows)
    return grouped_blocks(sizes, group.get("split_groups") or 1, rows)
