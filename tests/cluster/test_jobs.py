"""``ray job submit`` and ``rl-eval run --address`` on a real cluster, with token authentication and without."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import Machine, free_ports, machine, start_options, wait_until

from rl_eval.errors import EvalError
from rl_eval.log import read_log

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODES = ["disabled", "token"]

ENVS = '''
import time

import gymnasium as gym


class Slow(gym.Wrapper):
    """CartPole that takes its time."""

    def __init__(self, pause_s=0.0):
        super().__init__(gym.make("CartPole-v1"))
        self.pause_s = pause_s

    def step(self, action):
        time.sleep(self.pause_s)
        return self.env.step(action)


def register():
    """What a setup hook calls in every worker."""
    gym.register("OnlyHere-v0", entry_point=Slow)
'''

POLICIES = '''
import numpy as np


def lean():
    """Push to where the pole leans."""
    return lambda observations: (observations[:, 2] > 0).astype(np.int64)
'''

EPISODES = 60


def config(package: str, env: str) -> dict[str, Any]:
    """An evaluation whose environment and policy are nowhere on the machine's path."""
    return {
        "environment": {"env": env},
        "policy": {"policy": f"{package}policies:lean"},
        "runners": {"num_runners": 2, "num_envs_per_runner": 4},
        "evaluation": {"num_episodes": EPISODES},
    }


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and a folder in which a user works."""

    machine: Machine
    address: str
    dashboard: str
    project: Path

    def job(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Call ``ray job``."""
        return self.machine.run("ray", "job", command, "--address", self.dashboard, *words, cwd=self.project)

    def submit(self, *words: str) -> str:
        """Submit a job and wait for its success; return its output."""
        done = self.job("submit", *words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def log_of(self, job: str) -> str:
        """Return what Ray noted about a job."""
        (path,) = (self.machine.folder / "ray").glob(f"session_2*/logs/jobs/supervisor-{job}.log")
        return path.read_text()

    def expected(self) -> str:
        """Return the fingerprint of the evaluation without any cluster."""
        folder = self.machine.folder / "expected"
        if not folder.exists():
            command = ("rl-eval", "run", "config.yaml", "--num-runners=0", "--output", folder)
            done = self.machine.run(*command, cwd=self.project)
            assert done.returncode == 0, done.stdout
        return fingerprint(folder)


@pytest.fixture(scope="module", params=MODES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Start a head node with a dashboard on free ports."""
    token = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4} if request.param == "token" else {}
    with machine(RAY_AUTH_MODE=request.param, **token) as made:
        project, modules = made.folder / "project", made.folder / "modules" / "elsewhere"
        for folder in (project, modules):
            folder.mkdir(parents=True)
            (folder / "envs.py").write_text(ENVS)
            (folder / "policies.py").write_text(POLICIES)
        (modules / "__init__.py").touch()
        (project / "config.yaml").write_text(yaml.safe_dump(config("", "envs:Slow")))
        (project / "elsewhere.yaml").write_text(yaml.safe_dump(config("elsewhere.", "OnlyHere-v0")))
        ports = free_ports(4)
        started = made.run("ray", "start", "--head", *start_options(ports), "--temp-dir", made.folder / "ray")
        assert started.returncode == 0, started.stdout
        cluster = Cluster(made, f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}", project)
        wait_until(lambda: cluster.job("list").returncode == 0, "the dashboard answers")
        yield cluster


def fingerprint(folder: Path) -> str:
    """Read it from the files of a complete result."""
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "complete"
    return str(result["fingerprint"])


def rows(log_dir: Path) -> int:
    """Count the episodes of a log that may be about to come into being."""
    try:
        return len(read_log(log_dir).rows)
    except EvalError:
        return 0


def test_a_stopped_job_continues_where_it_was(cluster: Cluster) -> None:
    """``ray job stop`` leaves time to save; the same command again runs the rest, with the same fingerprint."""
    log_dir = cluster.machine.folder / "run"
    command = (
        "rl-eval",
        "run",
        "config.yaml",
        "--output",
        str(log_dir),
        "--set",
        "environment.env_kwargs.pause_s=0.01",
    )
    cluster.submit("--working-dir", ".", "--submission-id", "first", "--no-wait", "--", *command)
    wait_until(lambda: rows(log_dir) >= EPISODES // 4, "a quarter of the episodes")
    assert "was stopped" in cluster.job("stop", "first").stdout
    # The last thing that a driver does to its log; Ray's SIGKILL comes three seconds after its SIGTERM.
    assert json.loads((log_dir / "owners" / "000001").read_text())["released"]
    saved = read_log(log_dir).rows
    assert EPISODES // 4 <= len(saved) < EPISODES

    cluster.submit("--working-dir", ".", "--", *command)
    assert fingerprint(log_dir) == cluster.expected()
    log = read_log(log_dir)
    assert sorted(log.rows["index"]) == list(range(EPISODES))
    assert log.rows[: len(saved)].tobytes() == saved.tobytes()
    assert log.mismatches == ()


def test_py_modules_and_a_setup_hook_of_the_job(cluster: Cluster) -> None:
    """Runners inherit the job's runtime environment, although they have variables of their own."""
    runtime_env = {"py_modules": ["../modules/elsewhere"], "worker_process_setup_hook": "elsewhere.envs.register"}
    output = cluster.machine.folder / "of_job"
    command = ("rl-eval", "run", "elsewhere.yaml", "--output", str(output))
    cluster.submit("--working-dir", ".", "--runtime-env-json", json.dumps(runtime_env), "--", *command)
    assert fingerprint(output) == cluster.expected()


def test_py_modules_and_a_setup_hook_of_the_config(cluster: Cluster) -> None:
    """The same in ``runners.runtime_env``, from a process that is no job."""
    runtime_env = "{py_modules: [../modules/elsewhere], worker_process_setup_hook: elsewhere.envs.register}"
    output = cluster.machine.folder / "of_config"
    done = cluster.machine.run(
        *("rl-eval", "run", "elsewhere.yaml", "--output", output, "--address", cluster.address),
        *("--set", f"runners.runtime_env={runtime_env}"),
        cwd=cluster.project,
    )
    assert done.returncode == 0, done.stdout
    assert fingerprint(output) == cluster.expected()


def test_two_runtime_environments_that_contradict_each_other(cluster: Cluster) -> None:
    """The job's and the config's hook cannot both be; the job says so and fails with the code of a usage error."""
    hooks = [{"worker_process_setup_hook": f"envs.{name}"} for name in ("register", "other")]
    words = ("--working-dir", ".", "--runtime-env-json", json.dumps(hooks[0]))
    command = ("rl-eval", "run", "config.yaml", "--set", f"runners.runtime_env={json.dumps(hooks[1])}")
    done = cluster.job("submit", *words, "--", *command)
    assert done.returncode != 0
    assert "runners.runtime_env" in done.stdout
    assert "exit code 2" in done.stdout


@pytest.mark.parametrize("cluster", MODES[1:], indirect=True)
def test_an_address_that_asks_for_a_token(cluster: Cluster) -> None:
    """Without it no evaluation starts, and the message tells what is missing."""
    command = ("rl-eval", "run", "config.yaml", "--address", cluster.address)
    done = cluster.machine.run(*command, cwd=cluster.project, RAY_AUTH_MODE="disabled")
    assert done.returncode == 4, done.stdout
    assert "RAY_AUTH_TOKEN" in done.stdout
