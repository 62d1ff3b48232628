"""Settings that cannot change while the processes of runners live."""

from __future__ import annotations

from typing import Any, Final

from rl_eval.config.settings import EvalSettings, RunnersSection
from rl_eval.errors import ConfigError
from rl_eval.runners import class_of

_OF_EACH_START: Final = {"runner", "block", "runner_start_timeout_s", "num_envs_per_runner"}
"""Keys of the section ``runners`` that are not compared by value. ``num_envs_per_runner`` is compared by the number of
lanes, because None means the default of the runner class. The other keys may change."""
_DEADLINES: Final = ("episode_timeout_s", "reset_timeout_s", "step_timeout_s", "runner_timeout_s")
"""Keys of the deadlines that node agents were started with."""


def shares_processes(one: EvalSettings, other: EvalSettings) -> bool:
    """Whether the same processes can run the runners of one settings object, and later those of the other."""
    return _fixed(one) == _fixed(other)


def check_processes(present: EvalSettings, new: EvalSettings) -> None:
    """Check that the present processes can run the runners of new settings.

    Raises:
        ConfigError: A setting that is fixed when a process starts has another value.
    """
    ours, wanted = _fixed(present), _fixed(new)
    for key in wanted | ours:
        if ours.get(key) != wanted.get(key):
            problem = f"{key} differs from the value of the group, whose processes cannot change this setting"
            raise ConfigError(problem, key=key, fix="Create another group, or set the same value.")


def _fixed(settings: EvalSettings) -> dict[str, Any]:
    """Return the settings that are fixed when a process starts, by key.

    For runners in this process, only their number is fixed.
    """
    runners, faults = settings.runners, settings.fault_tolerance
    number = {"runners.num_runners": runners.num_runners}
    if not runners.num_runners:
        return number
    kept = RunnersSection.model_fields.keys() - _OF_EACH_START
    return {
        **number,
        **{f"runners.{key}": getattr(runners, key) for key in sorted(kept)},
        "runners.num_envs_per_runner": class_of(settings).facts.lanes(settings),
        **{f"fault_tolerance.{key}": getattr(faults, key) for key in _DEADLINES},
    }
