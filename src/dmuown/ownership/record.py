"""One dedicated parameter: what was decided for it, and the tensors that stand for it on this rank.

A parameter has up to two objects. Its *home* is what modules hold between boundaries and what the
optimizer steps: the whole master on its owner, a DTensor shard on `sharded_adamw`, an object without
data elsewhere. Its *compute* parameter is a part of a transfer's buffer, in `param_dtype`, and takes
the home's place in the modules while the boundary is whole.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuown.errors import OwnershipError
from dmuown.ownership.away import AwayParameter, make_away, released_tensor
from dmuown.policy.resolve import ResolvedRoute

_ATTRIBUTE = "_dmuown_record"
_REPLACED = "_dmuown_replaced"
_dedications = 0


class State(enum.Enum):
    """Where the data of a transfer is on this rank."""

    HOME = "home"
    FETCHING = "fetching"
    WHOLE = "whole"


class GradState(enum.Enum):
    """What has become of a transfer's gradients in this step."""

    NONE = "none"
    COLLECTING = "collecting"
    REDUCING = "reducing"


_LEGAL: dict[enum.Enum, frozenset[enum.Enum]] = {
    State.HOME: frozenset({State.FETCHING}),
    State.FETCHING: frozenset({State.WHOLE}),
    State.WHOLE: frozenset({State.HOME}),
    GradState.NONE: frozenset({GradState.COLLECTING}),
    GradState.COLLECTING: frozenset({GradState.REDUCING, GradState.NONE}),
    GradState.REDUCING: frozenset({GradState.NONE}),
}


def check_transition(current: enum.Enum, following: enum.Enum, subject: str) -> None:
    """Refuse a transition that the life of a transfer does not have.

    Raises:
        OwnershipError: Always an error of this package, unless several threads use one model at once.
    """
    if following not in _LEGAL[current]:
        raise OwnershipError(
            subject,
            f"cannot go from {current.value!r} to {following.value!r}",
            "Use one thread for each dedicated model; otherwise this is a bug",
        )


@dataclass(eq=False)
class Record:
    """A dedicated parameter on this rank.

    Attributes:
        name: Canonical name.
        aliases: Canonical names of its other uses; not empty for tied weights.
        places: Every module that holds it, and the attribute there.
        route: What the policy decided.
        shape: Global logical shape.
        owner: Owner's rank within the runtime's group; None for `sharded_adamw`.
        owner_global: Owner's global rank; None for `sharded_adamw`.
        owned: Whether this rank steps it: its whole on `muon` and `adamw`, its shard on `sharded_adamw`.
        home: The parameter that modules hold between boundaries and optimizers step.
        compute: The parameter that stands in while whole; None before the first use.
        compute_dtype: Dtype of `compute`.
        grad_dtype: Dtype of the reduction.
        tensor_parallel: Mesh and placements of a parameter that tensor parallelism cut; else None.
        local_shape: Shape of what this rank's module computes with.
        model: The records of all dedicated parameters of its model, by canonical name.
    """

    name: str
    aliases: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    route: ResolvedRoute
    shape: tuple[int, ...]
    owner: int | None
    owner_global: int | None
    owned: bool
    home: nn.Parameter
    compute_dtype: torch.dtype
    grad_dtype: torch.dtype
    local_shape: tuple[int, ...]
    tensor_parallel: tuple[Any, tuple[Any, ...]] | None = None
    compute: nn.Parameter | None = None
    home_dtype: torch.dtype = field(init=False)
    model: Mapping[str, Record] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.home_dtype = self.home.dtype

    @property
    def owner_text(self) -> str:
        """Who holds the data, in words."""
        return f"rank {self.owner_global}" if self.owner_global is not None else "all ranks, in shards"

    @property
    def device(self) -> torch.device:
        """Device of the data, also where there is none."""
        return self.home.device

    @property
    def optim_dtype(self) -> torch.dtype | None:
        """Dtype of the optimizer's state; None where it is the home's own."""
        wanted = self.route.optim_dtype
        return None if wanted == self.home_dtype else wanted

    @property
    def home_grad_dtype(self) -> torch.dtype:
        """Dtype of the home's gradient: the reduction's where both it and the optimizer are wider than the home."""
        if torch.promote_types(self.home_dtype, self.optim_dtype or self.home_dtype) == self.home_dtype:
            return self.home_dtype
        return torch.promote_types(self.home_dtype, self.grad_dtype)

    def local_home(self) -> Tensor:
        """Return this rank's data as a plain tensor: the whole, or the shard; only where `owned`."""
        with torch.inference_mode(False), torch.no_grad():
            data = self.home.detach()
            return data.to_local() if isinstance(data, DTensor) else data

    def install(self, param: nn.Parameter) -> None:
        """Let the modules hold `param`: `home` or `compute`."""
        for module, attribute in self.places:
            module._parameters[attribute] = param

    def mark(self) -> None:
        """Attach this record to its home, where `record_of` finds it."""
        setattr(self.home, _ATTRIBUTE, self)
        if self.home_grad_dtype != self.home_dtype:
            self.home.grad_dtype = self.home_grad_dtype

    def convert(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply what `nn.Module._apply` applies to parameters: moves between devices.

        Raises:
            OwnershipError: It would change the dtype, which the policy decides.
        """
        with torch.no_grad():
            moved = function(self.home)
        if moved.dtype != self.home_dtype:
            raise OwnershipError(
                self.name,
                f"has its dtype, {self.home_dtype}, from the policy; it cannot become {moved.dtype}",
                "Set `master_dtype` and `param_dtype` in param_policy, or convert the model before dedicate_params",
            )
        if moved is self.home:
            return
        if torch._has_compatible_shallow_copy_type(self.local_data(), moved) and not isinstance(moved, DTensor):
            self.home.data = moved
        else:
            # As torch does for meta tensors and other changes of device type: a new object takes its place.
            away = isinstance(self.home, AwayParameter)
            self.home = nn.Parameter(moved, requires_grad=self.home.requires_grad)
            if away:
                make_away(self.home, self.name, self.owner_text)
            self.mark()
            self.install(self.home)
        self.compute = None

    def local_data(self) -> Tensor:
        """Return `home.data`, or a stand-in of the same device where there is no data."""
        if isinstance(self.home, AwayParameter):
            return released_tensor((0,), self.home.dtype, self.home.device)
        return self.home.data


def record_of(param: Tensor) -> Record | None:
    """Return the record of a dedicated parameter, or None if `param` is not dedicated."""
    record = getattr(param, _ATTRIBUTE, None)
    return record if isinstance(record, Record) else None


def mark_replaced(param: Tensor, name: str) -> None:
    """Note that a home took the place of `param` in its model."""
    setattr(param, _REPLACED, name)


def replaced_name(param: Tensor) -> str | None:
    """Return the name that a parameter had in a model before another object took its place; None for all others."""
    name = getattr(param, _REPLACED, None)
    return name if isinstance(name, str) else None


def note_dedication() -> None:
    """Count a model that was dedicated."""
    global _dedications
    _dedications += 1


def dedications() -> int:
    """Return how many models were dedicated in this process: optimizers look again when it has changed."""
    return _dedications
