"""Small modules with one fused weight each, and the rows of the weights that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import dmuown
from tests.unit.algorithms.oracles import gradients, initial

#: 4 query heads in 2 groups of 6 rows a head: no block ends where 4 ranks cut.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
ALGORITHMS = ("muon", "normuon", "muown", "normuown", "angular_muown")


@dataclass(frozen=True)
class Case:
    """A fused weight.

    Attributes:
        name: What its module, or the parameter of a stack of experts, is called.
        rows: Rows of each separate weight, in the fused weight's order of rows.
        config: The model's config.
        experts: Experts; 0 for a plain layer.
        transposed: Stored `[input, output]`.
        per_head: Cut into heads.
    """

    name: str
    rows: tuple[tuple[int, ...], ...]
    config: dict[str, Any] = field(default_factory=dict)
    experts: int = 0
    transposed: bool = False
    per_head: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*([self.experts] if self.experts else []), sum(map(len, self.rows)), 8)


def ranges(*sizes: int) -> tuple[tuple[int, ...], ...]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def in_groups(groups: int, *sizes: int) -> tuple[tuple[int, ...], ...]:
    """Rows of parts that take `sizes` rows in each of the groups in turn."""
    return tuple(
        tuple(start + group * sum(sizes) + row for group in range(groups) for row in range(size))
        for start, size in ((sum(sizes[:index]), sizes[index]) for index in range(len(sizes)))
    )


CASES = {
    "grouped queries": Case("qkv_proj", ranges(24, 12, 12), HEADS),
    "grouped queries by group": Case("linear_qkv", in_groups(2, 12, 6, 6), HEADS),
    "gated attention": Case("qkv_proj", ranges(24, 24, 12, 12), {**HEADS, "attn_output_gate": True}),
    "gated attention by group": Case("linear_qkv", in_groups(2, 12, 12, 6, 6), HEADS),
    "gate and up": Case("gate_up_proj", ranges(10, 10)),
    "experts": Case("gate_up_proj", ranges(10, 10), experts=3),
    "experts, interleaved": Case(
        "gate_up_proj", in_groups(10, 1, 1), {"model_type": "gpt_oss"}, experts=3, transposed=True
    ),
    "heads of a fused weight": Case("qkv_proj", ranges(*[6] * 8), HEADS, per_head=True),
    "heads of queries": Case("q_proj", ranges(*[6] * 4), HEADS, per_head=True),
    "heads of a delta net": Case(
        "in_proj_qkv",
        ranges(8, 8, 8, 8, 6, 6, 6, 6),
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        },
        per_head=True,
    ),
}


class Fused(nn.Module):
    """One fused weight in a layer, or in a stack of experts."""

    def __init__(self, case: Case, weight: Tensor) -> None:
        super().__init__()
        self.config = SimpleNamespace(**{"model_type": "unheard_of", **case.config})
        stored = nn.Parameter(weight)
        if case.experts:
            self.experts = nn.Module()
            vars(self.experts)["is_transposed"] = case.transposed
            setattr(self.experts, case.name, stored)
        else:
            layer = nn.Linear(1, 1, bias=False)
            layer.weight = stored
            self.layers = nn.ModuleList([nn.ModuleDict({case.name: layer})])


def stored(case: Case, logical: Tensor) -> Tensor:
    return (logical.mT if case.transposed else logical).contiguous()


def fused_optimizer(case: Case, algorithm: str, weight: Tensor) -> tuple[dmuown.Muon, nn.Parameter]:
    """An optimizer of a model with one fused weight, and that weight.

    Args:
        case: The weight.
        algorithm: What steps it.
        weight: As it is stored; may be a DTensor.
    """
    model = Fused(case, weight)
    groups = dmuown.param_groups(model, algorithm=algorithm, auto_split=True, per_head=case.per_head)
    optimizer = dmuown.Muon(groups, **OPTIONS)
    return optimizer, next(model.parameters())


OPTIONS: dict[str, Any] = {"lr": 0.02, "ns_dtype": "float64", "weight_decay": 0.0}
STEPS = 4


def train_separate(case: Case, algorithm: str) -> Tensor:
    """The fused weight put together from parameters of their own."""
    whole = initial(*case.shape)
    parts = [nn.Parameter(whole[..., list(rows), :].clone()) for rows in case.rows]
    optimizer = dmuown.Muon([{"params": parts, "algorithm": algorithm}], **OPTIONS)
    for grad in gradients(case.shape, steps=STEPS):
        for part, rows in zip(parts, case.rows, strict=True):
            part.grad = grad[..., list(rows), :].contiguous()
        optimizer.step()
    result = torch.empty_like(whole)
    for part, rows in zip(parts, case.rows, strict=True):
        result[..., list(rows), :] = part.detach()
    return stored(case, result)
