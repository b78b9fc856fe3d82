"""The demo's questions and answers: the documentation of Python's standard library.

Source: docstrings in the source files of the running interpreter's standard library, under the
Python Software Foundation License 2.0 (docs.python.org/3/license.html). They are parsed, not
imported. A question asks what one public function, class or method does; the answer is the first
paragraph of its docstring. Validation takes whole modules, so that no question about them is seen
in training; answers that training has as well are left out of it.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = "docstrings of Python's standard library"
LICENSE = "Python Software Foundation License 2.0"

VALIDATION_MODULES = frozenset({"bisect", "calendar", "fractions", "heapq", "shutil", "statistics", "textwrap"})
VALIDATION_PAIRS = 24
PROMPT = "`calendar.HTMLCalendar.formatyearpage`"
"""The object that the demo asks about before and after training; its pair comes first in validation."""

_LENGTH = range(20, 200)
"""Answers of so many characters: one or two sentences."""

_SKIPPED_PACKAGES = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "ensurepip", "pydoc_data"}
)


class Pair(NamedTuple):
    """A question about one object of a module, and its answer."""

    module: str
    question: str
    answer: str


class DataFiles(NamedTuple):
    """The two JSONL files, with columns `question` and `answer`, and how many pairs they hold."""

    train: Path
    validation: Path
    train_pairs: int
    validation_pairs: int


def write_data(folder: Path) -> DataFiles:
    """Write the training and the validation pairs into `folder`, or count those that are there.

    The order of the pairs is that of their questions, so every run sees the same data.
    """
    train, validation = folder / "train.jsonl", folder / "validation.jsonl"
    if not (train.is_file() and validation.is_file()):
        pairs = list(standard_library_pairs(Path(sysconfig.get_paths()["stdlib"])))
        seen = [pair for pair in pairs if pair.module not in VALIDATION_MODULES]
        answers = {pair.answer for pair in seen}
        held_out = [pair for pair in pairs if pair.module in VALIDATION_MODULES and pair.answer not in answers]
        folder.mkdir(parents=True, exist_ok=True)
        _write(validation, _evenly(held_out, VALIDATION_PAIRS))
        _write(train, seen)
    return DataFiles(train, validation, _count(train), _count(validation))


def standard_library_pairs(library: Path) -> Iterator[Pair]:
    """Yield a pair for every documented public object below `library`, each question and answer once."""
    questions: set[str] = set()
    answers: set[str] = set()
    for file in sorted(_public_files(library)):
        parts = file.relative_to(library).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for pair in _pairs_of(module, file):
            if pair.question not in questions and pair.answer not in answers:
                questions.add(pair.question)
                answers.add(pair.answer)
                yield pair


def _public_files(library: Path) -> Iterator[Path]:
    for folder, packages, files in os.walk(library):
        # In place, so that the walk never enters what is skipped: site-packages may hold any number of files.
        packages[:] = [name for name in packages if not name.startswith("_") and name not in _SKIPPED_PACKAGES]
        for name in files:
            if name.endswith(".py") and (name == "__init__.py" or not name.startswith("_")):
                yield Path(folder) / name


def _pairs_of(module: str, file: Path) -> Iterator[Pair]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a file kept broken on purpose
        return
    for name, node in _public_objects(module, tree.body):
        answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if len(answer) in _LENGTH and answer[0].isalpha():
            verb = "What is" if isinstance(node, ast.ClassDef) else "What does"
            question = f"{verb} `{name}`" + ("?" if isinstance(node, ast.ClassDef) else " do?")
            yield Pair(module, question, answer)


def _public_objects(
    prefix: str, body: list[ast.stmt]
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from _public_objects(name, node.body)


def _evenly(pairs: list[Pair], count: int) -> list[Pair]:
    """Take `count` pairs spread over the modules, which come in alphabetical order, the demo's prompt among them."""
    prompt = [pair for pair in pairs if PROMPT in pair.question]
    others = [pair for pair in pairs if PROMPT not in pair.question]
    count = min(count - len(prompt), len(others))
    return prompt + [others[index * len(others) // count] for index in range(count)]


def _write(file: Path, pairs: list[Pair]) -> None:
    lines = [json.dumps({"question": pair.question, "answer": pair.answer}) + "\n" for pair in pairs]
    partial = file.with_suffix(".part")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(file)


def _count(file: Path) -> int:
    with file.open(encoding="utf-8") as lines:
        return sum(1 for _ in lines)
