"""The docs: what they show runs, what they link to exists, and nothing that can be looked up is missing."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import rl_eval
from rl_eval import EvalConfig, evaluate
from rl_eval.backends.pickling import pickled_settings
from rl_eval.errors import ConfigError
from tests.refused import refused
from tests.unit.pages_world import (
    DOCS,
    FOLLOWED,
    GUIDES,
    PAGES,
    ROOT,
    Reader,
    anchors,
    blocks,
    commands,
    has_code,
    is_said,
    links,
    pages,
    templates,
)

HERE = "tests/unit/test_docs_site.py"
PROGRAMS = {"tune_gain.py": "ray.tune", "optuna_gain.py": "optuna"}
"""Files of the how-to that are run by themselves, and what they need."""


# ------------------------------------------------------------------------------ what is shown runs


def cleanrl() -> dict[str, Any]:
    """A script of CleanRL, and what it saved."""
    Path("ppo.py").write_text(AGENT)
    import ppo
    import torch

    agent = ppo.Agent(gym.make_vec("CartPole-v1", num_envs=2))
    torch.save(agent.state_dict(), "ppo.cleanrl_model")
    return {"agent": agent, "q_network": torch.nn.Linear(4, 2)}


def log() -> dict[str, Any]:
    """A log in ``DIR``."""
    evaluate(cartpole(), balance, output="DIR")
    return {}


def package() -> dict[str, Any]:
    """A package with what one would test."""
    Path("my_pkg").mkdir()
    for name, text in (
        ("__init__", ""),
        ("envs", ENVS),
        ("policies", POLICIES),
        ("runners", RUNNERS),
        ("simulators", SIMULATORS),
    ):
        Path(f"my_pkg/{name}.py").write_text(text)
    return {}


AGENT = """
from torch import nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def get_action_and_value(self, x, action=None):
        drawn = Categorical(logits=self.actor(x))
        action = drawn.sample() if action is None else action
        return action, drawn.log_prob(action), drawn.entropy(), self.critic(x)
"""
"""The part of a script of CleanRL that is the agent."""
ENVS = """
import gymnasium as gym


def make_env():
    return gym.make("CartPole-v1", max_episode_steps=30)
"""
POLICIES = """
import numpy as np
from rl_eval.testing import make_gru as make_policy


def my_policy(observations):
    return (observations[:, 2] > 0).astype(np.int64)
"""
SIMULATORS = """
import gymnasium as gym


def make_simulator(num_envs):
    return gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")
"""
RUNNERS = "from rl_eval import VectorEvalRunner as MyRunner"


def cartpole() -> EvalConfig:
    return EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2)


def balance(observations: Any) -> Any:
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


BEFORE: dict[str, Callable[[], dict[str, Any]]] = {
    "faults": lambda: {"config": cartpole().policy(balance)},
    "howto": cleanrl,
    "log": log,
    "testing": package,
}
"""What a page takes for granted: it makes the files, and returns the names."""


@pytest.mark.parametrize("page", pages(HERE), ids=lambda page: page.stem)
def test_a_page_can_be_followed(reader: Reader, page: Path) -> None:
    """All its Python runs, and every command prints what is shown and ends with the code that is shown."""
    reader.names |= BEFORE.get(page.stem, dict)()
    reader.follow(page)


def test_no_code_is_left_out() -> None:
    """Each page that has Python or commands is followed by one file of tests, and a reader sees all its blocks."""
    followed = Counter(page for test in (HERE, *FOLLOWED) for page in pages(test))
    assert followed == Counter({*filter(has_code, PAGES), *GUIDES})
    for page in followed:
        opened = re.findall(r"^\s*(?:```|~~~)(?=.)", page.read_text(), re.MULTILINE)
        assert len(opened) == sum(bool(block.language) for block in blocks(page)), f"{page.name} has another fence"
    for page in PAGES:
        assert all(block.language for block in blocks(page)), f"{page.name} has a block without a language"
    for test in FOLLOWED:
        assert "reader.follow(page)" in (ROOT / test).read_text()


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
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A program starts Ray itself, even if another test has a cluster on this machine.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "RAY_ADDRESS": "local"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    expected = shown[f"python {program}"].splitlines()[-1].replace("...", "")
    assert done.stdout.splitlines()[-1].startswith(expected.rstrip("}"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, from ``mkdocs build --strict``, which fails at a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder to a browser, and yield the address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.process
def test_no_page_of_the_site_loads_anything_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(r'<(?:link|script|img)\b[^>]*?(?:href|src)="(https?://[^"]*)', page.read_text())
        assert loaded == [], page.name


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no program is called chromium here")
def test_the_search_finds_the_page_that_answers(site: Path) -> None:
    """The first result of what a user types is in a guide, and not in a reference that only has the words."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    wanted = {
        "max episode steps": "howto.html#max-episode-steps",
        "W%26B": "training.html",
        "exception in env.step": "troubleshooting.html#an-exception-in-envstep-or-in-reset",
    }
    with playwright.sync_playwright() as started, served(site) as address:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for query, place in wanted.items():
            page = browser.new_page()
            page.goto(f"{address}/index.html?q={query}")
            page.wait_for_selector(".md-search-result__item a", state="attached")
            found = page.locator(".md-search-result__item").first.locator("a")
            addresses = [link.get_attribute("href") for link in found.all()]
            assert any(place in str(address) for address in addresses), f"{query}: {addresses}"
        browser.close()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no program is called chromium here")
def test_a_page_from_a_disk_says_that_it_cannot_be_searched(site: Path) -> None:
    """Over HTTP, the search works, and nothing says so."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started, served(site) as address:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for place, notes in ((site.as_uri(), 1), (address, 0)):
            page = browser.new_page()
            page.goto(f"{place}/index.html")
            page.wait_for_load_state()
            assert page.get_by_text("run mkdocs serve").count() == notes
        browser.close()


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
    with refused(ConfigError, "environment.env") as unpicklable:
        pickled_settings(EvalConfig().environment(lambda: lock).build(), None)
    kind = type("MyEnv", (type(gym.make("CartPole-v1").unwrapped),), {})
    with refused(ConfigError, "env") as live:
        evaluate(kind(), "random", num_episodes=1)
    assert evaluate(gym.make("CartPole-v1"), "random", num_episodes=1).status == "complete"
    assert f"error: {unpicklable.value}\n" in page
    assert f"`{live.value.problem}`. {live.value.fix}" in page.replace("`lambda: MyEnv()`", "lambda: MyEnv()")


# ------------------------------------------------------------------------------ links


def test_the_navigation_shows_few_pages_to_users() -> None:
    """Internals, benchmarks and decisions are in sections of their own, and the README leads to few pages."""
    text = (ROOT / "mkdocs.yml").read_text()
    shown = text[text.index("\nnav:\n") : text.index("\n  - Internals:\n")]
    assert 10 < len(re.findall(r"\b\w+\.md$", shown, re.MULTILINE)) <= 23
    assert 4 < len(re.findall(r"\]\(", (ROOT / "README.md").read_text().partition("\n## Where next\n")[2])) <= 12


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


def entries() -> set[str]:
    """Return what ``docs/api.md`` has entries of."""
    return set(re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE))


def test_every_public_name_has_an_entry() -> None:
    """Add ``::: rl_eval.NAME`` to ``docs/api.md`` if this fails."""
    listed = {entry for entry in entries() if entry.count(".") == 1}
    assert listed == {f"rl_eval.{name}" for name in {*rl_eval.__all__, "errors"} - {"__version__"}}


@pytest.mark.parametrize("package", ["ope", "testing", "training.loggers"])
def test_every_name_of_a_package_has_an_entry(package: str) -> None:
    """Add ``::: rl_eval.PACKAGE.NAME`` to ``docs/api.md`` if this fails, or the next one."""
    names = {f"rl_eval.{package}.{name}" for name in import_module(f"rl_eval.{package}").__all__}
    assert names - entries() == set()


def test_every_name_that_a_page_gives_has_an_entry() -> None:
    """What a reader imports, or names in a configuration, can be looked up."""
    known, given = entries(), set()
    for text in (page.read_text() for page in PAGES):
        given.update(re.findall(r"\b(rl_eval[\w.]*):([a-zA-Z]\w*)", text))
        for module, names in re.findall(r"\bfrom (rl_eval[\w.]*) import \(?([\w, ]+)", text):
            given.update((module, name) for name in re.findall(r"\w+", names))
    assert len(given) > 40
    assert [
        f"{module}.{name}" for module, name in sorted(given) if not {f"rl_eval.{name}", f"{module}.{name}"} & known
    ] == []


def test_every_metric_has_an_entry() -> None:
    """In the table of ``docs/statistics.md``; those of agents are in ``docs/multi_agent.md``."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2, determinism_check=0)
    metrics = evaluate(config, lambda observations: np.zeros(len(observations), np.int64)).metrics
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "statistics.md").read_text(), re.MULTILINE)
    assert set(metrics) - set(re.findall(r"`(\w+)`", "\n".join(rows))) == set()
