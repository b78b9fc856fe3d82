"""LoRA adapters of the host's section `peft`: which modules have them, and their parameters' shapes.

Beside the weight [output, input] of an adapted module there are `lora_A` [rank, input] and `lora_B` [output, rank];
beside a stack of experts, stacks of both. Everything else is frozen. A test compares with what the host builds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dmuown.automodel import options
from dmuown.errors import OptionError
from dmuown.policy.roles import ParameterRole, Role
from dmuown.policy.schema import parse_dtype

#: The host's class, the only `_target_` whose adapters are known here.
TARGET = "nemo_automodel.components._peft.lora.PeftConfig"
_EXPERTS = re.compile(r"\.experts\.gate_and_up_projs$")


@dataclass(frozen=True)
class Adapters:
    """A section `peft`.

    Attributes:
        target_modules: Patterns of the modules that have adapters; see `matches`.
        exclude_modules: Instead, patterns of the linear modules that have none.
        match_all_linear: Instead, all linear modules.
        rank: Rows of `lora_A`.
        use_dora: Whether there is a magnitude for each output beside.
        dtype: Dtype of adapters; None is the model's.
        moe_rank_scaling: Whether adapters of experts share the rank among the experts of a token.
    """

    target_modules: tuple[str, ...]
    exclude_modules: tuple[str, ...]
    match_all_linear: bool
    rank: int
    use_dora: bool
    dtype: torch.dtype | None
    moe_rank_scaling: bool

    @classmethod
    def read(cls, section: Any) -> Adapters:
        """Read the section.

        Raises:
            OptionError: No mapping, another `_target_`, a wrong value, or selections that exclude each other.
        """
        if not isinstance(section, Mapping):
            raise OptionError("peft", f"must be a section, got {section!r}", f"Write _target_: {TARGET} below it")
        target = section.get("_target_")
        if target != TARGET:
            raise OptionError(
                "peft._target_", f"must be {TARGET} for its adapters to be planned, got {target!r}", "Write it"
            )
        targets, excluded = (_names(f"peft.{key}", section.get(key)) for key in ("target_modules", "exclude_modules"))
        every = options.switch("peft.match_all_linear", section.get("match_all_linear", False))
        if sum((bool(targets), bool(excluded), every)) > 1:
            raise OptionError(
                "peft", "takes one of target_modules, exclude_modules and match_all_linear", "Remove the others"
            )
        return cls(
            target_modules=targets if targets or excluded or every else ("*_proj",),  # the host's default
            exclude_modules=excluded,
            match_all_linear=every,
            rank=options.count("peft.dim", section.get("dim", 8)),
            use_dora=options.switch("peft.use_dora", section.get("use_dora", False)),
            dtype=parse_dtype(section.get("lora_dtype"), "peft.lora_dtype"),
            moe_rank_scaling=options.switch("peft.moe_rank_scaling", section.get("moe_rank_scaling", False)),
        )

    def adapts(self, path: str, *, linear: bool) -> bool:
        """Whether the module at `path` has adapters; only `target_modules` reaches experts."""
        if self.target_modules:
            return any(path == pattern or matches(pattern, path) for pattern in self.target_modules)
        if self.match_all_linear:
            return linear
        return linear and not any(path == pattern or matches(pattern, path) for pattern in self.exclude_modules)

    def add(
        self, entries: Sequence[ParameterRole], linears: Collection[str], *, experts_per_token: int = 0
    ) -> tuple[list[ParameterRole], set[str]]:
        """Return a model's parameters with adapters among them, and the adapters' names.

        Raises:
            OptionError: No module has adapters; DoRA of experts; a rank below one an expert.
        """
        result: list[ParameterRole] = []
        added: set[str] = set()
        waiting: list[ParameterRole] = []  # for the module's own bias, which comes first
        tied: list[ParameterRole] = []
        following = [entry.name.rpartition(".")[0] for entry in entries[1:]] + [""]
        for index, (entry, next_path) in enumerate(zip(entries, following, strict=True)):
            result.append(entry)
            path, _, leaf = entry.name.rpartition(".")
            if leaf == "weight" and path in linears and self.adapts(path, linear=True):
                waiting = self._linear(path, *entry.parameter.shape)
            elif index and _EXPERTS.search(entries[index - 1].name) and self.adapts(path, linear=False):
                # The stack's second weight completes the module.
                waiting = self._experts(path, entries[index - 1].parameter, entry.parameter, experts_per_token)
            if next_path != path:
                result += waiting
                added.update(made.name for made in waiting)
                waiting = []
            for name in entry.aliases:
                path, _, leaf = name.rpartition(".")
                if leaf == "weight" and path in linears and self.adapts(path, linear=True):
                    tied += self._linear(path, *entry.parameter.shape)
        result += tied
        added.update(made.name for made in tied)
        if not added:
            raise OptionError("peft", "adapts no module of the model", "Correct its target_modules")
        return result, added

    def _linear(self, path: str, rows: int, columns: int) -> list[ParameterRole]:
        made = [_entry(f"{path}.lora_magnitude", (rows,), Role.VECTOR)] if self.use_dora else []
        return [
            *made,
            _entry(f"{path}.lora_A.weight", (self.rank, columns), Role.MATRIX),
            _entry(f"{path}.lora_B.weight", (rows, self.rank), Role.MATRIX),
        ]

    def _experts(
        self, path: str, gate_and_up: torch.Tensor, down: torch.Tensor, experts_per_token: int
    ) -> list[ParameterRole]:
        if self.use_dora:
            raise OptionError("peft.use_dora", f"is not there for experts, and {path} is adapted", "Set it to false")
        rank = self.rank
        if self.moe_rank_scaling:
            rank //= max(1, experts_per_token)
            if rank < 1:
                raise OptionError(
                    "peft.dim", f"must be at least the {experts_per_token} experts of a token, got {self.rank}"
                )
        count, hidden, width = gate_and_up.shape
        inner = down.shape[1]
        shapes = {
            "lora_gate_and_up_A": (count, hidden, rank),
            "lora_gate_and_up_B": (count, rank, width),
            "lora_down_A": (count, inner, rank),
            "lora_down_B": (count, rank, hidden),
        }
        return [_entry(f"{path}.{name}", shape, Role.EXPERT, transposed=True) for name, shape in shapes.items()]


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of the host selects a module.

    `*` stands for any text, and so does `.*`, unless it follows a whole part of a path (`.layers`) or a number:
    there it stands for what is below, or nothing, so that `*.layers.1.*` does not select layer 10.
    """
    made, position = "", 0
    for star in re.finditer(r"\.?\*", pattern):
        literal = pattern[position : star.start()]
        made += literal  # a regular expression itself, as the host takes it
        whole = literal.startswith(".") or (position == 0 and literal != "") or re.search(r"\.\d+$", literal)
        made += r"(\..*)?" if star.group() == ".*" and whole else "(.*)"
        position = star.end()
    try:
        return re.match(f"^{made}{pattern[position:]}$", path) is not None
    except re.error as error:
        raise OptionError("peft.target_modules", f"{pattern!r} is no pattern: {error}", "Correct it") from None


def linear_modules(entries: Sequence[ParameterRole]) -> frozenset[str]:
    """Paths of the linear modules among parameters whose shapes are known: matrices, heads and tied heads."""
    found: set[str] = set()
    for entry in entries:
        linear = entry.role in (Role.MATRIX, Role.HEAD) or entry.name.endswith(".shared_expert_gate.weight")
        found.update(name.rpartition(".")[0] for name in (entry.name if linear else "", *entry.aliases))
    return frozenset(found - {""})


def _names(key: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence) or not all(isinstance(entry, str) and entry for entry in listed):
        raise OptionError(key, f"must be a list of names of modules, got {value!r}", "Write ['*_proj']")
    return tuple(listed)


def _entry(name: str, shape: tuple[int, ...], role: Role, *, transposed: bool = False) -> ParameterRole:
    parameter = nn.Parameter(torch.empty(shape, device="meta"))
    if len(shape) == 2 and min(shape) == 1:
        role = Role.VECTOR
    return ParameterRole(name, parameter, role, transposed, (), "LoRA adapter")
