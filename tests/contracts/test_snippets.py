"""What the README and the documentation show works: Python runs, YAML is valid, commands exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from dmuown.automodel.checks.sections import HEALTH
from dmuown.automodel.dmuon_options import OPTIONS_BY_CONFIG
from dmuown.cli import app
from dmuown.policy import ParamPolicy
from tests.contracts.snippets import PAGES, ROOT, Block, blocks, needs, parse, ranks, run_python
from tests.distributed.harness import run_ranks

BLOCKS = [block for page in PAGES for block in blocks(page)]
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
LANGUAGES = {"python", "yaml", "bash", "console", "text"}


def of(*languages: str) -> list[Any]:
    chosen = [block for block in BLOCKS if block.language in languages and not block.reason]
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in chosen]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_runs(page: Path, tmp_path: Path) -> None:
    for library in needs(page):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"the page is about {library}, which is not installed")
    done = run_ranks(ranks(page), run_python, page.relative_to(ROOT).as_posix(), str(tmp_path), timeout=120)
    expected = [block.line for block in blocks(page) if block.language == "python" and not block.reason]
    assert all(lines == expected for lines in done)


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_valid(block: Block) -> None:
    """Sections are checked by the classes that read them; a block that holds none must be marked."""
    content = yaml.safe_load(block.code)
    assert isinstance(content, dict)
    checked = 0
    for section in _sections(content):
        if "_target_" in section and str(section["_target_"]).startswith("dmuown."):
            target = str(section["_target_"])
            options = {key: value for key, value in section.items() if key != "_target_"}
            assert target.removeprefix("dmuown.automodel.") in OPTIONS_BY_CONFIG, target
            OPTIONS_BY_CONFIG[target.rpartition(".")[2]](**options)
            checked += 1
        elif set(section) <= {"defaults", "overrides"}:
            ParamPolicy.model_validate(section)
            checked += 1
        elif "dmuown" in section:
            assert set(section["dmuown"]) <= set(HEALTH)
            checked += 1
    assert checked, "nothing of this package: mark the block `<!-- not run: ... -->`"


def _sections(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield content
    for value in content.values():
        if isinstance(value, Mapping):
            yield from _sections(value)


@pytest.mark.parametrize("block", of("bash", "console"))
def test_commands_exist(block: Block) -> None:
    joined = re.sub(r"\\\n\s*", " ", block.code)
    commands = [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert commands
    for command in (part for line in commands for part in line.split(" && ")):
        words = shlex.split(command, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):  # environment
            words.pop(0)
        _check_command(words)


def _check_command(words: list[str]) -> None:
    match words:
        case ["dmuown", *arguments]:
            _check_dmuown(arguments)
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text()
            for target in targets:
                assert "=" in target or re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
        case ["pip", "install", *arguments]:
            _check_install(arguments)
        case ["torchrun", *arguments]:
            _check_program([word for word in arguments if not re.match(r"--(standalone|n)|\d+$", word)])
        case ["python", *arguments]:
            _check_program(arguments)
        case _:
            pytest.fail(f"{shlex.join(words)}: mark the block `<!-- not run: ... -->`, or teach this test to check it")


def _check_dmuown(arguments: list[str]) -> None:
    root: Any = typer.main.get_command(app)  # a click group, of click's own or of typer's copy of it
    if arguments and arguments[0].startswith("--"):
        assert any(arguments[0] in option.opts for option in root.params) or arguments[0] == "--help"
        return
    command = root.commands.get(arguments[0])
    assert command is not None, f"dmuown has no command {arguments[0]!r}, only {sorted(root.commands)}"
    known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)} | {"--help"}
    for word in arguments[1:]:
        name = word.partition("=")[0]
        # A dotted key is an override of the configuration, where the command takes any.
        free = command.context_settings.get("ignore_unknown_options") and "." in name
        assert not name.startswith("--") or name in known or free, f"dmuown {arguments[0]} has no option {name}"
        if re.fullmatch(r"configs/\S+\.yaml|examples/\S+\.yaml", word):
            assert (ROOT / word).is_file(), word


def _check_install(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for word in arguments:
        for extra in re.findall(r"\[([\w,]+)\]", word):
            assert set(extra.split(",")) <= set(project["project"]["optional-dependencies"]), word
    if "--group" in arguments:
        assert arguments[arguments.index("--group") + 1] in project["dependency-groups"]


def _check_program(arguments: list[str]) -> None:
    assert arguments
    if arguments[0] == "-m":
        # Without importing its packages, which may be large: the part that is ours is looked up as a file.
        name = arguments[1]
        if name.startswith("dmuown."):
            path = ROOT / "src" / Path(*name.split("."))
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
        else:
            assert importlib.util.find_spec(name.partition(".")[0]) is not None, name
    else:
        assert (ROOT / arguments[0]).is_file(), arguments[0]


def test_every_block_says_what_it_is() -> None:
    unknown = [f"{block.page}:{block.line} {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES]
    assert not unknown


def test_few_blocks_are_not_run() -> None:
    runnable = [block for block in BLOCKS if block.language != "text"]
    marked = [block for block in runnable if block.reason]
    assert len(marked) <= max(1, len(runnable) // 10), [
        f"{block.page}:{block.line}: {block.reason}" for block in marked
    ]


def test_a_wrong_snippet_is_found() -> None:
    """A guard on the tests above: blocks are found, hidden and marked ones too, and commands that do not exist."""
    page = "a\n```python\nx = 1\n```\n<!-- check\nassert x == 1\n-->\n"
    page += "<!-- not run: why -->\n1. b\n   ```bash\n   rm\n   ```\n"
    assert parse(page, "page.md") == [
        Block("page.md", 3, "python", "x = 1\n"),
        Block("page.md", 6, "python", "assert x == 1\n"),
        Block("page.md", 11, "bash", "rm\n", "why"),
    ]
    for line in ("dmuown finetun", "dmuown finetune --nproc 2", "make nothing", "pip install .[no]", "python no.py"):
        with pytest.raises(AssertionError):
            _check_command(line.split())
