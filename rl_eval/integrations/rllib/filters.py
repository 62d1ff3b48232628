"""Observation filters: normalization by statistics that are collected once, merged, and then frozen.

Filters are immutable. An evaluation never changes a filter, so its result does not depend on earlier evaluations.
:class:`Filtered` puts a filter before a policy. The statistics are buffers of a module, so they are sent with the
weights, and are part of the weights' digest. This module does not import RLlib.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree

from rl_eval.bounded_read import LARGE, read_bytes
from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import ConfigError, EvalError, WeightsError
from rl_eval.execution.evaluate import evaluate
from rl_eval.policies import adapt_policy
from rl_eval.policies.subject import DEFAULT_POLICY
from rl_eval.protocols import ActionLogProb, NoiseSource, Policy, Probeable, Recurrent
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.records.plain import parse_json
from rl_eval.weights import module_of

Array = npt.NDArray[Any]

_EPSILON: Final = 1e-8
_PARTS: Final = ("count", "mean", "m2")
_OBSERVER: Final = "rl_eval.integrations.rllib.filters:ObservationMoments"


@dataclass(frozen=True)
class Moments:
    """Statistics of arrays with the same shape: count, mean, and sum of squared deviations (``m2``), in float64."""

    count: int
    mean: Array
    m2: Array

    @classmethod
    def of(cls, values: Any) -> Moments:
        """Return the moments of a batch of values with the shape (count, ...)."""
        values = np.asarray(values, np.float64)
        mean = values.mean(0)
        return cls(len(values), mean, ((values - mean) ** 2).sum(0))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the values of ``self`` and ``other`` together (Chan, Golub and LeVeque, 1983)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        return Moments(count, mean, self.m2 + other.m2 + delta**2 * (self.count * other.count / count))

    @property
    def std(self) -> Array:
        """Sample standard deviation; 1 for fewer than two values."""
        return np.sqrt(self.m2 / (self.count - 1)) if self.count > 1 else np.ones_like(self.mean)


@final
@dataclass(frozen=True)
class MeanStdFilter:
    """Filter that maps each number x of a Box to ``(x - mean) / (std + 1e-8)``, like RLlib's filter.

    The result is computed in float64. Then it is converted to the dtype of the observation, or to float32 if that
    dtype is not a float. Parts of an observation that are not in a Box do not change.

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
        return cls({path: Moments(count, mean, std**2 * (count - 1)) for path, (mean, std) in arrays.items()})

    def merge(self, other: MeanStdFilter) -> MeanStdFilter:
        """Return a filter with the combined statistics of ``self`` and ``other``."""
        ours = dict(self.moments)
        for path, theirs in other.moments.items():
            ours[path] = ours[path].merge(theirs) if path in ours else theirs
        return MeanStdFilter(ours)

    def __call__(self, observations: Any) -> Any:
        """Return a batch of observations, normalized with the statistics of the filter."""
        return tree.map_structure_with_path(self._filtered, observations)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeanStdFilter) and self.plain() == other.plain()

    __hash__ = None  # type: ignore[assignment]

    def plain(self) -> dict[str, dict[str, Any]]:
        """Return count, mean and m2 (the sum of squared deviations) by path, as plain JSON."""
        return {
            path: {name: np.asarray(value).tolist() for name, value in vars(one).items()}
            for path, one in sorted(self.moments.items())
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the statistics as tensors, with the same keys as in the state dict of a :class:`Filtered`."""
        parts = ((path, name, getattr(one, name)) for path, one in self.moments.items() for name in vars(one))
        return {_name(path, part): torch.as_tensor(value) for path, part, value in parts}

    def _filtered(self, path: tuple[Any, ...], batch: Any) -> Any:
        if (moments := self.moments.get(_joined(path))) is None:
            return batch
        dtype = batch.dtype if batch.dtype.kind == "f" else np.float32
        return ((batch - moments.mean) / (moments.std + _EPSILON)).astype(dtype, copy=False)


def merged(filters: Iterable[MeanStdFilter]) -> MeanStdFilter:
    """Return one filter with the combined statistics of several filters, such as those of all episodes."""
    return reduce(MeanStdFilter.merge, filters, MeanStdFilter())


# ---------------------------------------------------------------------- before a policy


@final
class Filtered(torch.nn.Module):
    """Policy with a filter for its observations. Pass it wherever rl_eval accepts a policy.

    Its weights are the weights of the policy, with the prefix ``weights.``, and the statistics of the filter.

    Args:
        policy: A policy as for :func:`rl_eval.evaluate`, or the ``"module:factory"`` of a policy.
        statistics: The filter, or a JSON file that :func:`save_filters` wrote.
        policy_kwargs: Keyword arguments of the factory.

    Raises:
        ConfigError: The file cannot be read.
    """

    def __init__(
        self, policy: Any, statistics: MeanStdFilter | str | Path, policy_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if not isinstance(statistics, MeanStdFilter):
            statistics = load_filters(statistics)[DEFAULT_POLICY]
        object.__setattr__(self, "policy", policy)  # A plain attribute would register its weights a second time.
        self.policy: Any
        self.policy_kwargs = dict(policy_kwargs or {})
        self.weights = module_of(policy)
        self._paths = tuple(statistics.moments)
        for name, tensor in statistics.tensors().items():
            self.register_buffer(name, tensor)

    @property
    def filter(self) -> MeanStdFilter:
        """Filter with the current statistics."""
        arrays = {name: buffer.cpu().numpy().copy() for name, buffer in self.named_buffers(recurse=False)}
        return _filter_of({path: {part: arrays[_name(path, part)] for part in _PARTS} for path in self._paths})


@final
class FilteredPolicy:
    """Policy that filters observations with a :class:`Filtered`, and then calls the inner policy.

    It has the same optional methods as the inner policy.
    """

    def __init__(self, policy: Policy, module: Filtered) -> None:
        self.policy = policy
        self.module = module
        if isinstance(policy, Recurrent):
            self.initial_state = policy.initial_state
        if isinstance(policy, Probeable):
            self.probe_outputs = lambda observations: policy.probe_outputs(module.filter(observations))
        if isinstance(policy, ActionLogProb):
            self.log_prob = lambda observations, actions: policy.log_prob(module.filter(observations), actions)

    @property
    def outputs(self) -> Any:
        """Outputs of the inner policy's last call, without the actions; None if it returns only actions."""
        return getattr(self.policy, "outputs", None)

    @property
    def result_notes(self) -> tuple[str, ...]:
        """Notes of the inner policy for the readers of a result."""
        return getattr(self.policy, "result_notes", ())

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return self.policy.act(self.module.filter(observations), state, live, noise)


def as_policy(
    value: Filtered, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> FilteredPolicy:
    """Build the policy that filters observations and then acts.

    Raises:
        WeightsError: The statistics do not fit the observation space.
        ConfigError: The inner policy cannot act.
    """
    boxes = {path: box.shape for path, box in _boxes(observation_space).items()}
    for path, moments in value.filter.moments.items():
        if boxes.get(path) != np.shape(moments.mean):
            problem = (
                f"the filter has statistics of {path!r} with shape {np.shape(moments.mean)}, but the Boxes of the "
                f"observation space have these shapes: {boxes}"
            )
            raise WeightsError(problem, key=f"statistics[{path!r}]", value=np.shape(moments.mean))
    inside = section.model_copy(update={"policy": value.policy, "policy_kwargs": value.policy_kwargs})
    policy = adapt_policy(inside, observation_space, action_space)
    value.weights = module_of(policy)
    return FilteredPolicy(policy, value)


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
        policy: Policy object without its filter, used instead of the configured policy; None for the configured policy.
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
        self._boxes = _boxes(env.observation_space)

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Discard the statistics of the last attempt, and keep the first observation of the new attempt."""
        self._moments: dict[str, Moments] = {}
        self._seen = self._copied(observation)

    def on_step(self, observation: Any, *rest: Any) -> None:
        """Add the observation before the step to the statistics. Keep the observation after the step."""
        for path, array in self._seen.items():
            one = Moments(1, array, np.zeros_like(array))
            self._moments[path] = self._moments[path].merge(one) if path in self._moments else one
        self._seen = self._copied(observation)

    def on_episode_end(self, record: EpisodeRecord) -> MeanStdFilter:
        """Return a filter with the statistics of the episode."""
        return MeanStdFilter(self._moments)

    def _copied(self, observation: Any) -> dict[str, Array]:
        leaves = {_joined(path): leaf for path, leaf in tree.flatten_with_path(observation)}
        return {path: np.array(leaves[path], np.float64) for path in self._boxes}


def save_filters(filters: Mapping[str, MeanStdFilter], path: str | Path) -> None:
    """Write filters to a JSON file, which :func:`load_filters` reads. The numbers keep their full precision."""
    Path(path).write_text(json.dumps({name: one.plain() for name, one in filters.items()}) + "\n")


def load_filters(path: str | Path) -> dict[str, MeanStdFilter]:
    """Read a file that :func:`save_filters` wrote.

    Raises:
        ConfigError: The file is missing, or :func:`save_filters` did not write it.
    """
    try:
        return {name: _filter_of(one) for name, one in parse_json(read_bytes(Path(path), LARGE)).items()}
    except OSError as error:
        raise ConfigError(
            f"the filters {str(path)!r} cannot be read: {error.strerror or error}", key="path", value=str(path)
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(path)!r} was not written by save_filters: {error!r}", key="path", value=str(path)
        ) from None


def _filter_of(values: Mapping[str, Mapping[str, Any]]) -> MeanStdFilter:
    """Build a filter from the count, mean and m2 (the sum of squared deviations) of each path."""
    return MeanStdFilter(
        {
            path: Moments(int(one["count"]), np.asarray(one["mean"], np.float64), np.asarray(one["m2"], np.float64))
            for path, one in values.items()
        }
    )


# ---------------------------------------------------------------------- paths of Boxes


def _boxes(space: gym.Space[Any]) -> dict[str, gym.spaces.Box]:
    """Return all Boxes of a space by their paths."""
    return {_joined(path): box for path, box in tree.flatten_with_path(space) if isinstance(box, gym.spaces.Box)}


def _joined(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _name(path: str, part: str) -> str:
    """Return the name of the buffer for one statistic of a Box. Torch forbids dots in such a name."""
    return f"{path}/{part}".replace(".", "_")
