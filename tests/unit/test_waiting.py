"""An evaluation that waits for its episodes says so, once."""

import gymnasium as gym
import numpy as np

from rl_eval import EvalConfig, evaluate
from rl_eval.execution import session
from rl_eval.execution.session import Waiting
from rl_eval.records.episode import PROGRESS, ROW, RunReport
from tests.refused import untold


class Long(gym.Env):
    """Its episodes take several reports of the runner."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps >= 20_000, False, {}


def report(finished, *steps):
    live = np.array([(7 + place, 1, step) for place, step in enumerate(steps)], PROGRESS)
    return RunReport(np.zeros(finished, ROW), np.zeros((finished, 0)), (), live, (), 1, 0.0, 0.0, 0.0, 0)


def test_the_time_counts_from_the_first_runner_and_from_each_finished_episode():
    waiting = Waiting(None)
    assert not waiting.reason(1000.0)  # The group reports that no runner is ready.
    waiting.joined(1000.0)
    waiting.joined(1020.0)
    assert not waiting.reason(1029.0)
    waiting.reported(report(1, 5, 40), 1029.0)
    assert not waiting.reason(1058.0)
    waiting.reported(report(0, 5, 41), 1058.0)
    assert not untold(waiting.reason(1059.5), 8, 41, "evaluation.max_episode_steps")
    assert not waiting.reason(2000.0)


def test_the_time_without_a_policy_does_not_count():
    waiting = Waiting(None)
    waiting.paused(900.0)
    assert not waiting.reason(1000.0)
    waiting.joined(1000.0)
    waiting.paused(1050.0)
    assert not waiting.reason(1079.0)
    assert waiting.reason(1081.0)


def test_a_long_episode_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(session, "_LONG_EPISODE", 1000)
    config = EvalConfig().environment(Long).evaluation(num_episodes=1, determinism_check=0)
    result = evaluate(config.runners(num_envs_per_runner=1), lambda batch: np.zeros(len(batch), int))
    assert result.status == "complete"
    said = [one.getMessage() for one in caplog.records if one.name == "rl_eval.execution.session"]
    assert len(said) == 1
    assert "evaluation.max_episode_steps" in said[0]
