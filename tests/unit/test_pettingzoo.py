"""PettingZoo's own environments: the returns of its own loops, its own seeds, its masks and its rules."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import mpe2.simple_tag_v3
import numpy as np
import pettingzoo
import pytest

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.runners.multi_agent.inference import seat_seeds
from tests.refused import refused

TRUTH = {"win": 0.585, "draw": 0.127, "loss": 0.288}
"""What becomes of the first seat when both play tic-tac-toe at random."""


class RandomMover:
    """Moves at random, as the noise of its seat says, among what the mask allows."""

    def __init__(self, moves: int) -> None:
        self.moves = moves

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        drawn = noise.uniform(self.moves)
        if isinstance(observations, dict):
            drawn = np.where(observations["action_mask"] > 0, drawn, -1.0)
        return drawn.argmax(1), None


def tictactoe_config(num_episodes: int = 40, **runners: Any) -> EvalConfig:
    config = EvalConfig().environment("aec:classic/tictactoe-v3").runners(**runners)
    policies = {"player_1": RandomMover(9), "player_2": RandomMover(9)}
    config.policy(policies=policies, deterministic=False)
    return config.evaluation(num_episodes=num_episodes, determinism_check=0)


def tag_config(num_episodes: int = 25, **runners: Any) -> EvalConfig:
    kwargs = {"num_good": 2, "num_adversaries": 3, "num_obstacles": 1, "max_cycles": 20}
    config = EvalConfig().environment("mpe2.simple_tag_v3:parallel_env", env_kwargs=kwargs).runners(**runners)
    policies = {"pursuer": RandomMover(5), "evader": RandomMover(5)}
    config.policy(policies=policies, policy_mapping_fn=by_role, deterministic=False)
    return config.evaluation(num_episodes=num_episodes, determinism_check=0)


def by_role(agent: str, spec: Any) -> str:
    return "pursuer" if agent.startswith("adversary") else "evader"


def returns_of(result: EvalResult, index: int) -> dict[str, float]:
    rows = result.agents[result.agents["index"] == index]
    return dict(zip(rows["agent"].tolist(), rows["return"].tolist(), strict=True))


def moves(space: gym.Space[Any], seed: int, seat: int, step: int, mask: Any = None) -> int:
    """What the mover does: its noise is a function of the episode's seed, its seat and its own steps."""
    drawn = EpisodeNoise(np.array([seat_seeds(seed, seat + 1)[seat]]), np.array([step])).uniform(int(space.n))[0]
    return int((drawn if mask is None else np.where(mask > 0, drawn, -1.0)).argmax())


def test_a_parallel_environment_gives_the_returns_of_its_own_loop() -> None:
    """Pursuit of two by three in mpe2: 100 of 100 episodes, agent by agent, in batches of all."""
    result = evaluate(tag_config(100, num_envs_per_runner=16))
    assert result.status == "complete"
    env = mpe2.simple_tag_v3.parallel_env(num_good=2, num_adversaries=3, num_obstacles=1, max_cycles=20)
    for record in result.episodes:
        env.reset(seed=record.seed)
        due, step = dict.fromkeys(env.possible_agents, 0.0), 0
        while env.agents:
            seats = enumerate(env.possible_agents)
            actions = {agent: moves(env.action_space(agent), record.seed, seat, step) for seat, agent in seats}
            for agent, reward in env.step(actions)[1].items():
                due[agent] += reward
            step += 1
        assert returns_of(result, record.index) == due
        assert (record.length, record.truncated, record.terminated) == (step, True, False)


def test_a_board_game_gives_the_returns_of_its_own_loop() -> None:
    """Tic-tac-toe through ``agent_iter`` and ``last``: 100 of 100 games."""
    result = evaluate(tictactoe_config(100, num_envs_per_runner=16))
    env = pettingzoo.make("aec", "classic/tictactoe-v3")
    for record in result.episodes:
        env.reset(seed=record.seed)
        due, steps = dict.fromkeys(env.possible_agents, 0.0), dict.fromkeys(env.possible_agents, 0)
        for agent in env.agent_iter():
            observation, reward, terminated, truncated, _ = env.last()
            due[agent] += reward
            seat = env.possible_agents.index(agent)
            over = terminated or truncated
            mask = observation["action_mask"]
            env.step(None if over else moves(env.action_space(agent), record.seed, seat, steps[agent], mask))
            steps[agent] += not over
        assert returns_of(result, record.index) == due
        assert record.length == sum(steps.values())


def test_two_random_players_win_draw_and_lose_as_often_as_they_should() -> None:
    """The first seat of tic-tac-toe, within three standard errors over 1,000 games; draws stay in the count."""
    check_rates(1000)


@pytest.mark.slow
def test_two_random_players_over_4000_games() -> None:
    """The same with half the error."""
    check_rates(4000)


def check_rates(games: int) -> None:
    result = evaluate(tictactoe_config(games, num_envs_per_runner=32))
    metrics = result.metrics
    for name, due in TRUTH.items():
        assert abs(metrics[f"{name}_rate/player_1"] - due) <= 3 * (due * (1 - due) / games) ** 0.5, name
    assert metrics["win_rate/player_1"] == metrics["loss_rate/player_2"]
    assert metrics["draw_rate/player_1"] == metrics["draw_rate/player_2"]
    assert sum(metrics[f"{name}_rate/player_1"] for name in TRUTH) == pytest.approx(1.0, abs=1e-12)


def test_images_of_a_visual_environment_reach_the_policies() -> None:
    """Two paddles see pixels; one policy plays both."""

    def look(observations: Any) -> Any:
        return (observations.sum((1, 2, 3)) % 3).astype(np.int64)

    kwargs = {"max_cycles": 4, "render_mode": "rgb_array"}
    config = EvalConfig().environment("parallel:butterfly/cooperative_pong-v6", env_kwargs=kwargs)
    config.policy(look).evaluation(num_episodes=3, max_episode_steps=4, determinism_check=0)
    results = [evaluate(config.runners(runner="multi_agent", num_envs_per_runner=n)) for n in (1, 3)]
    assert results[0].status == "complete", results[0].reason
    assert results[0].fingerprint == results[1].fingerprint


class Even(pettingzoo.ParallelEnv[str, int, int]):
    """Each step pays 1 to a and 10 to b, without an end."""

    metadata = {"name": "even"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012
    render_mode = None

    def observation_space(self, agent: str) -> gym.Space[int]:
        return gym.spaces.Discrete(2)

    def action_space(self, agent: str) -> gym.Space[int]:
        return gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["a", "b"]
        return {"a": 0, "b": 0}, {"a": {}, "b": {}}

    def step(self, actions: Any) -> Any:
        no = {"a": False, "b": False}
        return {"a": 0, "b": 0}, {"a": 1.0, "b": 10.0}, no, no, {"a": {}, "b": {}}


class Tenth(pettingzoo.utils.BaseWrapper[str, int, int]):
    """Wrapper that scales rewards, as SuperSuit's do."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed=seed, options=options)
        self._cumulative_rewards = dict.fromkeys(self.env.agents, 0.0)

    def step(self, action: int | None) -> None:
        agent = self.env.agent_selection
        super().step(action)
        self.rewards = {agent: 0.1 * reward for agent, reward in self.env.rewards.items()}
        self._cumulative_rewards[agent] = 0.0
        self._accumulate_rewards()

    def last(self, observe: bool = True) -> Any:
        observation, _, *others = self.env.last(observe)
        return observation, self._cumulative_rewards[self.agent_selection], *others


class Paying(pettingzoo.AECEnv[str, int, int]):
    """Agents take turns without an end; each move pays 1 to a and 10 to b."""

    metadata = {"name": "paying"}  # noqa: RUF012
    possible_agents = ["a", "b"]  # noqa: RUF012
    render_mode = None
    observation_space = action_space = Even.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.agent_selection = ["a", "b"], "a"
        self.rewards, self._cumulative_rewards = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
        self.terminations = self.truncations = {"a": False, "b": False}
        self.infos = {"a": {}, "b": {}}

    def observe(self, agent: str) -> int:
        return 0

    def step(self, action: int | None) -> None:
        self._cumulative_rewards[self.agent_selection] = 0.0
        self.rewards = {"a": 1.0, "b": 10.0}
        self._accumulate_rewards()
        self.agent_selection = "b" if self.agent_selection == "a" else "a"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a_cut_counts_every_reward_once_behind_wrappers_and_conversions(limit: int) -> None:
    def total(make: Any) -> float:
        config = EvalConfig().environment(make).policy(lambda seen: np.zeros(len(seen), np.int64))
        config.runners(runner="multi_agent").evaluation(num_episodes=1, max_episode_steps=limit, determinism_check=0)
        return evaluate(config).episodes[0].episode_return

    assert total(Paying) == 11.0 * limit
    assert total(lambda: Tenth(Paying())) == pytest.approx(1.1 * limit)
    assert total(lambda: pettingzoo.utils.parallel_to_aec(Even())) == 11.0 * (limit // 2)


def test_an_unknown_id_is_refused_with_what_there_is() -> None:
    """PettingZoo's own hint is in the message."""
    from rl_eval.errors import ConfigError

    with refused(ConfigError, "environment.env", value="aec:classic/tictactoo-v3"):
        evaluate(tictactoe_config().environment("aec:classic/tictactoo-v3"))
