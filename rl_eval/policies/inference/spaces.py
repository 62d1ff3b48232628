"""Batches of observations and actions, checked against their spaces."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree
from typing_extensions import override

from rl_eval.errors import ConfigError, EnvError, PolicyError
from rl_eval.policies.inference.device_arrays import kind_of, numpy_of

Array = npt.NDArray[Any]
_FITTING_KINDS: Final = {"f": "biuf", "i": "biu", "u": "biu", "b": "b", "U": "U"}
"""Kinds of values that may be written to an array, by the kind of the array: letters of NumPy's ``dtype.kind``."""
_LOOK_EVERY: Final = 17
"""The bounds are checked in every 17th batch. The number is prime, so that checks do not follow episode lengths."""
_ROUNDING: Final = 1e-5
"""Rounding tolerance for actions outside of the bounds, as a fraction of the distance between the bounds."""
_PART_BYTES: Final = 2**20
"""Size of the part of an observation that is made up at once."""
_EACH: Final = "Return an action for each observation of the batch."
_ALONE: Final = "If predict() of a model chose them, pass the model itself. Otherwise return the actions alone."
_CHUNKS: Final = "For chunks of {} actions, set policy.chunk, such as policy.chunk: {{execute: {}}}."
NUMBERS: Final = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
"""Spaces whose values are arrays of numbers with one shape."""
TEXTS: Final = 4
"""Number of episodes whose first texts the probe uses."""


def _nested(space: gym.Space[Any], key: str) -> Any:
    """Turn a space into plain dicts and tuples of leaf spaces, which dm-tree can walk."""
    if isinstance(space, gym.spaces.Dict):
        return {name: _nested(part, key) for name, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_nested(part, key) for part in space.spaces)
    seen = key == "observation_space"
    if isinstance(space, NUMBERS) or (seen and isinstance(space, gym.spaces.Text)):
        return space
    problem = f"the environment's {key} has {space}, which rl_eval cannot batch"
    fix = "Wrap the environment: it may have Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple spaces."
    if seen:
        fix = f"{fix[:-1]}, and Text. gymnasium.wrappers.TransformObservation can pad a Sequence or a Graph to a Box."
    raise ConfigError(problem, key=key, value=str(space), fix=fix)


class ObservationBatch:
    """Observations of all lanes, one row per lane, in arrays that are allocated once."""

    def __init__(self, space: gym.Space[Any], rows: int) -> None:
        self._space = space
        self._scratch: ObservationBatch | None = None
        self.structure = _nested(space, "observation_space")
        self.arrays: Any = tree.map_structure(
            lambda leaf: np.zeros((rows, *(leaf.shape or ())), dtype_of(leaf)), self.structure
        )
        """Nested arrays of shape (rows, \\*leaf_shape)."""
        self._leaves: list[tuple[tuple[Any, ...], Array]] = tree.flatten_with_path(self.arrays)
        self._floats = [(path, array) for path, array in self._leaves if array.dtype.kind == "f"]
        self._bounded = [
            (path, array, *bounds)
            for (path, array), leaf in zip(self._leaves, tree.flatten(self.structure), strict=True)
            if (bounds := _narrower(leaf, array.dtype)) is not None
        ]
        leaves = tree.flatten_with_path(self.structure)
        self._boxes = {path for path, leaf in leaves if isinstance(leaf, gym.spaces.Box)}
        self._text_spaces = {path: leaf for path, leaf in leaves if isinstance(leaf, gym.spaces.Text)}
        self.texts: dict[tuple[Any, ...], Array] = {}
        """Texts that the policy is probed with, by the path of the leaf; see :meth:`learn_texts`."""
        self._noted: set[tuple[Any, ...]] = set()
        self._inside = self._bounded
        """Leaves without a note about values outside of their bounds."""
        self._batches = 0
        self._look_at_once = True
        self.rows = rows
        self.row_bytes = sum(array[:1].nbytes for _, array in self._leaves)
        # Views of the rows, for a space without parts. They are stored, because every step needs them.
        only = self._leaves[0][1] if self._leaves and not self._leaves[0][0] else None
        self._row_views = [] if only is None else [only[row, ...] for row in range(rows)]
        self._row_dtype = None if only is None else only.dtype
        self._row_shape = () if only is None else only.shape[1:]
        self.note: Callable[[int, str, str], None] = lambda *_: None
        """Called with the row, a description of an unusual observation, and the value."""

    def adopt(self, rows: Any, observations: Any) -> None:
        """Copy the observations of some rows.

        Args:
            rows: A slice of the first k rows, or an array of row indices, shape (k,).
            observations: Nested arrays, shape (k, ...).

        Raises:
            EnvError: The structure, a shape, a dtype or a value of the observations does not fit the space.
        """
        count = rows.stop if isinstance(rows, slice) else len(rows)
        for path, array in self._leaves:
            given = leaf_of(observations, path)
            given = text_array(given, array.dtype, path) if array.dtype.kind == "U" else numpy_of(given)
            self._check_batch(path, array, given, count)
            array[rows] = given
            if given.dtype != array.dtype and array.dtype.kind in "iu":
                self._check_kept(path, array, array[rows], given)

    def adopt_step(self, observations: Any, live: npt.NDArray[np.int64], width: int) -> None:
        """Copy the observations of live slots; those of other slots are ignored.

        Args:
            observations: Nested arrays, shape (width, ...).
            live: The live slots, in ascending order.
            width: Number of slots.

        Raises:
            EnvError: The structure, a shape, a dtype or a value of the observations does not fit the space.
        """
        if len(live) == width:
            self.adopt(slice(0, width), observations)
        elif len(live):
            self.adopt(live, tree.map_structure(lambda leaf: numpy_of(leaf)[live], observations))

    @staticmethod
    def _check_batch(path: tuple[Any, ...], array: Array, given: Any, count: int) -> None:
        if given.shape != (count, *array.shape[1:]) or kind_of(given) not in _FITTING_KINDS[array.dtype.kind]:
            shape = tuple(given.shape)
            problem = (
                f"observation{_at(path)} of {count} slots has shape {shape} and dtype {given.dtype}, {_due(array)}"
            )
            raise EnvError(problem, key=f"observation{_at(path)}", value=f"{given.dtype}{list(shape)}")

    @staticmethod
    def _check_kept(path: tuple[Any, ...], array: Array, kept: Array, given: Array) -> None:
        if not np.array_equal(kept, given):
            text = f"observation{_at(path)} has values from {given.min()} to {given.max()}, {_due(array)}"
            raise EnvError(text, key=f"observation{_at(path)}")

    def row(self, row: int) -> Any:
        """Return a copy of a row, in the structure and dtypes of the space."""
        return tree.map_structure(lambda leaf: leaf[row].copy(), self.arrays)

    def row_content(self, row: int | npt.NDArray[np.int64]) -> bytes:
        """Return the content of a row, or of several rows, as bytes.

        That of one row is equal to the result of :meth:`content` for the same observation.
        """
        return b"".join(array[row].tobytes() for _, array in self._leaves)

    def write(self, row: int, observation: Any) -> None:
        """Copy one observation into its row.

        Raises:
            EnvError: The structure, a shape, a dtype or a value of the observation does not fit the space.
        """
        if (
            type(observation) is np.ndarray
            and observation.dtype is self._row_dtype
            and observation.shape == self._row_shape
        ):
            self._row_views[row][...] = observation
            return
        for path, array in self._leaves:
            self._write_leaf(array, row, path, observation)

    def _write_leaf(self, array: Array, row: int, path: tuple[Any, ...], observation: Any) -> None:
        value = leaf_of(observation, path)
        if array.dtype.kind == "U":
            array[row] = _checked_text(value, array.dtype, path)
            return
        try:
            given = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            text = f"observation{_at(path)} is not an array ({error}), {_due(array)}"
            raise EnvError(text, key=f"observation{_at(path)}") from error
        kind = "masked" if isinstance(value, np.ma.MaskedArray) else given.dtype.kind
        if given.shape != array.shape[1:] or kind not in _FITTING_KINDS[array.dtype.kind]:
            what = f"is a {type(value).__name__} of shape {given.shape} and dtype {given.dtype}"
            problem = f"observation{_at(path)} {what}, {_due(array)}"
            raise EnvError(problem, key=f"observation{_at(path)}", value=f"{given.dtype}{list(given.shape)}")
        if given.dtype == array.dtype:
            array[row] = given
        else:
            self._convert(array, row, path, given, has_dtype=hasattr(value, "dtype"))

    def _convert(self, array: Array, row: int, path: tuple[Any, ...], given: Array, *, has_dtype: bool) -> None:
        """Write a leaf whose dtype differs from the dtype of its space."""
        with np.errstate(over="ignore"):  # A value that overflows becomes infinite, which is an error.
            array[row] = given
        if array.dtype.kind in "iu":
            self._check_kept(path, array, array[row], given)
        if has_dtype and path in self._boxes and path not in self._noted:
            self._noted.add(path)
            if not np.can_cast(given.dtype, array.dtype):
                what = f"observation{_at(path)} has another dtype than its space ({array.dtype}), and is converted"
                self.note(row, what, str(given.dtype))

    def content(self, observation: Any) -> bytes:
        """Return the content of an observation as bytes: only the parts that the space has, in the space's dtypes.

        Raises:
            EnvError: The structure, a shape, a dtype or a value of the observation does not fit the space.
        """
        self._scratch = self._scratch or ObservationBatch(self._space, 1)
        self._scratch.write(0, observation)
        return self._scratch.tobytes()

    def tobytes(self) -> bytes:
        """Return all rows as bytes, leaf by leaf."""
        return b"".join(array.tobytes() for _, array in self._leaves)

    def clear(self, row: int) -> None:
        """Set a row to zero, because the policy must not see its observation. Set a text to a known one."""
        for path, array in self._leaves:
            array[row] = self.texts[path][0] if path in self.texts else array.dtype.type()

    def nonfinite_rows(self, live: npt.NDArray[np.bool_]) -> list[int]:
        """Return the live rows with a NaN or infinite value."""
        if all(np.logical_and.reduce(np.isfinite(array), axis=None) for _, array in self._floats):
            return []
        bad = np.zeros(len(live), bool)
        for _, array in self._floats:
            bad |= ~np.isfinite(array).reshape(len(array), -1).all(1)
        return [int(row) for row in np.flatnonzero(bad & live)]

    def describe_nonfinite(self, row: int) -> str:
        """Return which part of a row is NaN or infinite."""
        path, array = next((path, array) for path, array in self._floats if not np.isfinite(array[row]).all())
        what = "a NaN" if np.isnan(array[row]).any() else f"an infinite value (as {array.dtype}, its space's dtype)"
        return f"the observation{_at(path)} has {what}"

    def look_outside(self, live: npt.NDArray[np.bool_]) -> None:
        """Add one note for each leaf with a live row outside of its bounds. Call this for every batch.

        It checks the first batch after :meth:`forget_notes`, and every batch whose number is a multiple of
        :data:`_LOOK_EVERY`. This takes almost no time, and detects an environment whose observations are repeatedly
        outside of the space.
        """
        self._batches += 1
        if not self._look_at_once and self._batches % _LOOK_EVERY:
            return
        self._look_at_once = False
        self._look(live)

    def _look(self, live: npt.NDArray[np.bool_]) -> None:
        for path in self._text_spaces.keys() - self._noted:
            texts, space = leaf_of(self.arrays, path), self._text_spaces[path]
            if wrong := [row for row in np.flatnonzero(live).tolist() if str(texts[row]) not in space]:
                self._noted.add(path)
                self.note(wrong[0], f"observation{_at(path)} is outside of its space", repr(str(texts[wrong[0]]))[:80])
        for leaf in self._inside:
            path, array, low, high = leaf
            outside = (array < low) | (array > high)
            if outside.any() and outside[live].any():
                row = int(np.flatnonzero(live & outside.reshape(len(array), -1).any(1))[0])
                place = tuple(np.argwhere(outside[row])[0])
                least, most = (np.broadcast_to(bound, array.shape[1:])[place] for bound in (low, high))
                what = f"observation{_at(path)} is outside of its space"
                self.note(row, what, f"{array[row][place]}, with bounds {least} and {most}")
                self._inside = [other for other in self._inside if other is not leaf]

    def forget_notes(self) -> None:
        """Allow the same notes to be reported again."""
        self._noted.clear()
        self._inside = self._bounded
        self._look_at_once = True

    def sample(self, rows: int, rng: np.random.Generator, scale: float = 1.0) -> Any:
        """Return a batch of made-up observations, for probing a policy. Their texts are those of :meth:`learn_texts`.

        Each quarter of the rows has one text, so that the blocks of the probe differ in their texts.
        """

        def sampled(path: tuple[Any, ...], leaf: gym.Space[Any]) -> Array:
            if path not in self._text_spaces:
                return _sample_leaf(leaf, rows, rng, scale)
            return self.texts.get(path, np.zeros(TEXTS, dtype_of(leaf)))[np.arange(rows) * TEXTS // rows]

        return tree.map_structure_with_path(sampled, self.structure)

    @property
    def has_texts(self) -> bool:
        """Whether a part of the observation is a text."""
        return bool(self._text_spaces)

    def learn_texts(self, observations: Sequence[Any]) -> None:
        """Use the texts of these observations for the probe, and the first one in rows without an episode.

        Made-up texts are of no use, because many policies only accept the texts of their tasks.

        Raises:
            EnvError: A text does not fit its space.
        """
        for path in self._text_spaces if observations else ():
            array = leaf_of(self.arrays, path)
            known = [_checked_text(leaf_of(one, path), array.dtype, path) for one in observations]
            self.texts[path] = np.resize(np.array([*dict.fromkeys(known)], array.dtype), TEXTS)
        self.share_texts(self)

    def share_texts(self, other: ObservationBatch) -> None:
        """Use the texts that a batch of the same space has learned."""
        self.texts = other.texts
        for path, texts in self.texts.items():
            leaf_of(self.arrays, path)[...] = texts[0]


def fitting(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return a part of an observation as an array with a dtype and a shape.

    The last observation of an episode is not written to the batch, so it has not been checked before.

    Raises:
        EnvError: The shape, the dtype or a value does not fit.
    """
    if dtype.kind == "U":
        return np.array(_checked_text(value, dtype, ()), dtype)
    given = np.asarray(value)
    fits = given.shape == shape and given.dtype.kind in _FITTING_KINDS[dtype.kind]
    with np.errstate(over="ignore", invalid="ignore"):
        array = given.astype(dtype, copy=False) if fits else given
    if not fits or (dtype.kind in "iu" and (array != given).any()):
        due = f"but the observation space has shape {shape} and dtype {dtype}"
        problem = f"the last observation has shape {given.shape}, dtype {given.dtype} or values that do not fit, {due}"
        raise EnvError(problem, key="observation", value=f"{given.dtype}{list(given.shape)}")
    return array


def dtype_of(leaf: gym.Space[Any]) -> np.dtype[Any]:
    """Return the dtype of the array for a leaf. That of a text has room for the longest text of its space."""
    return np.dtype(f"<U{leaf.max_length}") if isinstance(leaf, gym.spaces.Text) else np.dtype(leaf.dtype or np.float64)


def text_array(texts: Any, dtype: np.dtype[Any], path: tuple[Any, ...] = ()) -> Array:
    """Return texts of several observations as an array.

    Raises:
        EnvError: One of them is not a text, is too long, or ends with a NUL character, which NumPy removes.
    """
    return np.array([_checked_text(text, dtype, path) for text in texts], dtype)


def _checked_text(value: Any, dtype: np.dtype[Any], path: tuple[Any, ...]) -> str:
    text = value.item() if isinstance(value, np.ndarray) and not value.shape else value
    width = dtype.itemsize // np.dtype("<U1").itemsize
    if isinstance(text, str) and len(text) <= width and not text.endswith("\0"):
        return text
    what = f"is of type {type(value).__name__}, not str"
    if isinstance(text, str):
        what = f"has {len(text)} characters" if len(text) > width else "ends with a NUL character"
    problem = f"observation{_at(path)} {what}, but the observation space has texts of at most {width} characters"
    fix = "Return a str without NUL characters at its end. For longer texts, raise max_length of the Text space."
    raise EnvError(problem, key=f"observation{_at(path)}", value=repr(text)[:80], fix=fix)


def has_texts(space: gym.Space[Any]) -> bool:
    """Whether a part of a space is a Text."""
    parts = space.spaces.values() if isinstance(space, gym.spaces.Dict) else getattr(space, "spaces", ())
    return isinstance(space, gym.spaces.Text) or any(map(has_texts, parts))


def with_text_arrays(space: gym.Space[Any], batch: Any) -> Any:
    """Return a batch of observations with arrays in place of the tuples in which gymnasium has texts.

    Raises:
        EnvError: A text does not fit its space.
    """
    if isinstance(space, gym.spaces.Dict):
        return {**batch, **{key: with_text_arrays(part, batch[key]) for key, part in space.spaces.items()}}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(with_text_arrays(part, one) for part, one in zip(space.spaces, batch, strict=True))
    return text_array(batch, dtype_of(space)) if isinstance(space, gym.spaces.Text) else batch


def leaf_of(observation: Any, path: tuple[Any, ...]) -> Any:
    """Return a part of an observation, or of a batch of observations.

    Raises:
        EnvError: The part is missing.
    """
    value = observation
    try:
        for part in path:
            value = value[part]
    except (KeyError, IndexError, TypeError) as error:
        text = f"the observation lacks {_at(path)}, which the observation space has"
        raise EnvError(text, key=f"observation{_at(path)}") from error
    return value


def _at(path: tuple[Any, ...]) -> str:
    return "".join(f"[{part!r}]" for part in path)


def _due(array: Array) -> str:
    return f"but the observation space has shape {array.shape[1:]} and dtype {array.dtype}"


def _narrower(leaf: gym.Space[Any], dtype: np.dtype[Any]) -> tuple[Any, Any] | None:
    """Return the lowest and the highest value of a leaf; None if every value of the dtype is allowed, and for texts."""
    if dtype.kind == "U":
        return None
    low, high = _range(leaf)
    kind = dtype.kind
    limits = (-np.inf, np.inf) if kind == "f" else (0, 1) if kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return None if np.all(low == limits[0]) and np.all(high == limits[1]) else (low, high)


def _range(leaf: gym.Space[Any]) -> tuple[Any, Any]:
    """Return the lowest and the highest value of a leaf."""
    if isinstance(leaf, gym.spaces.Box):
        return leaf.low, leaf.high
    if isinstance(leaf, gym.spaces.MultiBinary):
        return 0, 1
    return leaf.start, leaf.start + (leaf.n if isinstance(leaf, gym.spaces.Discrete) else leaf.nvec) - 1  # type: ignore[attr-defined]


def zeros_of(space: gym.Space[Any], rows: tuple[int, ...]) -> Any:
    """Return nested arrays with rows of zeros, or of the lowest value where zero is not in the space."""

    def leaf_of_zeros(leaf: gym.Space[Any]) -> Any:
        if isinstance(leaf, gym.spaces.Text):
            return np.zeros(rows, dtype_of(leaf))[()]
        near = np.clip(0, *_range(leaf))
        return np.broadcast_to(near, (*rows, *(leaf.shape or ()))).astype(leaf.dtype)[()]

    return tree.map_structure(leaf_of_zeros, _nested(space, "observation_space"))


def _sample_leaf(leaf: gym.Space[Any], rows: int, rng: np.random.Generator, scale: float) -> Array:
    (low, high), shape = _range(leaf), (rows, *(leaf.shape or ()))
    if not isinstance(leaf, gym.spaces.Box):
        return rng.integers(low, high, shape, endpoint=True).astype(leaf.dtype)
    drawn = np.empty(shape, leaf.dtype)
    num_parts = drawn[:1].nbytes // _PART_BYTES
    if leaf.dtype.kind != "f" and not num_parts:
        return rng.integers(low, high, shape, dtype=leaf.dtype, endpoint=True)
    # Part by part, to save memory: numbers are drawn in 64 bits, and an image has millions.
    size = math.ceil(shape[1] / num_parts) if num_parts else 0
    parts = [slice(start, start + size) for start in range(0, shape[1], size)] if num_parts else [...]
    for row in range(rows):
        for part in parts:
            least, most = low[part], high[part]
            drawn[row, part] = (
                np.clip(rng.standard_normal(least.shape) * scale, least, most)
                if leaf.dtype.kind == "f"
                else rng.integers(least, most, dtype=leaf.dtype, endpoint=True)
            )
    return drawn


class ActionReader:
    """Reader that checks a batch of actions against the action space, and converts it for ``env.step``.

    Args:
        space: Action space.
        mode: For Box leaves: ``clip`` into the bounds, ``unsquash`` from [-1, 1] onto the bounds, or ``none``.

    Raises:
        ConfigError: The space cannot be batched, or ``unsquash`` is set for an unbounded space.
    """

    def __init__(self, space: gym.Space[Any], mode: Literal["clip", "unsquash", "none"]) -> None:
        self.structure = _nested(space, "action_space")
        self.clipped = False
        """Whether a live row exceeded the bounds by more than rounding; ``forget_notes`` of the inference resets it."""
        self.mode = mode
        self._single = not isinstance(self.structure, (dict, tuple))
        leaves = tree.flatten(self.structure)
        if not leaves:
            problem = f"the environment's action_space is {space}, which is empty"
            fix = "Wrap the environment to give it an action space with values, such as Discrete(1)."
            raise ConfigError(problem, key="action_space", value=str(space), fix=fix)
        for leaf in leaves:
            if mode == "unsquash" and isinstance(leaf, gym.spaces.Box) and not leaf.is_bounded():
                problem = f'policy.actions is "unsquash", but {leaf} has no bounds to map onto'
                raise ConfigError(problem, key="policy.actions", value="unsquash", fix='Use "clip" or "none".')

    def read(self, actions: Any, live: npt.NDArray[np.bool_]) -> Any:
        """Return checked actions as nested arrays with a leading batch dimension.

        Raises:
            PolicyError: The structure, shape or dtype, or the value of a live row, does not fit the action space.
        """
        if isinstance(actions, tuple) and len(actions) != len(live) and not isinstance(self.structure, tuple):
            problem = f"the policy returned a tuple ({', '.join(type(one).__name__ for one in actions)}), not an action"
            raise PolicyError(problem, key="action", value="tuple", fix=_ALONE)
        return self._read((), self.structure, actions, live)

    def split(self, actions: Any) -> Sequence[Any]:
        """Return one action per row."""
        if self._single:
            return actions  # type: ignore[no-any-return]
        rows = len(tree.flatten(actions)[0])
        return [tree.map_structure(lambda leaf, row=row: leaf[row], actions) for row in range(rows)]

    def _read(self, path: tuple[Any, ...], structure: Any, actions: Any, live: npt.NDArray[np.bool_]) -> Any:
        if isinstance(structure, dict):
            if not isinstance(actions, Mapping) or actions.keys() != structure.keys():
                raise _other_structure(path, structure, actions)
            return {key: self._read((*path, key), part, actions[key], live) for key, part in structure.items()}
        if isinstance(structure, tuple):
            if not isinstance(actions, (tuple, list)) or len(actions) != len(structure):
                raise _other_structure(path, structure, actions)
            parts = enumerate(zip(structure, actions, strict=True))
            return tuple(self._read((*path, place), part, given, live) for place, (part, given) in parts)
        return self._read_leaf(path, structure, actions, live)

    def _read_leaf(
        self, path: tuple[Any, ...], leaf: gym.Space[Any], actions: Any, live: npt.NDArray[np.bool_]
    ) -> Array:
        where = f"action{_at(path)}" if path else "action"
        array = actions if type(actions) is np.ndarray else _as_array(where, actions)
        shape = (len(live), *(leaf.shape or ()))
        if array.shape != shape:
            problem = (
                f"the policy returned {where} of shape {array.shape} for a batch of {len(live)}, "
                f"but {leaf} needs {shape}"
            )
            raise PolicyError(problem, key=where, value=str(array.shape), fix=_reshaped(array, leaf, shape))
        _check_kind(where, leaf, array)
        if isinstance(leaf, gym.spaces.Box):
            return self._read_box(where, leaf, array, live)
        low, high = _range(leaf)
        outside = (array < low) | (array > high)
        if outside.any() and outside[live].any():
            wrong = array[live][outside[live]].ravel()[0]
            raise PolicyError(
                f"the policy returned {where} {wrong}, which is outside {leaf}", key=where, value=wrong.item()
            )
        # A space contains only arrays of its dtype. Environments do not accept True as an action, although it equals 1.
        return array if array.dtype == leaf.dtype else array.astype(leaf.dtype)

    def _read_box(self, where: str, leaf: gym.spaces.Box, array: Array, live: npt.NDArray[np.bool_]) -> Array:
        finite = np.isfinite(array)
        if not finite.all() and not finite[live].all():
            row = int(np.flatnonzero(live & ~finite.reshape(len(array), -1).all(1))[0])
            raise PolicyError(
                f"the policy returned {where} {array[row]}, which is not finite", key=where, value=str(array[row])
            )
        if self.mode == "unsquash":
            array = leaf.low + (array.astype(np.float64) + 1.0) * 0.5 * (leaf.high.astype(np.float64) - leaf.low)
        if self.mode != "none":
            array, given = np.clip(array, leaf.low, leaf.high), array
            if not self.clipped and (array != given)[live].any():
                width = np.where(np.isfinite(leaf.high) & np.isfinite(leaf.low), leaf.high - leaf.low, 1.0)
                self.clipped = bool((np.abs(array - given) > _ROUNDING * width)[live].any())
        return (
            self._whole(where, leaf, array, live) if leaf.dtype.kind in "iu" else array.astype(leaf.dtype, copy=False)
        )

    def _whole(self, where: str, leaf: gym.spaces.Box, array: Array, live: npt.NDArray[np.bool_]) -> Array:
        """Convert numbers to the integers of a leaf. NumPy would cut off decimals, and wrap around large values."""
        whole = np.rint(array) if array.dtype.kind == "f" else array
        limits = np.iinfo(leaf.dtype.name)
        wrong = (whole < limits.min) | (whole > limits.max)
        if self.mode != "unsquash":
            wrong |= whole != array
        if wrong[live].any():
            value = array[live][wrong[live]][0]
            problem = f"the policy returned {where} {value}, but {leaf} needs integers of dtype {leaf.dtype}"
            raise PolicyError(problem, key=where, value=value.item())
        return np.where(wrong, 0, whole).astype(leaf.dtype)


class ChunkReader(ActionReader):
    """Reader that checks the structure, the shapes and the dtypes of chunks of actions, but not their values.

    Args:
        space: Space of one action.
        horizon: Number of actions in a chunk; None for that of the first chunk.
    """

    def __init__(self, space: gym.Space[Any], horizon: int | None) -> None:
        super().__init__(space, "none")
        self.horizon = horizon

    @override
    def _read_leaf(
        self, path: tuple[Any, ...], leaf: gym.Space[Any], actions: Any, live: npt.NDArray[np.bool_]
    ) -> Array:
        where = f"action{_at(path)}"
        array, shape = _as_array(where, actions), leaf.shape or ()
        if self.horizon is None and array.ndim == 2 + len(shape):
            self.horizon = array.shape[1]
        if array.shape != (len(live), self.horizon, *shape):
            due = ", ".join(map(str, (len(live), self.horizon or "horizon", *shape)))
            problem = f"the policy returned {where} of shape {array.shape}, but policy.chunk needs ({due})"
            fix = "Return a chunk of actions for each observation, or remove policy.chunk."
            if array.shape[:1] + array.shape[2:] == (len(live), *shape):
                fix = "Return equally long chunks in each call, and remove policy.chunk.horizon or correct it."
            elif array.shape[1:] == (len(live), *shape):
                fix = "The first two dimensions are swapped: return np.swapaxes(actions, 0, 1), of a batch of chunks."
            raise PolicyError(problem, key=where, value=str(array.shape), fix=fix)
        _check_kind(where, leaf, array)
        return array


def _check_kind(where: str, leaf: gym.Space[Any], array: Array) -> None:
    kinds, needs = ("biuf", "numbers") if isinstance(leaf, gym.spaces.Box) else ("biu", "integers")
    if array.dtype.kind not in kinds:
        problem = f"the policy returned {where} of dtype {array.dtype}, but {leaf} needs {needs}"
        cast = ", such as actions.astype(int) if all are whole numbers" if array.dtype.kind == "f" else ""
        raise PolicyError(problem, key=where, value=str(array.dtype), fix=f"Return {needs}{cast}.")


def _other_structure(path: tuple[Any, ...], structure: Any, actions: Any) -> PolicyError:
    given, due = _outline(actions), _outline(structure)
    return PolicyError(
        f"the policy's action{_at(path)} has another structure than the action space: {given}, not {due}",
        key=f"action{_at(path)}",
        value=given,
    )


def _reshaped(array: Array, leaf: gym.Space[Any], shape: tuple[int, ...]) -> str:
    """Return advice for actions of another shape than that of a batch of actions."""
    if array.shape[:1] != shape[:1]:
        return _EACH
    if array.size == math.prod(shape):
        return f"Return actions.reshape({', '.join(map(str, (-1, *shape[1:])))})."
    if isinstance(leaf, gym.spaces.Discrete) and array.shape[1:] == (leaf.n,) and not leaf.start:
        return "For logits, return logits.argmax(axis=1), or pass the nn.Module itself."
    return chunk_advice(array.shape, shape)


def chunk_advice(given: tuple[int, ...], due: tuple[int, ...]) -> str:
    """Return advice for a batch of chunks of actions in place of a batch of actions; empty for other shapes."""
    return _CHUNKS.format(given[1], given[1]) if len(given) > 1 and (given[0], *given[2:]) == due else ""


def _outline(nested: Any) -> str:
    if isinstance(nested, Mapping):
        return f"a dict with keys {list(nested)}"
    return f"a {type(nested).__name__}" + (f" of {len(nested)}" if isinstance(nested, (tuple, list)) else "")


def _as_array(where: str, actions: Any) -> Array:
    if actions is None:
        fix = f"Return {where}s, one for each observation of the batch."
        raise PolicyError("the policy returned None", key=where, fix=fix)
    if hasattr(actions, "detach"):
        actions = actions.detach().cpu()
    try:
        return np.asarray(actions)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PolicyError(f"the policy returned {where} that is not an array: {error}", key=where) from error


def assign_rows(target: Any, rows: Any, values: Any) -> None:
    """Write values into rows of one array or tensor."""
    target[rows] = values


def take_rows(nested: Any, rows: Any) -> Any:
    """Return some rows of every leaf: views for a slice, copies for indices; None stays None."""
    if type(nested) is np.ndarray:  # This is much faster than tree.map_structure for one leaf.
        return nested[rows]
    return None if nested is None else tree.map_structure(lambda leaf: leaf[rows], nested)


def _copy(leaf: Any) -> Any:
    if hasattr(leaf, "clone"):
        with no_grad():
            return leaf.clone()
    return leaf.copy() if hasattr(leaf, "copy") else np.array(leaf)


def copy_batch(nested: Any) -> Any:
    """Copy every leaf; None stays None."""
    if type(nested) is np.ndarray:  # This is much faster than tree.map_structure for one leaf.
        return nested.copy()
    return None if nested is None else tree.map_structure(_copy, nested)


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """Switch gradients off if torch is imported. Do not import torch, because the policy may not use it."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else contextlib.nullcontext()
