"""Block of trajectories that were cut out together: few large arrays, which travel and are kept as such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, final

import numpy.typing as npt

from rl_eval.records.episode import COLUMNS
from rl_eval.runners.sweep_log import Steps
from rl_eval.trajectories.trajectory import Key, Trajectory

__all__ = ["TrajectoryBlock"]

Array = npt.NDArray[Any]

_FIELDS: Final = ("index", "seed", "attempts", "weights_version", "terminated", "truncated")
_labels_of: Final = itemgetter(*(list(COLUMNS).index(name) for name in _FIELDS))


@final
class TrajectoryBlock(Mapping[int, Trajectory]):
    """Trajectories of episodes by index, whose arrays are parts of common ones.

    Args:
        steps: Of all episodes.
        observation: Key of the observations.
        action: Key of the actions.
    """

    def __init__(self, steps: Steps, observation: Key, action: Key) -> None:
        self._labels = [_labels_of(row) for row in steps.rows]
        self._stops = steps.lengths.cumsum().tolist()
        self._keys = observation, action
        self._observations, self._actions = steps.observations, steps.actions
        self._rewards = steps.rewards
        self._outputs = {tuple(name.split(".")): rows for name, rows in steps.outputs.items()}
        self._places = {index: place for place, (index, *_) in enumerate(self._labels)}

    def __getitem__(self, index: int) -> Trajectory:
        place = self._places[index]
        start, stop = self._stops[place - 1] if place else 0, self._stops[place]
        observation, action = self._keys
        _, seed, attempt, weights_version, terminated, truncated = self._labels[place]
        return Trajectory(
            index=index,
            seed=seed,
            attempt=attempt,
            weights_version=weights_version,
            terminated=terminated,
            truncated=truncated,
            observations={observation: self._observations[start + place : stop + place + 1]},
            actions={action: self._actions[start:stop]},
            rewards=self._rewards[start:stop],
            infos={},
            outputs={key: rows[start:stop] for key, rows in self._outputs.items()},
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
