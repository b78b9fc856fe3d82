"""What an optimizer rounds stochastically, and the steps that its random numbers go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmuown.engine.capturable import is_recording
from dmuown.engine.layout import held_positions, local_tensor
from dmuown.engine.records import ParamRecord
from dmuown.errors import LayoutError
from dmuown.policy.names import without_wrappers
from dmuown.state.rounding import Rounding, hashed, word_of, words_of_positions
from dmuown.state.working import compute_device

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class _Clock:
    """Of one group on one device, 0-d int32: steps taken, and what the present step's numbers are hashed with."""

    count: Tensor
    key: Tensor


class Roundings:
    """The stochastic rounding of an optimizer's bf16 parameters.

    A group's count of steps lives where its parameters are: a recorded step counts it on, so that replays draw anew.

    Attributes:
        of: By parameter, for those that are rounded so.
    """

    def __init__(self) -> None:
        self.of: dict[Tensor, Rounding] = {}
        self._clocks: dict[tuple[int, torch.device], _Clock] = {}

    def prepare(self, records: Sequence[ParamRecord], groups: Groups) -> None:
        """Make what is missing, before a graph records, since it keeps addresses.

        Raises:
            LayoutError: A shard that does not follow from its placements; nothing has been made then.
        """
        missing = []
        for record in records:
            group = groups[record.group_index]
            if not rounds_stochastically(record.param, group):
                continue
            device = compute_device(local_tensor(record.param), group)
            if record.param not in self.of or self.of[record.param].positions.device != device:
                words = words_of_positions(without_wrappers(record.name), _positions(record))
                missing.append((record, words.to(device)))
        for record, words in missing:
            self.of[record.param] = Rounding(words, self._clock(record.group_index, words.device, groups).key)

    def begin_step(self, records: Sequence[ParamRecord], groups: Groups) -> None:
        """Draw anew, before the host counts the step."""
        if not any(group["stochastic_rounding"] for group in groups):
            return
        self.prepare(records, groups)
        for (index, _), clock in self._clocks.items():
            group = groups[index]
            if not (group["capturable"] or is_recording()):  # else replays may have counted where the host did not see
                clock.count.fill_(group["step"])
            clock.key.copy_(hashed(clock.count ^ word_of(f"seed {group['rounding_seed']}")))
            clock.count.add_(1)

    def load_counts(self, groups: Groups) -> None:
        """Take the groups' counts, after a checkpoint has set them."""
        for (index, _), clock in self._clocks.items():
            clock.count.fill_(groups[index]["step"])

    def counts(self, groups: Groups) -> dict[int, int]:
        """Steps by capturable group, those of replays included; waits for the device."""
        return {index: int(clock.count) for (index, _), clock in self._clocks.items() if groups[index]["capturable"]}

    def _clock(self, index: int, device: torch.device, groups: Groups) -> _Clock:
        if (index, device) not in self._clocks:
            count = torch.full((), groups[index]["step"], dtype=torch.int32, device=device)
            self._clocks[index, device] = _Clock(count, torch.empty_like(count))
        return self._clocks[index, device]


def rounds_stochastically(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a parameter is rounded stochastically in its group."""
    return bool(group["stochastic_rounding"]) and param.dtype == torch.bfloat16


def follows_placements(param: Tensor) -> bool:
    """Whether the local shard has the shape that the global shape and the placements give it."""
    return tuple(map(len, held_positions(param))) == tuple(local_tensor(param).shape)


def _positions(record: ParamRecord) -> list[Tensor]:
    if not follows_placements(record.param):
        held = tuple(local_tensor(record.param).shape)
        raise LayoutError(
            record.name,
            f"the local shard {held} of global shape {tuple(record.param.shape)} does not follow from its placements, "
            "which stochastic rounding takes positions from",
            "Pad the sharded axis to a multiple of the mesh sizes, or set stochastic_rounding=False",
        )
    return held_positions(record.param)
