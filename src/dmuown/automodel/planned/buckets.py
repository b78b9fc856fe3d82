"""Buckets of the engine for parameters on the meta device, and what one rank holds of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuown.engine.layout import MatrixLayout
from dmuown.engine.plan import Bucket
from dmuown.engine.records import row_blocks
from dmuown.orthogonalize import resolve_orthogonalizer
from dmuown.policy.splits import ELEMENTWISE


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
                blocks = row_blocks(layout, group, name)
                made[key] = Bucket(index, [], [], layout, blocks, orthogonalizer, None, None, None, None, [layout.own])
            made[key].params.append(tensor)
            made[key].names.append(name)
    return sorted(made.values(), key=lambda bucket: -bucket.flops_per_unit * len(bucket.params))
