"""Episodes run again in an environment that renders: a window that it opens itself, or frames for a video.

A sibling of a runner has one lane with an environment of its own, and the runner's policy and weights. The runner's own
environments are not touched, and since an episode does not depend on its layout, it comes out again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rl_eval.config.settings import with_values
from rl_eval.errors import ConfigError, EnvError
from rl_eval.recording.replay import Replay, Spectator, compared, lease_of, rebuilt_runner, run_again
from rl_eval.results.result import EvalResult
from rl_eval.runners import EvalRunner, Runner
from rl_eval.supervision.caller import one_thread

__all__ = ["rendering_sibling", "replay_in_window"]

_DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
"""Variables of which one is set where a window can be opened."""


@contextmanager
def rendering_sibling(runner: Runner, mode: str, timeout_s: float | None, spectator: Spectator) -> Iterator[EvalRunner]:
    """Build a runner with one lane whose environment renders, and with the policy of another.

    Args:
        runner: Whose policy acts; between two of its calls.
        mode: ``render_mode`` of the environment.
        timeout_s: Longest time between reset and end of an episode, in seconds; None for any.
        spectator: Sees the episodes.

    Raises:
        ConfigError: The runner has no observers, or the environment does not render in this mode.
    """
    if not isinstance(runner, EvalRunner):
        raise ConfigError(f"episodes of {type(runner).__name__} cannot be shown: it is not an rl_eval.EvalRunner")
    settings = with_values(
        runner.settings,
        runners={"num_envs_per_runner": 1},
        evaluation={"observers": (spectator.watch,)},
        fault_tolerance={"episode_timeout_s": timeout_s},
    )
    kwargs = settings.environment.env_kwargs
    # Not every factory knows the mode, and some render anyway.
    ways = {f"with render_mode={mode!r}": {**kwargs, "render_mode": mode}, "as configured": kwargs}
    problems = []
    for way, given in ways.items():
        try:
            sibling = type(runner)(
                with_values(settings, environment={"env_kwargs": given}), runner.runner_index, runner.policy
            )
        except (ConfigError, EnvError) as error:
            problems.append(f"{way}, it cannot be built: {error}")
            continue
        try:
            if (found := getattr(spectator.env, "render_mode", None)) == mode:
                yield sibling
                return
        finally:
            sibling.stop()
        problems.append(f"{way}, its render_mode is {found!r}")
    raise ConfigError(
        f"the environment {settings.environment.env!r} does not render {mode}: {'; '.join(problems)}. A factory that "
        "takes an EnvContext has to pass render_mode on"
    )


def replay_in_window(result: EvalResult, indices: Sequence[int], *, trust: bool = False) -> Iterator[Replay]:
    """Run episodes again as :func:`rl_eval.replay` does, one after the other, in an environment that shows them.

    Args:
        result: Of the evaluation.
        indices: Which episodes.
        trust: Whether code that the result names may be imported and called.

    Raises:
        UsageError: An episode has no record.
        UntrustedError: The result names code that no evaluation of this process named.
        WeightsError: The weights are not those of the run.
        ConfigError: There is no display, the environment opens no window, or the recorded config cannot be used again.
        EnvError: An episode that completed fails beside the window.
    """
    if sys.platform == "linux":
        if not any(os.environ.get(name) for name in _DISPLAYS):
            raise ConfigError(
                f"there is no display to open a window on: set one of {', '.join(_DISPLAYS)}, or make videos instead"
            )
        os.environ.setdefault("SDL_VIDEODRIVER", "x11,wayland")  # SDL draws to nowhere if these fail, without a word.
    leases = [lease_of(result, index) for index in indices]
    with (
        rebuilt_runner(result, trust=trust) as runner,
        rendering_sibling(runner, "human", None, Spectator()) as sibling,
        one_thread(),
    ):
        for report in run_again(sibling, leases):
            replayed = compared(result, report)
            if report.faults and replayed.recorded.outcome != "failed":
                raise EnvError(
                    f"episode {replayed.again.index} completed in the run, and fails in a window: {report.faults[0]}"
                )
            yield replayed
