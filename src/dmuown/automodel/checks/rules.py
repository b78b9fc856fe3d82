"""Checks of single values: each takes a key and a value, and returns the value or raises an OptionError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dmuown.automodel import options
from dmuown.automodel.options import coefficient, count, count_or_zero, not_negative, positive, switch
from dmuown.errors import OptionError
from dmuown.policy.names import nearest

Rule = Callable[[str, Any], Any]

__all__ = [
    "Rule",
    "any_value",
    "between",
    "coefficient",
    "count",
    "count_or_zero",
    "dtype",
    "either",
    "items",
    "mapping",
    "not_negative",
    "one_of",
    "optional",
    "positive",
    "switch",
    "text",
]


def any_value(key: str, value: Any) -> Any:
    """Take anything."""
    return value


def optional(rule: Rule) -> Rule:
    """Also take none."""
    return lambda key, value: None if value is None else rule(key, value)


def one_of(*choices: Any) -> Rule:
    """Take one of these; the remedy names the nearest."""

    def check(key: str, value: Any) -> Any:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        listed = ", ".join(str(choice) for choice in choices)
        words = [choice for choice in choices if isinstance(choice, str)]
        remedy = nearest(value, words) if isinstance(value, str) and words else f"Give {key} one of them"
        raise OptionError(key, f"must be one of {listed}, got {value!r}", remedy)

    return check


def between(low: float, high: float) -> Rule:
    """Take a number in [low, high]."""
    return lambda key, value: options.number(key, value, f"a number in [{low}, {high}]", lambda x: low <= x <= high)


def text(key: str, value: Any) -> str:
    """Take a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise OptionError(key, f"must be text, got {value!r}", f"Write {key}: ...")
    return value


def mapping(key: str, value: Any) -> Mapping[str, Any]:
    """Take a mapping."""
    if not isinstance(value, Mapping):
        raise OptionError(key, f"must be a section of keys, got {value!r}", "Indent its keys below it")
    return value


def items(rule: Rule) -> Rule:
    """Take a list whose elements obey a rule."""

    def check(key: str, value: Any) -> Any:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise OptionError(key, f"must be a list, got {value!r}", f"Write {key}: [...]")
        for index, entry in enumerate(value):
            rule(f"{key}[{index}]", entry)
        return value

    return check


def either(what: str, *rules: Rule) -> Rule:
    """Take what any of the rules takes."""

    def check(key: str, value: Any) -> Any:
        for rule in rules:
            try:
                return rule(key, value)
            except OptionError:
                continue
        raise OptionError(key, f"must be {what}, got {value!r}", f"Give {key} such a value")

    return check


def dtype(key: str, value: Any) -> Any:
    """Take the name of a floating-point dtype, or none."""
    from dmuown.policy.schema import parse_dtype

    return parse_dtype(value, key)
