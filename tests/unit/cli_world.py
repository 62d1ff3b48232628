"""A working folder, a toy environment and the ways to run the command line that its tests share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml
from typer.testing import CliRunner

import rl_eval
from rl_eval.cli import app

TOYS = '''
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class Count(gym.Env):
    """Ten to nineteen steps; a step is worth 1 if action 1 is taken.

    Steps take ``pause_s``, if a file ``slow`` is named while it exists; the fourth episode hangs while ``hang`` does.
    """

    def __init__(self, pause_s=0.0, flag=None, fail=False, hang=None, slow=None):
        self.hang, self.slow = hang, slow
        self.observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.pause_s, self.flag, self.fail, self.episodes = pause_s, flag, fail, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        if self.flag and self.episodes == 3:
            Path(self.flag).touch()
        self.length, self.steps = int(self.np_random.integers(10, 20)), 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if self.pause_s and (self.slow is None or Path(self.slow).exists()):
            time.sleep(self.pause_s)
        if self.fail:
            raise RuntimeError("the simulator broke")
        self.steps += 1
        while self.hang and self.episodes == 4 and Path(self.hang).exists():
            Path("hanging").touch()
            time.sleep(0.01)
        return np.full(1, self.steps, np.float32), float(action), self.steps >= self.length, False, {}


def count(context):
    return Count(**context)


class Unstable(Count):
    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        self.length = int(np.random.default_rng().integers(10, 1000))
        return observation, info


def unstable(context):
    return Unstable(**context)


def ones():
    return lambda observations: np.ones(len(observations), np.int64)


def alternate():
    return lambda observations: (observations[:, 0] % 2).astype(np.int64)


def clumsy():
    return lambda observations: np.where(observations[:, 0] > 14, 7, 1)


def broken():
    raise RuntimeError("a bug of the factory")
'''

CONFIG = {
    "environment": {"env": "cli_toys:count"},
    "policy": {"policy": "cli_toys:ones"},
    "runners": {"num_runners": 0, "num_envs_per_runner": 4},
    "evaluation": {"num_episodes": 30, "seed": 0},
}


def make_folder(tmp_path, monkeypatch):
    """Go to a working folder with a config and the module that it names."""
    (tmp_path / "cli_toys.py").write_text(TOYS)
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in (
        "cli_toys",
        "watch_toys",
        "watch_factories",
    ):  # Another test's module of this name would be found first.
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def call(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def sets(*assignments):
    """Return options that set keys."""
    return [word for assignment in assignments for word in ("--set", assignment)]


def faulty(attempts, *rates):
    """Return options of episodes whose first, second, ... attempts fail at these rates."""
    kwargs = json.dumps({"env": "two_length", "attempt_rates": rates})
    limit = f"fault_tolerance.max_attempts_per_episode={attempts}"
    return sets("environment.env=rl_eval.testing:faulty", f"environment.env_kwargs={kwargs}", limit)


def failed(result):
    """Return the indices of the episodes that failed."""
    return np.flatnonzero(result.table.filled & ~result.table.completed).tolist()


def printed(command, text):
    """Return what a command printed with ``--json``, which has the shape that the docs say."""
    import jsonschema

    shapes = yaml.safe_load((Path(__file__).parents[2] / "docs" / "json_schemas.yaml").read_text())
    found = json.loads(text)
    jsonschema.validate(found, shapes[command])
    return found


def environment():
    """Variables of a process that finds this package, and the user's modules in the test's folder."""
    paths = os.pathsep.join([str(Path(rl_eval.__file__).parents[1]), str(Path.cwd())])
    return {**os.environ, "PYTHONPATH": paths, "TERM": "xterm", "COLUMNS": "80"}


def start(*args, **streams):
    command = [sys.executable, "-m", "rl_eval", *map(str, args)]
    return subprocess.Popen(command, env=environment(), **streams)


def call_alone(*args):
    """Run a command in a process of its own, where no other test has imported anything."""
    process = start(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
