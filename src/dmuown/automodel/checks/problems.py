"""What a check reports: problems, each with the key, the line, the rule and the remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from dmuown.errors import DmuownError

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Attributes:
        severity: `error`: the job would fail, or train something else. `warning`: it would run, perhaps not as meant.
        key: The dotted key.
        rule: What the key must satisfy, and what it was.
        remedy: What to do; may be empty.
        line: Line in the file, from 1; None for a key that is not there.
        default: What is taken instead of a key that is not set, where that is all there is to say; else empty.
    """

    severity: Severity
    key: str
    rule: str
    remedy: str = ""
    line: int | None = None
    default: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The problem as data that JSON can hold."""
        return {"key": self.key, "line": self.line, "message": self.rule, "remedy": self.remedy}


@dataclass
class Report:
    """All problems of one file, errors first, each in the order of lines.

    Attributes:
        path: The file.
        lines: Line of every dotted key.
        overridden: Dotted keys whose values are not the file's: what is wrong with them, or below them, is on no line.
        problems: What was found.
        meant: Keys that the remedies of misspelled ones name.
    """

    path: str
    lines: dict[str, int] = field(default_factory=dict)
    overridden: Collection[str] = ()
    problems: list[Problem] = field(default_factory=list)
    meant: set[str] = field(default_factory=set)

    def add(
        self, severity: Severity, key: str, rule: str, remedy: str = "", *, line: int | None = None, default: str = ""
    ) -> None:
        """Report a problem; the first one of a key and severity counts, later ones would repeat it."""
        if any(problem.key == key and problem.severity == severity for problem in self.problems):
            return
        self.problems.append(Problem(severity, key, rule, remedy, line or self._line(key), default))
        meant = re.match(r"Did you mean '([^']+)'", remedy)
        if meant:
            parent = key.rpartition(".")[0]
            self.meant.add(f"{parent}.{meant.group(1)}" if parent else meant.group(1))

    def missing(self, severity: Severity, key: str, rule: str, remedy: str = "") -> None:
        """Report a key that is not there, unless a misspelled one was told this very name."""
        if key not in self.meant:
            self.add(severity, key, rule, remedy)

    def default(self, key: str, taken: str, remedy: str, *, by: str = "the host takes") -> None:
        """Warn of a key that is not set, unless a misspelled one was told this very name; `taken` is what counts."""
        if key not in self.meant:
            self.add("warning", key, f"is not set: {by} {taken}", remedy, default=taken)

    def error(self, key: str, rule: str, remedy: str = "", *, line: int | None = None) -> None:
        """Report an error; `line` where it is not that of the key."""
        self.add("error", key, rule, remedy, line=line)

    def warning(self, key: str, rule: str, remedy: str = "") -> None:
        """Report a warning."""
        self.add("warning", key, rule, remedy)

    def raised(self, error: DmuownError, *, section: str = "") -> None:
        """Report an exception of this package as an error; its subject is a key of `section`."""
        key = f"{section}.{error.subject}" if section else error.subject
        self.error(key, error.rule, error.remedy)

    def has_error(self, key: str) -> bool:
        """Whether this key, or one below it, has an error."""
        return any(
            problem.severity == "error" and (problem.key == key or problem.key.startswith((f"{key}.", f"{key}[")))
            for problem in self.problems
        )

    @property
    def errors(self) -> list[Problem]:
        """The errors, by line."""
        return self._of("error")

    @property
    def warnings(self) -> list[Problem]:
        """The warnings, by line."""
        return self._of("warning")

    def _of(self, severity: Severity) -> list[Problem]:
        found = [problem for problem in self.problems if problem.severity == severity]
        return sorted(found, key=lambda problem: problem.line or 0)

    def _line(self, key: str) -> int | None:
        parts = key.replace("[", ".[").split(".")
        for depth in range(len(parts), 0, -1):
            dotted = ".".join(parts[:depth]).replace(".[", "[")
            if dotted in self.overridden:
                return None
            found = self.lines.get(dotted)
            if found is not None:
                return found
        return None

    def to_dict(self) -> dict[str, Any]:
        """The report as data that JSON can hold."""
        return {
            "file": self.path,
            "ok": not self.errors,
            "errors": [problem.to_dict() for problem in self.errors],
            "warnings": [problem.to_dict() for problem in self.warnings],
        }

    def text(self) -> Iterable[str]:
        """One line per problem, `file:line: severity: key: rule. Remedy.`, and one that sums up.

        Keys that are not set make one warning together, with a line for what is taken instead of each.
        """
        told = [problem for problem in self.warnings if not problem.default]
        defaults = sorted((problem for problem in self.warnings if problem.default), key=lambda problem: problem.key)
        if len(defaults) == 1:
            told, defaults = self.warnings, []
        for problem in (*self.errors, *told):
            place = self.path if problem.line is None else f"{self.path}:{problem.line}"
            # The file is named already where it is the subject itself.
            subject = "" if problem.key == self.path else f": {problem.key}"
            yield str(DmuownError(f"{place}: {problem.severity}{subject}", problem.rule.rstrip("."), problem.remedy))
        if defaults:
            yield f"{self.path}: warning: {len(defaults)} keys are not set. Write those whose default is not meant:"
            width = max(len(problem.key) for problem in defaults)
            for problem in defaults:
                yield f"  {problem.key:<{width}}  {problem.default}"
        counts = f"{_count(len(self.errors), 'error')}, {_count(len(told) + bool(defaults), 'warning')}"
        yield f"{self.path}: {counts}"


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
