"""Policies of sb3-contrib, and gSDE, beside plain loops of their own ``predict`` on the same seeds."""

import copy
from typing import Any

import pytest

pytest.importorskip("sb3_contrib")

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import ARS, QRDQN, TQC, TRPO, CrossQ, MaskablePPO, RecurrentPPO
from sb3_worlds import Rewards
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3 import load_policy
from rl_eval.policies.noise import EpisodeNoise

EPISODES, STEPS = 20, 12


class Masked(Rewards):
    """Allows other actions in every step, and nothing else."""

    def action_masks(self):
        rng = np.random.default_rng([self._steps, abs(int(1e3 * self._last[0]))])
        parts = [self._some(rng, n) for n in sizes(self.action_space)]
        self._allowed = parts
        return np.concatenate(parts)

    def step(self, action):
        assert all(part[taken] for part, taken in zip(self._allowed, np.ravel(action), strict=True))
        return super().step(action)

    @staticmethod
    def _some(rng, n):
        return np.isin(np.arange(n), rng.choice(n, rng.integers(1, n + 1), replace=False))


class InfoMasked(gym.Wrapper):
    """Tells the same masks by ``info``, and has no method."""

    def has_wrapper_attr(self, name):
        return name != "action_masks" and super().has_wrapper_attr(name)

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        return observation, info | {"action_mask": self.env.action_masks()}

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"action_mask": self.env.action_masks()}


def sizes(space: gym.Space) -> list[int]:
    if isinstance(space, gym.spaces.Discrete):
        return [int(space.n)]
    return space.nvec.tolist() if isinstance(space, gym.spaces.MultiDiscrete) else [2] * space.n


def make(kind: Any, action="discrete", policy="MlpPolicy", env=Rewards, wrap=lambda venv: venv, **kwargs: Any):
    """Build a model whose initial actions are worth comparing: the last layer is not near zero."""
    model = kind(policy, wrap(DummyVecEnv([lambda: env("vector", action)])), device="cpu", seed=3, **kwargs)
    if hasattr(model.policy, "value_net"):
        with torch.no_grad():
            model.policy.action_net.weight *= 200
    return model


SMALL = {"n_steps": 32, "batch_size": 32, "n_epochs": 1}


def recurrent(**kwargs):
    sizes = {"lstm_hidden_size": 12, "net_arch": [8]} | kwargs.pop("policy_kwargs", {})
    return make(RecurrentPPO, policy="MlpLstmPolicy", policy_kwargs=sizes, **SMALL, **kwargs)


def maskable(**kwargs):
    return make(MaskablePPO, env=Masked, **SMALL, **kwargs)


def config_of(action="discrete", env=Rewards, masks=False, **policy):
    return (
        EvalConfig()
        .environment(env, env_kwargs={"observation": "vector", "action": action}, action_masks=masks)
        .policy(**policy)
        .runners(num_envs_per_runner=7)
        .evaluation(num_episodes=EPISODES, seed=5, max_episode_steps=STEPS)
    )


def ours(result):
    assert result.status == "complete", result.reason
    return [(record.seed, record.episode_return, record.length) for record in result.episodes]


def loop(
    model: Any, env: gym.Env, result: Any, observe=lambda obs, start: obs, begin=lambda seed, copies: None, **more
):
    """Play the episodes of a result with the model's own ``predict``, on copies of each observation.

    A runner defines a row as that of a block of so many rows.
    """
    copies = 1 if result.provenance["numerics"]["reference"] == "row" else 16
    played = []
    for seed in (record.seed for record in result.episodes):
        begin(seed, copies)
        observation, _ = env.reset(seed=seed)
        state, rewards, over = None, [], False
        while not over:
            seen = np.repeat(observe(observation, not rewards)[None], copies, 0)
            if hasattr(env.unwrapped, "action_masks"):
                more["action_masks"] = np.repeat(env.unwrapped.action_masks()[None], copies, 0)
            start = np.full(copies, not rewards)
            actions, state = model.predict(seen, state=state, episode_start=start, **more)
            observation, reward, terminated, truncated, _ = env.step(actions[0])
            rewards.append(float(reward))
            over = terminated or truncated or len(rewards) == STEPS
        played.append((seed, np.cumsum(rewards)[-1], len(rewards)))
    assert len(played) == EPISODES
    assert len({total for _, total, _ in played}) == EPISODES
    return played


# ---------------------------------------------------------------------- RecurrentPPO


@pytest.mark.parametrize(
    ("action", "kwargs"),
    [
        ("discrete", {}),
        ("box", {"policy_kwargs": {"n_lstm_layers": 2, "enable_critic_lstm": False}}),
        ("multi_discrete", {"policy_kwargs": {"shared_lstm": True, "enable_critic_lstm": False}}),
        ("box", {"use_sde": True}),
    ],
)
def test_recurrent_ppo_has_the_returns_of_its_own_predict(action, kwargs):
    model = recurrent(action=action, **kwargs)
    result = evaluate(config_of(action), model)
    assert ours(result) == loop(model, Rewards("vector", action), result, deterministic=True)


def test_the_state_of_recurrent_ppo_counts():
    """Else a policy that forgets would pass the tests above."""
    model = recurrent(action="box")
    result = evaluate(config_of("box"), model)
    forgetful = copy.copy(model)
    forgetful.predict = lambda seen, state, episode_start, **more: model.predict(
        seen, None, np.ones(len(seen), bool), **more
    )
    assert ours(result) != loop(forgetful, Rewards("vector", "box"), result, deterministic=True)


def test_recurrent_ppo_with_stacked_and_normalized_observations():
    model = recurrent(action="box", wrap=lambda venv: VecNormalize(VecFrameStack(venv, 3))).learn(32)
    result = evaluate(config_of("box"), model)
    normalizer, stack = model.get_vec_normalize_env(), np.zeros(15, np.float32)

    def observe(observation, start):
        stack[:] = np.concatenate([np.zeros(10) if start else stack[5:], observation])
        return normalizer.normalize_obs(stack.copy())

    assert ours(result) == loop(model, Rewards("vector", "box"), result, observe, deterministic=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_recurrent_ppo_does_not_depend_on_the_layout(deterministic):
    model = recurrent(action="box", use_sde=not deterministic)
    config = config_of("box", deterministic=deterministic)
    prints = {evaluate(config.runners(num_envs_per_runner=lanes), model).fingerprint for lanes in (1, 7, 20)}
    assert len(prints) == 1


# ---------------------------------------------------------------------- MaskablePPO


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary"])
def test_maskable_ppo_has_the_returns_of_its_own_predict(action):
    model = maskable(action=action)
    result = evaluate(config_of(action, Masked, masks=True), model)
    assert ours(result) == loop(model, Masked("vector", action), result, deterministic=True)


def wrapped(context):
    return gym.wrappers.TimeLimit(gym.wrappers.OrderEnforcing(Masked(**context)), 1000)


def told(context):
    return InfoMasked(Masked(**context))


@pytest.mark.parametrize("env", [wrapped, told])
def test_masks_are_found_under_wrappers_and_in_info(env):
    model = maskable()
    plain = evaluate(config_of(env=Masked, masks=True), model)
    assert ours(evaluate(config_of(env=env, masks=True), model)) == ours(plain)


def test_masked_actions_are_drawn_from_what_is_allowed():
    model = maskable()
    with torch.no_grad():
        model.policy.action_net.weight /= 200
    sampled = evaluate(config_of(env=Masked, masks=True, deterministic=False), model)
    assert sampled.status == "complete"  # The environment asserts that each action is allowed.
    assert ours(sampled) != ours(evaluate(config_of(env=Masked, masks=True), model))


def test_maskable_ppo_without_masks_is_refused():
    with pytest.raises(
        ConfigError, match=r"needs the environment's action masks: set environment.action_masks to true"
    ):
        evaluate(config_of(), maskable())
    result = evaluate(config_of(masks=True).evaluation(num_episodes=1), maskable())
    assert "has no method action_masks(), and its info has no action_mask" in result.faults[0].message


def test_masks_of_another_size_are_the_environments_fault():
    class Short(Masked):
        def action_masks(self):
            return super().action_masks()[:-1]

    result = evaluate(config_of(env=Short, masks=True).evaluation(num_episodes=1), maskable())
    assert "the action mask has 3 numbers, but Discrete(4) has 4" in result.faults[0].message


def test_continuous_actions_have_no_masks():
    with pytest.raises(ConfigError, match=r"only Discrete, MultiDiscrete and MultiBinary actions have masks"):
        evaluate(config_of("box", masks=True), make(PPO, "box", **SMALL))


# ---------------------------------------------------------------------- the others, and files


@pytest.mark.parametrize(
    ("kind", "action", "policy", "kwargs"),
    [
        (TRPO, "box", "MlpPolicy", {}),
        (QRDQN, "discrete", "MlpPolicy", {"buffer_size": 50}),
        (TQC, "box", "MlpPolicy", {"buffer_size": 50}),
        (CrossQ, "box", "MlpPolicy", {"buffer_size": 50}),
        (ARS, "box", "LinearPolicy", {}),
    ],
)
def test_the_other_algorithms_have_the_returns_of_their_own_predict(kind, action, policy, kwargs):
    model = make(kind, action, policy, **kwargs)
    result = evaluate(config_of(action), model)
    assert ours(result) == loop(model, Rewards("vector", action), result, deterministic=True)


@pytest.mark.parametrize("build", [recurrent, maskable])
def test_a_saved_model_is_the_live_one(tmp_path, build):
    model = build().learn(32)
    model.save(tmp_path / "model.zip")
    config = config_of(env=Masked, masks=build is maskable)
    live = evaluate(config, model)
    assert evaluate(config, load_policy(tmp_path / "model.zip")).fingerprint == live.fingerprint


# ---------------------------------------------------------------------- gSDE


def gsde(kind, **policy_kwargs):
    kwargs = SMALL if kind is PPO else {"buffer_size": 50}
    return make(kind, "box", use_sde=True, policy_kwargs={"net_arch": [9, 8], **policy_kwargs}, **kwargs)


@pytest.mark.parametrize(
    ("kind", "policy_kwargs"),
    [(PPO, {}), (PPO, {"squash_output": True}), (PPO, {"full_std": False, "use_expln": True}), (SAC, {})],
)
def test_gsde_explores_by_one_matrix_per_episode(kind, policy_kwargs):
    """SB3's own ``predict``, once its matrix is the one that the episode's seed gives."""
    model = gsde(kind, **policy_kwargs)
    actor = getattr(model.policy, "actor", model.policy)
    result = evaluate(config_of("box", deterministic=False), model)

    def begin(seed, copies):
        distribution = actor.action_dist
        std = distribution.get_std(actor.log_std).detach()
        numbers = EpisodeNoise(np.array([seed]), np.array([0])).normal(std.numel())
        distribution.exploration_mat = torch.from_numpy(numbers).float().reshape(std.shape) * std
        distribution.exploration_matrices = distribution.exploration_mat.expand(copies, -1, -1)

    assert ours(result) == loop(model, Rewards("vector", "box"), result, begin=begin, deterministic=False)
    assert ours(result) != ours(evaluate(config_of("box"), model))


def test_gsde_does_not_depend_on_the_layout():
    config, model = config_of("box", deterministic=False), gsde(SAC)
    prints = {evaluate(config.runners(num_envs_per_runner=lanes), model).fingerprint for lanes in (1, 7, 20)}
    assert len(prints) == 1
