"""What a dotted `_target_` takes, read from the source text of its package: nothing is imported or run."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Names pass through re-exports and base classes; longer chains than this are given up.
_MAX_HOPS = 12
_SIMPLE: Mapping[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "bool": bool,
    "list": (list, tuple),
    "List": (list, tuple),
    "tuple": (list, tuple),
    "Tuple": (list, tuple),
    "Sequence": (list, tuple),
    "dict": dict,
    "Dict": dict,
    "Mapping": dict,
}


@dataclass(frozen=True)
class Argument:
    """One argument of a target.

    Attributes:
        required: Whether it has no default.
        annotation: Its annotation, None without one.
    """

    required: bool
    annotation: ast.expr | None = None


@dataclass(frozen=True)
class Target:
    """What a dotted name is.

    Attributes:
        status: `found`; `missing`: the package is there and the name is not; `unknown`: the package is not
            installed, or its source does not tell.
        arguments: By name; empty for what is no class or function.
        takes_any: Whether further keywords are taken.
        candidates: Names beside a missing one.
    """

    status: str
    arguments: Mapping[str, Argument]
    takes_any: bool = True
    candidates: tuple[str, ...] = ()


_UNKNOWN = Target("unknown", {})


@functools.lru_cache(maxsize=256)
def find_target(dotted: str) -> Target:
    """Find what a dotted name stands for."""
    try:
        return _find(dotted, _MAX_HOPS)
    except (OSError, SyntaxError, RecursionError, ValueError):
        return _UNKNOWN


def fits(value: Any, annotation: ast.expr | None) -> bool:
    """Whether a value from YAML can be what an annotation says; True where the annotation does not tell."""
    if annotation is None:
        return True
    if isinstance(annotation, ast.Constant):
        if annotation.value is None:
            return value is None
        if isinstance(annotation.value, str):
            try:
                return fits(value, ast.parse(annotation.value, mode="eval").body)
            except SyntaxError:
                return True
        return True
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return fits(value, annotation.left) or fits(value, annotation.right)
    if isinstance(annotation, ast.Subscript):
        name = _last(annotation.value)
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if name == "Optional":
            return value is None or fits(value, inner[0])
        if name == "Union":
            return any(fits(value, entry) for entry in inner)
        if name == "Literal":
            return any(isinstance(entry, ast.Constant) and entry.value == value for entry in inner)
        if name.lower() in ("list", "sequence") and isinstance(value, (list, tuple)):
            return all(fits(entry, inner[0]) for entry in value)
        return fits(value, annotation.value)
    expected = _SIMPLE.get(_last(annotation))
    if expected is None:
        return True
    if isinstance(value, bool) and expected is not bool:
        return False
    return isinstance(value, expected)


def describe(annotation: ast.expr | None) -> str:
    """The annotation as text."""
    return "" if annotation is None else ast.unparse(annotation).strip("'\"")


def _find(dotted: str, hops: int) -> Target:
    if hops == 0:
        return _UNKNOWN
    located = _locate(dotted)
    if located is None:
        return _UNKNOWN
    file, rest = located
    if not rest:
        return Target("found", {})
    return _in_module(file, rest, hops)


def _in_module(file: Path, rest: list[str], hops: int) -> Target:
    tree = _parse(file)
    name, *attributes = rest
    node = _definition(tree, name)
    if isinstance(node, str):
        return _find(".".join([_absolute(node, file), *attributes]), hops - 1)
    if isinstance(node, ast.ClassDef):
        return _in_class(node, file, attributes, hops)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _function(node, skip_first=False) if not attributes else Target("found", {})
    if node is not None:
        return Target("found", {})
    if any(isinstance(entry, ast.ImportFrom) and entry.names[0].name == "*" for entry in ast.walk(tree)):
        return _UNKNOWN
    if _definition(tree, "__getattr__") is not None:
        lazy = _lazy_home(tree, name)
        if lazy is not None:
            return _find(".".join([lazy, *attributes]), hops - 1)
    return Target("missing", {}, candidates=tuple(_names(tree)))


def _in_class(node: ast.ClassDef, file: Path, attributes: list[str], hops: int) -> Target:
    classes = list(_with_bases(node, file, hops))
    complete = all(found is not None for found in classes)
    known = [found for found in classes if found is not None]
    wanted = attributes[0] if attributes else "__init__"
    for owner in known:
        for entry in owner.body:
            if isinstance(entry, (ast.FunctionDef, ast.AsyncFunctionDef)) and entry.name == wanted:
                static = any(_last(decorator) == "staticmethod" for decorator in entry.decorator_list)
                return _function(entry, skip_first=not static)
    if attributes:
        methods = [entry.name for owner in known for entry in owner.body if isinstance(entry, ast.FunctionDef)]
        # A base whose source is out of reach may define it; a misspelled name of a method in reach it does not.
        if not complete and not difflib.get_close_matches(wanted, methods, n=1, cutoff=0.8):
            return _UNKNOWN
        return Target("missing", {}, candidates=tuple(methods))
    if any(_is_dataclass(owner) for owner in known):
        return Target("found", _fields(known), takes_any=not complete)
    return Target("found", {}, takes_any=True)


def _with_bases(node: ast.ClassDef, file: Path, hops: int) -> list[ast.ClassDef | None]:
    """The class and its bases, nearest first; None for a base whose source is not found."""
    found: list[ast.ClassDef | None] = [node]
    for base in node.bases:
        name = _dotted(base)
        if name in ("object", "Protocol", "Generic", "ABC", "typing.Protocol"):
            continue
        home = _class_of(name, file, hops - 1) if name else None
        if home is None:
            found.append(None)
        else:
            found += _with_bases(home[0], home[1], hops - 1)
    return found


def _class_of(name: str, file: Path, hops: int) -> tuple[ast.ClassDef, Path] | None:
    if hops <= 0:
        return None
    node = _definition(_parse(file), name.partition(".")[0])
    if isinstance(node, ast.ClassDef):
        return node, file
    if not isinstance(node, str):
        return None
    located = _locate(_absolute(node, file))
    if located is None or len(located[1]) != 1:
        return None
    return _class_of(located[1][0], located[0], hops - 1)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, skip_first: bool) -> Target:
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    without_default = len(positional) - len(spec.defaults)
    arguments = {
        entry.arg: Argument(index < without_default, entry.annotation) for index, entry in enumerate(positional)
    }
    if skip_first and positional:
        del arguments[positional[0].arg]
    for entry, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        arguments[entry.arg] = Argument(default is None, entry.annotation)
    return Target("found", arguments, takes_any=spec.kwarg is not None)


def _fields(classes: list[ast.ClassDef]) -> dict[str, Argument]:
    found: dict[str, Argument] = {}
    for owner in reversed(classes):
        for entry in owner.body:
            if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
                continue
            if _last(entry.annotation) == "ClassVar" or (
                isinstance(entry.annotation, ast.Subscript) and _last(entry.annotation.value) == "ClassVar"
            ):
                continue
            found[entry.target.id] = Argument(entry.value is None, entry.annotation)
    return found


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(
        _last(entry.func if isinstance(entry, ast.Call) else entry) == "dataclass" for entry in node.decorator_list
    )


def _definition(tree: ast.Module, name: str) -> ast.AST | str | None:
    """The node that binds a name at the top of a module, or the dotted name that an import binds to it."""
    for entry in _statements(tree.body):
        if isinstance(entry, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and entry.name == name:
            return entry
        if isinstance(entry, ast.ImportFrom):
            for alias in entry.names:
                if (alias.asname or alias.name) == name:
                    return f"{'.' * entry.level}{entry.module or ''}|{alias.name}"
        if isinstance(entry, ast.Assign) and any(_last(target) == name for target in entry.targets):
            return entry
        if isinstance(entry, ast.AnnAssign) and _last(entry.target) == name:
            return entry
    return None


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements at module level, those inside `if` and `try` too."""
    found: list[ast.stmt] = []
    for entry in body:
        found.append(entry)
        if isinstance(entry, ast.If):
            found += _statements(entry.body) + _statements(entry.orelse)
        elif isinstance(entry, ast.Try):
            found += _statements(entry.body) + [
                inner for handler in entry.handlers for inner in _statements(handler.body)
            ]
    return found


def _names(tree: ast.Module) -> list[str]:
    found = [entry.name for entry in tree.body if isinstance(entry, (ast.ClassDef, ast.FunctionDef))]
    for entry in ast.walk(tree):
        if isinstance(entry, ast.Dict):
            found += [key.value for key in entry.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return found


def _lazy_home(tree: ast.Module, name: str) -> str | None:
    """Where a table such as `{"Name": ("package.module", "Name")}` says that a lazy name lives."""
    for entry in ast.walk(tree):
        if not isinstance(entry, ast.Dict):
            continue
        for key, value in zip(entry.keys, entry.values, strict=True):
            if not (isinstance(key, ast.Constant) and key.value == name):
                continue
            if isinstance(value, ast.Tuple) and all(isinstance(part, ast.Constant) for part in value.elts):
                return ".".join(str(part.value) for part in value.elts if isinstance(part, ast.Constant))
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return f"{value.value}.{name}"
    return None


def _absolute(reference: str, file: Path) -> str:
    """Dotted name of an import as `_definition` writes it, relative ones resolved against the file."""
    module, _, name = reference.partition("|")
    level = len(module) - len(module.lstrip("."))
    if level:
        package = _package_of(file)
        base = package[: len(package) - (level - 1)] if level > 1 else package
        module = ".".join([*base, *([module.lstrip(".")] if module.lstrip(".") else [])])
    return f"{module}.{name}"


def _package_of(file: Path) -> list[str]:
    parts: list[str] = []
    folder = file.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return parts


def _locate(dotted: str) -> tuple[Path, list[str]] | None:
    """Source file of the longest prefix of a dotted name that is a module, and what remains of the name."""
    first, *rest = dotted.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    file = Path(spec.origin)
    while rest and file.name == "__init__.py":
        folder = file.parent
        if (folder / rest[0] / "__init__.py").is_file():
            file = folder / rest.pop(0) / "__init__.py"
        elif (folder / f"{rest[0]}.py").is_file():
            file = folder / f"{rest.pop(0)}.py"
        else:
            break
    return file, rest


@functools.lru_cache(maxsize=128)
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return _dotted(node.value) if isinstance(node, ast.Subscript) else ""
