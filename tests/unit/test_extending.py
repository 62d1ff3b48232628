"""Packages that add a learner library or a runner kind: the page on it, followed with packages that are installed."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.adapters import integration_for, integrations
from rl_eval.config.policy_sources import schemes
from tests.unit.pages_world import DOCS, Reader, blocks, forget, pages

PAGE = DOCS / "extending.md"


def install(folder: Path, toml: str) -> None:
    """Write what an installer makes of a ``pyproject.toml``: a ``dist-info`` folder with metadata and entry points."""
    name, version = (re.search(rf'^{key} = "(.*)"', toml, re.MULTILINE)[1] for key in ("name", "version"))  # type: ignore[index]
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    point = toml.partition("[project.entry-points.")[2].replace('"', "").strip()
    (info / "entry_points.txt").write_text(f"[{point}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, which is the current one as well."""
    for registry in (integrations, schemes):
        registry.cache_clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    forget(tmp_path)
    for registry in (integrations, schemes):
        registry.cache_clear()


def test_the_page_is_right(site: Path) -> None:
    """A library of one's own, live and by a file, and a runner kind: each block is executed."""
    (toml,) = (block.text for block in blocks(PAGE) if block.language == "toml")
    install(site, toml)
    reader = Reader(site)
    for page in pages("tests/unit/test_extending.py"):
        reader.follow(page)


@pytest.mark.process
def test_an_installed_library_is_there_in_another_process(site: Path) -> None:
    """Its scheme, the digest of its file and its version are in the result of the command line."""
    titled = {block.title: block.text for block in blocks(PAGE) if block.title}
    for title, text in titled.items():
        (site / title).write_text(text)
    install(site, titled["pyproject.toml"])
    (site / "model.ruler").write_text('{"threshold": 0.0}')
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    words = ["run", "--env", "CartPole-v1", "--policy", "ruler:model.ruler", "-n", "3", "--output", "out"]
    command = [sys.executable, "-m", "rl_eval", *words, "--set", "runners.num_runners=0"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    provenance = json.loads((site / "out" / "result.json").read_text())["provenance"]
    assert set(provenance["weights"]["files"]) == {"path"}
    assert provenance["packages"]["ruler"] == "1.0"


def test_a_library_without_an_adapter_has_no_functions(site: Path) -> None:
    points = '[project.entry-points."rl_eval.integrations"]\nbare = "bare:ONE"'
    install(site, f'[project]\nname = "bare"\nversion = "1"\n{points}')
    (site / "bare.py").write_text(
        'from rl_eval.adapters import Integration\nONE = Integration("bare", packages=("bare",))\n'
        "class Model:\n    pass\n"
    )
    assert integration_for(import_module("bare").Model(), "as_policy") is None


@pytest.mark.parametrize("target", ["no_such_module:INTEGRATION", "json:dumps"])
def test_a_broken_entry_point_is_left_out(site: Path, target: str, caplog: Any) -> None:
    """It is named in a warning, and evaluations go on."""
    points = f'[project.entry-points."rl_eval.integrations"]\nbroken = "{target}"'
    install(site, f'[project]\nname = "broken"\nversion = "1"\n{points}')
    with caplog.at_level(logging.WARNING):
        result = evaluate(EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2), "random")
    assert result.status == "complete"
    assert [record.args[0] for record in caplog.records if record.name == "rl_eval.adapters"] == ["broken"]
