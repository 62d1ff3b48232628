"""Loop of the watcher: evaluate new checkpoints, keep the curve, and keep the best.

In every turn: take what is new and whole, in the order of training, copy it, evaluate the copy, commit the entry, draw
the curve; then test the candidate on the held-out episodes and call it the best. Each step can be repeated, so whoever
comes after a ``kill -9`` does the step again: copies are renamed into place, an evaluation continues its own
log, the entry is one file that is replaced, and everything else follows from the entries.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import sweep, write_bytes
from rl_eval.config.policy_schemes import schemes
from rl_eval.config.settings import EvalSettings, EvaluationSection, with_values
from rl_eval.errors import ClusterError, ConfigError, LogMismatch, UsageError, WeightsError
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.handle import EvalHandle
from rl_eval.policies import came_from_factory
from rl_eval.results.result import EvalResult
from rl_eval.watching.best import BestCheckpoint, describe
from rl_eval.watching.checkpoints import CheckpointFolder, CheckpointInfo, Snapshot, SnapshotStore, compile_step_pattern
from rl_eval.watching.claim import OutputClaim
from rl_eval.watching.companions import companions_of, with_companions, without_companions
from rl_eval.watching.curve import CSV_FILE, PNG_FILE, curve_csv, curve_png, curve_rows
from rl_eval.watching.journal import Entry, Journal, Score
from rl_eval.watching.task import WEIGHTS, check_key, task_of, with_checkpoint
from rl_eval.weights import load_weights_file

__all__ = ["WatchOptions", "Watcher"]

_REFRESH_S: Final = 0.2
_VERSIONS: Final = 2**31


@dataclass(frozen=True)
class WatchOptions:
    """Options of a watch."""

    run_dir: Path
    """Folder of the training run."""
    pattern: str
    """Glob of checkpoints, relative to it."""
    output: Path
    """Where everything is written."""
    key: str = WEIGHTS
    """Where a checkpoint's path goes in the config: ``policy.weights``, or ``policy.policy_kwargs.NAME``."""
    step_pattern: str | None = None
    """Regular expression whose first group is the training step; by default the last number in the name."""
    held_out: int | None = None
    """Episodes of the second test; by default as many as of the first, and 0 for none."""
    retry_s: float = 60.0
    """So long after its last change, a checkpoint that cannot be loaded is tried again and not given up."""


class _BadCheckpoint(Exception):
    """The policy cannot be loaded from a checkpoint."""


class _Stopped(Exception):
    """The watcher was asked to stop."""


@final
class Watcher:
    """Evaluation of the checkpoints of a folder, each once.

    Args:
        settings: What to evaluate, without the checkpoint.
        options: Which checkpoints.
        log: Called with every line for the user.
        stopping: Called often; when it returns true, the current evaluation is given up, and continued by the next
            watcher.
        submitted: Called with every evaluation that begins.

    Raises:
        ConfigError: An option is wrong, or the output folder is somebody else's, or about something else.
        LogOwned: Another watcher writes to it, in this process or in another.
    """

    def __init__(
        self,
        settings: EvalSettings,
        options: WatchOptions,
        log: Callable[[str], None],
        stopping: Callable[[], bool],
        submitted: Callable[[EvalHandle], None],
    ) -> None:
        self._key = check_key(options.key)
        self._settings = settings if self._key == WEIGHTS else without_companions(settings)
        self._retry_s = options.retry_s
        self._log = log
        self._stopping = stopping
        self._submitted = submitted
        self._home = Path.cwd()
        self._output = options.output.resolve()
        episodes = settings.evaluation
        self._num_held_out = episodes.num_episodes if options.held_out is None else options.held_out
        if self._num_held_out:
            self._held_out_episodes()
        pattern = compile_step_pattern(options.step_pattern)
        self._folder = CheckpointFolder(options.run_dir.resolve(), options.pattern, pattern, self._output)
        self._claim = OutputClaim(options.run_dir.resolve(), self._output)
        try:
            self._journal = Journal(self._output, self._task())
            self._take_over()
            self._snapshots = SnapshotStore(self._output / "checkpoints", self._journal.own)
            self._best = BestCheckpoint(self._output / "best")
        except BaseException:
            self._claim.release()
            raise
        self._group: EvalRunnerGroup | None = None
        self._logged: set[str] = set()
        self._drawn: object = None

    # ------------------------------------------------------------------ the loop

    def run_once(self, poll_s: float) -> None:
        """Evaluate what is there: it is scanned twice, ``poll_s`` apart.

        Raises:
            ConfigError: Nothing matches the pattern, or the config cannot work.
            ClusterError: The machine cannot; the next watcher continues here.
        """
        with suppress(_Stopped):
            before = len(self._journal.entries)
            self._begin(poll_s, empty=False)
            self._turn()
            if self._folder.found and len(self._journal.entries) == before and not self.unfinished:
                self._log(f"nothing new: {before} checkpoints are in {self._output / CSV_FILE}")
            for name in self._folder.unstable:
                self._log(f"{name} has just changed: left for the next call")

    def run(self, poll_s: float) -> None:
        """Evaluate what is there and what comes, until asked to stop; raises as :meth:`run_once`."""
        with suppress(_Stopped):
            self._begin(poll_s, empty=True)
            while True:
                self._turn()
                self._sleep(poll_s)

    def close(self) -> None:
        """Stop the runners, and let the next watcher in."""
        self._stop_group()
        self._claim.release()

    @property
    def journal(self) -> Journal:
        """Journal of the checkpoints and their evaluations."""
        return self._journal

    @property
    def curve(self) -> list[dict[str, Any]]:
        """Rows of the curve, as JSON values: what ``curve.csv`` has."""
        return curve_rows(self._journal.curve, self._best.id)

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint of the last scan has no entry: half-written, unreadable and young, or not reached."""
        return any(not self._journal.knows(info) for info in self._folder.found)

    def _task(self) -> dict[str, Any]:
        return task_of(self._settings, self._key, self._num_held_out)

    def _take_over(self) -> None:
        """Write the journal, and remove what a killed watcher, or one of another task, has left."""
        if self._journal.superseded:
            for kind in ("evaluations", "held_out"):
                for checkpoint in self._journal.owned:
                    shutil.rmtree(self._output / kind / checkpoint, ignore_errors=True)
        self._journal.begin()
        sweep(self._output)

    def _copies(self) -> list[Snapshot]:
        return [snapshot for snapshot in self._snapshots.found() if snapshot.id in self._journal.owned]

    def _sleep(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s
        while (left := end - time.monotonic()) > 0:
            self._check_stop()
            time.sleep(min(left, _REFRESH_S))
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stopping():
            raise _Stopped

    def _begin(self, poll_s: float, *, empty: bool) -> None:
        """Make the first of the two scans that show what is stable, and finish earlier work between them.

        Raises:
            ConfigError: There is nothing.
        """
        self._folder.scan()
        if not self._folder.found:
            if not empty and not self._journal.entries:
                raise ConfigError(f"no checkpoint is there: {self._folder.absence}")
            self._log(f"{self._folder.absence}; {len(self._journal.entries)} were evaluated earlier")
        self._resume()
        self._sleep(poll_s)

    def _resume(self) -> None:
        """Finish what another watcher had begun, also where the trainer has removed the checkpoint since."""
        for snapshot in self._copies():
            if snapshot.id not in self._journal.entries:
                if snapshot.is_intact():
                    self._handle(snapshot)
                else:
                    self._snapshots.drop(snapshot.id)
        self._tidy()
        self._publish()

    def _turn(self) -> None:
        for info in self._folder.scan():
            self._check_stop()
            if not self._journal.knows(info) and (snapshot := self._stage(info)):
                self._handle(snapshot)
        self._promote_best()

    def _stage(self, info: CheckpointInfo) -> Snapshot | None:
        """Copy a checkpoint; None if there is nothing to evaluate."""
        try:
            snapshot = self._snapshots.take(self._folder.path(info), info, self._companions(info))
        except OSError as error:
            raise ConfigError(f"{info.name} cannot be copied to {self._output}: {error}") from error
        if snapshot is None:
            gone = not self._folder.path(info).exists()
            self._log(
                f"{info.name} was removed before it was evaluated"
                if gone
                else f"{info.name} changed while it was copied: the next look decides"
            )
            return None
        if snapshot.id in self._journal.entries:
            self._journal.touch(snapshot)
            self._tidy()
            return None
        return snapshot

    def _companions(self, info: CheckpointInfo) -> dict[str, Path]:
        return {} if self._key == WEIGHTS else companions_of(self._folder.path(info), self._settings)

    # ------------------------------------------------------------------ one checkpoint

    def _handle(self, snapshot: Snapshot) -> None:
        """Evaluate a copy and commit what is found."""
        try:
            result = self._evaluate(snapshot, "evaluations", self._settings.evaluation)
        except _BadCheckpoint as error:
            self._give_up(snapshot, str(error))
            return
        entry = self._journal.record(snapshot, Score.of(result))
        self._log(f"{entry.info}: {entry.selection}")
        self._tidy()
        self._publish()

    def _give_up(self, snapshot: Snapshot, reason: str) -> None:
        """Record a bad checkpoint, or leave it for later while it is young."""
        if time.time() - snapshot.info.modified < self._retry_s:
            self._log_once(f"{snapshot.info.name} cannot be evaluated yet, and is tried again: {reason}")
            self._snapshots.drop(snapshot.id)
            return
        self._journal.record(snapshot, Score.unreadable(reason, self._settings.evaluation.first_index))
        self._log(f"{snapshot.info}: skipped, it cannot be evaluated: {reason}")
        self._snapshots.drop(snapshot.id)
        self._publish()

    def _tidy(self) -> None:
        """Remove the copies that are needed no more: all but the best candidate's, until it is kept as the best."""
        candidate, best = self._journal.best_candidate, self._best.id
        for snapshot in self._copies():
            if snapshot.id in self._journal.entries and (
                candidate is None or snapshot.id not in {candidate.id} - {best}
            ):
                self._snapshots.drop(snapshot.id)
        self._best.tidy(self._journal.owned)

    def _log_once(self, line: str) -> None:
        """Log a line, the first time that it comes."""
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)

    # ------------------------------------------------------------------ the best

    def _promote_best(self) -> None:
        """Test the candidate on the held-out episodes, unless that was done, and keep it as the best."""
        candidate = self._journal.best_candidate
        if candidate is not None and candidate.id != self._best.id:
            self._check_stop()
            copies = {snapshot.id: snapshot for snapshot in self._copies()}
            if candidate.id not in copies:
                self._log_once(
                    f"the copy of {candidate.info.name} is gone from {self._output}: it cannot be kept as the best"
                )
                self._publish()
                return
            candidate = self._test_again(candidate, copies[candidate.id])
            self._keep(candidate, copies[candidate.id])
        self._publish()

    def _test_again(self, candidate: Entry, snapshot: Snapshot) -> Entry:
        if candidate.held_out is not None or not self._num_held_out:
            return candidate
        episodes = self._held_out_episodes()
        try:
            score = Score.of(self._evaluate(snapshot, "held_out", episodes))
        except _BadCheckpoint as error:
            score = Score.unreadable(str(error), episodes.first_index)
        return self._journal.record_held_out(candidate, score)

    def _held_out_episodes(self) -> EvaluationSection:
        """Return the episodes that follow those of the selection.

        Raises:
            ConfigError: There are not so many.
        """
        selection = self._settings.evaluation
        first_index = selection.first_index + selection.num_episodes
        values = {"num_episodes": self._num_held_out, "first_index": first_index}
        settings = with_values(self._settings, evaluation=values)
        settings.plan()
        return settings.evaluation

    def _keep(self, candidate: Entry, snapshot: Snapshot) -> None:
        """Make the candidate the best."""
        self._best.keep(snapshot, describe(candidate, self._settings.evaluation, self._num_held_out))
        self._tidy()
        self._log(f"best: {candidate.info}, chosen for its {candidate.selection}: on average too high")
        if candidate.held_out is not None:
            self._log(f"best: {candidate.info}, on episodes that had no part in the choice: {candidate.held_out}")

    def _publish(self) -> None:
        """Write the curve if it has changed."""
        entries, best = self._journal.curve, self._best.id
        if not entries or self._drawn == (entries, best):
            return
        write_bytes(self._output / CSV_FILE, curve_csv(entries, best).encode())
        title = f"{self._settings.identity()['environment']['env']}, {self._folder.label}"
        try:
            write_bytes(self._output / PNG_FILE, curve_png(entries, best, title))
        except ImportError:
            self._log_once(f"matplotlib is not installed, so there is no {PNG_FILE}: pip install 'rl-eval[plot]'")
        self._drawn = (entries, best)

    # ------------------------------------------------------------------ evaluations

    def _evaluate(self, snapshot: Snapshot, kind: str, episodes: EvaluationSection) -> EvalResult:
        """Run an evaluation, or what is left of it.

        Raises:
            _BadCheckpoint: The checkpoint cannot be loaded.
            _Stopped: It was given up; its log has what finished.
            UsageError: The config cannot work, or the code has changed.
            ClusterError: It cannot run, which is not the checkpoint's fault.
        """
        self._journal.check(self._task())
        try:
            result = self._run(snapshot, kind, episodes)
        except LogMismatch as error:
            raise ConfigError(f"{error.differences}\nGive another --output") from error
        except (_BadCheckpoint, UsageError, ClusterError):
            raise
        except Exception as error:
            raise ClusterError(
                f"{snapshot.info.name} was not evaluated, and is by the next call: {_one_line(error)}"
            ) from error
        finally:
            if self._key != WEIGHTS:
                self._stop_group()
        if result.stopped_early:
            self._check_stop()
            raise ClusterError(f"{snapshot.info.name}: {result.reason}")
        return result

    def _run(self, snapshot: Snapshot, kind: str, episodes: EvaluationSection) -> EvalResult:
        group = self._warm_group(snapshot) if self._key == WEIGHTS else self._new_group(snapshot)
        handle = group.submit(
            num_episodes=episodes.num_episodes,
            first_index=episodes.first_index,
            run_dir=self._output / kind / snapshot.id,
        )
        self._submitted(handle)
        try:
            return self._wait(handle)
        except Exception as error:
            # Without warm runners the factory has loaded the checkpoint; whatever else fails is not its fault.
            if self._key != WEIGHTS and came_from_factory(error):
                path = str(self._folder.path(snapshot.info))
                raise _BadCheckpoint(_one_line(error).replace(str(snapshot.path), path)) from error
            raise

    def _wait(self, handle: EvalHandle) -> EvalResult:
        while not handle.done():
            if self._stopping():
                handle.cancel()
            with suppress(TimeoutError):
                handle.result(_REFRESH_S)
        return handle.result()

    def _warm_group(self, snapshot: Snapshot) -> EvalRunnerGroup:
        """Return runners that have the weights of a checkpoint; they serve one after the other."""
        path = self._folder.path(snapshot.info)
        try:
            weights = load_weights_file(snapshot.path, self._settings.policy.weights_key)
        except ConfigError as error:
            reason = str(error).replace(str(snapshot.path), str(path))
            raise _BadCheckpoint(f"{reason}{_of_library(snapshot.path)}") from error
        if self._group is None:
            self._group = EvalRunnerGroup(with_checkpoint(self._settings, WEIGHTS, None))
        # What a result says about itself: the trainer's file, which can be looked for when the copy is gone.
        self._group.settings = with_checkpoint(self._settings, WEIGHTS, str(path))
        try:
            self._group.sync_weights(weights, version=_version(snapshot.info))
        except WeightsError as error:
            raise _BadCheckpoint(str(error)) from error
        return self._group

    def _new_group(self, snapshot: Snapshot) -> EvalRunnerGroup:
        copied = self._settings_of(snapshot.path, snapshot.copies)
        theirs = self._settings_of(self._folder.path(snapshot.info), snapshot.companions)
        self._group = EvalRunnerGroup(copied)
        # What a result says about itself: the trainer's files, which can be looked for when the copies are gone.
        named = copied.policy.named_as(theirs.policy.policy_kwargs)
        self._group.settings = copied.model_copy(update={"policy": named})
        return self._group

    def _settings_of(self, model: Path, companions: Mapping[str, Path]) -> EvalSettings:
        return with_companions(with_checkpoint(self._settings, self._key, str(model)), companions)

    def _stop_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.stop()
            os.chdir(self._home)  # An environment may have left it, and the next policy may read relative paths.


def _of_library(path: Path) -> str:
    """Return how the model of a library is watched, whose file holds more than weights; empty for any other file."""
    found = [(name, one.form) for name, one in schemes().items() if "@" not in one.form and one.recognises(path)]
    if not found:
        return ""
    name, form = found[0]
    return f". It is a policy as {form} names it: set policy.policy to rl_eval.integrations.{name}:load_policy"


def _version(info: CheckpointInfo) -> int:
    """Return the weights version of a checkpoint: its step, where that is one."""
    return info.step if info.step is not None and info.step < _VERSIONS else 0


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
