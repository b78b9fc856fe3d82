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


#: What commands of the documentation read, and the command that makes it.
MADE = {
    r"configs/automodel/smollm2_\w+\.yaml|runs/demo\b(?!/adamw)": "make demo",
    r"runs/demo/adamw": "--optimizer adamw",
    r"examples/automodel/muown\.yaml|runs/example\b": "examples/automodel/prepare.py",
}
COMMAND = re.compile(r"dmuown (?:check|plan|finetune|report|convert) [^`\n]*")


def unprepared(text: str) -> list[str]:
    """Commands of a page that read what an example makes, before the page says so."""
    return [
        command.group()
        for command in COMMAND.finditer(text)
        for read, maker in MADE.items()
        if re.search(read, command.group()) and maker not in text[: command.start()]
    ]


def test_pages_say_what_makes_the_files_that_their_commands_read() -> None:
    pages = [*(page for page in PAGES if page.name != "CHANGELOG.md"), ROOT / "examples/README.md"]
    found = [page for page in pages if any(re.search(read, page.read_text()) for read in MADE)]
    assert len(found) >= 3
    assert not {
        page.relative_to(ROOT).as_posix(): commands for page in found if (commands := unprepared(page.read_text()))
    }


def test_a_command_before_what_it_reads_is_found() -> None:
    """A guard on the test above; and that the recipes do read it."""
    command = "dmuown report runs/demo/muown runs/demo/adamw -o x.html"
    assert unprepared(f"`{command}`, after make demo") == [command, command]
    assert unprepared(f"make demo ... `{command}`") == [command]
    for file in (ROOT / "configs/automodel").glob("smollm2_*.yaml"):
        assert "runs/demo/model" in file.read_text()
    assert "runs/example/model" in (ROOT / "examples/automodel/muown.yaml").read_text()


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
