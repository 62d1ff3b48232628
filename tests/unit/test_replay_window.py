"""``rl-eval replay --render human``: episodes are shown in a window as they run again, or it is said why not."""

import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.config.builder import EvalConfig
from rl_eval.execution.evaluate import evaluate
from tests.refused import untold
from tests.unit.cli_world import call
from tests.unit.render_world import world

REPLAY = ("replay", "run", "--render", "human", "--episodes")


toys = pytest.fixture(world)


def evaluated(env="tests.unit.render_world:painted", **env_kwargs):
    config = EvalConfig().environment(env, env_kwargs=env_kwargs).policy("tests.unit.render_world:ones")
    return evaluate(config.evaluation(num_episodes=6, seed=3, determinism_check=0.0), output="run")


def test_the_window_shows_the_reset_and_every_step_of_the_chosen_episodes(toys):
    """In their order, in one window; they are compared with their records as without it."""
    result = evaluated()
    assert toys.SEEN == []
    outcome = call(*REPLAY, "4,1")
    assert outcome.exit_code == 0, outcome.output
    records = [result.table.record(index) for index in (4, 1)]
    assert [(record.seed, step) for record in records for step in range(record.length + 1)] == toys.SEEN
    assert outcome.stdout.count("identical") == 2
    assert toys.EVENTS["built", "human"] == 1
    toys.SHIFT = 1.0
    assert call(*REPLAY, "1").exit_code == ExitCode.PARTIAL


def test_an_environment_that_opens_no_window_is_refused(toys):
    evaluated("tests.unit.render_world:deaf")
    outcome = call(*REPLAY, "0")
    assert outcome.exit_code == ExitCode.USAGE
    assert untold(outcome.stderr, "tests.unit.render_world:deaf", "human") == []


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
    assert "DISPLAY" in outcome.stderr
    assert toys.SEEN == []


def test_a_display_that_does_not_answer_is_said(toys, monkeypatch):
    """It was left by a session that is over; SDL must not fall back to a window that nobody sees."""
    evaluated("CartPole-v1")
    monkeypatch.delenv("SDL_VIDEODRIVER")
    monkeypatch.setenv("DISPLAY", ":79")
    outcome = call(*REPLAY, "0")
    assert outcome.exit_code == ExitCode.FAILED
    assert "episode 0" in outcome.stderr
    assert "x11,wayland not available" in outcome.stderr
    assert "Traceback" not in outcome.output


def test_a_window_that_breaks_is_no_difference_of_the_episode(toys):
    evaluated(broken_at=0)
    outcome = call(*REPLAY, "2")
    assert outcome.exit_code == ExitCode.FAILED
    assert "episode 2" in outcome.stderr
    assert "the renderer broke" in outcome.stderr


def test_an_episode_that_had_failed_fails_in_its_window_too(toys):
    """And is identical."""
    evaluated(fails=[0])
    outcome = call(*REPLAY, "0")
    assert outcome.exit_code == 0, outcome.output
    assert [step for _, step in toys.SEEN] == [0, 1, 2]
