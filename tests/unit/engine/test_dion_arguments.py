"""Dion's arguments of `Muon` choose Dion's coefficients: the published numbers, and those of every Dion at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dmuown
from dmuown.errors import OptionError
from dmuown.orthogonalize import Orthogonalizer

#: Dion main's `polar_express`, with safety factor 1.02 beside the norm; modded-nanogpt and nanochat have it too.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
#: gram-newton-schulz 0.1.6, which Dion runs for `use_gram_newton_schulz`: arXiv 2505.16932, each p(x / 1.05).
GRAM = tuple(
    (a / 1.05, b / 1.05**3, c / 1.05**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
#: Jiacheng You's, https://x.com/YouJiacheng/status/1905861218138804534; the only ones of Dion 7452a58.
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

CASES: list[tuple[dict[str, Any], Any, float, str]] = [
    ({}, POLAR_EXPRESS, 1.02, "polar_express"),
    ({"use_polar_express": True}, POLAR_EXPRESS, 1.02, "polar_express"),
    ({"use_polar_express": False}, YOU, 1.0, "newton_schulz"),
    ({"use_gram_newton_schulz": True}, GRAM, 1.0, "gram"),
    ({"use_gram_newton_schulz": True, "use_polar_express": False}, GRAM, 1.0, "gram"),
]


def orthogonalizer_of(optimizer: dmuown.Muon) -> Orthogonalizer:
    (bucket,) = (bucket for part in optimizer.plan.parts for joint in part for bucket in joint.buckets)
    return bucket.orthogonalizer


@pytest.mark.parametrize("optimizer_class", [dmuown.Muon, dmuown.NorMuon])
@pytest.mark.parametrize(("flags", "triples", "factor", "scheme"), CASES, ids=str)
def test_flags_choose_dions_coefficients(
    optimizer_class: type[dmuown.Muon], flags: dict[str, Any], triples: Any, factor: float, scheme: str
) -> None:
    optimizer = optimizer_class([torch.nn.Parameter(torch.ones(4, 3))], **flags)
    found = orthogonalizer_of(optimizer)
    assert (found.scheme, found.table.safety_factor) == (scheme, factor)
    expected = torch.tensor(triples, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(found.table.triples, dtype=torch.float64), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("flags", [flags for flags, *_ in CASES], ids=str)
def test_a_scheme_brings_its_own_coefficients(flags: dict[str, Any]) -> None:
    for scheme, table in (("newton_schulz", "keller"), ("polar_express", "polar_express"), ("gram", "polar_express")):
        for key in ("scheme", "orthogonalization_strategy"):
            group = {"params": [torch.nn.Parameter(torch.ones(4, 3))], key: scheme}
            found = orthogonalizer_of(dmuown.Muon([group], **flags))
            assert (found.scheme, found.table.name) == (scheme, table)
            options: dict[str, Any] = {**flags, key: scheme}
            whole = dmuown.Muon([torch.nn.Parameter(torch.ones(4, 3))], **options)
            found = orthogonalizer_of(whole)
            assert (found.scheme, found.table.name) == (scheme, table)


def test_dions_arguments_are_arguments_of_the_optimizer_alone() -> None:
    for flag in ("use_polar_express", "use_gram_newton_schulz"):
        with pytest.raises(OptionError, match=f"^param group 0: {flag}: is not an option"):
            dmuown.Muon([{"params": [torch.nn.Parameter(torch.ones(4, 3))], flag: True}])


def test_every_dion_has_these_coefficients() -> None:
    folders = [Path(folder) for folder in os.environ.get("DMUOWN_DION_PATHS", "").split(os.pathsep) if folder]
    if not folders:
        pytest.skip("no Dion to test: DMUOWN_DION_PATHS names no folder that holds one")
    code = """
import inspect, json
import torch
try:
    from dion import polar_express
    from dion.megabatch_base import zeropower_via_newtonschulz5 as you
    table, source = polar_express._POLAR_EXPRESS_COEFFS, inspect.getsource(polar_express)
except ImportError:
    from dion.muon import zeropower_via_newtonschulz5 as you
    table, source = None, ""
print(json.dumps([table, "1.02" in source, inspect.getsource(inspect.unwrap(you))]))
"""
    main_seen = False
    for folder in folders:
        environment = {**os.environ, "PYTHONPATH": str(folder), "TORCHDYNAMO_DISABLE": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        table, factor, you = json.loads(done.stdout.splitlines()[-1])
        if table is not None:
            main_seen = True
            assert factor
            assert tuple(map(tuple, table)) == POLAR_EXPRESS
        for triple in YOU:
            for number in triple:
                assert f"{number:.4f}" in you
    assert main_seen or len(folders) == 1
