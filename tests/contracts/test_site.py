"""The documentation builds strictly, its links lead somewhere, and every public name is in the reference."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import dmuown
from tools.docs_hooks import expand

ROOT = Path(__file__).parents[2]
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))

#: Packages whose `__all__` is public beside that of `dmuown` itself.
PACKAGES = ("dmuown.automodel", "dmuown.orthogonalize", "dmuown.ownership", "dmuown.policy")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Building strictly fails on pages, links and anchors that do not exist."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


class _Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and key in ("id", "name"):
                self.anchors.add(value)
            elif value and (key == "src" or (key == "href" and tag in ("a", "link"))):
                self.links.append(value)


def pages_of(site: Path) -> dict[Path, _Page]:
    return {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def broken_links(site: Path, pages: dict[Path, _Page]) -> Iterator[str]:
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|//", target) or path.name == "404.html":  # elsewhere; 404 has absolute links
                continue
            found = (path.parent / unquote(target)).resolve() if target else path
            if found.is_dir():
                found /= "index.html"
            if not found.is_file() or (anchor and found in pages and unquote(anchor) not in pages[found].anchors):
                yield f"{path.relative_to(site)}: {link}"


def test_links_and_anchors_lead_somewhere(site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) > 15
    assert sum(len(page.links) for page in pages.values()) > 500
    assert not list(broken_links(site, pages))


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    """A guard on the test above."""
    (tmp_path / "index.html").write_text('<a href="other/">x</a><a href="#here">y</a><h1 id="there"></h1>')
    assert list(broken_links(tmp_path, pages_of(tmp_path))) == ["index.html: other/", "index.html: #here"]


def test_pages_need_nothing_from_other_servers(site: Path) -> None:
    loaded = [
        link
        for path in site.rglob("*.html")
        for link in re.findall(r"<(?:script|img|iframe)[^>]*?src=\"(https?://[^\"]+)", path.read_text())
        + re.findall(r"<link[^>]*?rel=\"stylesheet\"[^>]*?href=\"(https?://[^\"]+)", path.read_text())
    ]
    assert not loaded


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Under its own heading. The cure for a missing one: a mark or a `:::` line in a page of docs/reference."""
    anchors = {anchor for path, page in pages_of(site).items() if "reference" in path.parts for anchor in page.anchors}
    top = {name for name in dmuown.__all__ if not name.startswith("__")}
    public = {f"dmuown.{name}" for name in top}
    for package in PACKAGES:
        # What is public in dmuown itself has its heading there.
        public |= {f"{package}.{name}" for name in set(importlib.import_module(package).__all__) - top}
    assert len(public) > 40
    assert not public - anchors


def test_no_name_has_two_headings() -> None:
    pages = [expand(page.read_text()) for page in REFERENCE]
    directives = [name for page in pages for name in re.findall(r"^::: (\S+)", page, re.MULTILINE)]
    assert len(directives) > 20
    assert len(directives) == len(set(directives))
