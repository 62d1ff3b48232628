"""Export of trajectories: run episodes of a finished evaluation again, and write their steps to disk.

Every episode must match its record. The output is a new file or folder, which appears only when it is complete. Only a
few episodes are in memory at a time.
"""

from __future__ import annotations

import abc
import importlib.util
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from typing_extensions import override

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, EvalError, UsageError, nearest
from rl_eval.recording.replay import compared, lease_of, rebuilt_runner, recorded_episode
from rl_eval.records.agents import agent_columns, agents_in
from rl_eval.records.episode import RunReport
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult
from rl_eval.runners import Runner
from rl_eval.runners.again import run_again
from rl_eval.runners.core import RunnerCore
from rl_eval.runners.trajectories import (
    ACTION_LOG_PROB,
    Fragment,
    Trajectory,
    TrajectoryRecorder,
    as_arrays,
    as_tensordict,
    nested,
    reserve,
)
from rl_eval.supervision.caller import one_thread

if TYPE_CHECKING:
    from tensordict import TensorDictBase


class Writer(abc.ABC):
    """Writer of trajectories to a new file or folder, which appears only when it is complete.

    Args:
        target: Path of the output.

    Raises:
        ConfigError: The target cannot be used, or a package is missing.
    """

    place: Path
    """Path of the output; it must not exist."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.place = Path(target).absolute()
        self._data: Any = None
        self._lacking: set[Any] = set()
        """Keys that some episodes lack."""
        self._written = 0
        """Number of written steps."""

    def begin(self, folder: Path, env: Any, frames: int, title: str) -> None:
        """Start writing.

        Args:
            folder: New temporary folder, on the same disk as the output path.
            env: One of the environments that run the episodes.
            frames: Total number of steps of all trajectories.
            title: Description of the data, in one line.
        """
        self._folder, self._frames = folder / "data", frames

    @abc.abstractmethod
    def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write more trajectories, in order."""

    def finish(self) -> Path:
        """Finish writing; return the file or folder to move to the output path."""
        return self._folder

    def _next(self, trajectories: Sequence[Trajectory]) -> slice:
        """Return the rows of the output for the steps of the next trajectories, as a slice."""
        start, self._written = self._written, self._written + sum(map(len, trajectories))
        return slice(start, self._written)


class NpzWriter(Writer):
    """Writer of one ``.npz`` file with the arrays of all episodes.

    Keys and shapes are those of :func:`~rl_eval.runners.trajectories.as_arrays`. An output of the policy is left
    out if it is missing in some episodes.
    """

    @override
    def write(self, trajectories: Sequence[Trajectory]) -> None:
        here, arrays = self._next(trajectories), as_arrays(_whole(trajectories))
        self._folder.mkdir(exist_ok=True)
        self._data = {key: column for key, column in (self._data or {}).items() if key in arrays}
        for key, array in arrays.items():
            if here.start == 0:
                # A key of the environment's spaces may not be a valid file name.
                file, shape = self._folder / str(len(self._data)), (self._frames, *array.shape[1:])
                self._data[key] = np.lib.format.open_memmap(file, "w+", array.dtype, shape)
                reserve(file)
            if key in self._data:
                self._data[key][here] = array

    @override
    def finish(self) -> Path:
        path = self._folder / "all.npz"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for key, array in self._data.items():
                array.flush()
                archive.write(array.filename, f"{key}.npy")
        return path


class TensorDictWriter(Writer):
    """Writer of a folder for ``TensorDict.load_memmap``: the frames of all episodes, one episode after the other.

    An output of the policy is left out if it is missing in some episodes.
    """

    @override
    def write(self, trajectories: Sequence[Trajectory]) -> None:
        batch = as_tensordict(_whole(trajectories))
        if self._data is None:
            self._data = self._stored(batch[:1].expand(self._frames), self._folder)
        known, there = ({*one.keys(include_nested=True, leaves_only=True)} for one in (self._data, batch))
        self._lacking |= known - there
        self._data[self._next(trajectories)].update_(batch.select(*(known & there)))

    @override
    def finish(self) -> Path:
        if not self._lacking:
            return self._folder
        kept = self._data.exclude(*self._lacking)
        folder = self._folder.with_name("kept")
        self._stored(kept, folder).update_(kept)
        return folder

    @staticmethod
    def _stored(like: TensorDictBase, folder: Path) -> TensorDictBase:
        _make_folders(folder, like)
        stored = like.memmap_like(folder)
        reserve(*folder.rglob("*.memmap"))
        return stored


def _make_folders(folder: Path, batch: TensorDictBase) -> None:
    """Create the folders for keys with a slash. Tensordict 0.13 and later replaces the slash and needs no folders."""
    if tuple(map(int, version("tensordict").split(".")[:2])) < (0, 13):
        for key in batch.keys(include_nested=True, leaves_only=True):
            folder.joinpath(*((key,) if isinstance(key, str) else key)).parent.mkdir(parents=True, exist_ok=True)


class MinariWriter(Writer):
    """Writer of a data set for ``minari.load_dataset``, in Minari's folder (``MINARI_DATASETS_PATH``).

    Images are stored without loss, not as JPEG, and rewards as float64. An episode with T steps has T + 1 infos. The
    first info is NaN, because the info of the reset is not recorded. The metadata of an episode contain ``index``,
    ``attempt`` and ``weights_version``.

    Args:
        target: Id of the data set, such as ``cartpole/ppo-v0``.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        if missing := [name for name in ("minari", "h5py") if importlib.util.find_spec(name) is None]:
            fix = "Run pip install 'rl-eval[minari]' (Python 3.11 or newer)."
            raise ConfigError(f"Minari data sets need the package {missing[0]}", key="to", value="minari", fix=fix)
        from minari import __version__
        from minari.dataset.minari_dataset import parse_dataset_id
        from minari.dataset.minari_storage import MinariStorage
        from minari.storage.datasets_root_dir import get_dataset_path

        if "jpeg_encoding" not in signature(MinariStorage.new).parameters:
            problem, fix = (
                f"Minari {__version__} compresses images with loss",
                "Run pip install 'minari>=0.5.4' (Python 3.11 or newer).",
            )
            raise ConfigError(problem, key="to", value="minari", fix=fix)
        self._id = os.fspath(target)
        try:
            self._namespace = parse_dataset_id(self._id)[0]
        except (TypeError, ValueError) as error:
            # The TypeError is from Minari's conversion of the version.
            why = "the version is missing" if isinstance(error, TypeError) else str(error)
            problem, fix = (
                f"{self._id!r} is not the id of a Minari data set: {why}",
                "Pass an id such as 'cartpole/ppo-v0'.",
            )
            raise ConfigError(problem, key="output", value=self._id, fix=fix) from error
        super().__init__(get_dataset_path(self._id))

    @override
    def begin(self, folder: Path, env: Any, frames: int, title: str) -> None:
        super().begin(folder, env, frames, title)
        import minari
        from minari.dataset.minari_storage import MinariStorage

        self._spaces = env.observation_space, env.action_space
        (self._folder / "data").mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "env_spec is not serializable")
            self._storage = MinariStorage.new(
                self._folder / "data",
                *self._spaces,
                env_spec=getattr(env, "spec", None),
                data_format="hdf5",
                jpeg_encoding=False,
            )
        self._storage.update_metadata(
            {"dataset_id": self._id, "minari_version": minari.__version__, "description": title}
        )

    @override
    def write(self, trajectories: Sequence[Trajectory]) -> None:
        first = self._storage.total_episodes
        self._storage.update_episodes([self._buffer(one) for one in trajectories])
        labels = [
            {"index": one.index, "attempt": one.attempt, "weights_version": one.weights_version} for one in trajectories
        ]
        self._storage.update_episode_metadata(labels, range(first, first + len(trajectories)))

    @override
    def finish(self) -> Path:
        from minari.namespace import create_namespace, list_local_namespaces

        if self._namespace is not None and self._namespace not in list_local_namespaces():
            create_namespace(self._namespace)
        return self._folder

    def _buffer(self, trajectory: Trajectory) -> Any:
        from minari.data_collector.episode_buffer import EpisodeBuffer

        steps = len(trajectory)
        infos = dict(trajectory.infos)
        if ACTION_LOG_PROB in trajectory.outputs:
            infos["action_log_prob"] = trajectory.outputs[ACTION_LOG_PROB]
        ends = np.arange(1, steps + 1) == steps
        observation_space, action_space = self._spaces
        # Minari writes texts only if they are objects.
        seen = {
            key: np.asarray(array, object) if np.dtype(array.dtype).kind == "U" else array
            for key, array in trajectory.observations.items()
        }
        return EpisodeBuffer(
            seed=trajectory.seed,
            observations=nested(observation_space, seen),
            actions=nested(action_space, trajectory.actions, root="action"),
            rewards=trajectory.rewards,
            terminations=ends & trajectory.terminated,
            truncations=ends & trajectory.truncated,
            infos={key: np.concatenate([[np.nan], values]) for key, values in infos.items()},
        )


def _whole(trajectories: Sequence[Trajectory]) -> list[Fragment]:
    return [Fragment(one, 0, len(one)) for one in trajectories]


FORMATS: Final[dict[str, Callable[[str | os.PathLike[str]], Writer]]] = {
    "minari": MinariWriter,
    "npz": NpzWriter,
    "tensordict": TensorDictWriter,
}
"""Writer of each format, by the name of the format."""
_NAME: Final = "trajectory"


@dataclass(frozen=True)
class Exported:
    """Exported data set."""

    path: Path
    """Path of the data set."""
    episodes: int
    frames: int


def export_trajectories(
    source: str | os.PathLike[str] | EvalResult,
    to: str,
    output: str | os.PathLike[str],
    indices: Sequence[int] | None = None,
    config: EvalConfig | EvalSettings | None = None,
    policy: Any = None,
    *,
    trust: bool = False,
) -> Exported:
    """Run episodes of a finished evaluation again, in this process, and write their steps.

    The evaluation does not have to record trajectories, because the index of an episode determines all its steps. The
    outcome columns of every episode must be bitwise equal to its record. Otherwise, the export writes nothing. It never
    overwrites a file.

    Args:
        source: Folder or URI of an evaluation log, folder of a saved result, or a result.
        to: ``minari``, ``npz`` or ``tensordict``.
        output: Path of the new file or folder; for ``minari`` the id of the data set.
        indices: Indices of the episodes; by default, of all completed episodes.
        config: Config of the run. Pass it if the config contained Python objects. Default: the recorded config.
        policy: Policy object, if the run had one.
        trust: Whether this process may import and call code that the result names; see :func:`rl_eval.replay`.

    Raises:
        UsageError: The result does not exist, an episode did not complete or cannot run alone (see
            :func:`~rl_eval.recording.replay.lease_of`), or the config differs from that of the run.
        LogError: The evaluation log is damaged.
        UntrustedError: The result names code that no evaluation in this process has used, and ``trust`` is false.
        WeightsError: The weights are not those of the run.
        ConfigError: The format is unknown or does not fit the episodes, the output exists or cannot be written, a
            package is missing, or the recorded config cannot be used again.
        EvalError: An episode differs from its record, or failed when it ran again.
    """
    if to not in FORMATS:
        raise ConfigError(f"trajectories cannot be exported to {to!r}: {nearest(to, FORMATS)}", key="to", value=to)
    writer = FORMATS[to](output)
    if os.path.lexists(writer.place):
        problem = f"the output {writer.place} already exists"
        raise ConfigError(problem, key="output", value=str(writer.place), fix="Choose another name.")
    result = source if isinstance(source, EvalResult) else load(source)
    if to == "minari" and (agents := agents_in(result.table.info_keys)):
        problem = f"a Minari data set has one agent, but the episodes have {', '.join(agents)}"
        raise ConfigError(problem, key="to", value=to, fix="Export to npz or tensordict.")
    chosen = _selected(result, indices)
    with rebuilt_runner(result, config, policy, trust=trust) as runner, one_thread():
        try:
            _write(writer, result, runner, chosen)
        except OSError as error:
            problem = f"{writer.place} cannot be written: {error.strerror or error}"
            raise ConfigError(problem, key="output", value=str(writer.place)) from error
    return Exported(writer.place, len(chosen), int(result.table.rows["length"][chosen].sum()))


def _selected(result: EvalResult, indices: Sequence[int] | None) -> list[int]:
    """Return the indices of the episodes to run again: the chosen episodes, or all completed episodes.

    Raises:
        UsageError: A chosen episode did not complete, or no episode of the result completed.
    """
    completed = result.table.completed
    if indices is None and not completed.any():
        raise UsageError("no episode of the result completed, so there is no trajectory to export", key="episodes")
    chosen = completed.nonzero()[0].tolist() if indices is None else list(dict.fromkeys(indices))
    if not chosen:
        raise UsageError("no episodes are chosen", key="episodes", value=indices, fix="Choose at least one episode.")
    for index in chosen:
        if recorded_episode(result, index).outcome == "failed":
            problem = f"episode {index} failed, so it has no trajectory"
            raise UsageError(problem, key="episodes", episode=index, fix="Choose other episodes.")
    return chosen


def _write(writer: Writer, result: EvalResult, runner: Runner, chosen: Sequence[int]) -> None:
    """Run the chosen episodes, write their trajectories to a temporary folder, and move the data to the output path."""
    if not isinstance(runner, RunnerCore):
        name = type(runner).__name__
        problem = f"a {name} records no trajectories, because its class is not a subclass of rl_eval.EvalRunner"
        raise ConfigError(problem, key="runners.runner", value=name)
    seen: list[Any] = []
    of_agents = agent_columns(agents_in(result.table.info_keys))
    info_keys = [key for key in result.table.info_keys if key not in of_agents]
    runner.observe({_NAME: partial(_recorder, seen=seen, info_keys=info_keys)})
    at_once = 2 * runner.lanes
    reports = run_again(runner, (lease_of(result, index) for index in chosen), at_once)
    trajectories = (_proved(result, report) for report in reports)
    place, begun = writer.place, False
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent) as folder:
        while some := list(islice(trajectories, at_once)):
            if not begun:
                frames = int(result.table.rows["length"][chosen].sum())
                title = f"{len(chosen)} of {len(result.plan)} episodes of the evaluation {result.fingerprint[:16]}"
                writer.begin(Path(folder), seen[0], frames, title)
                begun = True
            writer.write(some)
        finished = writer.finish()
        if finished.is_dir():
            finished.rename(place)
        else:
            place.hardlink_to(finished)  # Does not replace a file that another process has created.


def _proved(result: EvalResult, report: RunReport) -> Trajectory:
    """Check that an episode matches its record, and return its trajectory.

    Raises:
        EvalError: The episode failed, differs from its record, or has no trajectory.
    """
    found = compared(result, report)
    index = found.again.index
    if report.faults:
        problem = f"episode {index} completed in the run, but failed when it ran again: {report.faults[0]}"
        raise EvalError(problem, episode=index)
    if found.differences:
        problem = f"episode {index} differs from its record: {_listed(found.differences)}" + (
            f"; this process may round floats differently: {_listed(found.numerics)}" if found.numerics else ""
        )
        raise EvalError(problem, key=min(found.differences), episode=index)
    artifact = next((kept[index] for name, kept in report.artifacts if name == _NAME and index in kept), None)
    if artifact is None:
        raise EvalError(f"episode {index} has no trajectory: {'; '.join(report.notes)}", episode=index)
    kept: Trajectory = replace(artifact, weights_version=found.recorded.weights_version)
    return kept


def _listed(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} was {was!r} and is now {now!r}" for name, (was, now) in differences.items())


def _recorder(env: Any, seen: list[Any], info_keys: Sequence[str]) -> Any:
    """Build the observer of an environment, and append the environment to ``seen``."""
    seen.append(env)
    return TrajectoryRecorder(env, info_keys, compress_images=True)
