"""The runner of several agents keeps the contract of runners, with one agent: then its rows are the reference's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym

from rl_eval import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.records.agents import agent_columns
from rl_eval.runners.environment import construct_env
from rl_eval.runners.metrics import scalar_columns
from rl_eval.runners.multi_agent.runner import MultiAgentEvalRunner
from rl_eval.runners.multi_agent.team import TeamEnv, Turn
from rl_eval.testing import EvalRunnerContract


class Solo:
    """A gymnasium environment as one of several agents, of which there is one."""

    possible_agents = ("solo",)

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env = env

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        return self.env.observation_space, self.env.action_space

    def reset(self, seed: int) -> Turn:
        observation, info = self.env.reset(seed=seed)
        return Turn({"solo": observation}, ("solo",), {}, {}, {}, {"solo": info}, over=False)

    def step(self, actions: Mapping[Any, Any]) -> Turn:
        observation, reward, terminated, truncated, info = self.env.step(actions["solo"])
        over = bool(terminated or truncated)
        flags = {"solo": terminated}, {"solo": truncated}
        return Turn(
            {"solo": observation}, () if over else ("solo",), {"solo": reward}, *flags, {"__common__": info}, over
        )

    def unread_rewards(self) -> Mapping[Any, Any]:
        return {}

    def close(self) -> None:
        self.env.close()


class SoloRunner(MultiAgentEvalRunner):  # type: ignore[misc]
    """Steps environments of one agent as the runner of several does."""

    def make_env(self, lane_index: int) -> Any:
        env = construct_env(self.settings.environment, self.runner_index, lane_index, 0)
        return TeamEnv(Solo(env), (), masks=False, evaluation=self.settings.evaluation)

    @classmethod
    def columns(cls, settings: EvalSettings) -> tuple[str, ...]:
        return (*scalar_columns(settings.evaluation), *agent_columns(Solo.possible_agents))


class TestMultiAgentRunner(EvalRunnerContract):
    """Without noise, which is a seat's own: a recurrent policy that takes the most likely action."""

    runner = SoloRunner
    config = EvalConfig().environment("CartPole-v1").policy("rl_eval.testing:make_gru").evaluation(max_episode_steps=25)
    num_episodes = 6
    lane_counts = (1, 3)

    # What observers see is by agent here: tests/unit/test_multi_agent.py compares it with the record.
    test_an_observer_sees_every_step_of_each_episode_in_order = None  # type: ignore[assignment]
    test_an_observer_sees_a_new_attempt_from_its_start = None  # type: ignore[assignment]
    test_what_an_observer_raises_is_its_own = None  # type: ignore[assignment]
