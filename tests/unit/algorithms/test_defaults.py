"""The table of docs/guides/defaults.md says what the libraries themselves have as defaults."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dmuown

GUIDE = Path(__file__).parents[3] / "docs/guides/defaults.md"
DIONS = [Path(path) for path in os.environ.get("DMUOWN_DION_PATHS", "").split(os.pathsep) if path]
NO_DION = pytest.mark.skip(reason="no Dion to test: DMUOWN_DION_PATHS names no folder that holds one")

#: Options whose cells are plain values.
PLAIN = ("lr", "weight_decay", "cautious_wd", "mu", "nesterov", "ns_steps", "betas", "flatten")


def table() -> dict[str, dict[str, str]]:
    """Cells by column and option."""
    lines = [line for line in GUIDE.read_text().split("\n\n")[2].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    head = [name.replace("`", "") for name in rows[0]]
    return {
        column: {re.match(r"`?([\w ]+)`?", row[0]).group(1): row[place] for row in rows[2:]}  # type: ignore[union-attr]
        for place, column in enumerate(head)
    }


def value(cell: str) -> Any:
    return ast.literal_eval(cell.strip("*"))


def signature(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def compare(column: str, defaults: dict[str, Any], names: dict[str, str] | None = None) -> int:
    compared = 0
    for option in PLAIN:
        name = (names or {}).get(option, option)
        if name in defaults:
            assert value(table()[column][option]) == defaults[name], (column, option)
            compared += 1
    return compared


def test_ours() -> None:
    assert compare("dmuown.Muon, NorMuon", signature(dmuown.Muon)) == len(PLAIN)
    assert compare("dmuown.Muown", signature(dmuown.Muown)) >= 5
    param = torch.nn.Parameter(torch.ones(2, 2))
    for optimizer, column in ((dmuown.Muon([param]), "dmuown.Muon, NorMuon"), (dmuown.Muown([param]), "dmuown.Muown")):
        group, cells = optimizer.param_groups[0], table()[column]
        assert group["scheme"] == cells["scheme"].strip("`")
        assert group["foreach"] is value(cells["foreach"])
        assert group["momentum_form"] == "sum"
        assert group["ns_norm"] == "add"
        assert (group["beta1"], group["beta2"]) == value(cells["betas"])
        assert group["flatten"] is value(cells["flatten"])


def test_torch() -> None:
    defaults = signature(torch.optim.Muon)
    assert compare("torch.optim.Muon", defaults, {"mu": "momentum"}) == 5
    assert value(table()["torch.optim.Muon"]["ns_epsilon"]) == defaults["eps"]
    assert defaults["ns_coefficients"] == (3.4445, -4.7750, 2.0315)  # keller
    assert defaults["adjust_lr_fn"] is None  # "original"


def test_muonium() -> None:
    """Its published table of options; the package is not a dependency."""
    published = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "cautious_wd": True,
        "mu": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "betas": (0.9, 0.95),
        "flatten": False,
    }
    assert compare("muonium Muon", published) == len(PLAIN)
    assert table()["muonium Muon"]["scheme"] == "`polar_express`"


@pytest.mark.parametrize("path", DIONS or [pytest.param(None, marks=NO_DION)], ids=str)
@pytest.mark.parametrize("kind", ["Muon", "NorMuon"])
def test_dion(path: Path, kind: str) -> None:
    """Read from its source, which needs CUDA's libraries to be imported."""
    module = ast.parse((path / f"dion/{kind.lower()}.py").read_text())
    (found,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == kind]
    (init,) = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    names = [argument.arg for argument in init.args.args][-len(init.args.defaults) :]
    defaults = {name: ast.literal_eval(node) for name, node in zip(names, init.args.defaults, strict=True)}
    assert compare("Dion Muon", defaults) >= 6
    ours = signature(getattr(dmuown, kind)) if kind == "Muon" else signature(dmuown.Muon) | {"muon_beta2": 0.95}
    if kind == "NorMuon" and "use_polar_express" not in defaults:
        assert defaults.pop("adjust_lr") == "rms_norm"  # revision 7452a58; the guide says so
    assert {name: ours[name] for name in defaults} == defaults


@pytest.mark.parametrize("name", ["MuonConfig", "NorMuonConfig"])
def test_automodel(name: str) -> None:
    """Our configurations stand in for the host's of the same name, default for default."""
    host = pytest.importorskip("nemo_automodel.components.optim.optimizer", reason="the host is an extra")
    import dmuown.automodel

    theirs, ours = (
        {field.name: field.default for field in dataclasses.fields(getattr(module, name))}
        for module in (host, dmuown.automodel)
    )
    del theirs["param_group_overrides"]
    assert {key: ours[key] for key in theirs} == theirs
    text = GUIDE.read_text()
    assert f"`lr` {theirs['lr']:.0e}".replace("e-0", "e-") in text
    assert f"`scalar_betas` {theirs['scalar_betas']}" in text
