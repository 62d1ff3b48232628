"""RLlib: PPO with a local env runner and learner, evaluated beside."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import base
from benchmarks.contenders.beside import beside, second_core


def training(params: base.Params) -> dict[str, Any]:
    """PPO on CartPole, asking for an evaluation after every iteration."""
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    from rl_eval.integrations.rllib import eval_config_of

    torch.set_num_threads(1)
    algorithm_config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(train_batch_size=2048, minibatch_size=256, num_epochs=4)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64]))
        .evaluation(evaluation_duration=100)
        .debugging(seed=0, log_level="ERROR")
    )
    config = eval_config_of(algorithm_config).runners(num_runners=1, num_envs_per_runner=16)
    with second_core() as core:
        algorithm = algorithm_config.build_algo()
        algorithm.train()
        with beside(params, core, config, algorithm) as measured:
            while not measured.over:
                result = algorithm.train()
                steps = int(result["num_env_steps_sampled_lifetime"])
                measured.iterated(algorithm, steps)
            row = measured.finish(algorithm, steps)
        algorithm.stop()
    return row


if __name__ == "__main__":
    base.run({"beside": training})
