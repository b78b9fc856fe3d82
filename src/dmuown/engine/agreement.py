"""What ranks must agree on before they communicate: which gradients exist, which can be used.

One small message per audience and step, between hosts. Without it, a gradient that is absent on one
rank would leave the others waiting in a collective that this rank never enters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dmuown.engine.lent import on_loan


@dataclass
class GradientReport:
    """What one rank sees of its gradients, and, after `agree`, what all ranks see together.

    Attributes:
        present: Per parameter, whether a gradient exists (on any rank, once agreed).
        absent: Per parameter, whether a gradient is missing (on any rank, once agreed).
        bad: Per parameter, whether its gradient cannot be used: a non-zero reason code.
        fault: The gravest reason code that any rank knows of, about parameters of other audiences or the step itself.
    """

    present: list[bool]
    absent: list[bool]
    bad: list[int]
    fault: int = 0


def agree(report: GradientReport, group: dist.ProcessGroup | None) -> GradientReport:
    """Combine the reports of all ranks of `group` by maximum; the same report on every rank returns.

    Args:
        report: This rank's view; lists of equal length on every rank.
        group: The control group of the parameters' audience; None for one rank.
    """
    if group is None:
        return report
    message = torch.tensor([*report.present, *report.absent, *report.bad, report.fault], dtype=torch.int32)
    on_loan(dist.all_reduce, message, op=dist.ReduceOp.MAX, group=group)
    count = len(report.present)
    values = message.tolist()
    return GradientReport(
        present=[bool(value) for value in values[:count]],
        absent=[bool(value) for value in values[count : 2 * count]],
        bad=values[2 * count : -1],
        fault=values[-1],
    )


@dataclass(frozen=True)
class Difference:
    """Where two ranks were given different things.

    Attributes:
        index: Index of the first description that is not the same on all ranks.
        ranks: Two global ranks that disagree on it, the first of the group and another one.
        texts: What each of the two was given; "absent" where its list is shorter.
    """

    index: int
    ranks: tuple[int, int]
    texts: tuple[str, str]


def first_difference(descriptions: Sequence[str], group: dist.ProcessGroup | None) -> Difference | None:
    """Compare lists of descriptions over the ranks of `group`; the same answer on every rank.

    Equal lists cost two messages of eight bytes a description: only digests travel.
    """
    if group is None:
        return None
    length = torch.tensor([len(descriptions), -len(descriptions)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=group)
    longest = int(length[0])
    digests = torch.tensor([_digest(text) for text in descriptions] + [-1] * (longest - len(descriptions)))
    extremes = torch.stack([digests, -digests])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    differing = (extremes[0] != -extremes[1]).nonzero()
    if not len(differing):
        return None
    index = int(differing[0])
    texts: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(texts, descriptions[index] if index < len(descriptions) else "absent", group=group)
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    members = dist.get_process_group_ranks(group)
    return Difference(index, (members[0], members[other]), (texts[0], texts[other]))


def _digest(text: str) -> int:
    """62 bits of a text: never negative, and its negation fits int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
