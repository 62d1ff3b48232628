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

import pytest
from typer.testing import CliRunner

from rl_eval.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY"))])
GUIDES = [DOCS / f"{name}.md" for name in ("index", "tutorial", "concepts", "howto", "troubleshooting")]
FOLLOWED = {
    "tests/cluster/test_pages.py": ("worker_interface",),
    "tests/integrations/test_pages.py": (
        "cli",
        "coming_from_rllib",
        "coming_from_sb3",
        "coming_from_torchrl",
        "training",
    ),
    "tests/learners/test_your_policy.py": ("your_policy",),
    "tests/unit/test_extending.py": ("extending",),
    "tests/unit/test_multi_agent.py": ("multi_agent",),
    "tests/unit/test_ope.py": ("trajectories",),
    "tests/unit/test_other_python.py": ("other_python",),
    "tests/unit/test_report_docs.py": ("report",),
}
"""Tests that follow pages of their own; ``tests/unit/test_docs_site.py`` follows all others that have code."""
NOT_FOLLOWED = {
    "benchmarks": "hours of measurements",
    "cluster": "machines and clouds; test_jobs.py and test_ray_submit.py try its commands, test_pages.py its Python",
    "CONTRIBUTING": "all of CI",
    "servers": "servers and clusters; tests/cluster/test_servers_page.py types its commands",
}
"""Pages that need more than a test has."""
PROGRAMS = {
    "tune_gain.py": "a slow test runs it, in a process of its own",
    "optuna_gain.py": "a slow test runs it where Optuna is installed",
    "jax_actor.py": "test_foreign_arrays.py runs it: with a stand-in, and where JAX is installed with that",
    "jax_drift.py": "tests/simulators/test_jumanji.py runs it where JAX is installed",
    "sampling.py": "test_foreign_arrays.py runs it",
    "lift.py": "it needs robosuite in another Python",
    "reach.py": "it needs Meta-World in another Python",
    "remote_env.py": "test_other_python.py runs it",
}
"""Files of Python that a page shows and does not use itself, and what runs them."""
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_PIP = re.compile(r"pip install -c constraints\.txt (?:\.|'\.\[([\w,]+)\]')")
_PREPARING = ("python -m venv .venv", "source .venv/bin/activate", "export RAY_", "ray start --head")
"""Beginnings of commands whose work is done where a reader begins."""
_SHOWN = doctest.OutputChecker()
_PYTEST = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "randomly", "timeout", "xdist")]
"""A run of pytest within one of pytest keeps what belongs to the process as it is."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    return [Block(*found) for found in _FENCE.findall(page.read_text())]


def pages(test: str) -> list[Path]:
    """Return the pages that a file of tests follows."""
    if test in FOLLOWED:
        return [DOCS / f"{name}.md" for name in FOLLOWED[test]]
    elsewhere = [page for other in FOLLOWED for page in pages(other)]
    return [page for page in PAGES if page not in elsewhere and (page in GUIDES or has_code(page))]


def has_code(page: Path) -> bool:
    """Whether a page has a block of Python, in whatever way it is marked, or commands, that a test can run."""
    code = re.search(r"^\s*(```|~~~)\s*\{?\.?(py|sh|bash|console)", page.read_text(), re.MULTILINE)
    return code is not None and page.stem not in NOT_FOLLOWED


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

    def follow(self, page: Path) -> None:
        """Save what has a title, run Python, and type commands, but those that end with one of ``PROGRAMS``.

        Raises:
            AssertionError: A command does not print what is shown, or nothing has executed a file of Python.
        """
        for block in blocks(page):
            if block.title:
                self._save(block)
            elif block.language == "python":
                self._execute(block, page)
            elif block.language == "console":
                for command, shown in commands(block.text):
                    if command.split()[-1] not in PROGRAMS:
                        self.type(command, shown)
            elif block.language in ("bash", "sh"):
                for line in block.text.splitlines():
                    self._must(line)
            elif page in GUIDES:
                assert block.language == "text", f"{page.name} has a block of {block.language!r}: who executes it?"
        written = {block.title for block in blocks(page) if block.title and block.language == "python"}
        assert written - PROGRAMS.keys() <= {Path(path).name for path in _files_of(self.folder)}, "not imported"

    def python(self, page: Path) -> None:
        """Run the Python of a page whose commands need more than a test has."""
        for block in blocks(page):
            if block.language == "python" and not block.title:
                self._execute(block, page)

    def _execute(self, block: Block, page: Path) -> None:
        exec(compile(self._here(block.text), str(page), "exec"), self.names)

    def _here(self, text: str) -> str:
        """Return what a page says, with its folders at the root of the disk in that of the reader."""
        return re.sub(r"(?<=[\"' ])/(?=(?:checkpoints|data|results)/)", f"{self.folder}/", text)

    def _save(self, block: Block) -> None:
        """Write a file; pytest runs it if it is named as a file of tests."""
        assert block.language in ("python", "toml", "yaml")
        path = self.folder / block.title
        sys.modules.pop(path.stem, None)  # Another reader's.
        path.write_text(self._here(block.text))
        if block.title.startswith("test_"):
            assert pytest.main([str(path), *_PYTEST], plugins=[]) == 0

    def _must(self, line: str) -> None:
        """Run a command that has to succeed; whole machines are set up by .ci/run, which takes its lines from here."""
        if not line.startswith("pip install -c constraints.txt "):
            self.type(line.partition("  #")[0], "")
            assert self.code == 0, line

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
        if command.startswith(_PREPARING):
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
    for name in _files_of(folder).values():
        del sys.modules[name]


def _files_of(folder: Path) -> dict[str, str]:
    """Return the files of a folder that were imported, with the names of their modules."""
    files = {getattr(module, "__file__", None) or "/": name for name, module in list(sys.modules.items())}
    return {path: name for path, name in files.items() if Path(path).is_relative_to(folder)}
