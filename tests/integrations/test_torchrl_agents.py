"""TorchRL's environments of several agents: the returns of a plain rollout, agent by agent, in every layout."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("torchrl")
pytest.importorskip("pettingzoo")
pytest.importorskip("mpe2")

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import TransformedEnv
from torchrl.envs.libs.pettingzoo import PettingZooWrapper
from torchrl.envs.transforms import RewardSum

from rl_eval import EvalConfig, evaluate
from rl_eval.integrations.torchrl import as_agents_env

pytestmark = pytest.mark.filterwarnings("ignore")


def tag(**kwargs: Any) -> PettingZooWrapper:
    """Three adversaries of one group and an agent of another, who act at once."""
    from mpe2 import simple_tag_v3

    return PettingZooWrapper(simple_tag_v3.parallel_env(max_cycles=12, **kwargs), return_state=True)


def steered() -> PettingZooWrapper:
    """Box actions, and bookkeeping that is no observation."""
    return TransformedEnv(tag(continuous_actions=True), RewardSum(reset_keys=["_reset", "_reset"]))


def board() -> PettingZooWrapper:
    """Two players in turn, whose moves are masked."""
    from pettingzoo.classic import tictactoe_v3

    return PettingZooWrapper(tictactoe_v3.env(), use_mask=True)


class Net(torch.nn.Module):
    """A linear layer of whatever comes, with fixed weights; works on any batch, and keeps to a mask."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        weights = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
        self.weights = torch.nn.Parameter(weights)

    def forward(self, observation: Any, action_mask: Any = None) -> torch.Tensor:
        if isinstance(observation, dict):
            observation, action_mask = observation["observation"]["observation"], observation["action_mask"]
        seen = observation.flatten(-3) if observation.shape[-1] == 2 else observation
        scores = (seen.double().unsqueeze(-2) * self.weights).sum(-1).float()
        return scores if action_mask is None else scores.masked_fill(~action_mask.bool(), -torch.inf)


def rollout(make: Any, nets: dict[str, Net], seed: int) -> dict[str, float]:
    """TorchRL's own loop, its rewards summed by agent."""
    env = make()
    env.set_seed(seed, static_seed=True)
    parts = []
    for group in env.group_map:
        keys = [(group, "observation"), *([(group, "action_mask")] if make is board else [])]
        if make is board:
            keys[0] = (group, "observation", "observation")
        act = (lambda scores: scores.clamp(0, 1)) if make is steered else (lambda scores: scores.argmax(-1))
        parts += [
            TensorDictModule(nets[group], in_keys=keys, out_keys=[(group, "scores")]),
            TensorDictModule(act, in_keys=[(group, "scores")], out_keys=[(group, "action")]),
        ]
    rewards = env.rollout(100, TensorDictSequential(*parts))["next"]
    seats = [(group, row, agent) for group, agents in env.group_map.items() for row, agent in enumerate(agents)]
    return {agent: sum(rewards[group, "reward"][:, row, 0].tolist()) for group, row, agent in seats}


WORLDS: dict[str, tuple[Any, dict[str, Net]]] = {
    "at once": (tag, {"adversary": Net(16, 5, 1), "agent": Net(14, 5, 2)}),
    "steered": (steered, {"adversary": Net(16, 5, 1), "agent": Net(14, 5, 2)}),
    "in turn": (board, {"player_1": Net(18, 9, 1), "player_2": Net(18, 9, 2)}),
}


def group_of(agent: str, spec: Any) -> str:
    return agent if agent.startswith("player") else agent.partition("_")[0]


def config(world: str, **runners: Any) -> EvalConfig:
    make, nets = WORLDS[world]
    return (
        EvalConfig()
        .environment(make)
        .policy(policies=dict(nets), policy_mapping_fn=group_of)
        .runners(**runners)
        .evaluation(num_episodes=6, determinism_check=0)
    )


@pytest.mark.parametrize("world", WORLDS)
def test_returns_are_those_of_a_plain_rollout(world: str) -> None:
    """Every agent of every episode, in two layouts."""
    make, nets = WORLDS[world]
    several, one = (evaluate(config(world, num_envs_per_runner=lanes)) for lanes in (4, 1))
    assert several.status == "complete", (several.reason, several.faults[:1])
    for record in several.episodes:
        rows = several.agents[several.agents["index"] == record.index]
        found = dict(zip(rows["agent"].tolist(), rows["return"].tolist(), strict=True))
        assert found == rollout(make, nets, record.seed)
    assert one.fingerprint == several.fingerprint
    assert set(several.agents["policy"]) == set(nets)


def test_policies_see_their_agents_part_alone() -> None:
    """Neither the state that agents share, nor the mask that says who acts, nor sums of rewards."""
    spaces = as_agents_env(steered()).spaces("adversary_1")
    assert [space.shape for space in spaces] == [(16,), (5,)]
    board_spaces = as_agents_env(board()).spaces("player_2")
    assert set(board_spaces[0].keys()) == {"action_mask", "observation"}
    assert board_spaces[1].n == 9


def verdict() -> PettingZooWrapper:
    """Game of one move: a acts and wins; b never acts, and its end with reward 0 is reported; c never comes."""
    from pettingzoo import ParallelEnv

    class Verdict(ParallelEnv):
        metadata: ClassVar[dict[str, Any]] = {"name": "verdict"}
        render_mode = None
        possible_agents: ClassVar[list[str]] = ["a", "b", "c"]

        def observation_space(self, agent: str) -> gym.Space[Any]:
            return gym.spaces.Box(0, 1, (1,), np.float32)

        def action_space(self, agent: str) -> gym.Space[Any]:
            return gym.spaces.Discrete(2)

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            self.agents = ["a"]
            return {agent: np.zeros(1, np.float32) for agent in "abc"}, {agent: {} for agent in "abc"}

        def step(self, actions: Any) -> Any:
            self.agents = []
            seen = {agent: np.zeros(1, np.float32) for agent in "ab"}
            return seen, {"a": 1.0, "b": 0.0}, dict.fromkeys("ab", True), dict.fromkeys("ab", False), {"a": {}, "b": {}}

    return PettingZooWrapper(Verdict(), use_mask=True)


def test_an_agent_that_never_acts_has_a_row_if_its_end_is_reported() -> None:
    config = EvalConfig().environment(verdict).policy(lambda observations: np.zeros(len(observations), np.int64))
    config = config.runners(runner="multi_agent").evaluation(num_episodes=1, determinism_check=0)
    rows = evaluate(config).agents[["agent", "return", "outcome"]]
    assert [tuple(row) for row in rows] == [("a", 1, 1), ("b", 0, -1)]
