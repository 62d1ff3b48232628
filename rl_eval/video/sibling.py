"""Sibling of a runner that renders: one lane with an environment of its own, and the runner's policy and weights.

The runner's own environments are not touched, and since an episode does not depend on its layout, it comes out again.
"""

from __future__ import annotations

from typing import Any, Final

from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError, EnvError
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.runners import EvalRunner

__all__ = ["Spectator", "rendering_sibling"]

_PURPOSES: Final = {"rgb_array": "recorded", "human": "shown in a window"}
"""What becomes of an environment that renders, by its mode."""


class Spectator:
    """Observer that knows the environment that it sees, and does nothing else."""

    def __init__(self) -> None:
        self.env: Any = None
        """What it sees."""

    def watch(self, env: Any) -> Spectator:
        """See another environment from now on."""
        self.env = env
        return self

    def problem(self, mode: str) -> str:
        """Return why the environment does not render in a mode; empty if it does."""
        found, modes = getattr(self.env, "render_mode", None), self.metadata.get("render_modes")
        return "" if found == mode else f"its render_mode is {found!r}, of {modes} that its metadata names"

    @property
    def metadata(self) -> Any:
        """Metadata of the environment; empty where it has none."""
        return getattr(self.env, "metadata", None) or {}

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """See :class:`EpisodeObserver`."""

    def on_step(self, *step: Any) -> None:
        """See :class:`EpisodeObserver`."""

    def on_episode_end(self, record: EpisodeRecord) -> None:
        """See :class:`EpisodeObserver`."""


def rendering_sibling(runner: EvalRunner, mode: str, timeout_s: float | None, spectator: Spectator) -> EvalRunner:
    """Build a runner with one lane whose environment renders, and with the policy of another.

    Args:
        runner: Whose policy acts; between two of its calls.
        mode: ``render_mode`` of the environment.
        timeout_s: Longest time between reset and end of an episode, in seconds; None for any.
        spectator: Sees the episodes.

    Raises:
        ConfigError: The environment does not render in this mode.
    """
    settings = _one_lane(runner.settings, timeout_s, spectator)
    problems = []
    for way, kwargs in _ways(settings, mode).items():
        rendering = with_values(settings, environment={"env_kwargs": kwargs})
        try:
            sibling = type(runner)(rendering, runner.runner_index, runner.policy)
        except (ConfigError, EnvError) as error:
            problems.append(f"{way}, it cannot be built: {error}")
            continue
        if not (problem := spectator.problem(mode)):
            return sibling
        sibling.stop()
        problems.append(f"{way}, {problem}")
    raise ConfigError(
        f"the environment {settings.environment.env!r} cannot be {_PURPOSES[mode]}, as it does not render {mode}: "
        f"{'; '.join(problems)}. A factory that takes an EnvContext has to pass render_mode on"
    )


def _one_lane(settings: EvalSettings, timeout_s: float | None, spectator: Spectator) -> EvalSettings:
    return with_values(
        settings,
        runners={"num_envs_per_runner": 1},
        evaluation={"observers": (spectator.watch,)},
        fault_tolerance={"episode_timeout_s": timeout_s},
    )


def _ways(settings: EvalSettings, mode: str) -> dict[str, dict[str, Any]]:
    """Return the kwargs to try: not every factory knows the mode, and some render anyway."""
    kwargs = settings.environment.env_kwargs
    return {f"with render_mode={mode!r}": {**kwargs, "render_mode": mode}, "as configured": dict(kwargs)}
