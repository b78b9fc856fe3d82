"""Checks of values that arrive from YAML, where a number may be a string and a list stand for a tuple."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dmuown.errors import OptionError


def reject_unknown(given: Iterable[str], known: Sequence[str], owner: str) -> None:
    """Raise an OptionError for the first name in `given` that is not in `known`, with the nearest name."""
    for key in given:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {nearest[0]!r}? " if nearest else ""
            raise OptionError(key, f"is no option of {owner}", f"{hint}Its options are {', '.join(sorted(known))}")


def number(key: str, value: Any, rule: str, holds: Callable[[float], bool]) -> float:
    """Return `value` as a finite float for which `holds` is true.

    A string that spells a number is accepted: YAML reads `1e-4` without a dot as a string.

    Raises:
        OptionError: Not a number, not finite, or `holds` is false; the message says `rule`.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise OptionError(key, f"must be {rule}, got the string {value!r}", f"Write {key} as a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise OptionError(key, f"must be {rule}, got {value!r}", f"Write {key} as a number")
    if not math.isfinite(value) or not holds(value):
        raise OptionError(key, f"must be {rule}, got {value}", f"Give {key} such a value")
    return float(value)


def not_negative(key: str, value: Any) -> float:
    """Return `value` as a finite number >= 0."""
    return number(key, value, "a finite number >= 0", lambda x: x >= 0)


def positive(key: str, value: Any) -> float:
    """Return `value` as a finite number > 0."""
    return number(key, value, "a finite number > 0", lambda x: x > 0)


def coefficient(key: str, value: Any) -> float:
    """Return `value` as a number in [0, 1), the range of an averaging coefficient."""
    return number(key, value, "a number in [0, 1)", lambda x: 0 <= x < 1)


def coefficients(key: str, value: Any) -> tuple[float, float]:
    """Return a pair of averaging coefficients, each in [0, 1)."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise OptionError(key, f"must be two numbers in [0, 1), got {value!r}", f"Write {key}: [0.9, 0.95]")
    first, second = (coefficient(f"{key}[{index}]", entry) for index, entry in enumerate(value))
    return first, second


def _whole(value: Any) -> Any:
    """A string that spells a whole number as that number; anything else as it is."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    return value


def count(key: str, value: Any) -> int:
    """Return a whole number >= 1. Fractions and booleans are refused."""
    value = _whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(key, f"must be a whole number >= 1, got {value!r}", f"Give {key} such a value")
    return value


def count_or_zero(key: str, value: Any) -> int:
    """Return a whole number >= 0. Fractions and booleans are refused."""
    value = _whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(key, f"must be a whole number >= 0, got {value!r}", f"Give {key} such a value")
    return value


def switch(key: str, value: Any) -> bool:
    """Return a boolean; numbers and words are refused."""
    if not isinstance(value, bool):
        raise OptionError(key, f"must be true or false, got {value!r}", f"Write {key}: true or {key}: false")
    return value


def choice(key: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return `value`, one of `choices`."""
    if value not in choices:
        listed = ", ".join(repr(entry) for entry in choices)
        raise OptionError(key, f"must be one of {listed}, got {value!r}", f"Give {key} one of them")
    return value


def patterns(key: str, value: Any) -> list[str]:
    """Return a list of regular expressions, each of which compiles."""
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(key, f"must be a list of regular expressions, got {value!r}", f"Write {key}: ['...']")
    for index, entry in enumerate(value):
        pattern(f"{key}[{index}]", entry)
    return list(value)


def pattern(key: str, value: Any) -> str:
    """Return a regular expression that compiles."""
    if not isinstance(value, str) or not value:
        raise OptionError(key, f"must be a regular expression, got {value!r}", "Write it as a non-empty string")
    try:
        re.compile(value)
    except re.error as error:
        raise OptionError(
            key, f"must be a regular expression, and {value!r} is none: {error}", "Escape it or correct it"
        ) from None
    return value


def override(key: str, value: Any) -> dict[str, Any]:
    """Return one entry of `param_group_overrides` as {pattern, lr_mult, wd_mult}, checked."""
    if not isinstance(value, Mapping):
        raise OptionError(key, f"must be a mapping with a pattern, got {value!r}", "Write {pattern: ..., lr_mult: ...}")
    reject_unknown(value, ("pattern", "lr_mult", "wd_mult"), key)
    if "pattern" not in value:
        raise OptionError(f"{key}.pattern", "is missing", "Say which parameter names the override is for")
    return {
        "pattern": pattern(f"{key}.pattern", value["pattern"]),
        "lr_mult": not_negative(f"{key}.lr_mult", value.get("lr_mult", 1.0)),
        "wd_mult": not_negative(f"{key}.wd_mult", value.get("wd_mult", 1.0)),
    }
