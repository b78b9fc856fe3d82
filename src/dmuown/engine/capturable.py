"""`capturable=True`: what a step that is captured into a CUDA graph must not freeze lives on the device, as in torch.

The learning rate of such a group is a 0-d fp32 tensor on its parameters' device, and so is every step count. A
captured step reads both there: torch's schedulers fill the tensor, and replays see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuown.engine.layout import local_tensor
from dmuown.engine.records import ParamRecord
from dmuown.errors import OptionError


def check_capturable(group: Mapping[str, Any], where: str) -> None:
    """Refuse what a replay would repeat wrongly.

    Args:
        group: A complete group.
        where: How errors call it.

    Raises:
        OptionError: An option that needs the host in every step.
    """
    if group.get("offload_state"):
        raise OptionError(f"{where}: offload_state", "moves state through the host in every step", "Turn it off")
    if group["algorithm"] == "angular_muown" and group["decay_degree"] != 0:
        raise OptionError(
            f"{where}: decay_degree",
            "makes the angular rate follow the step count on the host",
            "Set decay_degree=0 and use a scheduler",
        )


def hold_lr(group: dict[str, Any], device: torch.device, held: Tensor | None = None) -> None:
    """Make the learning rate of a capturable group a tensor where its parameters are, in place.

    Args:
        group: A complete group. An fp32 tensor that is there already stays the caller's own.
        device: Where its parameters are.
        held: The tensor that the group had, which a captured step reads; a scheduler has put a number in its place.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.dim() == 0 and lr.dtype == torch.float32 and lr.device == device:
        return
    if held is None or held.device != device:
        held = torch.empty((), dtype=torch.float32, device=device)
    group["lr"] = held.copy_(lr.reshape(())) if isinstance(lr, Tensor) else held.fill_(lr)


def hold_lrs(records: Sequence[ParamRecord], groups: Sequence[dict[str, Any]], held: dict[int, Tensor]) -> None:
    """Put numbers that schedulers wrote back into the tensors of capturable groups.

    Args:
        records: Parameters that this rank steps; a group without any has nothing to hold.
        groups: The optimizer's.
        held: Tensors by index of the group; updated in place.
    """
    if not any(group["capturable"] for group in groups):
        return
    devices = {record.group_index: local_tensor(record.param).device for record in records}
    for index, device in devices.items():
        if groups[index]["capturable"]:
            hold_lr(groups[index], device, held.get(index))
            held[index] = groups[index]["lr"]


def is_recording() -> bool:
    """Whether a CUDA graph records what is launched now."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def check_capture(records: Sequence[ParamRecord], groups: Sequence[Mapping[str, Any]], nonfinite: str) -> None:
    """While a CUDA graph records, refuse a step whose replays would go wrong in silence.

    Missing gradients are refused where ranks agree on them: `dmuown.engine.gradients`.

    Args:
        records: Parameters that this rank steps.
        groups: The optimizer's.
        nonfinite: What it does about gradients that are not finite.

    Raises:
        OptionError: A learning rate that the graph would freeze, or a `nonfinite` that waits for the card.
    """
    if not is_recording():
        return
    if nonfinite != "propagate":
        raise OptionError("nonfinite", f"must be 'propagate' in a graph, got {nonfinite!r}: others wait for the card")
    for record in records:
        group = groups[record.group_index]
        if not isinstance(group["lr"], Tensor):
            remedy = "Set capturable=True, or use dmuown.capture(optimizer)"
            if group["capturable"]:
                remedy = "Step once before recording, or write the tensor in place with fill_()"
            raise OptionError(
                f"param group {record.group_index}: lr",
                f"is the number {group['lr']}, which the graph being recorded would keep",
                remedy,
            )
