"""Importing `dmuown.automodel` registers its short names, whichever of it and the host comes first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"
HOST = "from nemo_automodel.components.optim import optimizer as host"
CHECK = """
import sys
names = {name for name in host.OPTIMIZER_CONFIG_REGISTRY if name.startswith("dmuown_")}
assert names >= {"dmuown_muown", "dmuown_muon", "dmuown_normuon", "dmuown_normuown", "dmuown_angular_muown"}, names
assert host.OPTIMIZER_CONFIG_REGISTRY["muon"].__module__.startswith("nemo_automodel"), "the host's own name was taken"
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("dmuown")]
"""


@pytest.mark.parametrize("imports", [("import dmuown.automodel", HOST), (HOST, "import dmuown.automodel")])
def test_short_names_are_registered_on_import(imports: tuple[str, str]) -> None:
    # The host reaches for CUDA at import in places; its optimizer module alone does not.
    code = "\n".join((*imports, CHECK))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
