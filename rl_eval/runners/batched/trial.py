"""Trial of a simulator before its first episode: a slot that starts alone must not change the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.errors import ConfigError
from rl_eval.policies.inference.device_arrays import numpy_of
from rl_eval.records.episode import EpisodeSpec
from rl_eval.runners.batched.simulator import BatchSimulator, Flags

Leaves = list[npt.NDArray[Any]]

WITHOUT_RESTARTS: Final = (
    "Use one of three settings. runners.block: 64 runs episodes that depend on the number of environments. "
    "runners.runner: vector runs single environments. For an id, env_kwargs: {vectorization_mode: sync} can help."
)
"""Next step for a simulator that cannot start slots alone."""
_STEPS: Final = 4


@dataclass(frozen=True, slots=True)
class _Course:
    """Arrays of the first steps of some episodes, with or without a restart of the last slot."""

    starts: Leaves
    """First observations, each of shape (num_envs, ...)."""
    alone: Leaves
    """First observations of the last slot, started alone, each of shape (1, ...); empty without a restart."""
    steps: list[tuple[Leaves, Leaves]]
    """Rewards and observations of each step. They are zero in slots whose episode has ended."""
    ends: list[Flags]
    """Mask of the slots whose episode ended in the step."""


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
    whole, disturbed = _play(simulator, specs), _play(simulator, specs, restart=True)
    count = simulator.num_envs
    if (slot := _different(whole.starts, disturbed.starts)) is not None:
        raise _rejected(simulator, "does not start the same episode from the same seed", slot, specs)
    if _different(_rows(whole.starts, [-1]), disturbed.alone) is not None:
        raise _rejected(simulator, "starts another episode if a slot is started alone", count - 1, specs)
    if not simulator.couples_slots and (changed := _changed(whole, disturbed)) is not None:
        part, slot = changed
        raise _rejected(simulator, f"changes {part} of other slots if a slot is started alone", slot, specs)
    same = _equal(whole.starts, _rows(whole.starts, [0] * count))
    return f"{count} seeds gave 1 distinct first observation" if same and count > 1 else ""


def try_block(simulator: BatchSimulator, specs: Sequence[EpisodeSpec]) -> str:
    """Run the first few steps of a block twice from the first seed; return a note if the two runs differ."""
    first, second = (_play(simulator, specs, block=True) for _ in range(2))
    if _equal(first.starts, second.starts) and all(
        _equal(rewards, rewards_2) and _equal(observations, observations_2)
        for (rewards, observations), (rewards_2, observations_2) in zip(first.steps, second.steps, strict=True)
    ):
        return ""
    return f"{simulator.name} does not repeat a block from the same seed, so no other run can repeat this result"


def _play(
    simulator: BatchSimulator, specs: Sequence[EpisodeSpec], *, restart: bool = False, block: bool = False
) -> _Course:
    """Start all slots and take a few steps. With ``restart``, start the last slot again after the first step."""
    slots = np.arange(simulator.num_envs)
    starts = simulator.reset(specs[0].seed) if block else simulator.start(slots, specs)
    course = _Course(_copied(starts), [], [], [])
    actions = gym.vector.utils.batch_space(simulator.action_space, simulator.num_envs)
    actions.seed(0)
    live = np.ones(simulator.num_envs, bool)
    for number in range(_STEPS):
        if restart and number == 1:
            course.alone.extend(_copied(simulator.start(slots[-1:], specs[-1:])))
        step = simulator.advance(actions.sample())
        rewards, observations = _copied(step.rewards), _copied(step.observations)
        for leaf in (*rewards, *observations):
            leaf[~live] = 0
        course.steps.append((rewards, observations))
        course.ends.append(live & (step.terminated | step.truncated))
        live = live & ~course.ends[-1]
    return course


def _changed(one: _Course, other: _Course) -> tuple[str, int] | None:
    """Return the name of the first difference and its slot; None if all slots except the last one are equal."""
    for (rewards, observations), (rewards_2, observations_2), ended in zip(
        one.steps, other.steps, one.ends, strict=True
    ):
        others, ended = np.arange(len(ended) - 1), ended[:-1]
        for part, ours, theirs, slots in (
            ("the reward", rewards, rewards_2, others),
            ("the observation", observations, observations_2, others[~ended]),
            ("the last observation", observations, observations_2, others[ended]),
        ):
            if (place := _different(_rows(ours, slots), _rows(theirs, slots))) is not None:
                return part, int(slots[place])
    return None


def _rows(leaves: Leaves, rows: Any) -> Leaves:
    return [leaf[rows] for leaf in leaves]


def _copied(values: Any) -> Leaves:
    return [np.array(numpy_of(leaf)) for leaf in tree.flatten(values)]


def _different(one: Leaves, other: Leaves) -> int | None:
    """Return the first row that differs; None if all are equal. NaN equals NaN."""
    rows = range(len(one[0]))
    return next((row for row in rows if not _equal(_rows(one, row), _rows(other, row))), None)


def _equal(one: Leaves, other: Leaves) -> bool:
    """Whether arrays are equal; NaN equals NaN."""
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(one, other, strict=True))


def _rejected(simulator: BatchSimulator, what: str, slot: int, specs: Sequence[EpisodeSpec]) -> ConfigError:
    return ConfigError(
        f"{simulator.name} {what}, first in slot {slot} (seed {specs[slot].seed}), so an episode would depend on other "
        "slots",
        key="environment.env",
        value=simulator.name,
        fix=WITHOUT_RESTARTS,
    )
