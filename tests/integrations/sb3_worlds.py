"""Models of Stable-Baselines3 and sb3-contrib, and what their own ``predict`` does."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch
import tree
from acting_world import Rewards
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

DATA = Path(__file__).parent / "data"
reads_data = pytest.mark.skipif(np.__version__ < "2", reason="models in data/ were saved with NumPy 2")

ON_POLICY = {"n_steps": 64, "batch_size": 32, "n_epochs": 2}
OFF_POLICY = {"buffer_size": 300, "learning_starts": 40}
RECURRENT = {**ON_POLICY, "policy": "MlpLstmPolicy", "policy_kwargs": {"lstm_hidden_size": 12, "net_arch": [8]}}
KWARGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("PPO", "MaskablePPO"), ON_POLICY),
    **dict.fromkeys(("DQN", "SAC", "TD3", "QRDQN", "TQC", "CrossQ"), OFF_POLICY),
    "ARS": {"policy": "LinearPolicy"},
    "RecurrentPPO": RECURRENT,
}


def make_model(
    algorithm: str = "PPO",
    observation: str = "vector",
    action: str = "discrete",
    wrap: Callable[[VecEnv], VecEnv] = lambda venv: venv,
    **kwargs: Any,
) -> Any:
    """Build a model whose initial actions are worth comparing: the last layer is not near zero."""
    venv = wrap(DummyVecEnv([lambda: (Masked if algorithm == "MaskablePPO" else Rewards)(observation, action)]))
    due = KWARGS.get(algorithm, {})
    due = {**due, **kwargs, "policy_kwargs": {**due.get("policy_kwargs", {}), **kwargs.get("policy_kwargs", {})}}
    policy = due.pop("policy", "MlpPolicy")
    policy = "MultiInputPolicy" if isinstance(venv.observation_space, gym.spaces.Dict) else policy
    kind = getattr(stable_baselines3, algorithm, None) or getattr(sb3_contrib, algorithm)
    model = kind(policy, venv, device="cpu", seed=3, **due)
    if hasattr(model.policy, "value_net"):
        with torch.no_grad():
            model.policy.action_net.weight *= 200
    return model


class Masked(Rewards):
    """Allows other actions in every step, and nothing else."""

    def action_masks(self):
        rng = np.random.default_rng([self._steps, abs(int(1e3 * self._last[0]))])
        space = self.action_space
        counts = [space.n] if isinstance(space, gym.spaces.Discrete) else getattr(space, "nvec", [2] * space.shape[0])
        self._allowed = [np.isin(np.arange(n), rng.choice(n, rng.integers(1, n + 1), replace=False)) for n in counts]
        return np.concatenate(self._allowed)

    def step(self, action):
        assert all(part[taken] for part, taken in zip(self._allowed, np.ravel(action), strict=True))
        return super().step(action)


class Wrapped(gym.Env):
    """An environment behind the wrappers of a training, with the statistics of its model, and its exact rewards.

    With ``channels_last``, images are laid out as when ``VecTransposeImage`` is the last wrapper.
    """

    def __init__(self, env: gym.Env, wrap: Callable[[VecEnv], VecEnv], model: Any, channels_last: bool = False) -> None:
        self._exact = Exact(env)
        self._venv = layer = wrap(DummyVecEnv([lambda: self._exact]))
        self._channels_last = channels_last
        if (own := model.get_vec_normalize_env()) is not None:
            while not isinstance(layer, VecNormalize):
                layer = layer.venv
            layer.training = layer.norm_reward = False
            layer.obs_rms = copy.deepcopy(getattr(own, "obs_rms", None))

    def reset(self, *, seed=None, options=None):
        self._venv.seed(seed)
        return self._seen(self._venv.reset()), {}

    def step(self, action):
        observations, _, dones, _ = self._venv.step([action])
        return self._seen(observations), self._exact.rewards.pop(), dones[0], False, {}

    def _seen(self, observations):
        seen = tree.map_structure(lambda part: part[0], observations)
        return np.ascontiguousarray(seen.transpose(1, 2, 0)).transpose(2, 0, 1) if self._channels_last else seen


class Exact(gym.Wrapper):
    """Keeps rewards as the environment gives them; a VecEnv makes float32 of them."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.rewards = [reward]
        return observation, reward, terminated, truncated, info


def predicted(model: Any, env: gym.Env | None = None, begin: Any = lambda seed, copies: None, **more: Any) -> Any:
    """Return how a model's own ``predict`` acts, with a state and masks where it has them."""
    state: Any = None

    def act(block: Any, seed: int, step: int) -> Any:
        nonlocal state
        copies = len(tree.flatten(block)[0])
        if not step:
            begin(seed, copies)
        masks = {"action_masks": np.repeat(env.action_masks()[None], copies, 0)} if isinstance(env, Masked) else {}
        start = {"state": state if step else None, "episode_start": np.full(copies, not step)}
        actions, state = model.predict(block, **start, **masks, **{"deterministic": True, **more})
        return actions[0]

    return act
