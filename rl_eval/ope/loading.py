"""Reading of logged episodes: npz files, TensorDicts in TorchRL's layout, Minari datasets."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import UsageError
from rl_eval.ope.data import MISSING, LoggedEpisodes, places_of

__all__ = ["load_episodes"]

Array = npt.NDArray[Any]

_MINARI: Final = "minari:"
_FORMS: Final = "Give an npz file, the folder of a TensorDict, or minari:ID"
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
"""Names of a column: ours, and TorchRL's joined with dots. The first that exists counts: TorchRL's flags outside of
``next`` are of the step before."""


def load_episodes(source: Any) -> LoggedEpisodes:
    """Read logged episodes, and check them.

    Args:
        source: A mapping of columns or the path of an npz file that has them (see :meth:`LoggedEpisodes.from_steps`);
            a TensorDict in TorchRL's layout, or the folder of one on disk; a Minari dataset, or ``"minari:ID"``.

    Raises:
        UsageError: It cannot be read, or is not valid; the message names the episode.
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
        raise UsageError(f"logged episodes cannot be read from a {type(source).__name__}: give an npz file")
    return LoggedEpisodes.from_steps(_steps(source))


def _npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as loaded:
            return dict(loaded)
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is not an npz file with one array per column: {error}. {_FORMS}") from error


def _memory_mapped(path: Path) -> Any:
    if not (path / "meta.json").is_file():
        raise UsageError(
            f"{path} has no meta.json, so it is not a TensorDict. rl-eval export writes the steps of a run to a file"
        )
    from tensordict import TensorDict

    return TensorDict.load_memmap(path)


def _tensordict_arrays(data: Any) -> dict[str, Array]:
    """Return the tensors of a TensorDict by their keys joined with dots."""
    found = data.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, str) else ".".join(key): leaf.detach().cpu().numpy() for key, leaf in found}


def _steps(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Return one entry per step from arrays of shape (steps, ...), or of (episodes, longest, ...) with a mask."""
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
    """Number the steps of each episode in the order in which they stand.

    Raises:
        UsageError: A step does not start with the next observation of the step before it.
    """
    episode = episode.reshape(len(episode), -1)[:, 0]
    positions = places_of(episode)
    apart = (observation[1:] != following[:-1]).reshape(len(episode) - 1, -1).any(1) & (positions[1:] > 0)
    if apart.any():
        row = int(apart.argmax()) + 1
        raise UsageError(
            f"episode {episode[row]}: the observation of step {positions[row]} is not the next observation of the step "
            "before. Steps are shuffled or missing: sort them, or add a column step"
        )
    return positions


def _minari_dataset(name: str) -> Any:
    try:
        minari = importlib.import_module("minari")
    except ImportError as error:
        raise UsageError(f"{_MINARI}{name} needs the package minari: pip install 'rl-eval[minari]'") from error
    try:
        return minari.load_dataset(name)
    except Exception as error:
        raise UsageError(f"the Minari dataset {name!r} cannot be read: {error}") from error


def _minari_columns(dataset: Any) -> dict[str, Array]:
    """Return columns, with the version of the weights if the metadata of all episodes have one."""
    parts = [_minari_episode(episode) for episode in dataset.iterate_episodes()]
    if (storage := getattr(dataset, "storage", None)) is not None:
        metadata = storage.get_episode_metadata([int(part["episode"][0]) for part in parts])
        versions = [one.get("weights_version") for one in metadata]
        if None not in versions:
            for part, version in zip(parts, versions, strict=True):
                part["weights_version"] = np.full(len(part["episode"]), int(version))
    return {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _minari_episode(episode: Any) -> dict[str, Array]:
    """Return the columns of an episode; its infos have an entry for the reset, which is not a step."""
    length = len(episode.rewards)
    for name in ("observations", "actions"):
        if isinstance(parts := getattr(episode, name), (dict, tuple)):
            raise UsageError(f"episode {episode.id}: its {name} have {len(parts)} parts: record flattened ones")
    if (log_probs := (episode.infos or {}).get("action_log_prob")) is None:
        raise UsageError(f"episode {episode.id} has no action_log_prob in its infos: {MISSING}")
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
