"""Policies on servers have the records of the policy in this process, in every layout and after every kill."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from tests.served import Flat, Recurrent, Served, Struck, Told

pytestmark = [pytest.mark.process, pytest.mark.slow]

EPISODES, STRUCK = 12, 5
POLICIES = {"flat": Flat, "recurrent": Recurrent}
Case = tuple[int, int, int, bool, bool, bool, str]
FACTORS: tuple[tuple[Any, ...], ...] = ((1, 8), (1, 2), (False, True), (False, True), (False, True), (*POLICIES,))
"""Lanes, servers, whether answers are late, whether a server is killed and restarted, ``deterministic``, policy."""


def config(policy: Any, deterministic: bool, **context: Any) -> EvalConfig:
    made = EvalConfig().environment(Struck, env_kwargs=context).policy(policy, deterministic=deterministic)
    return made.evaluation(num_episodes=EPISODES).fault_tolerance(max_runner_restarts=20)


@cache
def expected(policy: str, deterministic: bool) -> str:
    return evaluate(config(POLICIES[policy](), deterministic)).fingerprint


def check(case: Case) -> None:
    """Run an evaluation, and compare it with the policy in this process."""
    runners, lanes, servers, late, killed, deterministic, policy = case
    options = (
        "--deterministic" if deterministic else "--stochastic",
        "--set",
        f"policy.policy_kwargs.delay_s={late / 50}",
    )
    with ExitStack() as stack:
        processes = [Served(policy, *options) for _ in range(servers)]
        for process in processes:
            stack.callback(process.kill)
        context = {"pid": processes[0].process.pid, "struck": STRUCK} if killed else {}
        if killed:
            stack.callback(processes[0].start_again().join)
        addresses = ",".join(f"127.0.0.1:{process.port}" for process in processes)
        made = config(f"openpi://{addresses}", deterministic, **context)
        made.runners(num_runners=runners, num_envs_per_runner=lanes, num_cpus_per_runner=0.25)
        result = evaluate(made)
    assert (result.status, result.fingerprint) == ("complete", expected(policy, deterministic))
    assert not any(record.attempts > 1 for record in result.episodes)


STORY = """
import os, signal
import gymnasium as gym
import numpy as np

class Story(gym.Env):
    observation_space = gym.spaces.Dict(
        {"instruction": gym.spaces.Text(20), "place": gym.spaces.Box(-9.0, 9.0, (2,), np.float32)}
    )
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, server=0, folder=""):
        self.server, self.folder = server, folder

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.instruction = ("reach", "push the cup")[int(self.np_random.integers(2))]
        self.place, self.steps = self.np_random.normal(size=2), 0
        self.length = int(self.np_random.integers(20, 40))
        return self.seen(), {}

    def seen(self):
        return {"instruction": self.instruction, "place": self.place.astype(np.float32)}

    def once(self, name, count, pid):
        '''Kill a process, when this name has been called some times.'''
        if self.folder:
            open(os.path.join(self.folder, name), "a").write(".")
            if os.path.getsize(os.path.join(self.folder, name)) == count:
                os.kill(pid, signal.SIGKILL)

    def step(self, action):
        self.steps += 1
        if self.steps == 9:
            self.once("server", 10, self.server)
            self.once("runner", 22, os.getppid())
        self.place = self.place + 0.3 * np.asarray(action, np.float64) + 0.05 * self.np_random.normal(size=2)
        return self.seen(), -float(np.abs(self.place).sum()), self.steps >= self.length, False, {}
"""
CHUNK = {"execute": 3, "delay": 1}


def test_the_whole_story(ray_cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulators in another Python, a policy with instructions and chunks; a server, a runner and the run end."""
    (tmp_path / "story_world.py").write_text(STORY)
    monkeypatch.syspath_prepend(tmp_path)

    def story(policy: Any, **context: Any) -> EvalConfig:
        made = EvalConfig().environment("story_world:Story", env_kwargs=context).policy(policy, chunk=CHUNK)
        return made.evaluation(num_episodes=40).fault_tolerance(max_runner_restarts=20)

    whole = evaluate(story(Told())).fingerprint
    server = Served("told", "--set", "policy.chunk={execute: 3, delay: 1}", env="story_world:Story")
    again = server.start_again()
    marks = tmp_path / "marks"
    marks.mkdir()
    made = story(f"openpi://127.0.0.1:{server.port}", server=server.process.pid, folder=str(marks))
    made.environment(python=os.environ.get("RL_EVAL_TEST_PYTHON", sys.executable), python_path=[str(tmp_path)])
    made.runners(num_runners=2, num_envs_per_runner=4, num_cpus_per_runner=0.25)
    with EvalRunnerGroup(made) as group:
        handle = group.submit(output=tmp_path / "run")
        eventually(lambda: handle.progress().num_finished >= 24, 120)
        handle.cancel()
        first = handle.result(60)
    result = evaluate(made, output=tmp_path / "run")
    server.kill()
    again.join()
    assert (first.status, result.status, result.fingerprint) == ("partial", "complete", whole)
    assert {name: (marks / name).stat().st_size >= count for name, count in (("server", 10), ("runner", 22))} == {
        "server": True,
        "runner": True,
    }


def pairwise(factors: tuple[tuple[Any, ...], ...]) -> Iterator[tuple[Any, ...]]:
    """Yield cases in which each pair of values of two factors occurs."""
    rows = [*itertools.product(*factors)]
    random.Random(0).shuffle(rows)
    pairs = [{*itertools.combinations(enumerate(row), 2)} for row in rows]
    left = set().union(*pairs)
    while left:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & left))
        left -= pairs[best]
        yield rows[best]


@pytest.mark.parametrize("case", [*itertools.product((0,), *FACTORS)], ids=str)
def test_in_this_process(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [*pairwise(((1, 2, 4), *FACTORS))], ids=str)
def test_on_runners(ray_cluster: str, case: Case) -> None:
    check(case)
