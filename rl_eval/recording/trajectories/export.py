"""Export of the trajectories of a finished evaluation: its episodes run again, are compared, and are written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, EvalError, UsageError, nearest
from rl_eval.recording.replay import compared, lease_of, rebuilt_runner, recorded_episode, run_again
from rl_eval.recording.trajectories.recorder import TrajectoryRecorder
from rl_eval.recording.trajectories.trajectory import Trajectory
from rl_eval.recording.trajectories.writers import MinariWriter, NpzWriter, TensorDictWriter, Writer
from rl_eval.records.agents import agent_columns, agents_in
from rl_eval.records.episode import RunReport
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult
from rl_eval.runners import EvalRunner, Runner
from rl_eval.supervision.caller import one_thread

__all__ = ["FORMATS", "Exported", "export_trajectories"]

FORMATS: Final[dict[str, Callable[[str | os.PathLike[str]], Writer]]] = {
    "minari": MinariWriter,
    "npz": NpzWriter,
    "tensordict": TensorDictWriter,
}
"""Writers of formats, by their names."""
_NAME: Final = "trajectory"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    """Where it is."""
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

    Nothing has to have been recorded: an episode is a function of its index. Each has to come out as its record says,
    bit by bit in all outcome columns, or nothing is written at all. Nothing is ever overwritten.

    Args:
        source: Folder or URI of an evaluation log, folder of a saved result, or a result.
        to: ``minari``, ``npz`` or ``tensordict``.
        output: Path of the file or folder; for ``minari`` the id of the data set.
        indices: Which episodes; by default all that completed.
        config: What was evaluated, for a run that was configured with live objects; by default as recorded.
        policy: The live policy, if the run was given one.
        trust: Whether code that the result names may be imported and called; see
            :func:`rl_eval.replay`.

    Raises:
        UsageError: An episode did not complete, or the config is another one.
        UntrustedError: The result names code that no evaluation of this process named.
        WeightsError: The weights are not those of the run.
        ConfigError: Something is there already, it cannot be written, or the recorded config cannot be used again.
        EvalError: An episode did not come out as it was recorded.
    """
    if to not in FORMATS:
        raise ConfigError(f"trajectories cannot be exported to {to!r}: {nearest(to, FORMATS)}")
    writer = FORMATS[to](output)
    if os.path.lexists(writer.place):
        raise ConfigError(f"{writer.place} exists, and nothing is overwritten: choose another name for it")
    result = source if isinstance(source, EvalResult) else load(source)
    if to == "minari" and (agents := agents_in(result.table.info_keys)):
        raise ConfigError(
            f"Minari's data sets are of one agent, and the episodes have {', '.join(agents)}: export to npz or "
            "tensordict"
        )
    chosen = _selected(result, indices)
    with rebuilt_runner(result, config, policy, trust=trust) as runner, one_thread():
        try:
            _write(writer, result, runner, chosen)
        except OSError as error:
            raise ConfigError(f"{writer.place} cannot be written: {error.strerror or error}") from error
    return Exported(writer.place, len(chosen), int(result.table.rows["length"][chosen].sum()))


def _selected(result: EvalResult, indices: Sequence[int] | None) -> list[int]:
    """Return the episodes to run again: those that are named, or all that completed.

    Raises:
        UsageError: One that is named did not complete, or none did.
    """
    completed = result.table.completed
    if indices is None and not completed.any():
        raise UsageError("no episode of the result completed: there are no trajectories to export")
    chosen = completed.nonzero()[0].tolist() if indices is None else dict.fromkeys(indices)
    for index in chosen:
        if recorded_episode(result, index).outcome == "failed":
            raise UsageError(f"episode {index} did not complete, so it has no trajectory: choose others")
    return list(chosen)


def _write(writer: Writer, result: EvalResult, runner: Runner, chosen: Sequence[int]) -> None:
    """Write all trajectories beside their place, and move them there."""
    if not isinstance(runner, EvalRunner):
        raise ConfigError(f"episodes of {type(runner).__name__} leave no trajectories: it is not an rl_eval.EvalRunner")
    seen: list[Any] = []
    of_agents = agent_columns(agents_in(result.table.info_keys))
    info_keys = [key for key in result.table.info_keys if key not in of_agents]
    runner.observe({_NAME: partial(_recorder, seen=seen, info_keys=info_keys)})
    at_once = 2 * runner.settings.runners.lanes
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
            place.hardlink_to(finished)  # Nothing that has come up meanwhile is replaced.


def _proved(result: EvalResult, report: RunReport) -> Trajectory:
    """Return the trajectory of an episode that came out as it was recorded.

    Raises:
        EvalError: It did not.
    """
    found = compared(result, report)
    index = found.again.index
    if report.faults:
        raise EvalError(f"episode {index} is recorded as completed, and did not complete again: {report.faults[0]}")
    if found.differences:
        raise EvalError(
            f"episode {index} did not come out as it was recorded: {_listed(found.differences)}"
            + (f"; this process computes floats in another way: {_listed(found.numerics)}" if found.numerics else "")
        )
    artifact = next((kept[index] for name, kept in report.artifacts if name == _NAME and index in kept), None)
    if artifact is None:
        raise EvalError(f"episode {index} left no trajectory: {'; '.join(report.notes)}")
    kept: Trajectory = replace(artifact, weights_version=found.recorded.weights_version)
    return kept


def _listed(differences: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name} was {was!r} and is {now!r}" for name, (was, now) in differences.items())


def _recorder(env: Any, seen: list[Any], info_keys: Sequence[str]) -> Any:
    """Build the observer of an environment, and note the environment."""
    seen.append(env)
    return TrajectoryRecorder(env, info_keys, compress_images=True)
