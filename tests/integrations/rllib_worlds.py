"""Real but small PPO trainings with RLlib, and what their processes need of the tests, which travels by value."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import ray
from gymnasium.envs.classic_control import CartPoleEnv
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.connectors.env_to_module import EnvToModulePipeline, MeanStdFilter
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline

for pickler in (cloudpickle, ray.cloudpickle):
    pickler.register_pickle_by_value(sys.modules[__name__])


class Gated(CartPoleEnv):
    """CartPole whose episodes begin when a file is there."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = Path(config["gate"])

    def reset(self, **kwargs: Any) -> Any:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().reset(**kwargs)


def mean_std(env: Any = None, spaces: Any = None, device: Any = None) -> Any:
    return MeanStdFilter()


def ppo(env: Any, connector: Any = None, **model: Any) -> PPOConfig:
    return (
        PPOConfig()
        .environment(env)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=4, env_to_module_connector=connector)
        .rl_module(model_config={"fcnet_hiddens": [32, 32], **model})
        .training(train_batch_size=400, minibatch_size=100, num_epochs=2, lr=1e-3)
        .debugging(seed=1)
    )


def train(config: PPOConfig, iterations: int) -> PPO:
    algorithm = config.build_algo()
    for _ in range(iterations):
        algorithm.train()
    return algorithm


def saved(algorithm: PPO, folder: Path) -> Iterator[tuple[PPO, Path]]:
    """Yield an Algorithm with its checkpoint, and stop it in the end."""
    yield algorithm, Path(algorithm.save_to_path(str(folder)))
    algorithm.stop()


def pipelines_of(path: Path) -> tuple[Any, Any]:
    """Return RLlib's own connectors of a checkpoint, whose filters are frozen."""
    root = path / "env_runner"
    env_to_module = EnvToModulePipeline.from_checkpoint(str(root / "env_to_module_connector"))
    for piece in env_to_module.connectors:
        if isinstance(piece, MeanStdFilter):
            piece._update_stats = False
    return env_to_module, ModuleToEnvPipeline.from_checkpoint(str(root / "module_to_env_connector"))
