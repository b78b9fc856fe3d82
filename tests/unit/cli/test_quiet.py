"""What third parties say to nobody is dropped while our commands run, and nothing else is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: What is said, and whether users are to see it. Logger or module, text.
LOGGED = {
    ("torchao", "Failed to load _C_mxfp8.so"): False,
    ("torchao", "Skipping import of cpp extensions due to incompatible torch version."): False,
    ("torchao", "`config.force_recompute_fp8_weight_in_bwd` is deprecated"): True,
    ("torchao.kernel.intmm", "Warning: Detected no triton, on systems without Triton"): False,
    ("torchao.float8", "another message"): True,
    ("torch.utils._pytree", "%s is an Enum subclass"): True,  # of whose class is not said
    ("torch.utils._pytree", "another message"): True,
    ("transformers.modeling_utils", "`torch_dtype` is deprecated! Use `dtype` instead!"): False,
    ("transformers.configuration_utils", "`torch_dtype` is deprecated! Use `dtype` instead!"): False,
    ("transformers.modeling_utils", "Some weights were not initialized"): True,
    ("torch.distributed.tensor._redistribute", "While redistributing from %s, 2 sequential operations"): False,
    ("torch.distributed.tensor._redistribute", "another message"): True,
    ("nemo_automodel.components._peft.module_matcher", "No modules specified for LoRA."): True,
    ("root", "save_consolidated=final but v4_compatible=False"): True,
}
WARNED = {
    ("megatron_fsdp.mixed_precision", "Transformer Engine and Apex are not installed. Falling back"): False,
    ("torchdata.stateful_dataloader.stateful_dataloader", "'set_vital' is deprecated, please do not call"): False,
    ("nemo_automodel.components.checkpoint._backports.filesystem", "TypedStorage is deprecated. It will be"): False,
    ("nemo_automodel.components.models.gemma4_moe", "sequence_parallel=True is not yet supported"): True,
    ("torch.distributed.tensor._dispatch", "DTensor random operators may not have complete support on cpu"): False,
    ("torch.distributed.tensor.parallel.api", "Parallelize plan key 'x' could not be resolved"): True,
    ("their_model", "TypedStorage is deprecated. It will be"): True,
}

SCRIPT = """
import json, logging, sys, warnings

logged, warned = json.loads(sys.argv[1])
from dmuown.commands.quiet import quieten_host

quieten_host()
quieten_host()
found = []

class Keep(logging.Handler):
    def emit(self, record):
        found.append([record.name, record.msg])

logging.getLogger().addHandler(Keep())
for name, text in logged:
    logging.getLogger(None if name == "root" else name).warning(text)
with warnings.catch_warnings(record=True) as caught:
    for module, text in warned:
        warnings.warn_explicit(text, UserWarning, f"{module}.py", 1, module=module)
found += [[warning.filename.removesuffix(".py"), str(warning.message)] for warning in caught]
print(json.dumps([found, [len(logging.getLogger(name).filters) for name, _ in logged]]))
"""


def said(level: str | None = None) -> tuple[list[tuple[str, str]], list[int]]:
    """What passes in a fresh process, and how many filters the loggers have."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOGGING_LEVEL", "PYTHONWARNINGS")}
    environment |= {"LOGGING_LEVEL": level} if level else {}
    command = [sys.executable, "-c", SCRIPT, json.dumps([list(LOGGED), list(WARNED)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    found: list[Any]
    found, filters = json.loads(done.stdout)
    return [(name, text) for name, text in found], filters


def test_what_users_cannot_act_on_is_dropped_and_nothing_else() -> None:
    found, filters = said()
    assert found == [entry for entry, passes in {**LOGGED, **WARNED}.items() if passes]
    assert max(filters) == 1, "called twice, it filters once"


def test_all_is_said_where_the_hosts_log_is_wanted() -> None:
    assert said("20")[0] == [*LOGGED, *WARNED]


PACKAGE = """
import enum, logging, warnings
import torch
logging.getLogger(__name__).warning("Failed to load " + __file__)
logging.getLogger(__name__).warning("what users can act on, of " + __name__)
warnings.warn("a deprecated option of " + __name__)

class {kind}(str, enum.Enum):
    FIRST = "first"

torch.utils._pytree.register_constant({kind})
from {name} import written
"""


def imported(folder: Path, level: str | None = None) -> list[str]:
    """Lines on stderr of a program that imports a package `torchao` and one of the user's, which say the same."""
    (folder / "torchao of mine").mkdir(parents=True)
    for name, kind, place in (("torchao", "TorchaoKind", folder), ("theirs", "TheirKind", folder / "torchao of mine")):
        (place / name).mkdir()
        (place / name / "__init__.py").write_text(PACKAGE.format(name=name, kind=kind))
        # Every Python warns of this when it compiles it, as Python 3.12 warns of what stands in torchao.
        (place / name / "written.py").write_text("same = 1 is 1\n")
    script = "from dmuown.commands.quiet import quieten_host; quieten_host(); import torchao, theirs"
    environment = {key: value for key, value in os.environ.items() if key not in ("LOGGING_LEVEL", "PYTHONWARNINGS")}
    path = [str(folder), str(folder / "torchao of mine"), *sys.path]
    environment |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"LOGGING_LEVEL": level} if level else {}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    return [line for line in done.stderr.splitlines() if line and not line.startswith("  ")]


def test_torchao_is_quiet_when_it_is_imported_and_packages_of_users_are_not(tmp_path: Path) -> None:
    """What the compiler, torch and the package itself say of an import, with the words of the real one."""
    loud, quiet = imported(tmp_path / "loud", "20"), imported(tmp_path / "quiet")

    def of(package: str, lines: list[str]) -> list[str]:
        found = (str(tmp_path / "loud"), str(tmp_path / "quiet"))
        marks = {
            "torchao": ("/torchao/", "of torchao", "TorchaoKind"),
            "theirs": ("/theirs/", "of theirs", "TheirKind"),
        }
        kept = [line for line in lines if any(mark in line for mark in marks[package])]
        for folder in found:
            kept = [line.replace(folder, "") for line in kept]
        return [re.sub(r"^W\S+ \S+ \d+ ", "", line) for line in kept]  # torch's log begins with time and process

    assert len(loud) == len(of("torchao", loud)) + len(of("theirs", loud))
    for mark in ("Failed to load", "users can act on", "deprecated option", "SyntaxWarning"):
        for package in ("torchao", "theirs"):
            assert sum(mark in line for line in of(package, loud)) == 1, (mark, package, loud)
    assert of("theirs", quiet) == of("theirs", loud)
    left = of("torchao", quiet)
    assert len(left) == 2
    assert "users can act on" in left[0]
    assert "deprecated option" in left[1]


def test_importing_the_command_line_changes_nothing() -> None:
    script = """
import logging, os, warnings
import typer
before = list(warnings.filters), dict(os.environ), set(logging.root.manager.loggerDict)
import dmuown.cli, dmuown.commands.quiet
assert (list(warnings.filters), dict(os.environ)) == before[:2]
assert not {"torchao", "transformers.modeling_utils"} & (set(logging.root.manager.loggerDict) - before[2])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["check", "plan"])
def test_the_commands_that_import_the_host_are_quiet(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they import it, and only then."""
    from typer.testing import CliRunner

    from dmuown.cli import app
    from dmuown.commands import quiet

    called: list[str] = []
    monkeypatch.setattr(quiet, "quieten_host", lambda: called.append(command))
    CliRunner().invoke(app, [command, "none.yaml"])
    assert not called
    CliRunner().invoke(app, [command, "none.yaml", "--deep"])
    assert called == [command]
