"""Observation filters: normalization by statistics that are collected once, merged, and frozen from then on.

A filter is a value. Evaluations never change one, since a result would depend on what was evaluated before; it travels
with the weights, and is part of their digest.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.atomic_write import write_atomically
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.protocols import ActionLogProb, NoiseSource, Policy, Probeable, Recurrent
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.weights import TensorEntry, WeightsSnapshot, load_weights_file, module_of, snapshot_weights, weights_of

__all__ = [
    "DEFAULT_POLICY",
    "FilteredPolicy",
    "Filters",
    "MeanStdFilter",
    "Moments",
    "NoFilter",
    "ObservationMoments",
    "check_fits",
    "configured_weights",
    "filtered",
    "filters_of",
    "load_filters",
    "merged",
    "save_filters",
    "with_filters",
    "without_filters",
]

Array = npt.NDArray[Any]

DEFAULT_POLICY: Final = "default_policy"
"""Name of the only policy."""
_EPSILON: Final = 1e-8
_PREFIX: Final = "observation_filter/"
"""What the names of a filter's arrays in a snapshot begin with."""
_ALIGNMENT: Final = 64
_NO_EXTRA_STATE: Final = pickle.dumps({})


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of arrays of one shape, in float64."""

    count: int
    mean: Array
    m2: Array

    @classmethod
    def of(cls, values: Any) -> Moments:
        """Return the moments of a batch, shape (count, ...)."""
        values = np.asarray(values, np.float64)
        mean = values.mean(0)
        return cls(len(values), mean, ((values - mean) ** 2).sum(0))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan, Golub and LeVeque, 1983)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        return Moments(count, mean, self.m2 + other.m2 + delta**2 * (self.count * other.count / count))

    @property
    def std(self) -> Array:
        """Sample standard deviation; 1 below two values."""
        return np.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else np.ones_like(self.mean)


@final
@dataclass(frozen=True)
class NoFilter:
    """Filter that changes nothing."""

    def __call__(self, observations: Any) -> Any:
        """Return a batch as it is."""
        return observations


@final
@dataclass(frozen=True)
class MeanStdFilter:
    """Filter that maps each number x of a Box to ``(x - mean) / (std + 1e-8)``, as RLlib's does.

    The result is computed in float64 and has the dtype of the observation, or float32 if that is no float. Parts of an
    observation that are no Box stay as they are. A filter without statistics changes nothing.

    Args:
        moments: Statistics of each Box of the observation space by its path: ``""`` if the space is one, else keys and
            positions joined by slashes, such as ``"camera/left"``.
    """

    moments: Mapping[str, Moments] = field(default_factory=dict)

    @classmethod
    def of(cls, mean: Any, std: Any, count: int = 2**20) -> MeanStdFilter:
        """Build from the statistics of a training run.

        Args:
            mean: Array of the shape of the observation, or a mapping of paths to such.
            std: The same for standard deviations.
            count: Number of observations behind them, at least 2.
        """
        means, stds = (value if isinstance(value, Mapping) else {"": value} for value in (mean, std))
        arrays = {path: (np.asarray(means[path], np.float64), np.asarray(stds[path], np.float64)) for path in means}
        return cls({path: Moments(count, mean, std**2 * (count - 1)) for path, (mean, std) in arrays.items()})

    @property
    def count(self) -> int:
        """Number of observations behind the statistics; 0 without any."""
        return max((moments.count for moments in self.moments.values()), default=0)

    @property
    def mean(self) -> dict[str, Array]:
        """Means by path."""
        return {path: moments.mean for path, moments in self.moments.items()}

    @property
    def std(self) -> dict[str, Array]:
        """Standard deviations by path."""
        return {path: moments.std for path, moments in self.moments.items()}

    def merge(self, other: MeanStdFilter) -> MeanStdFilter:
        """Return the filter of the observations of both."""
        ours = dict(self.moments)
        for path, theirs in other.moments.items():
            ours[path] = ours[path].merge(theirs) if path in ours else theirs
        return MeanStdFilter(ours)

    def __call__(self, observations: Any) -> Any:
        """Return a batch of observations, filtered."""
        return self._filtered("", observations) if self.moments else observations

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeanStdFilter) and _plain(self) == _plain(other)

    __hash__ = None  # type: ignore[assignment]

    def _filtered(self, path: str, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {key: self._filtered(_below(path, key), part) for key, part in batch.items()}
        if isinstance(batch, tuple):
            return tuple(self._filtered(_below(path, place), part) for place, part in enumerate(batch))
        if (moments := self.moments.get(path)) is None:
            return batch
        dtype = batch.dtype if batch.dtype.kind == "f" else np.float32
        return ((batch - moments.mean) / (moments.std + _EPSILON)).astype(dtype, copy=False)


Filter: TypeAlias = NoFilter | MeanStdFilter
Filters: TypeAlias = Mapping[str, Filter]
"""Filters by the names of their policies."""


def merged(filters: Iterable[MeanStdFilter]) -> MeanStdFilter:
    """Return the filter of all observations of several, such as those that runners have collected."""
    return reduce(MeanStdFilter.merge, filters, MeanStdFilter())


def check_fits(one: Filter, space: gym.Space[Any]) -> None:
    """Check a filter against the observation space.

    Raises:
        WeightsError: A path or a shape is not the space's.
    """
    boxes = dict(_boxes("", space))
    for path, moments in one.moments.items() if isinstance(one, MeanStdFilter) else ():
        shape = np.shape(moments.mean)
        if path not in boxes:
            raise WeightsError(f"the filter has statistics of {path!r}, but the Boxes of the space are {list(boxes)}")
        if shape != boxes[path].shape:
            raise WeightsError(
                f"the filter's statistics of {path!r} have shape {shape}, but observations have {boxes[path].shape}"
            )


# ---------------------------------------------------------------------- acting and collecting


def filtered(policy: Policy, kind: str) -> Policy:
    """Put the filter of ``policy.observation_filter``, without statistics yet, before a policy that has none."""
    if kind == "NoFilter" or isinstance(policy, FilteredPolicy):
        return policy
    return FilteredPolicy(policy, MeanStdFilter())


@final
class FilteredPolicy:
    """Policy whose observations go through a filter first; it has what the policy inside has."""

    def __init__(self, policy: Policy, filter: Filter) -> None:  # noqa: A002
        self.policy = policy
        self.filter = filter
        if (module := module_of(policy)) is not None:
            self.module = module
        if isinstance(policy, Recurrent):
            self.initial_state = policy.initial_state
        if isinstance(policy, Probeable):
            self.probe_outputs = self._probe_outputs
        if isinstance(policy, ActionLogProb):
            self.log_prob = self._log_prob

    @property
    def outputs(self) -> Any:
        """What the policy's last call computed besides actions; None for a policy that does not show it."""
        return getattr(self.policy, "outputs", None)

    @property
    def result_notes(self) -> tuple[str, ...]:
        """Sentences of the policy for the reader of a result."""
        return getattr(self.policy, "result_notes", ())

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return self.policy.act(self.filter(observations), state, live, noise)

    def _probe_outputs(self, observations: Any) -> list[Any]:
        assert isinstance(self.policy, Probeable)
        return self.policy.probe_outputs(self.filter(observations))

    def _log_prob(self, observations: Any, actions: Any) -> Any:
        assert isinstance(self.policy, ActionLogProb)
        return self.policy.log_prob(self.filter(observations), actions)


@final
class ObservationMoments:
    """Observer that returns, of each episode, the moments of all observations that were acted upon."""

    def __init__(self, env: Any) -> None:
        self._paths = [path for path, _ in _boxes("", env.observation_space)]

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """See :class:`rl_eval.runners.EpisodeObserver`."""
        self._moments: dict[str, Moments] = {}
        self._seen = self._copied(observation)

    def on_step(self, observation: Any, *rest: Any) -> None:
        """Count the observation before the step."""
        for path, array in self._seen.items():
            one = Moments(1, array, np.zeros_like(array))
            self._moments[path] = self._moments[path].merge(one) if path in self._moments else one
        self._seen = self._copied(observation)

    def on_episode_end(self, record: EpisodeRecord) -> MeanStdFilter:
        """Return the filter of the episode."""
        return MeanStdFilter(self._moments)

    def _copied(self, observation: Any) -> dict[str, Array]:
        return {path: np.array(_at(observation, path), np.float64) for path in self._paths}


def _boxes(path: str, space: gym.Space[Any]) -> Iterator[tuple[str, gym.spaces.Box]]:
    """Yield all Boxes with their paths."""
    if isinstance(space, gym.spaces.Dict):
        for key, part in space.spaces.items():
            yield from _boxes(_below(path, key), part)
    elif isinstance(space, gym.spaces.Tuple):
        for place, part in enumerate(space.spaces):
            yield from _boxes(_below(path, place), part)
    elif isinstance(space, gym.spaces.Box):
        yield path, space


def _at(observation: Any, path: str) -> Any:
    for key in path.split("/") if path else ():
        observation = observation[int(key) if isinstance(observation, (tuple, list)) else key]
    return observation


def _below(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


# ---------------------------------------------------------------------- files


def save_filters(filters: Filters, path: str | Path) -> None:
    """Write a JSON file that :func:`load_filters` reads back, exactly."""
    plain = {name: _plain(one) for name, one in filters.items()}
    write_atomically(Path(path), lambda temporary: temporary.write_text(json.dumps(plain) + "\n"))


def load_filters(path: str | Path) -> dict[str, Filter]:
    """Read a file of :func:`save_filters`.

    Raises:
        ConfigError: It is missing, or another kind of file.
    """
    try:
        return {str(name): _from_plain(one) for name, one in json.loads(Path(path).read_text()).items()}
    except OSError as error:
        raise ConfigError(f"policy.filters: {str(path)!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"policy.filters: {str(path)!r} is no file of rl_eval.policies.filters.save_filters: {error!r}"
        ) from None


def _plain(one: Filter) -> Any:
    if isinstance(one, NoFilter):
        return None
    return {
        path: {"count": moments.count, "mean": moments.mean.tolist(), "m2": moments.m2.tolist()}
        for path, moments in sorted(one.moments.items())
    }


def _from_plain(plain: Any) -> Filter:
    if plain is None:
        return NoFilter()
    return MeanStdFilter(
        {
            path: Moments(int(one["count"]), np.asarray(one["mean"], np.float64), np.asarray(one["m2"], np.float64))
            for path, one in plain.items()
        }
    )


# ---------------------------------------------------------------------- with the weights


def configured_weights(section: PolicySection, live: Any = None, version: int = 0) -> WeightsSnapshot | None:
    """Return the weights of the configured file, else those of a live policy, with the filters; None without either.

    Raises:
        ConfigError: A file cannot be read, or there are statistics for no filter.
    """
    if section.filters is not None and section.observation_filter == "NoFilter":
        raise ConfigError(
            f"policy.filters is {section.filters!r}, but policy.observation_filter is NoFilter: set it to "
            "MeanStdFilter, or leave policy.filters out"
        )
    path = section.weights
    snapshot = (
        weights_of(live) if path is None else snapshot_weights(load_weights_file(path, section.weights_key), version)
    )
    if section.observation_filter == "NoFilter":
        return snapshot
    filters = filters_of(snapshot) if section.filters is None else load_filters(section.filters)
    return with_filters(snapshot, filters or {DEFAULT_POLICY: MeanStdFilter()}, version)


def with_filters(snapshot: WeightsSnapshot | None, filters: Filters, version: int) -> WeightsSnapshot:
    """Add filters to a snapshot, which may be of nothing else, in place of those that it has."""
    base = WeightsSnapshot(0, (), np.empty(0, np.uint8), _NO_EXTRA_STATE) if snapshot is None else snapshot
    parts = {entry: base.buffer[entry.offset :][: entry.num_bytes] for entry in base.entries if not _is_filter(entry)}
    for name, array in _arrays(filters):
        data = np.frombuffer(array.tobytes(), np.uint8)
        parts[TensorEntry(name, str(array.dtype), array.shape, 0, len(data))] = data
    return replace(_packed(base, parts), version=version)


def without_filters(snapshot: WeightsSnapshot) -> WeightsSnapshot:
    """Return a snapshot of the weights alone; it is the same object if it has no filters."""
    if not any(map(_is_filter, snapshot.entries)):
        return snapshot
    kept = [entry for entry in snapshot.entries if not _is_filter(entry)]
    return _packed(snapshot, {entry: snapshot.buffer[entry.offset :][: entry.num_bytes] for entry in kept})


def _is_filter(entry: TensorEntry) -> bool:
    return entry.name.startswith(_PREFIX)


def _packed(snapshot: WeightsSnapshot, parts: Mapping[TensorEntry, npt.NDArray[np.uint8]]) -> WeightsSnapshot:
    """Lay out tensors anew, as :func:`rl_eval.weights.snapshot_weights` does: equal ones have equal digests."""
    entries, buffers, offset = [], [np.empty(0, np.uint8)], 0
    for entry, data in sorted(parts.items(), key=lambda item: item[0].name):
        padding = -len(data) % _ALIGNMENT
        entries.append(entry._replace(offset=offset))
        buffers += [data, np.zeros(padding, np.uint8)]
        offset += len(data) + padding
    return replace(snapshot, entries=tuple(entries), buffer=np.concatenate(buffers))


def filters_of(snapshot: WeightsSnapshot | None) -> dict[str, Filter]:
    """Return the filters that a snapshot has; none, if it has weights alone.

    Raises:
        WeightsError: They are incomplete.
    """
    found: dict[str, dict[str, dict[str, Array]]] = {}
    for entry in () if snapshot is None else snapshot.entries:
        if _is_filter(entry):
            policy, _, rest = entry.name.removeprefix(_PREFIX).partition("/")
            path, _, kind = rest.rpartition("/")
            assert snapshot is not None
            data = snapshot.buffer[entry.offset : entry.offset + entry.num_bytes].tobytes()
            array = np.frombuffer(data, entry.dtype).reshape(entry.shape)
            found.setdefault(policy, {}).setdefault(path, {})[kind] = array
    try:
        return {policy: _from_arrays(parts) for policy, parts in found.items()}
    except (KeyError, ValueError) as error:
        raise WeightsError(f"the weights have a filter of which parts are missing: {error!r}") from None


def _arrays(filters: Filters) -> Iterator[tuple[str, Array]]:
    for policy, one in sorted(filters.items()):
        if isinstance(one, MeanStdFilter):
            yield f"{_PREFIX}{policy}/empty", np.zeros(1, np.uint8)  # A filter without statistics is something, too.
            for path, moments in sorted(one.moments.items()):
                yield f"{_PREFIX}{policy}/{path}/count", np.array(moments.count, np.int64)
                yield f"{_PREFIX}{policy}/{path}/mean", np.asarray(moments.mean)
                yield f"{_PREFIX}{policy}/{path}/m2", np.asarray(moments.m2)


def _from_arrays(parts: dict[str, dict[str, Array]]) -> MeanStdFilter:
    """Build a filter; the array that marks an empty one stands among those of a Box that has no path."""
    return MeanStdFilter(
        {
            path: Moments(int(arrays["count"]), arrays["mean"], arrays["m2"])
            for path, arrays in parts.items()
            if arrays.keys() != {"empty"}
        }
    )
