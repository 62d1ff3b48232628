"""Secrets in the environment of runners: they arrive there, and reach no file and no line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rl_eval.results.loading import load
from tests.planted import leaking_files, leaks, secret
from tests.unit.cli_world import call, make_folder

pytestmark = pytest.mark.usefixtures("ray_cluster")

TOYS = '''
import os

from cli_toys import Count


class Connected(Count):
    """Breaks once per episode, and tells what it was connected to."""

    def begin_episode(self, index, seed, attempt):
        self.breaks = attempt == 1

    def step(self, action):
        if self.breaks:
            raise ConnectionError(f"{os.environ['DATABASE']} with {os.environ['HF_TOKEN']}")
        return super().step(action)


def connected(context):
    assert os.environ["OMP_NUM_THREADS"] == "1"
    return Connected()


def broken(context):
    raise ConnectionError(f"no connection to {os.environ['DATABASE']}")
'''

VARIABLES = {"DATABASE": f"db://me:{secret('uri')}@there", "HF_TOKEN": secret("token"), "OMP_NUM_THREADS": "1"}

CONFIG = {
    "environment": {"env": "planted_toys:connected"},
    "policy": {"policy": "cli_toys:ones"},
    "runners": {"num_runners": 1, "num_envs_per_runner": 2, "runtime_env": {"env_vars": VARIABLES}},
    "evaluation": {"num_episodes": 4},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_folder(tmp_path, monkeypatch)
    (tmp_path / "planted_toys.py").write_text(TOYS)
    (tmp_path / "planted.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


@pytest.fixture
def said(folder: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command whose runners find the folder's modules; return what it printed, which holds no secret."""
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))

    def run(command: str, *args: str) -> str:
        found = () if command == "show" else ("--set", f"runners.runtime_env.env_vars.PYTHONPATH={paths}")
        outcome = call(command, *args, *found)
        printed = outcome.output + "".join(capfd.readouterr())
        assert not leaks(printed), args
        return f"{outcome.exit_code} {printed}"

    return run


DATABASE = ("--set", f"runners.runtime_env.env_vars.DATABASE={secret('argument')}")


def test_variables_of_runners_reach_no_file_and_no_line(folder: Path, said: Callable[..., str]) -> None:
    assert said("run", "planted.yaml", "--output", "runs", *DATABASE).startswith("0 ")
    assert "ConnectionError: *** with ***" in said("show", "runs", "--faults")

    assert list(leaking_files(folder)) == []
    kept = load("runs").provenance["config"]["runners"]["runtime_env"]["env_vars"]
    assert (kept["DATABASE"], kept["HF_TOKEN"], kept["OMP_NUM_THREADS"]) == ("***", "***", "1")


def test_an_environment_that_cannot_be_built_tells_no_variable(folder: Path, said: Callable[..., str]) -> None:
    assert "no connection to" in said("run", "planted.yaml", "--set", "environment.env=planted_toys:broken")
    assert list(leaking_files(folder)) == []
