"""Observation filters: normalization by statistics that are collected once, merged, and then frozen.

Filters are immutable. An evaluation never changes a filter, so its result does not depend on earlier evaluations.
:class:`rl_eval.wrappers.Normalized` puts a filter before a policy. This module does not import RLlib.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import tree

from rl_eval.bounded_read import LARGE, read_bytes
from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import EvalError
from rl_eval.execution.evaluate import evaluate
from rl_eval.integrations.policy_files import reading
from rl_eval.policies.normalization import boxes_of, joined
from rl_eval.policies.subject import DEFAULT_POLICY
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.records.plain import parse_json

Array = npt.NDArray[Any]

_EPSILON: Final = 1e-8
_OBSERVER: Final = "rl_eval.integrations.rllib.filters:ObservationMoments"


@dataclass(frozen=True)
class Moments:
    """Statistics of arrays with the same shape: count, mean, and sample variance, in float64.

    The variance is 1 for fewer than two values.
    """

    count: int
    mean: Array
    var: Array

    @classmethod
    def of(cls, values: Any) -> Moments:
        """Return the moments of a batch of values with the shape (count, ...)."""
        values = np.asarray(values, np.float64)
        return cls(len(values), values.mean(0), values.var(0, ddof=1) if len(values) > 1 else np.ones(values.shape[1:]))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the values of ``self`` and ``other`` together (Chan, Golub and LeVeque, 1983)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        between = delta**2 * (self.count * other.count / count)
        inside = self.var * (self.count - 1) + other.var * (other.count - 1)
        return Moments(count, mean, (inside + between) / (count - 1))


@final
@dataclass(frozen=True)
class MeanStdFilter:
    """Filter that maps each number x of a Box to ``(x - mean) / (std + 1e-8)``, like RLlib's filter.

    The result is computed in float64, and then converted to float32. Parts of an observation that are not in a Box do
    not change.

    Args:
        moments: Statistics of the Boxes in the observation space, by path. The path is ``""`` if the space is a Box,
            otherwise keys and positions joined by slashes, such as ``"camera/left"``.
    """

    moments: Mapping[str, Moments] = field(default_factory=dict)

    @classmethod
    def of(cls, mean: Any, std: Any, count: int = 2**20) -> MeanStdFilter:
        """Create a filter from the statistics of a training run.

        Args:
            mean: Means, as an array with the shape of the observation, or as a mapping from paths to such arrays.
            std: Standard deviations, in the same form.
            count: Number of observations in the statistics, at least 2.
        """
        means, stds = (value if isinstance(value, Mapping) else {"": value} for value in (mean, std))
        arrays = {path: (np.asarray(means[path], np.float64), np.asarray(stds[path], np.float64)) for path in means}
        return cls({path: Moments(count, mean, std**2) for path, (mean, std) in arrays.items()})

    def merge(self, other: MeanStdFilter) -> MeanStdFilter:
        """Return a filter with the combined statistics of ``self`` and ``other``."""
        ours = dict(self.moments)
        for path, theirs in other.moments.items():
            ours[path] = ours[path].merge(theirs) if path in ours else theirs
        return MeanStdFilter(ours)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeanStdFilter) and self.plain() == other.plain()

    __hash__ = None  # type: ignore[assignment]

    def plain(self) -> dict[str, dict[str, Any]]:
        """Return count, mean and variance by path, as plain JSON."""
        return {
            path: {name: np.asarray(value).tolist() for name, value in vars(one).items()}
            for path, one in sorted(self.moments.items())
        }

    def frozen(self) -> dict[str, Any]:
        """Return the statistics as arguments of :class:`rl_eval.wrappers.Normalized`."""
        parts = ("mean", "var", "count")
        arrays = {part: {path: getattr(one, part) for path, one in self.moments.items()} for part in parts}
        return {**arrays, "epsilon": _EPSILON, "inside": False}


def merged(filters: Iterable[MeanStdFilter]) -> MeanStdFilter:
    """Return one filter with the combined statistics of several filters, such as those of all episodes."""
    return reduce(MeanStdFilter.merge, filters, MeanStdFilter())


# ---------------------------------------------------------------------- statistics


def warm_up_filters(
    config: EvalConfig | EvalSettings,
    policy: Any = None,
    num_episodes: int | None = None,
    seed: int | None = None,
    first_index: int | None = None,
) -> dict[str, MeanStdFilter]:
    """Run episodes that are not part of the evaluation, and collect filter statistics from their observations.

    The statistics include every observation for which the policy chose an action. The statistics are merged in
    the order of the episodes, so they depend only on policy, environment and plan.

    Args:
        config: Configuration of the evaluation.
        policy: Policy object without a filter, used instead of the configured policy; None for the configured policy.
        num_episodes: Number of episodes; by default, the configured number.
        seed: Root seed; by default, the configured seed.
        first_index: Index of the first episode. By default, the episodes follow those of the configured plan, so that
            the two plans share no episodes.

    Returns:
        Filters, by policy name.

    Raises:
        EvalError: An episode failed.
    """
    settings = settings_of(config)
    section = settings.evaluation
    asked = {
        "num_episodes": section.num_episodes if num_episodes is None else num_episodes,
        "seed": section.seed if seed is None else seed,
        "first_index": section.first_index + section.num_episodes if first_index is None else first_index,
        "observers": (*section.observers, _OBSERVER),
        "determinism_check": 0.0,
    }
    result = evaluate(with_values(settings, evaluation=asked), policy)
    if result.status != "complete":
        raise EvalError(
            f"the warm-up of the filters is {result.status}: {result.reason}", key="status", value=result.status
        )
    return {DEFAULT_POLICY: merged(result.artifacts[index][_OBSERVER] for index in sorted(result.artifacts))}


@final
class ObservationMoments:
    """Observer of episodes. It returns the moments of an episode's observations, without the last observation."""

    def __init__(self, env: Any) -> None:
        self._boxes = boxes_of(env.observation_space)

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Discard the statistics of the last attempt, and keep the first observation of the new attempt."""
        self._moments: dict[str, Moments] = {}
        self._seen = self._copied(observation)

    def on_step(self, observation: Any, *rest: Any) -> None:
        """Add the observation before the step to the statistics. Keep the observation after the step."""
        for path, array in self._seen.items():
            one = Moments(1, array, np.ones_like(array))
            self._moments[path] = self._moments[path].merge(one) if path in self._moments else one
        self._seen = self._copied(observation)

    def on_episode_end(self, record: EpisodeRecord) -> MeanStdFilter:
        """Return a filter with the statistics of the episode."""
        return MeanStdFilter(self._moments)

    def _copied(self, observation: Any) -> dict[str, Array]:
        leaves = {joined(path): leaf for path, leaf in tree.flatten_with_path(observation)}
        return {path: np.array(leaves[path], np.float64) for path in self._boxes}


def save_filters(filters: Mapping[str, MeanStdFilter], path: str | Path) -> None:
    """Write filters to a JSON file, which :func:`load_filters` reads. The numbers keep their full precision."""
    Path(path).write_text(json.dumps({name: one.plain() for name, one in filters.items()}) + "\n")


def load_filters(path: str | Path) -> dict[str, MeanStdFilter]:
    """Read a file that :func:`save_filters` wrote.

    Raises:
        ConfigError: The file is missing, or :func:`save_filters` did not write it.
    """
    with reading("policy.normalizer", path, "a file of save_filters"):
        return {name: _filter_of(one) for name, one in parse_json(read_bytes(Path(path), LARGE)).items()}


def _filter_of(values: Mapping[str, Mapping[str, Any]]) -> MeanStdFilter:
    """Build a filter from the count, mean and variance of each path."""
    return MeanStdFilter(
        {
            path: Moments(int(one["count"]), np.asarray(one["mean"], np.float64), np.asarray(one["var"], np.float64))
            for path, one in values.items()
        }
    )
