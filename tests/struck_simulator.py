"""Simulators of CartPole and Atari that raise, or kill their process, while certain episodes run."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from typing_extensions import override

from rl_eval import EvalConfig
from rl_eval.config.settings import EnvironmentSection
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep
from rl_eval.runners.batched.vector_env import build_simulator
from rl_eval.scheduling.plan import EpisodePlan

Fault = Literal["", "raises", "kills"]

WIDTHS: Final = (1, 4, 7, 32)
EPISODES: Final = {"CartPole": 40, "Pong": 8}
STEPS: Final = {"CartPole": 500, "Pong": 16}
SECTIONS: Final = {
    "CartPole": EnvironmentSection(env="CartPole-v1", env_kwargs={"vectorization_mode": "sync"}),
    "Pong": EnvironmentSection(
        env="ale_py:ALE/Pong-v5",
        env_kwargs={"repeat_action_probability": 0.25, "noop_max": 0, "use_fire_reset": False},
    ),
}
_STEP: Final = 3
"""Number of the step in which a fault happens."""


class StruckSimulator(BatchSimulator):
    """Vector environment with faults in the first attempts of some episodes. The rewards of Pong are mean pixels.

    Args:
        num_envs: Number of slots.
        name: Key of :data:`SECTIONS`.
        fault: ``raises`` strikes half of the episodes, ``kills`` one of them.
        marks: Folder with a file for each seed that was struck.
    """

    trusted = True

    def __init__(self, num_envs: int, name: str, fault: Fault = "", marks: str = "") -> None:
        self.inner = build_simulator(SECTIONS[name], 0, 0, num_envs)
        self.num_envs, self.marks, self.fault = num_envs, Path(marks), fault
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
        seeds = EpisodePlan(EPISODES[name], 0).seeds.tolist()
        self.struck: set[int] = {*({"raises": seeds[::2], "kills": seeds[5:6]}.get(fault, []))}
        self.seeds, self.steps = [-1] * num_envs, np.zeros(num_envs, np.int64)

    @override
    def restart(self, slots: Any, specs: Any) -> Any:
        self.steps[slots] = 0
        for slot, spec in zip(slots.tolist(), specs, strict=True):
            self.seeds[slot] = spec.seed
        return self.inner.start(slots, specs)

    @override
    def step(self, actions: Any) -> BatchStep:
        self.steps += 1
        for slot in np.flatnonzero(self.steps == _STEP).tolist():
            mark = self.marks / str(self.seeds[slot])
            if self.seeds[slot] in self.struck and not mark.exists():
                mark.touch()
                if self.fault == "kills":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the simulator diverged")
        step = self.inner.advance(actions)
        if step.observations.dtype != np.uint8:
            return step
        return replace(step, rewards=step.observations.reshape(self.num_envs, -1).mean(1))

    @override
    def close(self) -> None:
        self.inner.close()


def act(observations: Any) -> Any:
    """Policy that looks at all parts of an observation."""
    if observations.dtype == np.uint8:
        return observations.reshape(len(observations), -1).sum(1, np.int64) % 6
    return (observations[:, 2] > 0).astype(np.int64)


def config(name: str, width: int, fault: Fault = "", marks: Path = Path()) -> EvalConfig:
    """Return a config without a runner process."""
    kwargs = {"name": name, "fault": fault, "marks": str(marks)}
    made = EvalConfig().environment(StruckSimulator, env_kwargs=kwargs).policy(act)
    made.evaluation(num_episodes=EPISODES[name], max_episode_steps=STEPS[name], determinism_check=0)
    return made.runners(runner="batched", num_envs_per_runner=width)
