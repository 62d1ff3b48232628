"""The table of published environments tells "same", "flagged" and "silent" apart."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2]))  # The benchmarks are not part of the package.
from benchmarks import environments, table
from benchmarks.contenders import environment

PARAMS = {
    "module": "",
    "wrap": "",
    "kwargs": {},
    "steps": 20,
    "episodes": 24,
    "layouts": [[0, 1], [0, 8]],
    "address": "",
}


class Wears(gym.Env):
    """Its rewards depend on the episodes that it has run before."""

    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def __init__(self):
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), float(self.resets), self.steps >= 3, False, {}


def evaluated(name):
    return {"label": name, "status": "ok", **environment.environment({**PARAMS, "id": name})}


@pytest.mark.process
def test_a_function_of_its_seed_is_the_same_everywhere():
    (row,) = environments.measure(only="^CartPole", quick=True, timeout_s=120.0, progress=lambda text: None)
    assert environments.verdict(row) == "same", row
    assert len(row["layouts"]) == 2
    assert row["layouts"][0]["steps"] > 24
    assert row["cured"] is None


def test_an_environment_that_remembers_is_flagged_and_cured(monkeypatch):
    monkeypatch.setitem(environment.ADAPTERS, "wears", Wears)
    row = evaluated("wears")
    assert environments.verdict(row) == "flagged", row
    assert row["cured"] is True
    assert [one["differ"] for one in row["layouts"]] == [23, 16]
    assert row["fresh"][0]["differ"] == 0
    (shown,) = table.environments([row])
    assert shown.caption == "1 flagged"
    assert "(23 differ)" in next(shown.columns[2].cells)


def test_a_mismatch_is_silent_when_two_results_differ_and_neither_says_so():
    def row(*results, fresh="a"):
        layouts = [{"fingerprint": name, "passed": passed, "status": "complete"} for name, passed in results]
        return {"status": "ok", "layouts": layouts, "fresh": [{**layouts[0], "fingerprint": fresh, "passed": True}]}

    assert environments.verdict(row(("a", True), ("a", True))) == "same"
    assert environments.verdict(row(("a", None), ("b", False))) == "flagged"
    assert environments.verdict(row(("a", True), ("b", None))) == "SILENT MISMATCH"
    assert environments.verdict(row(("b", True), ("b", True))) == "SILENT MISMATCH"
    assert environments.verdict({"status": "timeout", "error": "no result after 1 s"}) == "timeout"
