"""Invariant 10: importing is free of effects, and the optimizers need no optional library."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

# Neither by `import dmuown` nor by its optimizers. torch imports some of them itself, so what counts is what we add.
OPTIONAL = ("triton", "torchao", "nemo_automodel", "dion", "pydantic", "typer", "rich", "transformers", "matplotlib")


def run(script: str) -> dict[str, list[str]]:
    """Run a script in a fresh interpreter, and return the JSON that it prints last."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SRC)!r})\n{textwrap.dedent(script)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


ADDED = """
    import json, torch, torch.distributed.tensor
    before = set(sys.modules)
    {statements}
    added = sorted(set(sys.modules) - before)
    print(json.dumps(dict(added=added)))
"""


def added_modules(statements: str) -> list[str]:
    return run(ADDED.format(statements=statements))["added"]


def test_importing_the_package_loads_its_version_alone() -> None:
    added = [name for name in added_modules("import dmuown") if not name.startswith("__")]
    assert set(added) == {"dmuown", "dmuown._version"}


def test_public_names_load_no_optional_library() -> None:
    added = added_modules(
        "import dmuown; [getattr(dmuown, n) for n in dmuown.__all__ if n not in ('ParamPolicy', 'automodel')]"
    )
    assert "dmuown.errors" in added  # the names were loaded
    roots = {name.partition(".")[0] for name in added}
    assert roots.isdisjoint(OPTIONAL), roots & set(OPTIONAL)


def test_the_check_sees_an_optional_library() -> None:
    """A guard on the two tests above: a module that is imported does show."""
    assert "pydantic" in added_modules("import pydantic")


STATE = """
    import json, logging, os, warnings
    import torch, torch.distributed as dist, torch.distributed.tensor, torch.optim

    def fingerprint():
        inductor = sys.modules.get("torch._inductor.config")
        return {
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "dtype": str(torch.get_default_dtype()),
            "device": str(torch.get_default_device()),
            "grad": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
            "rng": torch.get_rng_state().sum().item(),
            "group": dist.is_initialized(),
            "cuda": torch.cuda.is_initialized(),
            "environment": sorted(os.environ.items()),
            "handlers": [len(logging.getLogger().handlers), logging.getLogger().level],
            "filters": len(warnings.filters),
            "path": list(sys.path),
            "hooks": [str(sys.excepthook), str(sys.displayhook)],
            "optimizer": sorted(vars(torch.optim.Optimizer)),
            "patches": [id(torch.optim.Optimizer.step), id(torch.nn.Module.__call__), id(torch.compile)],
            "dispatch": len(torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers),
        }

    first = fingerprint()
    assert first == fingerprint()
    import dmuown
    for name in dmuown.__all__:
        if name not in ("ParamPolicy", "automodel"):
            getattr(dmuown, name)
    second = fingerprint()
    print(json.dumps(dict(changed=[key for key in first if first[key] != second[key]])))
"""


def test_importing_changes_nothing_global() -> None:
    assert run(STATE)["changed"] == []


def test_unknown_names_raise_and_known_ones_are_listed() -> None:
    import dmuown

    assert set(dmuown.__all__) <= set(dir(dmuown))
    with pytest.raises(AttributeError, match="'Moun'"):
        dmuown.Moun  # noqa: B018


def test_the_table_of_public_names_is_right() -> None:
    import dmuown

    for name in dmuown.__all__:
        assert getattr(dmuown, name) is not None
    assert len(dmuown.__all__) == len(set(dmuown.__all__))
