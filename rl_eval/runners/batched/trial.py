"""Trial of a simulator before its first episode: a slot that starts alone must not change the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import tree

from rl_eval.errors import ConfigError
from rl_eval.policies.inference.device_arrays import numpy_of
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.simulator import BatchSimulator

_Rows = list[bytes]
"""Content of each slot."""

WITHOUT_RESTARTS: Final = (
    "Use one of three settings. runners.block: 64 runs episodes that depend on the number of environments. "
    "runners.runner: vector runs single environments. For an id, env_kwargs: {vectorization_mode: sync} can help."
)
"""Next step for a simulator that cannot start slots alone."""
_STEPS: Final = 4


class _Course(NamedTuple):
    """First steps of some episodes, with or without a restart of the last slot."""

    starts: _Rows
    """First observations."""
    alone: _Rows
    """First observation of the last slot, started alone; empty without a restart."""
    steps: list[list[_Rows]]
    """Rewards, observations and last observations of each step. They are empty in slots without them."""


def try_out(simulator: BatchSimulator, specs: Sequence[EpisodeSpec]) -> str:
    """Run the same few steps twice; in the second run, start the last slot again while the others run.

    Args:
        simulator: The simulator.
        specs: A spec for each slot.

    Returns:
        A note if all seeds give the same first observation; otherwise an empty string.

    Raises:
        ConfigError: Equal specs do not start equal episodes, or the restart changes other slots.
    """
    whole, disturbed = _play(simulator, specs, restart=False), _play(simulator, specs, restart=True)
    count = simulator.num_envs
    if (slot := _different(whole.starts, disturbed.starts)) is not None:
        raise _rejected(simulator, "does not start the same episode from the same seed", slot, specs)
    if whole.starts[-1:] != disturbed.alone:
        raise _rejected(simulator, "starts another episode if a slot is started alone", count - 1, specs)
    for one, other in () if simulator.couples_slots else zip(whole.steps, disturbed.steps, strict=True):
        for part, ours, theirs in zip(("reward", "observation", "last observation"), one, other, strict=True):
            if (slot := _different(ours[:-1], theirs[:-1])) is not None:
                raise _rejected(simulator, f"changes the {part} of other slots if a slot is started alone", slot, specs)
    return f"{count} seeds gave 1 distinct first observation" if len({*whole.starts}) == 1 < count else ""


def _play(simulator: BatchSimulator, specs: Sequence[EpisodeSpec], *, restart: bool) -> _Course:
    """Start all slots and take a few steps. With ``restart``, start the last slot again after the first step."""
    slots = np.arange(simulator.num_envs)
    course = _Course(_rows(simulator.start(slots, specs)), [], [])
    actions = gym.vector.utils.batch_space(simulator.action_space, simulator.num_envs)
    actions.seed(0)
    live = np.ones(simulator.num_envs, bool)
    for number in range(_STEPS):
        if restart and number == 1:
            course.alone.extend(_rows(simulator.start(slots[-1:], specs[-1:])))
        step = simulator.advance(actions.sample())
        rewards, observations = _rows(step.rewards), _rows(step.observations)
        ended = live & (step.terminated | step.truncated)
        parts = ((rewards, live), (observations, live & ~ended), (observations, ended))
        course.steps.append([[row if kept else b"" for row, kept in zip(*part, strict=True)] for part in parts])
        live = live & ~ended
    return course


def _rows(values: Any) -> _Rows:
    """Return the content of each row of some arrays."""
    leaves = [numpy_of(leaf) for leaf in tree.flatten(values)]
    return [b"".join(row.tobytes() for row in rows) for rows in zip(*leaves, strict=True)]


def _different(one: _Rows, other: _Rows) -> int | None:
    """Return the first slot that differs; None if all are equal."""
    return next((slot for slot, (ours, theirs) in enumerate(zip(one, other, strict=True)) if ours != theirs), None)


def _rejected(simulator: BatchSimulator, what: str, slot: int, specs: Sequence[EpisodeSpec]) -> ConfigError:
    return ConfigError(
        f"{simulator.name} {what}, first in slot {slot} (seed {specs[slot].seed}), so an episode would depend on other "
        "slots",
        key="environment.env",
        value=simulator.name,
        fix=WITHOUT_RESTARTS,
    )
