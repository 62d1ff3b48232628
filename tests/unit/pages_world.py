"""Pages of the docs as programs: a reader's folder, Python session and shell, in this process."""

from __future__ import annotations

import ast
import doctest
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rl_eval.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_PIP = re.compile(r"pip install -c constraints\.txt (?:\.|'\.\[([\w,]+)\]')")
_PREPARING = ("python -m venv .venv", "source .venv/bin/activate")
_SHOWN = doctest.OutputChecker()


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    return [Block(*found) for found in _FENCE.findall(page.read_text())]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block, each with what it is shown to print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


@dataclass
class Reader:
    """Somebody who does what a page says, in a folder of their own, which is the current one."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    code: int = 0

    def follow(self, page: Path, without: tuple[str, ...] = ()) -> None:
        """Save what has a title, run Python, and type commands, but those that end with a file of ``without``.

        Raises:
            AssertionError: A command does not print what is shown.
        """
        for block in blocks(page):
            if block.title:
                assert block.language in ("python", "yaml")
                (self.folder / block.title).write_text(block.text)
            elif block.language == "python":
                exec(compile(block.text, str(page), "exec"), self.names)
            elif block.language == "console":
                for command, shown in commands(block.text):
                    if command.split()[-1] not in without:
                        self.type(command, shown)
            elif block.language == "bash":  # Whole machines are set up by .ci/run, which takes its lines from here.
                assert all(line.startswith("pip install -c constraints.txt ") for line in block.text.splitlines())
            else:
                assert block.language == "text", f"{page.name} has a block of {block.language!r}: who executes it?"

    def type(self, command: str, shown: str) -> None:
        """Run a command, and compare what it prints; ``...`` stands for anything."""
        printed = self._printed(command)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert not shown or _SHOWN.check_output(shown, printed, flags), f"$ {command}\n{printed}\n-- shown:\n{shown}"

    def _printed(self, command: str) -> str:
        if command == "echo $?":
            return f"{self.code}\n"
        if command.startswith("pip "):
            return installs(command)
        if command in _PREPARING:
            return ""
        program, *arguments = shlex.split(command)
        assert program == "rl-eval", f"nobody executes {command!r}"
        done = CliRunner().invoke(app, arguments)
        self.code = done.exit_code
        return done.stdout or done.output


def installs(command: str) -> str:
    """Check that a command of pip installs this project, with extras that it has."""
    asked = _PIP.fullmatch(command)
    assert asked, f"{command!r} is not how this project is installed"
    extras = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(filter(None, (asked[1] or "").split(","))) <= set(extras)
    return ""


def templates() -> Iterator[list[str | None]]:
    """Yield the longer texts of what reads a config and starts runners, in parts, None where a value goes."""
    folders = [ROOT / "rl_eval" / name for name in ("backends", "config", "execution")]
    for path in [path for folder in folders for path in folder.glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            values = node.values if isinstance(node, ast.JoinedStr) else [node]
            parts = [str(part.value) if isinstance(part, ast.Constant) else None for part in values]
            if sum(len(part or "") for part in parts) > 40:
                yield parts


def is_said(message: str, template: list[str | None]) -> bool:
    """Whether a text of the package can be this message, with anything where values go."""
    if any(part not in message for part in template if part):
        return False
    pattern = "".join(".*" if part is None else re.escape(part) for part in template)
    return re.fullmatch(pattern, message, re.DOTALL) is not None


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, code left out."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def forget(folder: Path) -> None:
    """Drop the modules that were imported from a folder: another page may have others of their names."""
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]
