"""Rules on the source text: length of files, docstrings of public names, and words that do not belong."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path

import dmuown
from dmuown.errors import install_extra

ROOT = Path(__file__).parents[2]
SMELL = 500  # lines: reported
LIMIT = 700  # lines: refused

# Paths, hosts and marks of the machines that people happen to work on. The brackets keep this file from being found.
FORBIDDEN = re.compile(
    r"(?<![\w.])/wor[k]/|/roo[t]/|/op[t]/(?:pypi|wheels)|extra-index-ur[l]|download\.pytorch\.or[g]"
    r"|(?i:\bco-authored-b[y]\b)|<<<<<<[<]|>>>>>>[>]"
)


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():  # an unpacked source archive
        return [path for folder in ("src", "tests", "docs") for path in (ROOT / folder).rglob("*") if path.is_file()]
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_files_are_readable_in_one_sitting() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in tracked_files()
        if path.suffix == ".py"
    }
    assert "src/dmuown/errors.py" in lengths
    long = {name: length for name, length in lengths.items() if length > SMELL}
    if long:
        warnings.warn(f"files of more than {SMELL} lines: {long}", stacklevel=1)
    assert not {name: length for name, length in long.items() if length > LIMIT}


def test_no_kernel_is_tuned_at_run_time() -> None:
    """dion#58: tuning ran out of memory where eight ranks tuned at once, and chose a kernel that made NaN."""
    sources = [path for path in (ROOT / "src").rglob("*.py") if "triton" in path.read_text()]
    assert len(sources) > 3
    assert not [path.name for path in sources if re.search(r"\bautotune\b|\bdo_bench", path.read_text())]


def test_no_file_names_somebodys_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:  # an image
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in FORBIDDEN.finditer(text)]
    assert not found


def test_the_forbidden_words_are_found() -> None:
    """A guard on the test above."""
    assert FORBIDDEN.search("see " + "/".join(["", "work", "main"]))
    assert FORBIDDEN.search("-".join(["", "", "extra", "index", "url=x"]))
    assert not FORBIDDEN.search("a framework/main, network/x")


def test_extras_are_advised_as_they_can_be_installed() -> None:
    """The package is on no index: what installs an extra is a clone."""
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in tracked_files()
        if path.suffix in (".py", ".md", ".yaml") and not path.is_relative_to(ROOT / "tests")
    }
    assert "README.md" in texts
    assert not [name for name, text in texts.items() if re.search(r"pip install \W*dmuown\b", text)]
    advised = [found for text in texts.values() for found in re.findall(r"install_extra\(.(\w+).\)", text)]
    assert {"automodel", "lp", "plot", "triton"} <= set(advised)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(advised) <= set(extras)
    assert install_extra("lp").startswith('pip install ".[lp]"')


def test_public_names_have_docstrings() -> None:
    missing = []
    for name in dmuown.__all__:
        value = getattr(dmuown, name)
        if inspect.isroutine(value) and not inspect.getdoc(value):
            missing.append(name)
        elif inspect.isclass(value):
            if not vars(value).get("__doc__"):
                missing.append(name)
            missing += [
                f"{name}.{attribute}"
                for attribute, member in vars(value).items()
                if not attribute.startswith("_") and inspect.isroutine(member) and not inspect.getdoc(member)
            ]
    assert not missing


def test_modules_say_what_they_hold() -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert files
    undocumented = [
        path.relative_to(ROOT).as_posix()
        for path in files
        if not re.match(r'\s*(#[^\n]*\n\s*)*r?"""\S', path.read_text())
    ]
    assert not undocumented


def test_the_package_ships_its_types_and_one_version() -> None:
    assert (ROOT / "src/dmuown/py.typed").is_file()
    version = re.compile(r'^(__version__|version) = "', re.MULTILINE)
    holders = [
        path for path in [*(ROOT / "src").rglob("*.py"), ROOT / "pyproject.toml"] if version.search(path.read_text())
    ]
    assert [path.relative_to(ROOT).as_posix() for path in holders] == ["src/dmuown/_version.py"]
