"""`capturable=True`: what a step that is captured into a CUDA graph must not freeze lives on the device, as in torch.

The learning rate of such a group is a 0-d fp32 tensor on its parameters' device, and so is every step count. A
captured step reads both there: torch's schedulers fill the tensor, and replays see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.engine.layout import local_tensor
from dmuown.errors import LayoutError, OptionError


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


def hold_lr(group: dict[str, Any], held: Tensor | None = None) -> None:
    """Make the learning rate of a capturable group a tensor where its parameters are, in place.

    Args:
        group: A complete group. An fp32 tensor that is there already stays the caller's own.
        held: The tensor that the group had, which a captured step reads; a scheduler has put a number in its place.
    """
    lr = group["lr"]
    device = local_tensor(group["params"][0]).device
    if isinstance(lr, Tensor) and lr.dim() == 0 and lr.dtype == torch.float32 and lr.device == device:
        return
    if held is None or held.device != device:
        held = torch.empty((), dtype=torch.float32, device=device)
    group["lr"] = held.copy_(lr.reshape(())) if isinstance(lr, Tensor) else held.fill_(lr)


def hold_lrs(groups: Sequence[dict[str, Any]], held: dict[int, Tensor]) -> None:
    """Put numbers that schedulers wrote back into the tensors of capturable groups.

    Args:
        groups: The optimizer's.
        held: Tensors by index of the group; updated in place.
    """
    for index, group in enumerate(groups):
        if group["capturable"]:
            hold_lr(group, held.get(index))
            held[index] = group["lr"]


def check_capture(groups: Sequence[Mapping[str, Any]]) -> None:
    """While a CUDA graph records, refuse a step whose replays would go wrong in silence.

    Raises:
        OptionError: A learning rate that the graph would freeze.
        LayoutError: A sharded parameter: ranks agree on their gradients through the host in every step.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    for index, group in enumerate(groups):
        if not isinstance(group["lr"], Tensor):
            raise OptionError(
                f"param group {index}: lr",
                f"is the number {group['lr']}, which the graph being recorded would keep",
                "Set capturable=True, or use dmuown.capture(optimizer)",
            )
        for param in group["params"]:
            if isinstance(param, DTensor) and param.device_mesh.size() > 1:
                raise LayoutError(
                    f"param group {index}",
                    "is sharded: ranks agree on their gradients through the host in every step",
                    "Step the optimizer outside of the graph",
                )
