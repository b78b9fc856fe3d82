"""Checks of option values: each error names the option, the rule and the nearest valid name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from dmuown.errors import OptionError

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def choice_error(option: str, value: object, choices: Sequence[str]) -> OptionError:
    """The error for a value that is none of `choices`, suggesting the nearest one."""
    nearest = difflib.get_close_matches(str(value), choices, n=1)
    remedy = f"Did you mean {nearest[0]!r}" if nearest else ""
    return OptionError(option, f"must be one of {', '.join(map(repr, choices))}, got {value!r}", remedy)


def check_choice(option: str, value: object, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`.

    Raises:
        OptionError: Otherwise.
    """
    if not isinstance(value, str) or value not in choices:
        raise choice_error(option, value, choices)
    return value


def check_steps(option: str, value: object) -> int:
    """`value` if it is an int of at least 1 (a bool or float is not).

    Raises:
        OptionError: Otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(option, f"must be an int of at least 1, got {value!r}")
    return value


def check_positive(option: str, value: object) -> float:
    """`value` as a float if it is a finite positive number (or a one-element CPU tensor holding one).

    Raises:
        OptionError: Otherwise.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()  # Dion hands scalars over as 0-d CPU tensors.
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise OptionError(option, f"must be a finite number above 0, got {value!r}")
    return float(value)


def check_dtype(option: str, value: object) -> torch.dtype:
    """`value` as a floating torch dtype: a torch.dtype or its name.

    Raises:
        OptionError: Otherwise.
    """
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return value
    if isinstance(value, str):
        name = _DTYPE_ALIASES.get(value, value.removeprefix("torch."))
        if name in DTYPES:
            return DTYPES[name]
    raise choice_error(option, value, ("auto", *DTYPES))
