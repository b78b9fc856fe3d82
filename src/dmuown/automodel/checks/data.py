"""Data sets: files that are there, columns that are in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dmuown.automodel.checks.document import Document, with_variables
from dmuown.automodel.checks.model import is_path
from dmuown.automodel.checks.problems import Report
from dmuown.automodel.checks.rules import Rule, count, count_or_zero, one_of, optional
from dmuown.errors import OptionError
from dmuown.policy.names import nearest

PATH_KEYS = ("path_or_dataset_id", "path_or_dataset", "paths", "path")

VALUES: Mapping[str, Rule] = {
    "seq_length": optional(count),
    "seq_len": optional(count),
    "max_length": optional(count),
    "limit_dataset_samples": optional(count),
    "num_samples_limit": optional(count),
    "num_samples": optional(count),
    "num_proc": optional(count),
    "shuffle_seed": optional(count_or_zero),
    "padding": one_of(False, True, "do_not_pad", "max_length", "longest"),
    "truncation": one_of(False, True, "do_not_truncate", "longest_first", "only_first", "only_second"),
}
"""Ranges of arguments that the host's data sets share."""

_COLUMN_ROLES = ("context", "question", "answer")


def data_sections(document: Document) -> list[str]:
    """Names of the sections that describe data sets."""
    return [
        name
        for name, section in document.config.items()
        if (name == "dataset" or name.startswith("validation_dataset")) and isinstance(section, Mapping)
    ]


def check_data(document: Document, report: Report) -> None:
    """Check values, files and columns of every data set."""
    for name in data_sections(document):
        section = document.config[name]
        for key, rule in VALUES.items():
            if key in section:
                try:
                    rule(f"{name}.{key}", section[key])
                except OptionError as error:
                    report.raised(error)
        files = _check_files(name, section, report)
        _check_columns(name, section, files, report)


def _check_files(name: str, section: Mapping[str, Any], report: Report) -> list[Path]:
    found = []
    for key in PATH_KEYS:
        value = section.get(key)
        for index, entry in enumerate(value if isinstance(value, list) else [value]):
            dotted = f"{name}.{key}[{index}]" if isinstance(value, list) else f"{name}.{key}"
            if not isinstance(entry, str) or not is_path(entry):
                continue
            path = Path(with_variables(entry)).expanduser()
            if not path.exists():
                report.error(dotted, f"{entry!r} does not exist", "Give the path of the data, or a name on the hub")
            elif path.is_file():
                found.append(path)
    return found


def _check_columns(name: str, section: Mapping[str, Any], files: list[Path], report: Report) -> None:
    columns = section.get("column_mapping")
    if columns is None:
        return
    key = f"{name}.column_mapping"
    if not isinstance(columns, Mapping) or not columns:
        report.error(key, f"must map roles to columns, got {columns!r}", "Write {question: ..., answer: ...}")
        return
    for role, column in columns.items():
        if role not in _COLUMN_ROLES:
            report.error(f"{key}.{role}", f"is none of {', '.join(_COLUMN_ROLES)}", nearest(role, _COLUMN_ROLES))
        elif not isinstance(column, str) or not column:
            report.error(f"{key}.{role}", f"must be the name of a column, got {column!r}", "Write it as text")
    if report.has_error(key):
        return
    if "answer" not in columns:
        report.error(f"{key}.answer", "is missing: there would be nothing to learn", "Name the column of the answers")
    for file in files:
        present = _first_row(file)
        if present is None:
            report.error(f"{name}.path_or_dataset_id", f"{str(file)!r} holds no JSON lines", "Write one object a line")
            continue
        for role, column in columns.items():
            if column not in present:
                report.error(f"{key}.{role}", f"{str(file)!r} has no column {column!r}", nearest(column, present))


def _first_row(file: Path) -> set[str] | None:
    """Columns of the first line of a file of JSON lines; None where it holds none."""
    if file.suffix not in (".json", ".jsonl"):
        return None
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            if not line.strip():
                continue
            if file.suffix == ".json" and line.lstrip().startswith("["):
                return _first_of_array(file)
            try:
                row = json.loads(line)
            except ValueError:
                return None
            return set(row) if isinstance(row, dict) else None
    return None


def _first_of_array(file: Path) -> set[str] | None:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return set(rows[0]) if isinstance(rows, list) and rows and isinstance(rows[0], dict) else None
