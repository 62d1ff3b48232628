"""Policies of imitation: trainers, their policies, and the files that these policies save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("imitation")

from imitation.algorithms import bc
from imitation.algorithms.adversarial import gail
from imitation.data.types import Transitions
from imitation.policies.base import FeedForward32Policy, NormalizeFeaturesExtractor
from imitation.rewards.reward_nets import BasicRewardNet
from imitation.util import logger
from imitation.util.networks import RunningNorm
from own_loops import check_equal_to_loop
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from rl_eval import EvalConfig, evaluate
from rl_eval.integrations.sb3 import portable
from rl_eval.weights import snapshot_weights

ENV = "CartPole-v1"


def demonstrations() -> Transitions:
    env, rows = gym.make(ENV), []
    for seed in range(6):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            action = int(observation[2] + observation[3] > 0)
            following, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            rows.append((observation, action, following, terminated))
            observation = following
    observations, actions, following, ends = map(np.array, zip(*rows, strict=True))
    infos = np.array([{}] * len(rows))
    return Transitions(obs=observations, acts=actions, infos=infos, next_obs=following, dones=ends)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A logger without files, which trainers leave open."""
    return logger.configure(tmp_path_factory.mktemp("logs"), format_strs=[])


@pytest.fixture(scope="module")
def trainer(silent: Any) -> Any:
    """A cloning trainer whose policy normalizes observations with running statistics, after a short training."""
    torch.manual_seed(0)
    env = gym.make(ENV)
    policy = FeedForward32Policy(
        env.observation_space,
        env.action_space,
        lr_schedule=lambda _: 1e-3,
        features_extractor_class=NormalizeFeaturesExtractor,
        features_extractor_kwargs={"normalize_class": RunningNorm},
    )
    found = bc.BC(
        observation_space=env.observation_space,
        action_space=env.action_space,
        demonstrations=demonstrations(),
        policy=policy,
        rng=np.random.default_rng(0),
        batch_size=32,
        custom_logger=silent,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Its logger converts tensors with gradients.
        found.train(n_epochs=1, progress_bar=False)
    found.policy.train()
    return found


def test_trainer_policy_and_file_have_the_episodes_of_a_loop(trainer: Any, tmp_path: Path) -> None:
    """The training mode and the statistics of the trainer's policy do not change."""
    policy, file = trainer.policy, str(tmp_path / "cloned.pt")
    policy.save(file)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    acting = portable(policy)
    check_equal_to_loop(ENV, [trainer, policy, file], lambda seen: int(acting.predict(seen, deterministic=True)[0]))
    assert policy.training
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    assert snapshot_weights(trainer, 0).digest == snapshot_weights(acting, 0).digest


def test_an_adversarial_trainer_is_evaluated_with_its_generator(silent: Any) -> None:
    venv = DummyVecEnv([lambda: gym.make(ENV)])
    generator = PPO("MlpPolicy", venv, n_steps=64, seed=0)
    adversarial = gail.GAIL(
        demonstrations=demonstrations(),
        demo_batch_size=32,
        venv=venv,
        gen_algo=generator,
        reward_net=BasicRewardNet(venv.observation_space, venv.action_space),
        allow_variable_horizon=True,
        custom_logger=silent,
        init_tensorboard=False,
    )
    config = EvalConfig().environment(ENV).evaluation(num_episodes=4)
    assert evaluate(config, adversarial).fingerprint == evaluate(config, generator.policy).fingerprint
