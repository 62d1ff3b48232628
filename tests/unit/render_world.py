"""Environments whose frames are known, for videos and windows."""

import os
import sys
from collections import Counter
from typing import ClassVar

import gymnasium as gym
import numpy as np

SHIFT = 0.0
EVENTS = Counter()
"""What was done in this process, by render mode."""
SEEN = []
"""What the windows of this process have shown: seed and step."""


def world(tmp_path, monkeypatch):
    """Return this module, as if nothing had been done; a fixture."""
    module = sys.modules[__name__]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(module, "SHIFT", 0.0)
    EVENTS.clear()
    SEEN.clear()
    return module


class Painted(gym.Env):
    """Three to twelve steps; each frame is grey, and five shades lighter than the one before."""

    metadata: ClassVar = {"render_modes": ["human", "rgb_array"], "render_fps": 20}
    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    size = (32, 48)

    def __init__(self, render_mode=None, fails=(), broken_at=None, growing=False):
        self.render_mode, self.fails, self.broken_at, self.growing = render_mode, fails, broken_at, growing
        EVENTS["built", render_mode] += 1

    def begin_episode(self, index, seed, attempt):
        self.failing = index in self.fails

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.steps, self.length = seed, 0, int(self.np_random.integers(3, 13))
        return self._observation(), {}

    def step(self, action):
        EVENTS["step", self.render_mode] += 1
        if self.failing and self.steps == 2:
            raise RuntimeError("the simulator broke")
        self.steps += 1
        reward = float(action) + self.np_random.random() + SHIFT
        return self._observation(), reward, self.steps >= self.length, False, {}

    def render(self):
        EVENTS["render", self.render_mode] += 1
        EVENTS["sound", os.environ.get("SDL_AUDIODRIVER")] += 1
        if self.broken_at == self.steps:
            raise RuntimeError("the renderer broke")
        height, width = self.size
        return np.full((height + self.steps * self.growing, width, 3), 5 * self.steps, np.uint8)

    def close(self):
        EVENTS["closed", self.render_mode] += 1

    def _observation(self):
        if self.render_mode == "human":
            self.render()
            SEEN.append((self.seed, self.steps))
        return np.full(1, self.steps, np.float32)


class Odd(Painted):
    size = (33, 47)


class Blind(Painted):
    """Takes no render_mode."""

    metadata: ClassVar = {"render_modes": []}

    def __init__(self):
        super().__init__()


def painted(context):
    return Painted(**context)


def deaf(context):
    """Takes no notice of the render_mode in its context."""
    return Painted()


def strict(context):
    """Refuses what it does not know, and renders anyway."""
    if context:
        raise TypeError(f"unknown: {list(context)}")
    return Painted(render_mode="rgb_array")


def ones():
    return lambda observations: np.ones(len(observations), np.int64)
