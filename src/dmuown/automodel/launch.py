"""Start the ranks of a run: in this process for one, under torchrun for several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch

from dmuown.automodel import worker
from dmuown.automodel.checks import check_config
from dmuown.automodel.request import Request, read_request
from dmuown.errors import DmuownError, OptionError


def launch(
    config: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    processes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Check a request, run it, and return its exit code: 0, or 1 if a rank failed.

    Args:
        config: The YAML file.
        arguments: Overrides, `--dotted.key value`.
        processes: Ranks on this machine; None is one per GPU, or one. Inside torchrun, this process
            is already a rank and the argument does not matter.
        environment: Variables to add for the ranks. Several ranks without OMP_NUM_THREADS share the cores.

    Raises:
        DmuownError: The request is wrong; nothing was started.
    """
    if processes is None:
        processes = max(1, torch.cuda.device_count())
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ
    request = _checked(config, arguments, world_size=int(os.environ.get("WORLD_SIZE", 1)) if is_rank else processes)
    added = dict(environment or {})
    if processes == 1 or is_rank:
        os.environ.update(added)
        worker.run(request)
        return 0
    if "OMP_NUM_THREADS" not in os.environ:
        added.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("-m", "dmuown.cli", "finetune", str(request.path), *request.overrides),
    ]
    return 1 if subprocess.run(command, env=os.environ | added, check=False).returncode else 0


def _checked(config: str | os.PathLike[str], arguments: Sequence[str], *, world_size: int) -> Request:
    """Check all sections as `dmuown check` does, which needs no import of the host, and then what needs it."""
    report = check_config(os.fspath(config), arguments, world_size=world_size)
    if len(report.errors) == 1:
        (problem,) = report.errors
        raise OptionError(problem.key, problem.rule, problem.remedy)
    if report.errors:
        told = (DmuownError(problem.key, problem.rule.rstrip("."), problem.remedy) for problem in report.errors)
        lines = "".join(f"\n  {error}" for error in told)
        raise OptionError(str(config), f"has {len(report.errors)} errors:{lines}\ndmuown check names their lines")
    return read_request(config, arguments)
