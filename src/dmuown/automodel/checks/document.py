"""A recipe's YAML: loaded safely, with the line of every key, values as the host would read them."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dmuown.errors import OptionError
from dmuown.policy.names import nearest

#: Sizes of a layout, by the names of their options, and their keys in the section `distributed`.
SIZES: Mapping[str, str] = {
    "tp": "tp_size",
    "ep": "ep_size",
    "pp": "pp_size",
    "cp": "cp_size",
    "replicas": "dp_replicate_size",
}

_WORDS: dict[str, Any] = {"none": None, "None": None, "true": True, "True": True, "false": False, "False": False}
_VARIABLE = re.compile(r"\$\{(?:oc\.env:)?(\w+)(?:[:,-][^}]*)?\}|\$(\w+)")
# Literals longer than this stay strings, as in the host.
_LONGEST_LITERAL = 1000


@dataclass
class Document:
    """A configuration file.

    Attributes:
        path: The file.
        config: Its content, overrides applied, strings that spell numbers, booleans or none translated.
        lines: Line of every dotted key, from 1; elements of lists are `key[0]`.
        overridden: Dotted keys that the command line set.
    """

    path: Path
    config: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    overridden: tuple[str, ...] = ()

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value at a dotted key, or `default`."""
        node: Any = self.config
        for part in dotted.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def has(self, dotted: str) -> bool:
        """Whether the key is there, whatever its value."""
        marker = object()
        return self.get(dotted, marker) is not marker


class FileError(OptionError):
    """A file that cannot be read as YAML.

    Attributes:
        line: Where, from 1; None where no line is at fault.
    """

    line: int | None = None

    @classmethod
    def at(cls, path: object, line: int, column: int, what: str) -> FileError:
        """The error for a place in the file, both counted from 1."""
        error = cls(str(path), f"is no valid YAML at line {line}, column {column}: {what}", "Correct it there")
        error.line = line
        return error


class _Loader(yaml.SafeLoader):
    """The safe loader; a key that appears twice in one mapping is an error, where YAML takes the last."""


def read_document(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), sizes: Mapping[str, int | None] | None = None
) -> Document:
    """Read a file and apply `--dotted.key value` overrides.

    Args:
        path: The file.
        overrides: The arguments.
        sizes: Sizes of the layout, by the names of `SIZES`, instead of those in the YAML and the overrides; None leaves
            those.

    Raises:
        FileError: No such file, no YAML, or no mapping at the top.
        OptionError: A key twice, an argument that is no override or sets a key within a value, a name that is no size.
    """
    file = Path(path)
    if not file.is_file():
        raise FileError(str(path), "is no file", "Give the path of a YAML configuration")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(str(path), f"is no text in UTF-8: {error}", "Give the path of a YAML configuration") from None
    try:
        root, content = _load(text)
        lines: dict[str, int] = {}
        if root is not None:
            _note_lines(root, "", lines)
    except yaml.YAMLError as error:
        raise FileError.at(path, *_place(error, text)) from None
    except RecursionError:
        raise FileError(str(path), "refers to itself", "Remove the anchor that contains its own alias") from None
    if not isinstance(content, dict):
        raise FileError(
            str(path), f"must be a mapping of sections, got {type(content).__name__}", "See configs/automodel"
        )
    config = _translated(content)
    given = parse_overrides(overrides) | _layout(sizes or {})
    for dotted, value in given.items():
        _set(config, dotted, value)
    return Document(file, config, lines, tuple(given))


def _layout(sizes: Mapping[str, int | None]) -> dict[str, Any]:
    """{dotted key: value} of the sizes that are given."""
    for name in sizes:
        if name not in SIZES:
            raise OptionError(name, "is no size of a layout", nearest(name, SIZES))
    return {f"distributed.{SIZES[name]}": value for name, value in sizes.items() if value is not None}


def _load(text: str) -> tuple[yaml.Node | None, Any]:
    """The nodes of a text and its content."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def parallel_size(document: Document, key: str) -> int:
    """A size of the section `distributed`; 1 where it is not given or not a number."""
    value = document.get(f"distributed.{key}")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Return {dotted key: value} of `--dotted.key value` and `--dotted.key=value`; a key alone means true.

    Raises:
        OptionError: An argument belongs to no key.
    """
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        key = rest.pop(0)
        if not key.startswith("--") or key in ("--", "--="):
            raise OptionError(key, "belongs to no --dotted.key", "Write overrides as --section.key value")
        name, equals, value = key[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "True"
        found[name] = translate(value)
    return found


def translate(value: Any) -> Any:
    """Return what the host makes of a string: a word such as `none`, a Python literal, or itself."""
    if not isinstance(value, str):
        return value
    if value in _WORDS:
        return _WORDS[value]
    if len(value) > _LONGEST_LITERAL or not re.match(r"[\s\d+\-.({\['\"]", value):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def with_variables(value: str) -> str:
    """Return a string with the environment variables in it (`$NAME`, `${NAME,default}`), as the host reads it.

    One that is not set stays as it is written.
    """

    def found(match: re.Match[str]) -> str:
        default = re.search(r",([^}]*)\}$", match.group())
        return os.environ.get(match.group(1) or match.group(2), default.group(1).strip() if default else match.group())

    return _VARIABLE.sub(found, value)


def unset_variables(value: str) -> list[str]:
    """Names of the environment variables in `value` (`$NAME`, `${NAME}`) that are not set and have no default."""
    found = []
    for match in _VARIABLE.finditer(value):
        name = match.group(1) or match.group(2)
        has_default = bool(match.group(1)) and re.search(r"\{(?:oc\.env:)?\w+[:,-]", match.group()) is not None
        if name not in os.environ and not has_default:
            found.append(name)
    return found


def _translated(node: Any) -> Any:
    if isinstance(node, dict):
        return {str(key): _translated(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_translated(value) for value in node]
    return translate(node)


def _note_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(getattr(key_node, "value", ""))
            line = key_node.start_mark.line + 1
            dotted = f"{prefix}.{key}" if prefix else key
            if key in seen and key != "<<":
                raise OptionError(dotted, f"appears twice in one mapping, again on line {line}", "Keep one of them")
            seen.add(key)
            lines[dotted] = line
            _note_lines(value_node, dotted, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, value_node in enumerate(node.value):
            lines[f"{prefix}[{index}]"] = value_node.start_mark.line + 1
            _note_lines(value_node, f"{prefix}[{index}]", lines)


def _place(error: yaml.YAMLError, text: str) -> tuple[int, int, str]:
    """Line and column of an error, from 1, and what is wrong there, without the excerpt and the file's name.

    The parser's own text shows both once for each of its two places.
    """
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        what = f"the character U+{ord(text[error.position]):04X} is not allowed"
        return before.count("\n") + 1, error.position - before.rfind("\n"), what
    mark, context = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    what = str(getattr(error, "problem", None) or error)
    if getattr(error, "context", None):
        start = f" from line {context.line + 1}, column {context.column + 1}" if mark and context else ""
        what = f"{error.context}{start}, {what}"  # type: ignore[attr-defined]
    found = mark or context
    return (found.line + 1, found.column + 1, what) if found else (1, 1, what)


def _set(config: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node = config
    for depth, parent in enumerate(parents, start=1):
        if node.get(parent) is None:
            node[parent] = {}
        if not isinstance(node[parent], dict):
            section = ".".join(parents[:depth])
            rule = f"must be a section of keys for {dotted} to be set in it, got {node[parent]!r}"
            raise OptionError(section, rule, "Indent its keys below it")
        node = node[parent]
    node[last] = value
