"""The state entries of an optimizer, one by one: what every way of saving is built from.

An entry belongs to the ranks that yield it. State of a DTensor parameter is yielded by all ranks
of its mesh and holds this rank's shard; state of a plain parameter is whole and equal on all ranks;
state of a dedicated parameter is whole and yielded by its owner alone. DCP writes exactly what each
rank yields, under one name for all, so that owners write their own entries and no rank ever holds
everything.

For the ownership runtime: `optimizer_entries` is the one place to extend, for example to drain pending
broadcasts first. A dedicated parameter of another rank has no record in this rank's optimizer and
yields nothing here; getting, setting, saving and loading follow from what is yielded. What is not
yielded on a rank is neither asked for nor missed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from dmuown.checkpoint.names import optimizer_fqns
from dmuown.engine.optimizer import MuonEngine
from dmuown.state import BufferSpec


@dataclass(frozen=True)
class StateEntry:
    """One buffer of one parameter.

    Attributes:
        fqn: The parameter's canonical name.
        key: The buffer's name, such as `"momentum"`.
        value: The live buffer, not a copy: a DTensor of the parameter's mesh, or a whole plain tensor.
        spec: Its declaration.
    """

    fqn: str
    key: str
    value: Tensor
    spec: BufferSpec


def optimizer_entries(model: nn.Module, optimizer: MuonEngine) -> Iterator[StateEntry]:
    """Yield the state entries that this rank holds, parameters in the order of the groups.

    Args:
        model: Has all of the optimizer's parameters.
        optimizer: One of this package's optimizers.

    Raises:
        ParameterError: A parameter that the model does not have.
    """
    record_of = {record.param: record for record in optimizer.records}
    for fqns, group in zip(optimizer_fqns(model, optimizer), optimizer.param_groups, strict=True):
        for fqn, param in zip(fqns, group["params"], strict=True):
            record = record_of.get(param)
            if record is None:
                continue  # a dedicated parameter of another rank
            for key, spec in record.state_spec.items():
                yield StateEntry(fqn, key, optimizer.state[param][key], spec)
