"""Logged episodes: observations, actions and rewards of a behaviour policy, with the log-probability of each action.

They are read from npz files, TensorDicts in TorchRL's layout, and Minari datasets.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.bounded_read import check_inflation, open_zip, read_entry
from rl_eval.errors import UsageError

Array = npt.NDArray[Any]

_COLUMNS: Final = (
    *("episode", "step", "observation", "action", "reward", "terminated", "truncated"),
    "action_log_prob",
)
"""Required columns."""

_BEHAVIOURS: Final = ("behaviour", "weights_version")
"""Optional columns that identify the policy of a step. In each column, all values must be equal."""

_ROUNDING: Final = 1e-5
"""Maximum valid log-probability of a discrete action. Rounding to float32 can make a log-probability slightly
positive."""

_MISSING: Final = "Record episodes of a policy with log_prob: estimates need log-probabilities of recorded actions."
"""Advice for data without log-probabilities."""


@final
@dataclass(frozen=True, eq=False)
class LoggedEpisodes:
    r"""Finished episodes of one behaviour policy, as read-only arrays of steps.

    The steps of an episode are consecutive.
    """

    observations: Array
    """Observation before each action, shape (steps, \\*observation_shape)."""
    actions: Array
    """Shape (steps, \\*action_shape); integers are discrete actions, floats continuous ones."""
    rewards: npt.NDArray[np.float64]
    """Shape (steps,)."""
    log_probs: npt.NDArray[np.float64]
    """Log-probability (density, if continuous) of each action under the policy that took it, shape (steps,)."""
    lengths: npt.NDArray[np.int64]
    """Number of steps of each episode, at least 1, shape (episodes,)."""
    terminated: npt.NDArray[np.bool_]
    """Whether each episode terminated, shape (episodes,). The other episodes were truncated."""
    ids: npt.NDArray[np.int64]
    """Number of each episode in the data, shape (episodes,)."""

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def from_steps(cls, columns: Mapping[str, npt.ArrayLike]) -> LoggedEpisodes:
        r"""Create episodes from columns with one entry per step, and check them.

        Args:
            columns: ``episode`` and ``step`` (integers; the steps of an episode are numbered from 0 without gaps),
                ``observation``, ``action``, ``reward``, ``terminated``, ``truncated`` and ``action_log_prob``, each of
                shape (steps, ...). If there is a column ``behaviour`` or ``weights_version``, all its entries must be
                equal.

        Raises:
            UsageError: A column is missing. Or an episode is unfinished or out of order, belongs to another policy, or
                has invalid numbers; the message names the episode.
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
        """Return values of steps, shape (steps,), as a matrix, shape (episodes, longest).

        The matrix has 0 after the end of each episode.
        """
        matrix = np.zeros((len(self), int(self.lengths.max())))
        matrix[np.arange(matrix.shape[1]) < self.lengths[:, None]] = values
        return matrix

    def rows_of(self, episodes: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return the mask of the steps of some episodes, shape (steps,).

        Args:
            episodes: Mask of the episodes, shape (episodes,).
        """
        return np.repeat(episodes, self.lengths)

    def step_numbers(self) -> npt.NDArray[np.int64]:
        """Return the number of each step in its episode, from 0, shape (steps,)."""
        return places_of(np.repeat(np.arange(len(self)), self.lengths))

    def place(self, row: int) -> str:
        """Return a text with the episode and the number of a step, for messages."""
        return f"episode {np.repeat(self.ids, self.lengths)[row]}, step {self.step_numbers()[row]}"


def places_of(episode: Array) -> npt.NDArray[np.int64]:
    """Return the number of each step in its episode, from 0, shape (steps,). The steps must be grouped by episode."""
    first = _starts(episode)
    return np.arange(len(episode)) - np.repeat(first, np.diff(first, append=len(episode)))


def _starts(episode: Array) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.append(True, episode[1:] != episode[:-1]))


def _frozen(array: Array) -> Array:
    copied = array.copy()
    copied.setflags(write=False)
    return copied


def _arrays(columns: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
    """Return the columns as numeric arrays of equal length.

    All arrays except observations and actions have one dimension.
    """
    if missing := [name for name in _COLUMNS if name not in columns]:
        fix = _MISSING if "action_log_prob" in missing else f"Pass {', '.join(_COLUMNS)}, one entry per step."
        raise UsageError(f"the data have no column {missing[-1]}", key=missing[-1], fix=fix)
    steps = {name: np.asarray(columns[name]) for name in (*_COLUMNS, *_BEHAVIOURS) if name in columns}
    count = steps["episode"].size
    if not count:
        raise UsageError("the data have no steps", key="episode", value=0, fix="Pass at least one episode.")
    for name, column in steps.items():
        flat = name not in ("observation", "action")
        if column.dtype.kind not in "biuf":
            fix = "Pass numbers."
            raise UsageError(f"column {name} has dtype {column.dtype}", key=name, value=str(column.dtype), fix=fix)
        if not column.ndim or len(column) != count or (flat and column.size != count):
            problem, fix = f"column {name} has shape {column.shape}", f"Pass one entry for each of the {count} steps."
            raise UsageError(problem, key=name, value=column.shape, fix=fix)
        if flat:
            steps[name] = column.reshape(count)
    for name in ("episode", "step"):
        whole = np.nan_to_num(steps[name]).astype(np.int64)
        if (bad := whole != steps[name]).any():
            value, fix = float(steps[name][bad][0]), "Use integers for the numbers of episodes and steps."
            raise UsageError(f"column {name} has {value}", key=name, value=value, fix=fix)
        steps[name] = whole
    return steps


def _check(steps: Mapping[str, Array]) -> None:
    """Raise an error for the first invalid step. The message names the step's episode."""
    episode, step, log_prob = steps["episode"], steps["step"], steps["action_log_prob"]
    ids, times = np.unique(episode[_starts(episode)], return_counts=True)
    if (times > 1).any():
        wrong = int(ids[times > 1][0])
        fix = "Sort the data by episode and step, and number the episodes of different files differently."
        raise UsageError(f"the steps of episode {wrong} are not contiguous", key="episode", episode=wrong, fix=fix)
    over = (steps["terminated"] != 0) | (steps["truncated"] != 0)
    last = np.append(episode[1:] != episode[:-1], True)
    highest = np.inf if steps["action"].dtype.kind == "f" else _ROUNDING
    rules: list[tuple[str, Any, str, str, Array]] = [
        (
            "step",
            step != places_of(episode),
            "expected step {value}, but found step {step}",
            "Sort the steps, and omit incomplete episodes.",
            places_of(episode),
        ),
        ("truncated", last & ~over, "step {step}, the last, is neither terminated nor truncated", "Omit it.", step),
        (
            "episode",
            over & ~last,
            "the episode continues after its end at step {step}",
            "Give every episode a different number.",
            step,
        ),
    ]
    for name in _BEHAVIOURS:
        if name in steps:
            why = f"its {name} is {{value}}, but was {steps[name][0]} before"
            rules.append((name, steps[name] != steps[name][0], why, "Pass the episodes of one policy.", steps[name]))
    for name in ("observation", "action", "reward"):
        bad = ~np.isfinite(steps[name]) if name == "reward" else np.isnan(steps[name])
        why = f"the {name} at step {{step}} is {{value}}"
        rules.append((name, bad.reshape(len(bad), -1).any(1), why, "Omit it.", steps[name]))
    why, name = "the log-probability at step {step} is {value}", "action_log_prob"
    rules += [
        (name, np.isnan(log_prob), why, _MISSING, log_prob),
        (
            name,
            np.isneginf(log_prob),
            f"{why}, but the action was taken",
            "Store the log-probability that the acting policy gave to this action.",
            log_prob,
        ),
        (
            name,
            np.isposinf(log_prob) | (log_prob > highest),
            f"{why}, but it must be finite, and at most 0 for a discrete action",
            "Store logarithms.",
            log_prob,
        ),
    ]
    for name, bad, problem, fix, values in rules:
        if bad.any():
            row = int(bad.argmax())
            place, value = int(episode[row]), values[row].tolist()
            text = f"episode {place}: {problem.format(step=step[row], value=values[row])}"
            raise UsageError(text, key=name, value=value, episode=place, fix=fix)


_MINARI: Final = "minari:"
_FORMS: Final = "Pass an npz file, the folder of a TensorDict, or minari:ID."
_UNPACKED: Final = "Save the arrays with numpy.savez, which does not compress them."
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "episode": ("episode", "collector.traj_ids", "traj_ids"),
    "step": ("step", "collector.step"),
    "observation": ("observation",),
    "next_observation": ("next.observation", "next_observation"),
    "action": ("action",),
    "reward": ("next.reward", "reward"),
    "terminated": ("next.terminated", "terminated"),
    "truncated": ("next.truncated", "truncated"),
    "action_log_prob": ("action_log_prob", "sample_log_prob"),
    "weights_version": ("weights_version", "collector.weights_version"),
    "behaviour": ("behaviour",),
    "mask": ("collector.mask", "mask"),
}
"""Possible names of each column: our name, and TorchRL's keys joined with dots. The first name that exists is used.
TorchRL's flags under ``next`` come first, because its other flags belong to the previous step."""


def load_episodes(source: Any) -> LoggedEpisodes:
    """Read logged episodes, and check them.

    Args:
        source: A mapping with the columns of :meth:`LoggedEpisodes.from_steps`, or the path of an npz file with these
            columns; a TensorDict in TorchRL's layout, or the folder of a stored TensorDict; a Minari dataset, or
            ``"minari:ID"``.

    Raises:
        UsageError: The source cannot be read, or an episode is invalid; the message names the episode.
    """
    if isinstance(source, str) and source.startswith(_MINARI):
        source = _minari_dataset(source.removeprefix(_MINARI))
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        source = _memory_mapped(path) if path.is_dir() else _npz(path)
    if hasattr(source, "iterate_episodes"):
        source = _minari_columns(source)
    elif hasattr(source, "batch_size"):  # A TensorDict is a Mapping, too.
        source = _tensordict_arrays(source)
    if not isinstance(source, Mapping):
        name = type(source).__name__
        raise UsageError(f"a {name} does not contain logged episodes", key="data", value=name, fix="Pass an npz file.")
    return LoggedEpisodes.from_steps(_steps(source))


def _npz(path: Path) -> dict[str, Array]:
    try:
        with open_zip(path) as archive:
            check_inflation(archive, path)
            # From an archive, numpy would inflate a whole header before it checks the header's length.
            entries = ((name, io.BytesIO(read_entry(archive, name, path, sys.maxsize))) for name in archive.namelist())
            return {name.removesuffix(".npy"): np.lib.format.read_array(entry) for name, entry in entries}
    except (OSError, ValueError, EOFError, TypeError, AttributeError, MemoryError, zipfile.BadZipFile) as error:
        problem = f"{path} is not an npz file with one array per column: {error}"
        fix = _UNPACKED if getattr(error, "errno", None) == errno.EFBIG else _FORMS
        raise UsageError(problem, key="data", value=str(path), fix=fix) from error


def _memory_mapped(path: Path) -> Any:
    if not (path / "meta.json").is_file():
        problem = f"{path} has no meta.json, so it is not a TensorDict"
        raise UsageError(problem, key="data", value=str(path), fix="Write the steps of a run with rl-eval export.")
    from tensordict import TensorDict

    # A link could lead to a pickle, which tensordict loads for fields that are not tensors.
    if bad := [one for one in path.rglob("*") if one.suffix == ".pickle" or one.is_symlink()]:
        problem = f"{path} contains {bad[0].name}, but pickle files, which can run any code, and links are not read"
        raise UsageError(problem, key="data", value=str(path), fix="Store only tensors.")
    return TensorDict.load_memmap(path)


def _tensordict_arrays(data: Any) -> dict[str, Array]:
    """Return the tensors of a TensorDict by their keys joined with dots."""
    found = data.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, str) else ".".join(key): leaf.detach().cpu().numpy() for key, leaf in found}


def _steps(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Return arrays with one entry per step.

    The given arrays have shape (steps, ...), or (episodes, longest, ...) with a mask.
    """
    columns: dict[str, Array] = {
        name: np.asarray(arrays[key]) for name, keys in _NAMES.items() for key in reversed(keys) if key in arrays
    }
    if (mask := columns.pop("mask", None)) is not None:
        kept = mask.astype(bool).reshape(mask.shape[: columns.get("episode", mask).ndim])
        columns = {name: column[kept] for name, column in columns.items()}
    following = columns.pop("next_observation", None)
    if "step" not in columns and following is not None and {"episode", "observation"} <= columns.keys():
        columns["step"] = _positions(columns["episode"], columns["observation"], following)
    return columns


def _positions(episode: Array, observation: Array, following: Array) -> Array:
    """Return the number of each step in its episode, in the order of the data.

    Raises:
        UsageError: The observation of a step differs from the next observation that the previous step recorded.
    """
    episode = episode.reshape(len(episode), -1)[:, 0]
    positions = places_of(episode)
    apart = (observation[1:] != following[:-1]).reshape(len(episode) - 1, -1).any(1) & (positions[1:] > 0)
    if apart.any():
        row = int(apart.argmax()) + 1
        problem = (
            f"the observation of step {positions[row]} of episode {episode[row]} differs from the next observation "
            "of the previous step, so steps are shuffled or missing"
        )
        fix = "Sort the steps, or add a column step."
        raise UsageError(problem, key="next_observation", value=int(positions[row]), episode=int(episode[row]), fix=fix)
    return positions


def _minari_dataset(name: str) -> Any:
    try:
        minari = importlib.import_module("minari")
    except ImportError as error:
        fix = "Run pip install 'rl-eval[minari]'."
        raise UsageError(f"{_MINARI}{name} needs the package minari", key="data", value=name, fix=fix) from error
    try:
        return minari.load_dataset(name)
    except Exception as error:
        raise UsageError(f"the Minari dataset {name!r} cannot be read: {error}", key="data", value=name) from error


def _minari_columns(dataset: Any) -> dict[str, Array]:
    """Return the columns of a Minari dataset.

    The columns include the version of the weights if the metadata of all episodes contain a version.
    """
    parts = [_minari_episode(episode) for episode in dataset.iterate_episodes()]
    if (storage := getattr(dataset, "storage", None)) is not None:
        metadata = storage.get_episode_metadata([int(part["episode"][0]) for part in parts])
        versions = [one.get("weights_version") for one in metadata]
        if None not in versions:
            for part, version in zip(parts, versions, strict=True):
                part["weights_version"] = np.full(len(part["episode"]), int(version))
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _minari_episode(episode: Any) -> dict[str, Array]:
    """Return the columns of an episode. The first entry of the infos belongs to the reset, and is left out."""
    length = len(episode.rewards)
    for name in ("observations", "actions"):
        if isinstance(parts := getattr(episode, name), (dict, tuple)):
            problem, fix = f"the {name} of episode {episode.id} have {len(parts)} parts", f"Record flattened {name}."
            raise UsageError(problem, key=name, value=len(parts), episode=int(episode.id), fix=fix)
    if (log_probs := (episode.infos or {}).get("action_log_prob")) is None:
        problem = f"episode {episode.id} has no action_log_prob in its infos"
        raise UsageError(problem, key="action_log_prob", episode=int(episode.id), fix=_MISSING)
    return {
        "episode": np.full(length, episode.id),
        "step": np.arange(length),
        "observation": np.asarray(episode.observations)[:length],
        "action": np.asarray(episode.actions),
        "reward": np.asarray(episode.rewards),
        "terminated": np.asarray(episode.terminations),
        "truncated": np.asarray(episode.truncations),
        "action_log_prob": np.asarray(log_probs)[-length:],
    }
