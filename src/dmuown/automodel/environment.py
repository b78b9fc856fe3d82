"""What is installed here, what works with it, and what to install for the rest. Imports no host."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from dmuown._version import __version__
from dmuown.automodel.host import DISTRIBUTION, SUPPORTED, installed_version
from dmuown.errors import MissingDependencyError, install_extra

#: The oldest torch that the package declares.
OLDEST_TORCH = (2, 11)
#: Triton from this version on breaks the host's LoRA kernels at import.
FIRST_TRITON_TOO_NEW = (3, 9)

OK, MISSING, BROKEN = "ok", "missing", "broken"


@dataclass(frozen=True)
class Part:
    """One library or device.

    Attributes:
        name: What it is.
        version: Its version; empty where it is missing.
        status: `ok`, `missing` or `broken`.
        note: What is worth knowing, or what to do.
    """

    name: str
    version: str
    status: str
    note: str = ""

    def row(self) -> tuple[str, str, str, str]:
        """Cells for a table."""
        return self.name, self.version or "-", self.status, self.note


@dataclass(frozen=True)
class Ability:
    """Something one can do here, or not.

    Attributes:
        name: What.
        works: Whether.
        note: Why, or what to install.
    """

    name: str
    works: bool
    note: str

    def row(self) -> tuple[str, str, str]:
        """Cells for a table."""
        return self.name, "yes" if self.works else "no", self.note


@dataclass
class Environment:
    """What `dmuown doctor` reports.

    Attributes:
        parts: Libraries and devices.
        abilities: What works with them.
    """

    parts: list[Part] = field(default_factory=list)
    abilities: list[Ability] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        """Whether something that is installed cannot work."""
        return any(part.status == BROKEN for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """The findings as data that JSON can hold."""
        return {
            "ok": not self.broken,
            "parts": {part.name: asdict(part) for part in self.parts},
            "abilities": {ability.name: asdict(ability) for ability in self.abilities},
        }

    def part(self, name: str) -> Part:
        """The part of this name."""
        return next(part for part in self.parts if part.name == name)


def examine() -> Environment:
    """Look at everything; imports torch, Triton, quack and Dion, where they are installed."""
    found = Environment([Part("dmuown", __version__, OK), Part("Python", platform.python_version(), OK)])
    found.parts += [*_torch(), _triton(), _quack(), _dion(), _host(), *(_optional(*entry) for entry in _OPTIONAL)]
    found.abilities = _abilities(found)
    return found


_OPTIONAL = (
    ("torchao", "torchao", f"low-bit optimizer state: {install_extra('lp')}"),
    ("matplotlib", "matplotlib", f"plots of dmuown report: {install_extra('plot')}"),
    ("wandb", "wandb", "only for the section wandb of a YAML: pip install wandb"),
    ("mlflow", "mlflow", "only for the section mlflow of a YAML: pip install mlflow"),
)


def _torch() -> list[Part]:
    import torch
    import torch.distributed as dist

    version = str(torch.__version__)
    old = _numbers(version) < OLDEST_TORCH
    remedy = f"older than {'.'.join(map(str, OLDEST_TORCH))}: pip install --upgrade torch" if old else ""
    parts = [Part("torch", version, BROKEN if old else OK, remedy)]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        parts.append(Part("CUDA", str(torch.version.cuda), OK, counted))
    elif torch.version.cuda is None:
        parts.append(Part("CUDA", "", MISSING, "this torch is built without it: runs use the CPU and gloo"))
    else:
        parts.append(Part("CUDA", str(torch.version.cuda), MISSING, "no device is visible: runs use the CPU and gloo"))
    nccl = ""
    if dist.is_available() and dist.is_nccl_available():
        with contextlib.suppress(Exception):  # without a driver torch may not tell
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        parts.append(Part("NCCL", nccl or "built in", OK))
    else:
        parts.append(Part("NCCL", "", MISSING, "several processes use gloo"))
    gloo = dist.is_available() and dist.is_gloo_available()
    parts.append(Part("gloo", "built in" if gloo else "", OK if gloo else MISSING))
    return parts


def _triton() -> Part:
    version = _version("triton") or _version("pytorch-triton")
    if version is None:
        return Part("Triton", "", MISSING, f"kernels: {install_extra('triton')}")
    if _numbers(version) >= FIRST_TRITON_TOO_NEW:
        limit = ".".join(map(str, FIRST_TRITON_TOO_NEW))
        status = BROKEN if installed_version() else OK
        return Part("Triton", version, status, f'the host cannot be imported with it: pip install "triton<{limit}"')
    return Part("Triton", version, OK, "" if _has_cuda() else "its kernels need a CUDA device")


def _quack() -> Part:
    version = _version("quack-kernels")
    if version is None:
        return Part("quack", "", MISSING, "optional, faster symmetric products on Hopper: pip install quack-kernels")
    from dmuown.orthogonalize import available_backends

    if "quack" in available_backends():
        return Part("quack", version, OK)
    return Part("quack", version, OK, "is not used: no device that it has kernels for")


def _dion() -> Part:
    from dmuown.engine.info import engine_info

    if importlib.util.find_spec("dion") is None:
        return Part("Dion", "", MISSING, "the embedded engine is used, which does the same")
    try:
        info = engine_info()
    except MissingDependencyError as error:
        return Part("Dion", _version("dion") or "unknown", BROKEN, f"{error.rule}. {error.remedy}")
    generations = {"muon_tasks": "of revision 7452a58, as AutoModel locks it", "ortho_tasks": "of the current main"}
    return Part("Dion", info.revision or "unknown", OK, f"generation {info.generation}, {generations[info.generation]}")


def _host() -> Part:
    version = installed_version()
    if version is None:
        return Part(DISTRIBUTION, "", MISSING, f"the host: {install_extra('automodel')}")
    if version.split(".")[:2] != SUPPORTED.split(".")[:2]:
        return Part(
            DISTRIBUTION, version, BROKEN, f'dmuown works with {SUPPORTED}: pip install "{DISTRIBUTION}=={SUPPORTED}"'
        )
    return Part(DISTRIBUTION, version, OK, "the host")


def _optional(name: str, distribution: str, note: str) -> Part:
    version = _version(distribution)
    return Part(name, version or "", OK if version else MISSING, "" if version else note)


def _abilities(found: Environment) -> list[Ability]:
    host, triton = found.part(DISTRIBUTION), found.part("Triton")
    cuda, nccl = found.part("CUDA"), found.part("NCCL")
    torch_works = found.part("torch").status == OK and found.part("Dion").status != BROKEN
    fine_tunes = torch_works and host.status == OK and triton.status != BROKEN
    blocked = next((part for part in (found.part("torch"), found.part("Dion")) if part.status == BROKEN), None)
    reason = blocked.note if blocked else "torch is all they need"
    if triton.status == OK and cuda.status == OK:
        kernels = "where they are faster than torch"
    elif triton.status == OK:
        kernels = "there is no CUDA device; torch's own products are used"
    else:
        kernels = triton.note
    if host.status != OK:
        ready = host.note
    elif triton.status == BROKEN:
        ready = triton.note
    else:
        ready = "on GPUs" if cuda.status == OK else "on the CPU: small models"
    where = "NCCL between GPUs" if nccl.status == OK and cuda.status == OK else "gloo between CPU processes"
    return [
        Ability("optimizers", torch_works, reason),
        Ability("dmuown finetune", fine_tunes, ready),
        Ability("several processes", found.part("gloo").status == OK or nccl.status == OK, where),
        Ability("Triton kernels", triton.status == OK and cuda.status == OK, kernels),
        Ability(
            "low-bit state", found.part("torchao").status == OK, found.part("torchao").note or "int8, int4 and fp8"
        ),
        Ability(
            "dmuown report with plots",
            found.part("matplotlib").status == OK,
            found.part("matplotlib").note or "HTML and PNG",
        ),
    ]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])
