"""Logged episodes: what a behaviour policy saw, did and got, with the log-probability of each action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError

__all__ = ["COLUMNS", "MISSING", "LoggedEpisodes", "places_of"]

Array = npt.NDArray[Any]

COLUMNS: Final = (
    *("episode", "step", "observation", "action", "reward", "terminated", "truncated"),
    "action_log_prob",
)
"""What a step must have."""

_BEHAVIOURS: Final = ("behaviour", "weights_version")
"""Optional columns that name the policy of a step: all steps must have the same."""

_ROUNDING: Final = 1e-5
"""How far the log-probability of a certain action may be above 0, in float32."""

MISSING: Final = (
    "ratios need the log-probability that the policy which acted gave to each of its actions, stored when it acted; "
    "it cannot be made up afterwards. Record episodes of a policy that has log_prob"
)
"""What is to be done where log-probabilities are missing."""


@final
@dataclass(frozen=True, eq=False)
class LoggedEpisodes:
    r"""Finished episodes of one behaviour policy: flat arrays of steps, one episode after the other, not writeable."""

    observations: Array
    """What the policy saw before each action, shape (steps, \\*observation_shape)."""
    actions: Array
    """Shape (steps, \\*action_shape); integers are discrete actions, floats continuous ones."""
    rewards: npt.NDArray[np.float64]
    """Shape (steps,)."""
    log_probs: npt.NDArray[np.float64]
    """Log-probability (density, if continuous) of each action under the policy that took it, shape (steps,)."""
    lengths: npt.NDArray[np.int64]
    """Steps of each episode, at least 1, shape (episodes,)."""
    terminated: npt.NDArray[np.bool_]
    """Whether each episode came to its own end rather than to a time limit, shape (episodes,)."""
    ids: npt.NDArray[np.int64]
    """Number of each episode in the data, shape (episodes,)."""

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def from_steps(cls, columns: Mapping[str, npt.ArrayLike]) -> LoggedEpisodes:
        r"""Build episodes from columns with one entry per step, and check that they are what they must be.

        Args:
            columns: ``episode`` and ``step`` (integers; the steps of an episode follow one another from 0 on),
                ``observation``, ``action``, ``reward``, ``terminated``, ``truncated`` and ``action_log_prob``, each of
                shape (steps, ...). Where ``behaviour`` or ``weights_version`` is given, all its entries must be equal.

        Raises:
            UsageError: A column is missing, or an episode is unfinished, out of order, of another policy, or has
                numbers that cannot be; the message names the episode.
        """
        steps = _same_length(columns)
        _check_order(steps)
        _check_behaviour(steps)
        _check_numbers(steps)
        _check_log_probs(steps)
        first = _starts(steps["episode"])
        last = np.append(first[1:], len(steps["episode"])) - 1
        return cls(
            observations=_frozen(steps["observation"]),
            actions=_frozen(steps["action"]),
            rewards=_frozen(steps["reward"].astype(np.float64)),
            log_probs=_frozen(steps["action_log_prob"].astype(np.float64)),
            lengths=_frozen((last - first + 1).astype(np.int64)),
            terminated=_frozen(steps["terminated"][last].astype(np.bool_)),
            ids=_frozen(steps["episode"][first].astype(np.int64)),
        )

    def padded(self, values: Array) -> npt.NDArray[np.float64]:
        """Return values of steps, shape (steps,), as a matrix of shape (episodes, longest), with 0 after the ends."""
        matrix = np.zeros((len(self), int(self.lengths.max())))
        matrix[np.arange(matrix.shape[1]) < self.lengths[:, None]] = values
        return matrix

    def rows_of(self, episodes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return the mask of the steps of some episodes, given by a mask of shape (episodes,)."""
        return np.repeat(episodes, self.lengths)

    def step_numbers(self) -> npt.NDArray[np.int64]:
        """Return the number of each step in its episode, from 0, shape (steps,)."""
        return places_of(np.repeat(np.arange(len(self)), self.lengths))

    def __post_init__(self) -> None:
        assert len({len(getattr(self, part.name)) for part in fields(self)[:4]}) == 1


def _frozen(array: Array) -> Array:
    copied = array.copy()
    copied.setflags(write=False)
    return copied


def _same_length(columns: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
    """Return the columns as arrays, after checking that all are there and of one length."""
    if "action_log_prob" not in columns:
        raise UsageError(f"the data have no column action_log_prob: {MISSING}")
    if missing := [name for name in COLUMNS if name not in columns]:
        raise UsageError(f"the data have no column {missing[0]}: give {', '.join(COLUMNS)}, one entry per step")
    steps = {name: np.asarray(columns[name]) for name in (*COLUMNS, *_BEHAVIOURS) if name in columns}
    count = steps["episode"].size
    if not count:
        raise UsageError("the data have no steps: give at least one episode")
    for name, column in steps.items():
        if column.dtype.kind not in "biuf":
            raise UsageError(f"column {name} has dtype {column.dtype}: give numbers")
        if not column.ndim or len(column) != count:
            raise UsageError(
                f"column {name} has shape {column.shape}, but there are {count} steps: give one entry each"
            )
    for name in set(steps) - {"observation", "action"}:
        steps[name] = steps[name].reshape(count, -1)
        if steps[name].shape[1] != 1:
            raise UsageError(f"column {name} has {steps[name].shape[1]} numbers per step: give one")
        steps[name] = steps[name][:, 0]
    for name in ("episode", "step"):
        whole = np.nan_to_num(steps[name]).astype(np.int64)
        if (bad := whole != steps[name]).any():
            raise UsageError(f"column {name} has {steps[name][bad][0]}: number episodes and steps with integers")
        steps[name] = whole
    return steps


def places_of(episode: Array) -> npt.NDArray[np.int64]:
    """Return the place of each step in its episode, from 0, of steps that stand together, shape (steps,)."""
    first = _starts(episode)
    return np.arange(len(episode)) - np.repeat(first, np.diff(first, append=len(episode)))


def _starts(episode: Array) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.append(True, episode[1:] != episode[:-1]))


def _check_order(steps: Mapping[str, Array]) -> None:
    """Refuse episodes whose steps are not one after the other, or that have no end, or go on after it."""
    episode, step = steps["episode"], steps["step"]
    first = _starts(episode)
    ids, times = np.unique(episode[first], return_counts=True)
    if (times > 1).any():
        raise UsageError(
            f"episode {ids[times > 1][0]}: its steps do not stand together. Sort the data by episode and step, and "
            "number episodes of different files differently"
        )
    expected = places_of(episode)
    _refuse(
        steps,
        step != expected,
        lambda row: (
            f"step {step[row]} stands where step {expected[row]} belongs. Steps are shuffled or missing; sort them, "
            "and leave out episodes that are not whole"
        ),
    )
    over = (steps["terminated"] != 0) | (steps["truncated"] != 0)
    is_last = np.append(episode[1:] != episode[:-1], True)
    _refuse(
        steps,
        is_last & ~over,
        lambda row: (
            f"it is unfinished: step {step[row]} is its last and neither terminated nor truncated. Leave it out"
        ),
    )
    _refuse(
        steps,
        over & ~is_last,
        lambda row: f"it goes on after step {step[row]}, where it ended. Give each episode a number of its own",
    )


def _check_behaviour(steps: Mapping[str, Array]) -> None:
    for name in set(_BEHAVIOURS) & set(steps):
        column = steps[name]
        _refuse(
            steps,
            np.asarray(column != column[0]),
            lambda row, name=name, column=column: (
                f"{name} {column[row]} acted, but {name} {column[0]} before it. Estimate from the episodes of each "
                "behaviour policy on their own"
            ),
        )


def _check_numbers(steps: Mapping[str, Array]) -> None:
    for name in ("observation", "action", "reward"):
        bad = ~np.isfinite(steps[name]) if name == "reward" else np.isnan(steps[name])
        _refuse(
            steps,
            np.asarray(bad.reshape(len(bad), -1).any(1)),
            lambda row, name=name: f"its {name} at step {steps['step'][row]} is {steps[name][row]}. Leave it out",
        )


def _check_log_probs(steps: Mapping[str, Array]) -> None:
    """Refuse log-probabilities that are missing, or that no action can have that was taken."""
    value, step = steps["action_log_prob"], steps["step"]
    _refuse(
        steps,
        np.isnan(value),
        lambda row: (
            f"step {step[row]} has no log-probability (NaN): {MISSING}. The logarithm of a negative "
            "probability is NaN, too"
        ),
    )
    _refuse(
        steps,
        np.isneginf(value),
        lambda row: (
            f"the log-probability at step {step[row]} is -inf, but the action was taken. The policy that "
            "acted is not the one whose log-probabilities are stored"
        ),
    )
    highest = np.inf if steps["action"].dtype.kind == "f" else _ROUNDING
    _refuse(
        steps,
        np.asarray(np.isposinf(value) | (value > highest)),
        lambda row: (
            f"the log-probability at step {step[row]} is {value[row]:g}, which is impossible: that of a "
            "discrete action is at most 0, and of none infinite. Store logarithms of probabilities, not probabilities"
        ),
    )


def _refuse(steps: Mapping[str, Array], bad: Array, why: Any) -> None:
    """Refuse the data if a row is bad; the message names the episode of the first one."""
    if bad.any():
        row = int(bad.argmax())
        raise UsageError(f"episode {steps['episode'][row]}: {why(row)}")
