"""How a model finds its runtime, and what others may ask of it."""

from __future__ import annotations

from torch import nn

from dmuown.errors import OwnershipError
from dmuown.ownership.record import Record
from dmuown.ownership.runtime import OwnershipRuntime

_ATTRIBUTE = "_dmuown_runtime"


def register(model: nn.Module, runtime: OwnershipRuntime) -> None:
    """Attach a runtime to its model."""
    setattr(model, _ATTRIBUTE, runtime)


def find_runtime(model: nn.Module) -> OwnershipRuntime | None:
    """Return the runtime of a dedicated model, also inside wrappers such as DDP; None if there is none."""
    for module in model.modules():
        runtime = vars(module).get(_ATTRIBUTE)
        if isinstance(runtime, OwnershipRuntime):
            return runtime
    return None


def runtime_of(model: nn.Module) -> OwnershipRuntime:
    """Return the runtime of a dedicated model.

    Raises:
        OwnershipError: The model is not dedicated.
    """
    runtime = find_runtime(model)
    if runtime is None:
        raise OwnershipError(type(model).__name__, "has no dedicated parameters", "Call dmuown.dedicate_params first")
    return runtime


def dedicated_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters under the runtime, for `fully_shard(..., ignored_params=...)`."""
    return {record.home for record in runtime_of(model).records.values()}


def dedicated_records(model: nn.Module) -> dict[str, Record]:
    """Return the record of every dedicated parameter by canonical name, in the model's order."""
    return dict(runtime_of(model).records)
