"""MkDocs hooks: reference pages from the tables of public names, and the project's own pages.

A page of `docs/reference` says which names it documents:

    <!-- names: dmuown from dmuown.engine -->     public names of dmuown that live below dmuown.engine
    <!-- names: dmuown.policy -->                 the module's __all__, without what dmuown itself has

and mkdocstrings gets one directive for each. Names are looked up when the site is built, so that a new public name
appears without an edit, and one without a page fails tests/contracts/test_site.py.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

NAMES = re.compile(r"<!-- names: ([\w.]+)(?: from ([\w., ]+))? -->")
PROJECT_PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}


def public_names(module: str, homes: str | None = None) -> list[str]:
    """Return the public names of a module as dotted paths.

    Args:
        module: `dmuown` or a package below it.
        homes: Comma-separated packages; only names that live in one of them. For `dmuown` itself.
    """
    names: list[str] = list(importlib.import_module(module).__all__)
    if homes is not None:
        table: dict[str, str] = importlib.import_module(module)._PUBLIC
        wanted = tuple(home.strip() for home in homes.split(","))
        names = [name for name in names if _below(table.get(name, ""), wanted)]
    if module != "dmuown":
        top = importlib.import_module("dmuown").__all__
        names = [name for name in names if name not in top]
    return [f"{module}.{name}" for name in sorted(names, key=str.lower) if not name.startswith("__")]


def _below(home: str, packages: tuple[str, ...]) -> bool:
    return any(home == package or home.startswith(f"{package}.") for package in packages)


def expand(markdown: str) -> str:
    """Return a reference page with directives in place of its marks."""
    return NAMES.sub(
        lambda mark: "\n\n".join(f"::: {name}" for name in public_names(mark[1], mark[2])),
        markdown,
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Expand the marks of reference pages."""
    return expand(markdown) if page.file.src_uri.startswith("reference/") else markdown


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the project's pages, which live at the root of the repository."""
    from mkdocs.structure.files import File

    for page, source in PROJECT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files
