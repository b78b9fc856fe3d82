"""Tensors inside whatever a module takes and returns.

Outputs stay the objects they are: hooks go on the tensors inside. Only a cast makes new ones, of the
same class.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings (Hugging Face's `ModelOutput` is one) and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None))


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to the tensors in it; what holds none of them is returned as it is."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return items
        result: Any = copy.copy(value)
        for key, item in items.items():
            result[key] = item
        return result
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(function, item) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*parts)
        return type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = value
        for field in dataclasses.fields(value):
            old = getattr(value, field.name, None)
            new = map_tensors(function, old)
            if new is not old:
                changed = copy.copy(value) if changed is value else changed
                object.__setattr__(changed, field.name, new)
        return changed
    return value
