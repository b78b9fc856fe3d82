"""What low-bit state costs in loss, on the tiny model of benchmarks/bench_lowbit_lm.py: no more than was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/bench_lowbit_lm.py"

#: Percent of the fp32 run's validation loss, mean of the seeds: the aim of 0.5, and where it is not met half as much
#: again as was measured. Four bits are too few for a sum over some twenty gradients, and fp8's three bits of mantissa
#: are for Muon: see docs/lab-log.md.
ALLOWED = {
    "muon": {"bf16": 0.5, "int8": 0.5, "fp8": 1.25, "int4": 8.0},
    "muown": {"bf16": 0.5, "int8": 0.5, "fp8": 0.5, "int4": 7.6},
    "angular_muown": {"bf16": 1.0, "int8": 0.5, "fp8": 0.5, "int4": 5.2},
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALLOWED)
def test_losses_stay_near_the_fp32_runs(algorithm: str, tmp_path: Path) -> None:
    output = tmp_path / "losses.json"
    command = [sys.executable, str(SCRIPT), "--algorithms", algorithm, "--seeds", "2", "--steps", "250"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True, env=environment, timeout=900)
    rows = json.loads(output.read_text())["rows"]
    losses = {row["precision"]: row["loss"] for row in rows}
    assert losses.keys() == {"fp32", *ALLOWED[algorithm]}
    assert 1.0 < losses["fp32"] < 2.4  # it has learnt something: 4.5 at the start
    excess = {row["precision"]: row["percent"] for row in rows}
    for precision, allowed in ALLOWED[algorithm].items():
        assert abs(excess[precision]) <= allowed, excess
