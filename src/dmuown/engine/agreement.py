"""What ranks must agree on before they communicate: which gradients exist, which are finite.

One small message per mesh and step, between hosts. Without it, a gradient that is absent on one
rank would leave the others waiting in a collective that this rank never enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class GradientReport:
    """What one rank sees of its gradients, and, after `agree`, what all ranks see together.

    Attributes:
        present: Per parameter, whether a gradient exists (on any rank, once agreed).
        absent: Per parameter, whether a gradient is missing (on any rank, once agreed).
        bad: Per parameter, whether its gradient cannot be used: a non-zero reason code.
    """

    present: list[bool]
    absent: list[bool]
    bad: list[int]


def agree(report: GradientReport, group: dist.ProcessGroup | None) -> GradientReport:
    """Combine the reports of all ranks of `group` by maximum; the same report on every rank returns.

    Args:
        report: This rank's view; lists of equal length on every rank.
        group: The control group of the parameters' mesh; None for one rank.
    """
    if group is None or not report.present:
        return report
    message = torch.tensor([*report.present, *report.absent, *report.bad], dtype=torch.int32)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    count = len(report.present)
    values = message.tolist()
    return GradientReport(
        present=[bool(value) for value in values[:count]],
        absent=[bool(value) for value in values[count : 2 * count]],
        bad=values[2 * count :],
    )


def first_difference(descriptions: Sequence[str], group: dist.ProcessGroup | None) -> tuple[int, int] | None:
    """Compare lists of descriptions over the ranks of `group`.

    Returns:
        None if they are equal; else `(group rank, index)` of the first description that differs
        from the first rank's, the same on every rank.
    """
    if group is None:
        return None
    gathered: list[list[str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, list(descriptions), group=group)
    reference = gathered[0] or []
    for rank, other in enumerate(gathered):
        other = other or []
        for index in range(max(len(reference), len(other))):
            if index >= len(reference) or index >= len(other) or reference[index] != other[index]:
                return rank, index
    return None
