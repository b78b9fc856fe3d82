"""Fenced blocks of the README and the documentation, as the tests run them.

A block runs as it stands. What a reader does not need to see stands in HTML comments:

    <!-- setup                          Python that runs where it stands: what the page takes for granted
    <!-- check                          the same, after a block: what a reader is told to expect
    <!-- not run: reason -->            the next block is not run; the reason is for reviewers
    <!-- ranks: 2 -->                   this page's Python runs on two gloo ranks, process group up
    <!-- needs: nemo_automodel -->      this page's Python needs an optional library
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_PIECE = re.compile(
    r"^(?P<indent>[ ]*)```(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)```[ ]*$"
    r"|^<!-- (?P<hidden>setup|check)\n(?P<script>.*?)^-->$"
    r"|^<!-- not run: (?P<reason>[^\n]+) -->$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        page: Path below the root.
        line: Line of its first line of code.
        language: As the fence says: `python`, `bash`, `yaml`, `text`, ...; hidden blocks are `python`.
        code: Its text, unindented.
        reason: Why it is not run; empty if it is.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str = ""


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    return parse(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())


def parse(text: str, name: str) -> list[Block]:
    """All blocks of a page's text, in order."""
    found = []
    reason = ""
    for piece in _PIECE.finditer(text):
        if piece["reason"]:
            reason = piece["reason"]
            continue
        code = piece["script"] if piece["hidden"] else _unindented(piece["code"], piece["indent"])
        start = piece.start("script") if piece["hidden"] else piece.start("code")
        language = "python" if piece["hidden"] else piece["language"]
        line = text.count("\n", 0, start) + 1
        found.append(Block(name, line, language, code, reason))
        reason = ""
    return found


def ranks(page: Path) -> int:
    """On how many ranks a page's Python runs."""
    found = re.search(r"^<!-- ranks: (\d+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 1


def needs(page: Path) -> list[str]:
    """Optional libraries that a page's Python imports."""
    return re.findall(r"^<!-- needs: (\w+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)


def run_python(rank: int, world_size: int, page: str, folder: str) -> list[int]:
    """Run a page's Python blocks in order, in one namespace, as one rank; the current folder is `folder`.

    Returns:
        The lines of the blocks that ran.
    """
    import os
    import sys

    os.chdir(folder)
    if str(ROOT / "src") not in sys.path:
        sys.path.insert(0, str(ROOT / "src"))
    namespace: dict[str, object] = {"__name__": "__main__", "__file__": str(ROOT / page)}
    done = []
    for block in blocks(ROOT / page):
        if block.language != "python" or block.reason:
            continue
        # Empty lines put errors at their lines of the page.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, f"{block.page}", "exec"), namespace)
        done.append(block.line)
    return done


def _unindented(code: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
