"""Replay of episodes in a window, which the environment opens itself: its ``render_mode`` is ``human``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from rl_eval.errors import ConfigError, EnvError
from rl_eval.results.replay import Replay, rebuilt_runner, recorded_episode, replay_with
from rl_eval.results.result import EvalResult
from rl_eval.runners import EvalRunner
from rl_eval.video.sibling import Spectator, rendering_sibling

__all__ = ["replay_in_window"]

_MODE: Final = "human"
_DRIVER: Final = "SDL_VIDEODRIVER"
_DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY", _DRIVER)
"""Variables of which one is set where a window can be opened."""
_INSTEAD: Final = "rl-eval replay --video makes videos of episodes without one"


def replay_in_window(result: EvalResult, indices: Sequence[int], *, trust: bool = False) -> Iterator[Replay]:
    """Run episodes again as :func:`rl_eval.replay` does, one after the other, in an environment that shows them.

    Args:
        result: Of the evaluation.
        indices: Which episodes.
        trust: Whether code that the result names may run although somebody else may have made it.

    Raises:
        UsageError: An episode has no record.
        UntrustedError: Somebody else may have made the result.
        WeightsError: The weights are not those of the run.
        ConfigError: There is no display, the environment opens no window, or the recorded config cannot be used again.
        EnvError: An episode that completed fails beside the window.
    """
    _check_display()
    for index in indices:
        recorded_episode(result, index)
    with rebuilt_runner(result, trust=trust) as runner:
        if not isinstance(runner, EvalRunner):
            raise ConfigError(f"episodes of {type(runner).__name__} cannot be shown: it is no rl_eval.EvalRunner")
        sibling = rendering_sibling(runner, _MODE, None, Spectator())
        try:
            for index in indices:
                yield _shown(replay_with(sibling, result, index))
        finally:
            sibling.stop()


def _check_display() -> None:
    """Make sure that nothing is drawn where nobody sees it, which SDL falls back to without a word."""
    if sys.platform != "linux":
        return
    if not any(os.environ.get(name) for name in _DISPLAYS):
        raise ConfigError(f"there is no display to open a window on: none of {', '.join(_DISPLAYS)} is set; {_INSTEAD}")
    os.environ.setdefault(_DRIVER, "x11,wayland")


def _shown(replayed: Replay) -> Replay:
    """Refuse an episode that failed where it had completed: that was the window."""
    again = replayed.again
    if again.outcome == "failed" and replayed.recorded.outcome != "failed" and again.faults:
        raise EnvError(
            f"episode {again.index} completed in the run, and fails in a window: {again.faults[-1]}. A window needs a "
            f"display and the packages that the environment draws with; {_INSTEAD}"
        )
    return replayed
