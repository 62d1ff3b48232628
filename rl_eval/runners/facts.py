"""Facts of a runner class that settings are checked against, and that an evaluation uses."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from rl_eval.config.settings import EvalSettings, is_live_environment

DEFAULT_LANES: Final = 8


class RunnerFacts(NamedTuple):
    """Facts of a runner class."""

    default_lanes: int = DEFAULT_LANES
    """Number of simultaneous episodes, if ``runners.num_envs_per_runner`` is not set."""
    max_lanes: int | None = None
    """Highest number of simultaneous episodes; None for no limit."""
    unit: Literal["slot", "process", "batch", "block"] = "slot"
    """Part that runs episodes: a slot with an environment of its own, a process with an environment of its own, a
    simulator that steps all slots in one call, or such a simulator with ``runners.block``."""
    agents: bool = False
    """Whether the environments have several agents, with policies from ``policy.policies``."""
    conditions: bool = True
    """Whether the runner resets an episode with its condition."""
    processes: bool = False
    """Whether the runner needs its own process, so that ``runners.num_runners`` must be at least 1."""
    sweeps: bool = False
    """Whether every live episode takes one step after each call of the policy."""

    @property
    def steps_all_slots(self) -> bool:
        """Whether one call steps all slots."""
        return self.unit in ("batch", "block")

    def lanes(self, settings: EvalSettings) -> int:
        """Return the number of lanes of a runner.

        By default, it is the number of slots of an environment object, and 1 if a process can build only one
        environment.
        """
        if settings.runners.num_envs_per_runner is not None:
            return settings.runners.num_envs_per_runner
        if self.one_environment(settings):
            return 1
        return slots_of(settings) or self.default_lanes

    def one_environment(self, settings: EvalSettings) -> bool:
        """Whether a runner has only one lane, because its process can build only one environment."""
        return settings.environment.instances == "one" and self.unit == "slot"


def slots_of(settings: EvalSettings) -> int | None:
    """Return the number of slots of an environment object; None for any other environment."""
    env = settings.environment.env
    return getattr(env, "num_envs", None) if is_live_environment(env) else None
