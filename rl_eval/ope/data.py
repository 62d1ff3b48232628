"""Logged episodes: observations, actions and rewards of a behaviour policy, with the log-probability of each action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
"""Required columns."""

_BEHAVIOURS: Final = ("behaviour", "weights_version")
"""Optional columns that name the policy of a step: all steps must have the same."""

_ROUNDING: Final = 1e-5
"""Highest log-probability of a certain action, in float32."""

MISSING: Final = (
    "estimates need the log-probability of each action, stored by the policy that acted. Record episodes of a policy "
    "that has log_prob"
)
"""Advice for data without log-probabilities."""


@final
@dataclass(frozen=True, eq=False)
class LoggedEpisodes:
    r"""Finished episodes of one behaviour policy: flat arrays of steps, one episode after the other, not writeable."""

    observations: Array
    """Observations before each action, shape (steps, \\*observation_shape)."""
    actions: Array
    """Shape (steps, \\*action_shape); integers are discrete actions, floats continuous ones."""
    rewards: npt.NDArray[np.float64]
    """Shape (steps,)."""
    log_probs: npt.NDArray[np.float64]
    """Log-probability (density, if continuous) of each action under the policy that took it, shape (steps,)."""
    lengths: npt.NDArray[np.int64]
    """Steps of each episode, at least 1, shape (episodes,)."""
    terminated: npt.NDArray[np.bool_]
    """Whether each episode terminated, rather than being truncated, shape (episodes,)."""
    ids: npt.NDArray[np.int64]
    """Number of each episode in the data, shape (episodes,)."""

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def from_steps(cls, columns: Mapping[str, npt.ArrayLike]) -> LoggedEpisodes:
        r"""Build episodes from columns with one entry per step, and check them.

        Args:
            columns: ``episode`` and ``step`` (integers; the steps of an episode follow one another from 0 on),
                ``observation``, ``action``, ``reward``, ``terminated``, ``truncated`` and ``action_log_prob``, each of
                shape (steps, ...). If ``behaviour`` or ``weights_version`` is given, all its entries must be equal.

        Raises:
            UsageError: A column is missing, or an episode is unfinished, out of order, of another policy, or has
                impossible numbers; the message names the episode.
        """
        steps = _arrays(columns)
        _check(steps)
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

    def place(self, row: int) -> str:
        """Return the episode and the number of a step, for messages."""
        return f"episode {np.repeat(self.ids, self.lengths)[row]}, step {self.step_numbers()[row]}"


def places_of(episode: Array) -> npt.NDArray[np.int64]:
    """Return the place of each step in its episode, from 0, for steps that are grouped by episode, shape (steps,)."""
    first = _starts(episode)
    return np.arange(len(episode)) - np.repeat(first, np.diff(first, append=len(episode)))


def _starts(episode: Array) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.append(True, episode[1:] != episode[:-1]))


def _frozen(array: Array) -> Array:
    copied = array.copy()
    copied.setflags(write=False)
    return copied


def _arrays(columns: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
    """Return the columns as numeric arrays of one length; all but observations and actions are flat."""
    if missing := [name for name in COLUMNS if name not in columns]:
        advice = MISSING if "action_log_prob" in missing else f"give {', '.join(COLUMNS)}, one entry per step"
        raise UsageError(f"the data have no column {missing[-1]}: {advice}")
    steps = {name: np.asarray(columns[name]) for name in (*COLUMNS, *_BEHAVIOURS) if name in columns}
    count = steps["episode"].size
    if not count:
        raise UsageError("the data have no steps: give at least one episode")
    for name, column in steps.items():
        flat = name not in ("observation", "action")
        if column.dtype.kind not in "biuf":
            raise UsageError(f"column {name} has dtype {column.dtype}: give numbers")
        if not column.ndim or len(column) != count or (flat and column.size != count):
            raise UsageError(f"column {name} has shape {column.shape}: give one entry for each of the {count} steps")
        if flat:
            steps[name] = column.reshape(count)
    for name in ("episode", "step"):
        whole = np.nan_to_num(steps[name]).astype(np.int64)
        if (bad := whole != steps[name]).any():
            raise UsageError(f"column {name} has {steps[name][bad][0]}: number episodes and steps with integers")
        steps[name] = whole
    return steps


def _check(steps: Mapping[str, Array]) -> None:
    """Raise for the first step that breaks a rule; the message names its episode."""
    episode, step, log_prob = steps["episode"], steps["step"], steps["action_log_prob"]
    ids, times = np.unique(episode[_starts(episode)], return_counts=True)
    if (times > 1).any():
        raise UsageError(
            f"episode {ids[times > 1][0]}: its steps do not stand together. Sort the data by episode and step, and "
            "number episodes of different files differently"
        )
    over = (steps["terminated"] != 0) | (steps["truncated"] != 0)
    last = np.append(episode[1:] != episode[:-1], True)
    highest = np.inf if steps["action"].dtype.kind == "f" else _ROUNDING
    rules: list[tuple[Any, str, Array]] = [
        (
            step != places_of(episode),
            "step {step} stands where step {value} belongs: sort the steps, and leave out incomplete episodes",
            places_of(episode),
        ),
        (last & ~over, "it is unfinished: step {step} is neither terminated nor truncated. Leave it out", step),
        (over & ~last, "it continues after step {step}, where it ended. Give each episode its own number", step),
    ]
    for name in _BEHAVIOURS:
        if name in steps:
            why = f"{name} {{value}} acted, but {name} {steps[name][0]} before it: give the episodes of one policy"
            rules.append((steps[name] != steps[name][0], why, steps[name]))
    for name in ("observation", "action", "reward"):
        bad = ~np.isfinite(steps[name]) if name == "reward" else np.isnan(steps[name])
        why = f"its {name} at step {{step}} is {{value}}. Leave it out"
        rules.append((bad.reshape(len(bad), -1).any(1), why, steps[name]))
    why = "the log-probability at step {step} is {value}, but "
    rules += [
        (np.isnan(log_prob), f"step {{step}} has no log-probability (NaN): {MISSING}", log_prob),
        (np.isneginf(log_prob), why + "the action was taken: store that of the policy that acted", log_prob),
        (
            np.isposinf(log_prob) | (log_prob > highest),
            why + "at most 0 is possible for a discrete action, and never infinity. Store logarithms",
            log_prob,
        ),
    ]
    for bad, message, values in rules:
        if bad.any():
            row = int(bad.argmax())
            raise UsageError(f"episode {episode[row]}: {message.format(step=step[row], value=values[row])}")
