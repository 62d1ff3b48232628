"""The page on policies: each line of its tables evaluates a policy of the real library.

A module ``lines_*.py`` beside this one has ``BEFORE``: for each line, a function that makes the files in the current
folder and returns the names that the line uses. It skips the line where its library is not installed.
"""

import functools
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_eval import evaluate, load
from rl_eval.cli import app
from tests.unit.pages_world import DOCS, pages

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # In an export of torch.
PAGE = DOCS / "your_policy.md"
LINES = re.findall(r"\| `((?:rl-eval|evaluate).*)` \|$", PAGE.read_text(), re.MULTILINE)
MODULES = [import_module(path.stem) for path in sorted(Path(__file__).parent.glob("lines_*.py"))]
BEFORE = {line: make for module in MODULES for line, make in module.BEFORE.items()}
EPISODES = 2
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future", "User")]
RAY = [line for line in LINES if re.search(r" checkpoint | ppo\)", line)]
"""Lines of RLlib, which needs Ray to make what they evaluate."""


def test_every_line_is_made_ready_once():
    assert sorted(LINES) == sorted(line for module in MODULES for line in module.BEFORE)
    assert len(set(LINES)) == len(LINES)


@pytest.mark.parametrize("line", [line for line in LINES if line not in RAY])
def test_a_line_evaluates(reader, line):
    evaluates(line)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("line", RAY)
def test_a_line_of_rllib_evaluates(reader, line):
    evaluates(line)


def evaluates(line):
    names = BEFORE[line]()
    if line.startswith("rl-eval "):
        done = CliRunner().invoke(app, [*shlex.split(line)[1:], "-n", str(EPISODES)])
        assert done.exit_code == 0, done.output
        result = load("runs/latest")
    else:
        result = eval(line, {"evaluate": functools.partial(evaluate, num_episodes=EPISODES), **names})
    assert (result.status, len(result.table.rows)) == ("complete", EPISODES)
    assert not [note for note in result.notes if "weights at random" in note]


@pytest.mark.parametrize("page", pages("tests/learners/test_your_policy.py"), ids=lambda page: page.stem)
def test_the_page_can_be_followed(reader, page):
    for library in ("onnxruntime", "skrl", "rsl_rl", "rl_games", "d3rlpy", "imitation"):
        pytest.importorskip(library)
    reader.follow(page)
