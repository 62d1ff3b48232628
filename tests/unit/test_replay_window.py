"""``rl-eval replay --render human``: episodes are shown in a window as they run again, or it is said why not."""

import sys
from pathlib import Path

import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.config.builder import EvalConfig
from rl_eval.execution.group import evaluate
from tests.unit.cli_world import call

TOYS = '''
import gymnasium as gym
import numpy as np

SEEN = []
"""What the windows of this process have shown: step by step, by episode seed."""
BUILT = []
"""The mode of each environment of this process."""
EXTRA = 0.0


class Shown(gym.Env):
    """Three to twelve steps; its window is a list."""

    metadata = {"render_modes": ["human"], "render_fps": 20}
    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None, broken=False, failing=False):
        self.render_mode, self.broken, self.failing = render_mode, broken, failing
        BUILT.append(render_mode)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.steps, self.length = seed, 0, int(self.np_random.integers(3, 13))
        self._draw()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.failing:
            raise RuntimeError("the simulator broke")
        self._draw()
        return np.full(1, self.steps, np.float32), 1.0 + EXTRA, self.steps >= self.length, False, {}

    def _draw(self):
        if self.render_mode == "human":
            if self.broken:
                raise RuntimeError("the window broke")
            SEEN.append((self.seed, self.steps))


def shown(context):
    return Shown(**context)


def deaf(context):
    return Shown()


def ones():
    return lambda observations: np.ones(len(observations), np.int64)
'''
REPLAY = ("replay", "run", "--render", "human", "--episodes")


@pytest.fixture
def toys(tmp_path, monkeypatch):
    (tmp_path / "window_toys.py").write_text(TOYS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    import window_toys

    yield window_toys
    del sys.modules["window_toys"]


def evaluated(env="window_toys:shown", **env_kwargs):
    config = EvalConfig().environment(env, env_kwargs=env_kwargs).policy("window_toys:ones")
    return evaluate(config.evaluation(num_episodes=6, seed=3, determinism_check=0.0), run_dir="run")


def test_the_window_shows_the_reset_and_every_step_of_the_chosen_episodes(toys):
    """In their order, in one window; they are compared with their records as without it."""
    result = evaluated()
    assert toys.SEEN == []
    outcome = call(*REPLAY, "4,1")
    assert outcome.exit_code == 0, outcome.output
    records = [result.table.record(index) for index in (4, 1)]
    assert [(record.seed, step) for record in records for step in range(record.length + 1)] == toys.SEEN
    assert outcome.stdout.count("identical") == 2
    assert toys.BUILT.count("human") == 1


def test_an_episode_that_differs_is_1(toys):
    evaluated()
    toys.EXTRA = 1.0
    assert call(*REPLAY, "1").exit_code == ExitCode.PARTIAL


def test_cartpole_opens_its_window(toys):
    """Of pygame, on a display that nobody sees: it is drawn after the reset and after each step."""
    import pygame

    flips = []
    with pytest.MonkeyPatch.context() as patch:
        flip = pygame.display.flip
        patch.setattr(pygame.display, "flip", lambda: (flips.append(pygame.display.get_surface().get_size()), flip()))
        result = evaluated("CartPole-v1")
        outcome = call(*REPLAY, "0")
    assert outcome.exit_code == 0, outcome.output
    assert flips == [(600, 400)] * (result.table.record(0).length + 1)


def test_without_a_display_it_is_said_and_nothing_runs(toys, monkeypatch):
    """SDL itself would draw where nobody sees it."""
    evaluated()
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    outcome = call(*REPLAY, "0")
    assert outcome.exit_code == ExitCode.USAGE
    assert outcome.stderr.startswith("error: there is no display to open a window on: none of DISPLAY, ")
    assert "rl-eval replay --video makes videos of episodes without one" in outcome.stderr
    assert toys.SEEN == []


def test_a_display_that_does_not_answer_is_said(toys, monkeypatch):
    """It was left by a session that is over; SDL must not fall back to a window that nobody sees."""
    evaluated("CartPole-v1")
    monkeypatch.delenv("SDL_VIDEODRIVER")
    monkeypatch.setenv("DISPLAY", ":79")
    outcome = call(*REPLAY, "0")
    assert outcome.exit_code == ExitCode.FAILED
    assert "episode 0 completed in the run, and fails in a window" in outcome.stderr
    assert "x11,wayland not available" in outcome.stderr
    assert "Traceback" not in outcome.output


def test_a_window_that_breaks_is_no_difference_of_the_episode(toys):
    evaluated(broken=True)
    outcome = call(*REPLAY, "2")
    assert outcome.exit_code == ExitCode.FAILED
    assert "episode 2 completed in the run, and fails in a window" in outcome.stderr
    assert "the window broke" in outcome.stderr


def test_an_episode_that_had_failed_fails_in_its_window_too(toys):
    """And is identical."""
    evaluated(failing=True)
    outcome = call(*REPLAY, "0")
    assert outcome.exit_code == 0, outcome.output
    assert [step for _, step in toys.SEEN] == [0]


@pytest.mark.parametrize("env", ["window_toys:deaf"])
def test_an_environment_that_opens_no_window_is_refused(toys, env):
    evaluated(env)
    outcome = call(*REPLAY, "0")
    assert outcome.exit_code == ExitCode.USAGE
    assert "cannot be shown in a window, as it does not render human" in outcome.stderr
    assert "its render_mode is None, of ['human']" in outcome.stderr


def test_only_human_is_known(toys):
    outcome = call("replay", "run", "--render", "rgb_array", "--episodes", "0")
    assert outcome.exit_code == ExitCode.USAGE
    assert not Path("run").exists()
