"""Stable-Baselines3: PPO in this process, evaluated beside."""

from __future__ import annotations

from typing import Any

from benchmarks.contenders import base
from benchmarks.contenders.beside import Beside, beside, second_core


def training(params: base.Params) -> dict[str, Any]:
    """PPO on Hopper, asking for an evaluation after every rollout."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    from rl_eval import EvalConfig

    class Ask(BaseCallback):
        def __init__(self, measured: Beside) -> None:
            super().__init__()
            self._measured = measured

        def _on_rollout_end(self) -> None:
            self._measured.iterated(self.model, self.num_timesteps)

        def _on_step(self) -> bool:
            return not self._measured.over

    torch.set_num_threads(1)
    config = EvalConfig().environment("Hopper-v5").runners(num_envs_per_runner=16).evaluation(num_episodes=100)
    with second_core() as core:
        model = PPO("MlpPolicy", make_vec_env("Hopper-v5", n_envs=4), n_steps=256, seed=0, device="cpu")
        with beside(params, core, config, model) as measured:
            model.learn(1_000_000_000, callback=Ask(measured))
            return measured.finish(model, model.num_timesteps)


if __name__ == "__main__":
    base.run({"beside": training})
