"""The documentation points at what exists: relative links, and the tests that the invariants name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST = re.compile(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`")


def test_relative_links_lead_somewhere() -> None:
    links = [(page, target) for page in PAGES for target in LINK.findall(page.read_text())]
    assert links
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page, target in links
        if not re.match(r"[a-z]+:|#", target) and not (page.parent / target.partition("#")[0]).exists()
    ]
    assert not broken


def test_named_tests_exist() -> None:
    named = [(page, *match) for page in PAGES for match in TEST.findall(page.read_text())]
    assert named
    missing = [
        f"{page.relative_to(ROOT)}: {file}::{function}"
        for page, file, function in named
        if not (ROOT / file).is_file() or (function and f"def {function}(" not in (ROOT / file).read_text())
    ]
    assert not missing


def test_the_invariants_are_numbered_without_gaps() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|$", (ROOT / "docs/design/README.md").read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 10


def test_the_tests_of_an_invariant_name_it() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", (ROOT / "docs/design/README.md").read_text(), re.MULTILINE)
    wrong = []
    for number, cell in rows:
        files = [file for file, _ in TEST.findall(cell)]
        named = re.compile(rf"[Ii]nvariants? (\d+(, | and ))*{number}\b")
        wrong += [f"{number}: names no test"] if not files else []
        wrong += [f"{number}: {file}" for file in files if not named.search((ROOT / file).read_text())]
    assert not wrong
