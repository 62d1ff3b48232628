"""Stand-in for simulators on a GPU (ManiSkill, Isaac Lab, mjlab) with their traps, and an adapter of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
import torch

from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep

Trap = Literal[
    "",
    "auto_reset",  # Slots restart in the step that ends them, with final observations (ManiSkill).
    "no_final_observation",  # As auto_reset, without final observations (Isaac Lab, unless compute_final_obs is set).
    "next_as_last",  # As auto_reset; the final observation is the first one of the next episode.
    "couples_slots",  # The solver mixes all slots (ManiSkill on a GPU).
    "noisy_steps",  # Steps draw from the generator of all slots (mjlab).
    "ignores_seeds",
    "one_start",  # Ignores seeds, and each episode starts equally.
    "ignores_masks",  # Resets all slots, whatever env_ids says.
    "resets_neighbour",
    "reversed_rows",
    "aliases",  # As auto_reset; calls return the same two arrays in turns, with other values.
    "nan",
    "raises",
    "dies",
    "hangs",
]
TRAPS: tuple[Trap, ...] = get_args(Trap)


class GpuSimulator:
    """Walks of 2 to 9 steps in torch tensors, which are functions of their start without a trap.

    Resets take ``env_ids`` and seed one generator for all slots. A step while a slot has ended raises, as in mjlab.

    Args:
        num_envs: Number of slots.
        trap: Deviation from this.
        struck: Seed of the episode in which ``nan``, ``raises``, ``dies`` and ``hangs`` happen, in its second step.
    """

    def __init__(self, num_envs: int, trap: Trap = "", struck: int = -1) -> None:
        self.num_envs, self.trap, self.struck = num_envs, trap, struck
        self.auto_reset = trap in (*TRAPS[1:4], "aliases", "noisy_steps", "ignores_seeds")
        self.place, self.length = torch.zeros(num_envs), torch.ones(num_envs, dtype=torch.int64)
        self.steps, self.seeds = torch.zeros_like(self.length), torch.full_like(self.length, -1)
        self.done = torch.ones(num_envs, dtype=torch.bool)
        self.buffers, self.turn = torch.zeros(2, num_envs, 3), 0

    def reset(self, seed: int | None = None, env_ids: Sequence[int] | None = None) -> torch.Tensor:
        """Start episodes in some slots, or in all; return the observations of all slots."""
        ids = torch.arange(self.num_envs) if env_ids is None or self.trap == "ignores_masks" else torch.tensor(env_ids)
        if self.trap == "resets_neighbour":
            ids = torch.unique(torch.cat([ids, (ids + 1) % self.num_envs]))
        if seed is not None and self.trap != "ignores_seeds":
            torch.manual_seed(0 if self.trap == "one_start" else seed)
            self.seeds[ids] = seed
        self.place[ids] = torch.randn(len(ids))
        self.length[ids] = torch.randint(2, 10, (len(ids),))
        self.steps[ids], self.done[ids] = 0, False
        return self.observed()

    def observed(self) -> torch.Tensor:
        seen = torch.stack([self.place, self.steps.float(), self.length.float()], 1)
        if self.trap == "reversed_rows":
            return seen.flip(0)
        if self.trap == "aliases":
            self.turn = 1 - self.turn
            return self.buffers[self.turn].copy_(seen)
        return seen

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Return observations, rewards, ended slots and extras."""
        if self.done.any():
            raise RuntimeError("reset the environments that are done before the next step")
        self.place += 0.2 * (actions - 1) + 0.3 * torch.sin(3 * self.place)
        if self.trap == "couples_slots":
            self.place += 0.1 * self.place.mean()
        if self.trap == "noisy_steps":
            self.place += 0.1 * torch.randn(self.num_envs)
        self.steps += 1
        self._strike()
        self.done = self.steps >= self.length
        ended, rewards, observations = self.done.clone(), self.place.clone(), self.observed()
        extras = {}
        if self.auto_reset and ended.any():
            following = self.reset(env_ids=ended.nonzero()[:, 0].tolist())
            if self.trap != "no_final_observation":
                extras["final_obs"] = following if self.trap == "next_as_last" else observations
            observations = following
        return observations, rewards, ended, extras

    def _strike(self) -> None:
        struck = (self.seeds == self.struck) & (self.steps == 2)
        if not struck.any():
            return
        if self.trap == "nan":
            self.place[struck] = torch.nan
        elif self.trap == "raises":
            raise RuntimeError("the solver diverged")
        elif self.trap == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.trap == "hangs":
            time.sleep(3600)


class GpuAdapter(BatchSimulator):
    """Adapter of the stand-in.

    Args:
        num_envs: Number of slots.
        couples_slots: What the adapter declares.
        options: Arguments of :class:`GpuSimulator`.
    """

    def __init__(self, num_envs: int, *, couples_slots: bool = False, **options: Any) -> None:
        self.env = GpuSimulator(num_envs, **options)
        self.num_envs, self.couples_slots, self.restarts_idle = num_envs, couples_slots, not self.env.auto_reset
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
        self.action_space = gym.spaces.Discrete(3)

    def restart(self, slots: Any, specs: Any) -> Any:
        for slot, spec in zip(slots.tolist(), specs, strict=True):  # One call for each, since it seeds all slots.
            observations = self.env.reset(spec.seed, [slot])
        return observations[slots]

    def reset(self, seed: int) -> Any:
        return self.env.reset(seed)

    def step(self, actions: Any) -> BatchStep:
        observations, rewards, ended, extras = self.env.step(torch.as_tensor(actions))
        absent = torch.full_like(observations, torch.nan)
        last = torch.where(ended[:, None], extras.get("final_obs", absent), observations)
        return BatchStep(last, rewards, ended, torch.zeros_like(ended), started=(ended.numpy(), observations))

    def close(self) -> None:
        """Nothing is open."""
