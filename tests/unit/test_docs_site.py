"""The docs: what they show runs, what they link to exists, and nothing that can be looked up is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import rl_eval
from rl_eval import EvalConfig, evaluate
from rl_eval.backends import pickled_settings
from rl_eval.errors import ConfigError
from tests.unit.pages_world import DOCS, ROOT, Reader, anchors, blocks, commands, forget, is_said, links, templates

GUIDES = [DOCS / f"{name}.md" for name in ("index", "tutorial", "concepts", "howto", "troubleshooting")]
PROGRAMS = {"tune_gain.py": "ray.tune", "optuna_gain.py": "optuna"}
"""Files of the how-to that are run by themselves, and what they need."""
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """A reader in an empty folder, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Reader(tmp_path)
    forget(tmp_path)


# ------------------------------------------------------------------------------ what is shown runs


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_a_guide_can_be_followed(reader: Reader, page: Path) -> None:
    """All its Python runs, and every command prints what is shown and ends with the code that is shown."""
    assert blocks(page)
    reader.follow(page, without=tuple(PROGRAMS))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_guides_compiles_and_names_what_there_is(program: str) -> None:
    """Names of rl_eval exist; the others are looked at where the program runs."""
    text = next(block.text for block in blocks(DOCS / "howto.md") if block.title == program)
    compile(text, program, "exec")
    [names] = re.findall(r"^from rl_eval import (.*)$", text, re.MULTILINE)
    assert set(names.split(", ")) <= set(rl_eval.__all__)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_guides_prints_what_is_shown(reader: Reader, program: str) -> None:
    """In a process of its own, as a reader would run it."""
    if find_spec(PROGRAMS[program]) is None:
        pytest.skip(f"{PROGRAMS[program]} is not installed")
    shown = {}
    for block in blocks(DOCS / "howto.md"):
        if block.title == program:
            Path(program).write_text(block.text)
        shown |= dict(commands(block.text)) if block.language == "console" else {}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    expected = shown[f"python {program}"].splitlines()[-1].replace("...", "")
    assert done.stdout.splitlines()[-1].startswith(expected.rstrip("}"))


@pytest.mark.slow
@pytest.mark.process
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """``mkdocs build --strict``, which fails at a warning; no page loads anything from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for page in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(r'<(?:link|script|img)\b[^>]*?(?:href|src)="(https?://[^"]*)', page.read_text())
        assert loaded == [], page.name


# ------------------------------------------------------------------------------ what is said is true


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """Each is a text of the package, with values where it has values."""
    shown = [block.text.strip() for block in blocks(DOCS / "troubleshooting.md") if block.language == "text"]
    known = list(templates())
    assert len(shown) > 3
    for message in shown:
        said = message.removeprefix("error: ")
        assert said != message
        assert any(is_said(said, template) for template in known), message


def test_the_messages_about_objects_are_word_for_word() -> None:
    """What cannot be pickled, and an environment that is built already."""
    page = (DOCS / "troubleshooting.md").read_text()
    lock = threading.Lock()
    with pytest.raises(ConfigError) as unpicklable:
        pickled_settings(EvalConfig().environment(lambda: lock).build(), None)
    with pytest.raises(ConfigError) as live:
        EvalConfig().environment(gym.make("CartPole-v1")).runners(num_runners=2).build()
    assert f"error: {unpicklable.value}\n" in page
    assert f"error: {live.value}\n" in page


# ------------------------------------------------------------------------------ links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """A file that exists and, with an anchor, a heading in it; of the API, a name that is listed there."""
    wrong = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if "://" in link:
            continue
        if not target.is_file():
            wrong.append(link)
        elif anchor.startswith("rl_eval."):
            wrong += [] if f"::: {anchor}\n" in target.read_text() else [link]
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(link)
    assert wrong == []


# ------------------------------------------------------------------------------ nothing is missing


def test_every_public_name_has_an_entry() -> None:
    """Add ``::: rl_eval.NAME`` to ``docs/api.md`` if this fails."""
    listed = re.findall(r"^::: rl_eval\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted([*set(rl_eval.__all__) - {"__version__"}, "errors"])


def test_every_metric_has_an_entry() -> None:
    """In the table of ``docs/statistics.md``; those of agents are in ``docs/multi_agent.md``."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2, determinism_check=0)
    metrics = evaluate(config, lambda observations: np.zeros(len(observations), np.int64)).metrics
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "statistics.md").read_text(), re.MULTILINE)
    assert set(metrics) - set(re.findall(r"`(\w+)`", "\n".join(rows))) == set()
