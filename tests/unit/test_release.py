"""Files of a release: they agree on the version, and the hooks and workflows name what exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl_eval

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_all_files_have_the_version_of_the_package() -> None:
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert project[1] == read("CITATION.cff")["version"] == rl_eval.__version__
    assert re.search(rf"^## {re.escape(rl_eval.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_citation_has_the_fields_of_its_format() -> None:
    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_hooks_use_the_tools_of_the_environment() -> None:
    """Their versions are those of ``constraints.txt``, and no others."""
    [local] = read(".pre-commit-config.yaml")["repos"]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    assert {hook["entry"].split()[0] for hook in local["hooks"]} == {"ruff", "mypy"} <= set(pinned)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_scripts_that_exist(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    for script in re.findall(r"(?<!\S)\.ci/\w+", text):
        assert (ROOT / script).stat().st_mode & 0o111, script
