"""Pages of the docs that need another library: their Python and their commands run where it is installed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_eval import EvalConfig, evaluate
from tests.unit.pages_world import Reader, pages

pytestmark = pytest.mark.usefixtures("ray_cluster")

NEEDS = {
    "cli": "stable_baselines3",
    "coming_from_rllib": "ormsgpack",
    "coming_from_sb3": "sb3_contrib",
    "coming_from_torchrl": "torchrl",
    "training": "stable_baselines3",
}
BIRDS = """
import gymnasium as gym
import numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv


class HawksAndDoves(MultiAgentEnv):
    def __init__(self, config=None):
        super().__init__()
        self.agents = self.possible_agents = ["hawk", "dove"]
        self.observation_spaces = dict.fromkeys(self.agents, gym.spaces.Box(-1.0, 1.0, (2,), np.float32))
        self.action_spaces = dict.fromkeys(self.agents, gym.spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return dict.fromkeys(self.agents, np.zeros(2, np.float32)), {}

    def step(self, actions):
        self.steps += 1
        seen, over = dict.fromkeys(self.agents, np.zeros(2, np.float32)), {"__all__": self.steps >= 5}
        return seen, {bird: float(action) for bird, action in actions.items()}, over, {"__all__": False}, {}


def mapping(agent, episode):
    return agent
"""
"""A game of two birds, one of each kind."""
MASKED = """
import gymnasium as gym
import numpy as np


class Masked(gym.Env):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def action_masks(self):
        return np.array([True, False, True])

    def step(self, action):
        assert action != 1
        return np.zeros(2, np.float32), float(action), False, False, {}


gym.register("MaskedEnv-v0", Masked, max_episode_steps=5)
"""
"""A package with an environment of which one action is never legal."""


def command_line(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model of SB3, results of an old and a new policy, and a run of which some episodes failed."""
    from stable_baselines3 import PPO

    PPO("MlpPolicy", "CartPole-v1").save("model.zip")
    local = EvalConfig.from_yaml("configs/local.yaml").evaluation(num_episodes=60)
    for name, weights in (("old", "early"), ("new", "final")):
        weights = f"configs/weights/cartpole_ppo_{weights}.safetensors"
        evaluate(local.copy().policy(weights=weights)).save(f"out/{name}")
    flaky = EvalConfig.from_yaml("configs/flaky.yaml").runners(num_runners=0).evaluation(num_episodes=30)
    assert evaluate(flaky.fault_tolerance(max_attempts_per_episode=1), output="runs/flaky").num_failed
    return {}


def training(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A training that makes great steps and changes nothing, and two folders of checkpoints."""
    import torch
    from stable_baselines3 import PPO

    settings = {"environment": {"env": "CartPole-v1"}, "policy": {"policy": "rl_eval.policies.mlp:make_mlp"}}
    evaluation = {"runners": {"num_runners": 0}, "evaluation": {"num_episodes": 3}}
    Path("eval.yaml").write_text(yaml.safe_dump(settings | evaluation))
    for folder in ("ppo", "sb3"):
        Path(f"runs/{folder}").mkdir(parents=True)
    for step, name in ((1, "early"), (2, "final")):
        shutil.copy(f"configs/weights/cartpole_ppo_{name}.safetensors", f"runs/ppo/model_{step}.safetensors")
        PPO("MlpPolicy", "CartPole-v1").save(f"runs/sb3/model_{step}_steps.zip")
    module, steps = torch.nn.Linear(4, 2), count(250_000, 250_000)
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=0).evaluation(num_episodes=2)
    names = {"config": config, "module": module, "chosen": module, "policy": module, "step": 0}
    return {**names, "train": lambda module: next(steps)}


def rllib(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A game for several agents, in the session of the reader, so that it travels by value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(BIRDS, names)
    return names


def sb3(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model with its normalizer, one with masks, and trainings that end soon."""
    from sb3_contrib import MaskablePPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    learn = PPO.learn
    patch.setattr(PPO, "learn", lambda model, steps, callback=None: learn(model, min(steps, 64), callback))
    venv = VecNormalize(make_vec_env("Hopper-v5"))
    PPO("MlpPolicy", venv, n_steps=64).learn(64).save("model.zip")
    venv.save("vecnormalize.pkl")
    Path("my_package.py").write_text(MASKED)
    maskable = MaskablePPO("MlpPolicy", "my_package:MaskedEnv-v0", n_steps=8, batch_size=8)
    return {"maskable_model": maskable}


def torchrl(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An environment and a policy of TorchRL."""
    from torch import nn
    from torchrl.envs import GymEnv
    from torchrl.modules import QValueActor

    def make() -> Any:
        return GymEnv("CartPole-v1", categorical_action_encoding=True)

    return {"make_torchrl_env": make, "policy": QValueActor(nn.Linear(4, 2), spec=make().action_spec)}


BEFORE: dict[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "cli": command_line,
    "coming_from_rllib": rllib,
    "coming_from_sb3": sb3,
    "coming_from_torchrl": torchrl,
    "training": training,
}
"""What a page takes for granted: it makes the files, and returns the names."""


def needing(page: Path) -> Any:
    """Return a page as a parameter; without its library the test is skipped before a cluster starts."""
    library = NEEDS[page.stem]
    return pytest.param(page, id=page.stem, marks=pytest.mark.skipif(not find_spec(library), reason=f"no {library}"))


@pytest.mark.parametrize("page", [needing(page) for page in pages("tests/integrations/test_pages.py")])
def test_a_page_can_be_followed(reader: Reader, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its Python runs, and its commands."""
    reader.names |= BEFORE[page.stem](monkeypatch)
    reader.follow(page)
