"""Start the ranks of a run: in this process for one, under torchrun for several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import torch

from dmuown.automodel import worker
from dmuown.automodel.request import read_request


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
    request = read_request(config, arguments)
    if processes is None:
        processes = max(1, torch.cuda.device_count())
    added = dict(environment or {})
    if processes == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
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
