"""RLlib's environments of several agents: the sums of a plain loop, in every layout, with RLlib's own rules."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ormsgpack")  # ray.rllib comes with ray; this comes with ray[rllib] alone.

import gymnasium as gym
import numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.examples.envs.classes.multi_agent.tic_tac_toe import TicTacToe

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.runners.multi_agent.inference import seat_seeds
from tests.refused import result_of


class Herd(MultiAgentEnv):
    """Three cars; one leaves early, one comes late, and the second acts in every second step only."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.possible_agents = ["car_2", "car_0", "car_1"]
        self.agents = list(self.possible_agents)
        body, moves = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), gym.spaces.Discrete(3)
        self.observation_spaces = dict.fromkeys(self.possible_agents, body)
        self.action_spaces = dict.fromkeys(self.possible_agents, moves)
        self.broken = (config or {}).get("broken", "")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.rng = np.random.default_rng(seed)
        self.time, self.gone = 0, set()
        self.length = int(self.rng.integers(3, 9))
        return {"car_0": self._look(), "car_1": self._look()}, {}

    def _look(self) -> Any:
        return self.rng.normal(size=2).astype(np.float32)

    def step(self, action_dict: dict[str, Any]) -> Any:
        self.time += 1
        rewards = {agent: float(action) + 0.1 * self.time for agent, action in action_dict.items()}
        over = self.time >= self.length
        heard = {"car_0"} if not self.gone else set()
        heard |= {"car_1"} if self.time % 2 == 0 else set()
        heard |= {"car_2"} if self.time >= 2 else set()
        terminateds = {"__all__": over}
        if self.time == 2:
            self.gone.add("car_0")
            terminateds["car_0"] = True
        truncateds = {"__all__": False} if self.broken != "no __all__" else {}
        return {agent: self._look() for agent in sorted(heard)}, rewards, terminateds, truncateds, {}


class Mover:
    """Moves at random."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        return noise.uniform(3).argmax(1), None


def shared(agent: str, spec: Any) -> str:
    return "odd" if agent == "car_1" else "even"


def config(**runners: Any) -> EvalConfig:
    made = EvalConfig().environment(Herd).runners(**runners)
    made.policy(policies={"odd": Mover(), "even": Mover()}, policy_mapping_fn=shared, deterministic=False)
    return made.evaluation(num_episodes=100, determinism_check=0)


def plain(seed: int) -> dict[str, float]:
    """RLlib's loop: whoever has an observation acts, until ``__all__``."""
    env = Herd()
    seats = dict(zip(env.possible_agents, seat_seeds(seed, 3), strict=True))
    steps, due = dict.fromkeys(seats, 0), dict.fromkeys(seats, 0.0)
    observations, _ = env.reset(seed=seed)
    terminateds = {"__all__": False}
    while not terminateds["__all__"]:
        actions = {}
        for agent in observations:
            if not terminateds.get(agent):
                noise = EpisodeNoise(np.array([seats[agent]]), np.array([steps[agent]]))
                actions[agent] = int(noise.uniform(3).argmax())
                steps[agent] += 1
        observations, rewards, terminateds, _, _ = env.step(actions)
        for agent, reward in rewards.items():
            due[agent] += reward
    return due


def bits(result: EvalResult) -> tuple[str, bytes]:
    assert result.status == "complete", result.reason
    return result.fingerprint, result.table.infos.tobytes()


def test_returns_are_those_of_rllibs_loop_in_every_layout() -> None:
    """100 of 100 episodes, with agents that come, leave and pause."""
    result = evaluate(config(num_envs_per_runner=16))
    assert bits(result) == bits(evaluate(config(num_envs_per_runner=3)))
    for record in result.episodes:
        rows = result.agents[result.agents["index"] == record.index]
        ours = dict(zip(rows["agent"].tolist(), rows["return"].tolist(), strict=True))
        assert ours == plain(record.seed)
        assert rows["agent"].tolist() == ["car_2", "car_0", "car_1"]
        assert rows["terminated"].all()


def test_rllibs_own_board_game_runs() -> None:
    """Illegal moves are the environment's to judge, for it has no masks."""

    def corner(observations: Any) -> Any:
        return np.argmin(np.abs(observations), axis=1)

    made = EvalConfig().environment(TicTacToe, env_kwargs={"config": {}}).runners(runner="multi_agent")
    result = evaluate(made.policy(corner).evaluation(num_episodes=8))
    assert result.status == "complete", result.reason
    assert set(result.agents["agent"]) == {"player1", "player2"}


def test_an_environment_without_all_is_told_so() -> None:
    """The key that ends an episode is required."""
    made = config().environment(Herd, env_kwargs={"config": {"broken": "no __all__"}}).evaluation(num_episodes=2)
    result = result_of(evaluate, made)
    assert result.status == "failed"
    assert "'__all__'" in result.faults[0].message


@pytest.mark.parametrize("seed", [0, 1])
def test_agents_that_rllib_has_from_a_set_are_seated_by_name(seed: int) -> None:
    """The order of a set is the process's, and must not decide who sits where."""
    from rl_eval.integrations.rllib.agents import RLlibAgents

    class Old(Herd):
        def __init__(self) -> None:
            super().__init__()
            self._agent_ids = {f"car_{number}" for number in range(30)}
            self.possible_agents = list(self._agent_ids)

    assert list(RLlibAgents(Old()).possible_agents) == sorted(Old().possible_agents)


class Verdict(MultiAgentEnv):
    """Car a acts once and wins; car b never acts, and its end with reward 0 is reported."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.possible_agents = ["a", "b"]
        self.agents = list(self.possible_agents)
        self.observation_spaces = dict.fromkeys("ab", gym.spaces.Discrete(2))
        self.action_spaces = dict.fromkeys("ab", gym.spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"a": 0}, {}

    def step(self, action_dict: dict[str, Any]) -> Any:
        ended = {"a": True, "b": True, "__all__": True}
        return {"a": 1, "b": 1}, {"a": 1.0, "b": 0.0}, ended, {"__all__": False}, {}


def test_an_agent_that_never_acts_has_a_row_if_its_end_is_reported() -> None:
    config = EvalConfig().environment(Verdict).policy(lambda observations: np.zeros(len(observations), np.int64))
    config = config.runners(runner="multi_agent").evaluation(num_episodes=1, determinism_check=0)
    rows = evaluate(config).agents[["agent", "return", "outcome"]]
    assert [tuple(row) for row in rows] == [("a", 1, 1), ("b", 0, -1)]
