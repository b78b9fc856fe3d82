"""The summary of a model that is not dedicated."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from torch import nn

import dmuown


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)


POLICY = {
    "overrides": [
        {"name": "embed", "set": {"route": "sharded_adamw"}},
        {"name": "nothing", "set": {"route": "adamw"}},
        {"role": ["norm", "bias"], "set": {"route": "adamw"}},
    ]
}


def test_routes_rows_and_warnings() -> None:
    model = Tiny()
    optimizer = dmuown.Muown(dmuown.param_groups(model, POLICY, algorithm="muown"), lr=0.1)
    summary = dmuown.summarize_param_groups(model, optimizer)
    assert [(row.route, row.algorithms, row.parameters, row.elements, row.bytes) for row in summary.routes] == [
        ("muon", ("muown",), 2, 72, 288),
        ("adamw", ("adamw",), 6, 36, 144),
        ("sharded_adamw", ("adamw",), 1, 72, 288),
    ]
    rows = {row.name: row for row in summary.parameters}
    assert list(rows) == [name for name, param in model.named_parameters() if param.requires_grad]
    embed = rows["embed.weight"]
    assert (embed.route, embed.matched, embed.shape, embed.group, embed.owner) == (
        "sharded_adamw",
        (0,),
        (12, 6),
        2,
        None,
    )
    assert rows["layers.0.0.weight"].matched == (2,)
    assert rows["layers.0.1.weight"].matched == ()
    assert (embed.param_dtype, embed.bytes, embed.local_bytes, embed.comm_bytes) == ("float32", 288, 288, 0)
    assert summary.warnings == ("override 1 (name=['nothing']) matches no parameter",)
    assert summary.per_step == {}


def test_it_prints_and_converts() -> None:
    model = Tiny()
    optimizer = dmuown.Muown(dmuown.param_groups(model, POLICY), lr=0.1)
    summary = dmuown.summarize_param_groups(model, optimizer)
    lines = str(summary).splitlines()
    assert lines[0].split()[:3] == ["route", "algorithm", "parameters"]
    assert lines[1].split()[:4] == ["muon", "muown", "2", "2"]
    assert any(line.startswith("layers.0.1.weight") and " 6x6 " in line for line in lines)
    assert lines[-1] == "warning: override 1 (name=['nothing']) matches no parameter"
    data = json.loads(json.dumps(summary.to_dict()))
    assert data["parameters"][0]["name"] == "embed.weight"
    assert data["routes"][0]["parameters"] == 2
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(summary)
    assert "layers.0.1.weight" in console.export_text()


def test_foreign_optimizers_and_forgotten_parameters() -> None:
    model = Tiny()
    optimizer = torch.optim.AdamW(model.layers.parameters())
    summary = dmuown.summarize_param_groups(model, optimizer)
    assert [(row.route, row.parameters) for row in summary.routes] == [("", 9)]
    assert next(row for row in summary.parameters if row.name == "embed.weight").group is None
    assert summary.warnings == ("1 trainable parameters are in no param group: embed.weight, ...",)


def test_a_rule_that_is_too_broad() -> None:
    model = nn.ModuleList(nn.LayerNorm(4) for _ in range(60))
    groups = dmuown.param_groups(model, {"defaults": {"route": "sharded_adamw"}})
    summary = dmuown.summarize_param_groups(model, dmuown.Muown(groups, lr=0.1))
    assert len(summary.warnings) == 1
    assert "120 tensors" in summary.warnings[0]
    assert "too broad" in summary.warnings[0]


@pytest.mark.parametrize("name", ["dedicate_params", "no_sync", "clip_grad_norm_", "gathered", "dedicated_parameters"])
def test_public_names(name: str) -> None:
    assert callable(getattr(dmuown, name))
