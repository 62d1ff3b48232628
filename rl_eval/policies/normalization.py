"""Normalization of observations with frozen statistics, before a policy acts.

An evaluation never changes the statistics, so its result does not depend on earlier evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.errors import WeightsError
from rl_eval.protocols import ActionLogProb, Deferred, NoiseSource, Policy, Probeable, Recurrent
from rl_eval.weights import module_of

Array = npt.NDArray[Any]

ARRAYS: Final = ("mean", "var", "factor", "count")
"""Fields of :class:`Statistics` that are arrays."""
_FORWARDED: Final = (
    "connections",
    "doubt",
    "ended",
    "numerics",
    "others",
    "outputs",
    "reconnect",
    "server",
    "speed_notes",
)
"""Attributes of a policy that do not depend on its observations."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the observations in one Box, and the formula of the library that collected them.

    A number x becomes ``(x * factor - mean) / sqrt(var + epsilon)``. It is computed in the dtype of ``mean``.
    """

    mean: Array
    var: Array
    clip: float | None = None
    """Maximum absolute value of a normalized number."""
    epsilon: float = 1e-8
    inside: bool = True
    """Whether ``epsilon`` is added to the variance; otherwise, it is added to the standard deviation."""
    factor: Array | None = None
    count: Array | None = None
    """Number of observations in the statistics. It is not used."""
    dtype: str = "float32"
    """Dtype of normalized numbers."""

    def __call__(self, observations: Array) -> Array:
        """Return a batch of normalized observations."""
        numbers: Array = observations.astype(self.mean.dtype, copy=False)
        if self.factor is not None:
            numbers = numbers * self.factor
        scale = np.sqrt(self.var + self.epsilon) if self.inside else np.sqrt(self.var) + self.epsilon
        numbers = (numbers - self.mean) / scale
        if self.clip is not None:
            numbers = numbers.clip(-self.clip, self.clip)
        return numbers.astype(self.dtype, copy=False)


def by_path(*, mean: Any, var: Any, factor: Any = None, count: Any = None, **formula: Any) -> dict[str, Statistics]:
    """Return statistics by the path of their Box in an observation.

    Args:
        mean: Array of the Box, or arrays by path. The path is ``""`` if the observation is a Box, otherwise keys and
            positions joined by slashes, such as ``"camera/left"``.
        var: Variances, in the same form.
        factor: Factors, in the same form, or None.
        count: Numbers of observations, in the same form, or None.
        formula: Other fields of :class:`Statistics`.
    """
    given = dict(zip(ARRAYS, (mean, var, factor, count), strict=True))
    by_name = {name: value if isinstance(value, Mapping) else {"": value} for name, value in given.items()}
    by_part: dict[str, dict[str, Any]] = {
        path: {name: _array(values[path]) for name, values in by_name.items() if values.get(path) is not None}
        for path in by_name["mean"]
    }
    return {path: Statistics(**arrays, **formula) for path, arrays in by_part.items()}


def _array(value: Any) -> Array:
    array = np.array(value)
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def check_shapes(statistics: Mapping[str, Statistics], space: gym.Space[Any]) -> None:
    """Check that statistics fit an observation space.

    Raises:
        WeightsError: There are statistics of a part that is not a Box of the space, or that has another shape.
    """
    boxes = boxes_of(space)
    shapes = {path: box.shape for path, box in boxes.items()}
    for path, one in statistics.items():
        if path not in shapes or any(not _fits(part, shapes[path]) for part in (one.mean, one.var)):
            name = f"the observation part {path!r}" if path else "the observation"
            problem = (
                f"the normalizer has statistics of {name} with shape {one.mean.shape}, but the Boxes of the "
                f"observation space have these shapes: {shapes}"
            )
            parts = "Pass mean and var as mappings from keys to arrays."
            fix = parts if "" not in shapes else "Pass the normalizer behind which this policy was trained."
            raise WeightsError(problem, key=f"statistics[{path!r}]", value=one.mean.shape, fix=fix)


def _fits(part: Array, shape: tuple[int, ...]) -> bool:
    """Whether an array is a number, or has the shape of a Box, except that axes can have size 1."""
    return not part.ndim or (
        len(shape) == part.ndim and all(a in (1, b) for a, b in zip(part.shape, shape, strict=True))
    )


@final
class NormalizedPolicy:
    """Policy that gets normalized observations. It has the same optional methods as the inner policy.

    Args:
        policy: The inner policy.
        statistics: Function that returns the current statistics by path.
        module: Module with the weights of the policy; by default, that of the inner policy.
        notes: Notes for readers of a result, in addition to those of the inner policy.
    """

    normalizes: Final = True

    def __init__(
        self,
        policy: Policy,
        statistics: Callable[[], Mapping[str, Statistics]],
        module: Any = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.policy = policy
        self.statistics = statistics
        self.module = module_of(policy) if module is None else module
        self.result_notes = (*getattr(policy, "result_notes", ()), *notes)
        if isinstance(policy, Recurrent):
            self.initial_state = policy.initial_state
        if isinstance(policy, Probeable):
            self.probe_outputs = lambda observations: policy.probe_outputs(self._normalized(observations))
        if (explained := getattr(policy, "explained", None)) is not None:
            self.explained = lambda error, observations: explained(error, self._normalized(observations))
        if isinstance(policy, ActionLogProb):
            self.log_prob = lambda observations, actions: policy.log_prob(self._normalized(observations), actions)
        if isinstance(policy, Deferred):
            self.send = lambda observations, *others: policy.send(self._normalized(observations), *others)
            self.received, self.fileno = policy.received, policy.fileno

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.policy, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return self.policy.act(self._normalized(observations), state, live, noise)

    def _normalized(self, observations: Any) -> Any:
        statistics = self.statistics()
        return tree.map_structure_with_path(
            lambda path, batch: batch if (one := statistics.get(joined(path))) is None else one(batch), observations
        )


def boxes_of(space: gym.Space[Any]) -> dict[str, gym.spaces.Box]:
    """Return all Boxes of a space by their paths."""
    return {joined(path): box for path, box in tree.flatten_with_path(space) if isinstance(box, gym.spaces.Box)}


def joined(path: tuple[Any, ...]) -> str:
    """Return the path of a part of an observation as text."""
    return "/".join(map(str, path))
