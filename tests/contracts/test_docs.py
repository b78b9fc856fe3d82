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


def test_every_invariant_has_a_test_that_names_it() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|([^|]*)\|$", (ROOT / "docs/design/README.md").read_text(), re.MULTILINE)
    unnamed = []
    for number, cell in rows:
        named = re.compile(rf"[Ii]nvariants? (\d+(, | and ))*{number}\b")
        if not any(named.search((ROOT / file).read_text()) for file, _ in TEST.findall(cell)):
            unnamed.append(number)
    assert len(rows) >= 10
    assert not unnamed


def test_the_figures_of_the_readme_are_in_their_results() -> None:
    section = (ROOT / "README.md").read_text().partition("<!-- figures -->")[2].partition("<!-- end of figures -->")[0]
    results = "".join((ROOT / target).read_text() for target in LINK.findall(section))
    figures = re.findall(r"\d+\.\d+(?= \|)|\+\d+\.\d+%", section)
    assert len(figures) > 5
    assert not [figure for figure in figures if figure not in results]
