"""Launching a Triton kernel with little host time.

Triton binds, classifies and hashes every argument on every launch (80 microseconds with five tensor
descriptors). Where the caller can name everything that decides the compilation, that happens once: later launches
hand the compiled kernel its arguments directly.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any, key: Hashable, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device, **options: int
) -> None:
    """Run `kernel` on the current stream of `device`.

    Args:
        kernel: A `triton.jit` or `gluon.jit` function.
        key: Equal only for launches that Triton would compile alike: argument dtypes, constexpr values, options,
            and for arguments it specialises on, pointer alignment, divisibility by 16 and being 1.
        grid: Programs per axis.
        arguments: All parameters in order, constexpr ones included.
        device: Where every tensor among them is.
        options: `num_warps`, `num_stages`, `maxnreg`.
    """
    if INTERPRETED:
        kernel[grid](*arguments, **options)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, key, grid, arguments, device, **options)
        return
    entry = (kernel, key, device.index)
    compiled = _compiled.get(entry)
    if compiled is None or _hooked():
        _compiled[entry] = kernel[grid](*arguments, **options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def _hooked() -> bool:
    """Whether somebody (a profiler) listens to launches, and wants the metadata that only the ordinary way provides."""
    hooks = triton.knobs.runtime.launch_enter_hook
    return hooks is not None and bool(getattr(hooks, "calls", True))


def specialization(arguments: Sequence[Any]) -> Hashable:
    """A key for `launch` from the arguments themselves, by the rules of Triton's own specialisation."""
    return tuple([_class_of(argument) for argument in arguments])


def _class_of(argument: Any) -> Hashable:
    kind = type(argument)
    if kind is int:
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if kind is float:
        return float
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return kind, argument
