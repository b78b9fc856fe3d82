"""What third parties say to nobody is dropped while our commands run, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

#: What is said, and whether users are to see it. Logger or module, text.
LOGGED = {
    ("torchao", "Failed to load _C_mxfp8.so"): False,
    ("torch.utils._pytree", "<enum 'KernelPreference'> is an Enum subclass"): False,
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
