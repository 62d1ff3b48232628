"""Observations that stay in the arrays of a batched simulator, on their device."""

from __future__ import annotations

from typing import Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.policies.inference.device_arrays import kind_of, like, numpy_of, with_rows
from rl_eval.policies.inference.spaces import ObservationBatch, leaf_of


@final
class DeviceObservations(ObservationBatch):
    """Observations in the simulator's own arrays (NumPy, torch or JAX) and dtypes.

    The observations of a step are not copied. Rows are copied to the NumPy arrays of the base class only for notes,
    errors and traces.
    """

    def __init__(self, space: gym.Space[Any], rows: int) -> None:
        super().__init__(space, rows)
        if self.has_texts:
            text = next(iter(self._text_spaces.values()))
            problem = f"policy.inference is batched, which keeps observations on their device, but {text} is a text"
            raise ConfigError(problem, key="policy.inference", value="batched", fix="Remove policy.inference.")

    @override
    def adopt(self, rows: Any, observations: Any) -> None:
        count = rows.stop if isinstance(rows, slice) else len(rows)
        given = self._fitting(observations, count)
        if isinstance(rows, slice):
            self.arrays = given
        elif count:
            parts = zip(self._leaves, tree.flatten(self.arrays), tree.flatten(given), strict=True)
            merged = [self._merged(*first, former, rows, leaf) for first, former, leaf in parts]
            self.arrays = tree.unflatten_as(self.structure, merged)

    @override
    def adopt_step(self, observations: Any, live: npt.NDArray[np.int64], width: int) -> None:
        self.arrays = self._fitting(observations, width)

    @override
    def row(self, row: int) -> Any:
        return tree.map_structure(lambda leaf: np.array(numpy_of(leaf[row])), self.arrays)

    @override
    def row_content(self, row: int | npt.NDArray[np.int64]) -> bytes:
        self._copy(row)
        return super().row_content(row)

    @override
    def clear(self, row: int) -> None:
        self.arrays = tree.map_structure(lambda leaf: with_rows(leaf, row, 0), self.arrays)

    @override
    def nonfinite_rows(self, live: npt.NDArray[np.bool_]) -> list[int]:
        bad = np.zeros(len(live), bool)
        with np.errstate(invalid="ignore"):
            for leaf in tree.flatten(self.arrays):
                # The difference of NaN or infinity to itself is NaN, in every library.
                if kind_of(leaf) == "f" and not bool((finite := leaf - leaf == 0).all()):
                    bad[: len(leaf)] |= ~numpy_of(finite.reshape(len(leaf), -1).all(1))
        return np.flatnonzero(bad & live).tolist()

    @override
    def describe_nonfinite(self, row: int) -> str:
        self._copy(row)
        return super().describe_nonfinite(row)

    @override
    def _look(self, live: npt.NDArray[np.bool_]) -> None:
        self._copy(slice(0, len(tree.flatten(self.arrays)[0])))
        super()._look(live)

    def _copy(self, rows: Any) -> None:
        """Copy rows to the NumPy arrays of the base class."""
        with np.errstate(over="ignore"):
            for (_, array), leaf in zip(self._leaves, tree.flatten(self.arrays), strict=True):
                array[rows] = numpy_of(leaf[rows])

    def _fitting(self, observations: Any, count: int) -> Any:
        """Return the parts of observations that the space has, shape (count, ...).

        Lists become arrays with the dtypes of the space.

        Raises:
            EnvError: The structure, a shape or a dtype of the observations does not fit the space.
        """
        given = []
        for path, array in self._leaves:
            leaf = leaf_of(observations, path)
            rows = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            self._check_batch(path, array, rows, count)
            given.append(leaf if rows is leaf else self._as(array, path, array, rows))
        return tree.unflatten_as(self.structure, given)

    def _merged(self, path: tuple[Any, ...], first: Any, former: Any, rows: npt.NDArray[np.int64], given: Any) -> Any:
        """Return an array with new values in some rows.

        The simulator's first array replaces the array of the base class, or the shorter array of a simulator with fewer
        slots. In this case, the other rows have arbitrary values; none of them is live.
        """
        if former is first or len(former) <= rows[-1]:
            former = given[np.zeros(self.rows, np.int64)]
        return with_rows(former, rows, self._as(former, path, first, given))

    def _as(self, former: Any, path: tuple[Any, ...], array: Any, given: Any) -> Any:
        """Return values, converted to the library, dtype and device of an array.

        Raises:
            EnvError: A value does not fit the integer dtype.
        """
        converted = like(given, former)
        if given.dtype != former.dtype and kind_of(former) in "iu":
            self._check_kept(path, array, numpy_of(converted), numpy_of(given))
        return converted
