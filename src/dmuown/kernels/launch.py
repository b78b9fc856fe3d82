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

#: The largest number of a kernel's 32-bit counters and offsets.
INT32_LIMIT = 2**31 - 1

INTERPRETED = bool(triton.knobs.runtime.interpret)

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    constants: tuple[Any, ...],
    device: torch.device,
    *,
    key: Hashable = None,
    **options: int,
) -> None:
    """Run `kernel` on the current stream of `device`.

    Args:
        kernel: A `triton.jit` or `gluon.jit` function whose constexpr parameters come last.
        grid: Programs per axis.
        arguments: The parameters but the constexpr ones, in order.
        constants: The constexpr parameters, in order.
        device: Where every tensor among the arguments is.
        key: What else decides the compilation, where the arguments say it less quickly than the caller; the
            arguments' own classes by default.
        options: `num_warps`, `num_stages`, `launch_pdl`.
    """
    if INTERPRETED:
        kernel[grid](*arguments, *constants, **options)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, arguments, constants, device, key=key, **options)
        return
    entry = (kernel, _classes(arguments) if key is None else key, constants, tuple(options.values()), device.index)
    compiled = _compiled.get(entry)
    if compiled is None or _hooked():
        _compiled[entry] = kernel[grid](*arguments, *constants, **options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constants)


def _hooked() -> bool:
    """Whether somebody (a profiler) listens to launches, and wants the metadata that only the ordinary way provides."""
    hooks = triton.knobs.runtime.launch_enter_hook
    return hooks is not None and bool(getattr(hooks, "calls", True))


def _classes(arguments: Sequence[Any]) -> Hashable:
    """What Triton specialises on: dtypes, aligned addresses, and integers that are 1, divisible by 16, or wide."""
    return tuple([_class_of(argument) for argument in arguments])


def _class_of(argument: Any) -> Hashable:
    kind = type(argument)
    if kind is int:
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    if kind is float:
        return float
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    raise TypeError(f"an argument of a kernel must be an int, a float or a tensor, got {kind.__name__}")
