"""What a step works on, where that is not what is kept: low-bit, offloaded and 16-bit storage, master weights.

A task loads its tensors, works on them, and stores them. Plain state on the compute device is its
own working tensor: nothing is copied. All else gets a copy that `store` writes back:

    low-bit state           decoded to fp32                  encoded
    state or weights on     copied to the compute device     copied back
      the host
    16-bit weights          widened to fp32                  rounded, stochastically where asked
    master weights          the master is worked on          and copied into the parameter

On CUDA both copies run on a stream of their own. Between `WorkingSet.load` and `wait` other tasks
compute; `finish_copies` ends a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dmuown.state.lowbit import dequantize, is_low_bit
from dmuown.state.rounding import Rounding

_streams: dict[torch.device, torch.cuda.Stream] = {}
_copying: set[torch.device] = set()


def compute_device(local: Tensor, options: Mapping[str, Any]) -> torch.device:
    """Where a parameter is updated.

    Parameters that live on the host (FSDP2's `CPUOffloadPolicy`) take a round trip to the accelerator with
    `foreach=True`; all others stay where they are.
    """
    if local.device.type == "cpu" and options.get("foreach") is True and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return local.device


@dataclass
class _Copy:
    """A working tensor that is not the stored one."""

    stored: Tensor
    working: Tensor
    rounding: Rounding | None = None


@dataclass
class WorkingSet:
    """The working tensors of one task.

    Attributes:
        device: Where the task computes.
        copied: Bytes of working tensors that are copies.
    """

    device: torch.device
    copied: int = 0
    _copies: list[_Copy] = field(default_factory=list)
    _event: torch.cuda.Event | None = None

    def load(self, stored: Tensor, *, dtype: torch.dtype | None = None, rounding: Rounding | None = None) -> Tensor:
        """Return what to work on in place of `stored`: itself, or a copy that `store` writes back.

        Args:
            stored: A local tensor: plain, low-bit, or on the host.
            dtype: Working dtype; None keeps the stored one (fp32 for low-bit state).
            rounding: How the fp32 copy of bf16 weights is rounded, where not to the nearest.
        """
        low_bit = is_low_bit(stored)
        wanted = dtype or (torch.float32 if low_bit else stored.dtype)
        if not low_bit and stored.device == self.device and stored.dtype == wanted:
            return stored
        working = self._fetch(stored, wanted)
        self.copied += working.numel() * working.element_size()
        self._copies.append(_Copy(stored, working, rounding))
        return working

    def read(self, source: Tensor) -> Tensor:
        """Return a tensor on the compute device that is only read, such as a gradient."""
        return source if source.device == self.device else self._fetch(source, source.dtype)

    def mirror(self, target: Tensor, working: Tensor) -> None:
        """Have `store` write a working tensor's value into one more place: a parameter, from its master."""
        self._copies.append(_Copy(target, working))

    @property
    def in_flight(self) -> bool:
        """Whether copies to the device may still be running."""
        return self._event is not None

    def wait(self) -> None:
        """Make the compute stream wait for what `load` started."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
            self._event = None

    def store(self) -> None:
        """Write working copies back to where they are kept."""
        # Latest first: a copy may have been made of another one.
        for copy in reversed(self._copies):
            value = copy.working if copy.rounding is None else copy.rounding(copy.working)
            if copy.stored.device == self.device or self.device.type != "cuda":
                copy.stored.copy_(value)
                continue
            stream = copy_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                _copy_to_host(copy.stored, value)
            value.record_stream(stream)
        self._copies = []

    def _fetch(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        if stored.device == self.device or self.device.type != "cuda":
            return _decoded(stored.to(self.device), dtype, stored)
        stream = copy_stream(self.device)
        with torch.cuda.stream(stream):
            working = _decoded(stored.to(self.device, non_blocking=True), dtype, stored)
            self._event = stream.record_event()
        # Allocated on the copy stream and used on the compute stream: it must outlive both uses.
        working.record_stream(torch.cuda.current_stream(self.device))
        return working


def _decoded(moved: Tensor, dtype: torch.dtype, stored: Tensor) -> Tensor:
    if is_low_bit(moved):
        return dequantize(moved, dtype)
    return moved.to(dtype, copy=moved is stored)


def _copy_to_host(stored: Tensor, value: Tensor) -> None:
    if is_low_bit(stored):
        encoded = stored.to(value.device)  # its class and block size; the codes are overwritten
        encoded.copy_(value)
        value = encoded
        for name in ("codes", "scale"):
            getattr(stored, name).copy_(getattr(value, name), non_blocking=True)
        return
    stored.copy_(value.to(stored.dtype), non_blocking=True)


def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that copies between the host and a CUDA device; `finish_copies` waits for what it is given."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    _copying.add(device)
    return _streams[device]


def finish_copies() -> None:
    """Wait on the host until state that lives there is complete; nothing to do where this step made no copy.

    A step that is recorded makes none, and must not wait because another optimizer's step once did.
    """
    while _copying:
        _streams[_copying.pop()].synchronize()
