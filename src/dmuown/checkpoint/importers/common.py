"""What importers share: renaming buffers and options, and refusing what has no counterpart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.checkpoint.importers.targets import Target
from dmuown.engine.options import FOREIGN_KEYS, every_option
from dmuown.errors import CheckpointError

logger = logging.getLogger(__name__)

Options = dict[str, Any]
Buffers = dict[str, Any]


@dataclass(frozen=True)
class Importer:
    """How one library's state is converted.

    Attributes:
        source: Its name.
        convert_group: `(where, their group, targets) -> options`, `algorithm` among them.
        convert_buffers: `(target, their buffers, their group, converted options) -> buffers`.
    """

    source: str
    convert_group: Callable[[str, Mapping[str, Any], Sequence[Target]], Options]
    convert_buffers: Callable[[Target, Buffers, Mapping[str, Any], Options], Buffers]


def rename_buffers(
    target: Target, buffers: Buffers, names: Mapping[str, str], *, unused: Iterable[str] = ()
) -> Buffers:
    """Return buffers under their names here, dequantized.

    Args:
        target: Their parameter.
        buffers: By their names there.
        names: Name there -> name here; all must be present.
        unused: Names there of buffers that have no counterpart and need none.

    Raises:
        CheckpointError: A buffer is missing, or there is one too many.
    """
    for key in names:
        if key not in buffers:
            found = ", ".join(sorted(buffers))
            raise CheckpointError(target.name, f"has no {key!r} in the checkpoint, only {found}", "Check `source`")
    for key in sorted(buffers.keys() - names.keys() - set(unused)):
        raise CheckpointError(target.name, f"has {key!r} in the checkpoint, which has no counterpart here")
    return {here: dequantized(target.name, buffers[there]) for there, here in names.items()}


def dequantized(name: str, value: Any) -> Any:
    """Return a plain tensor of a quantized one; other values as they are.

    Raises:
        CheckpointError: A tensor subclass that cannot be dequantized.
    """
    if type(value) in (Tensor, torch.nn.Parameter, DTensor) or not isinstance(value, Tensor):
        return value
    try:
        return value.dequantize()
    except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
        raise CheckpointError(
            name, f"its state is a {type(value).__name__}, which cannot be dequantized: {error}"
        ) from None


def counter(name: str, buffers: Buffers, key: str, group: Mapping[str, Any]) -> float:
    """A step counter: the parameter's own, or its group's where there is none or a cast has rounded it.

    Loaders of torch cast state to the parameter's dtype unless its key is `step`; in 16 bits a counter
    above 256 (bf16) or 2048 (fp16) is not exact any more.

    Raises:
        CheckpointError: Neither exists.
    """
    own = buffers.pop(key, None)
    shared = group.get("step")
    if isinstance(own, Tensor) and own.dtype in (torch.bfloat16, torch.float16) and shared is not None:
        own = None
    if own is None:
        own = shared
    if own is None:
        raise CheckpointError(name, f"has no {key!r} in the checkpoint, and its group has no 'step'", "Check `source`")
    if isinstance(own, DTensor):
        own = own.full_tensor()
    return float(own)


def rename_options(
    where: str,
    group: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    unused: Iterable[str] = (),
) -> Options:
    """Return options under their names here; unknown ones are left out, and logged.

    Args:
        where: How messages call the group.
        group: Their group.
        names: Name there -> name here, where they differ.
        unused: Names there without meaning here.
    """
    known = every_option() | FOREIGN_KEYS
    options: Options = {}
    for key, value in group.items():
        here = names.get(key, key)
        if key in ("params", "param_names", *unused):
            continue
        if here not in known:
            logger.warning("%s: option %r of the checkpoint has no counterpart and is left out", where, key)
            continue
        options[here] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return options


def split_betas(options: Options, betas: Any) -> None:
    """Set `beta1` and `beta2` from a pair."""
    options["beta1"], options["beta2"] = (float(beta) for beta in betas)


def refuse(where: str, group: Mapping[str, Any], *keys: str) -> None:
    """Refuse options that are switched on and have no counterpart.

    Raises:
        CheckpointError: One is.
    """
    for key in keys:
        if group.get(key):
            raise CheckpointError(
                f"{where}: {key}", f"is {group[key]!r} in the checkpoint, which has no counterpart here"
            )


def refuse_other_direction(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> None:
    """Refuse `maximize` where the optimizer is configured otherwise: it stays as configured.

    Raises:
        CheckpointError: It differs.
    """
    theirs = bool(group.get("maximize", False))
    for target in targets:
        if target.options and bool(target.options["maximize"]) != theirs:
            raise CheckpointError(f"{where}: maximize", f"is {theirs} in the checkpoint", f"Pass maximize={theirs}")


def unknown_algorithm(where: str, name: Any, known: Sequence[str]) -> CheckpointError:
    """The error for a group of an algorithm without counterpart."""
    return CheckpointError(
        f"{where}: algorithm", f"{name!r} has no counterpart here; known are {', '.join(known)}", "Check `source`"
    )
