"""Decides what a watcher does next, and what it leaves behind if it is killed there.

In every turn: take what is new and whole, in the order of training, copy it, evaluate the copy, commit the entry, draw
the curve; then test the leader on the held-out episodes and call it the best. Each step can be repeated, so whoever
comes after a ``kill -9`` does the step again: copies are renamed into place, an evaluation continues its own
log, the entry is one file that is replaced, and everything else follows from the entries.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from rl_eval.atomic_write import sweep, write_bytes
from rl_eval.errors import ClusterError, ConfigError, LogMismatch, UsageError, WeightsError
from rl_eval.group import EvalRunnerGroup
from rl_eval.policies import came_from_factory
from rl_eval.watching.best import BestCheckpoint, describe
from rl_eval.watching.checkpoints import CheckpointFolder, Sighting, Staged, Staging, compile_step_pattern
from rl_eval.watching.claim import OutputClaim
from rl_eval.watching.curve import CSV_FILE, PNG_FILE, curve_csv, curve_png
from rl_eval.watching.journal import Entry, Journal, Score
from rl_eval.watching.task import WEIGHTS, check_key, task_of, with_checkpoint
from rl_eval.weights import load_weights_file

if TYPE_CHECKING:
    from rl_eval.handle import EvalHandle
    from rl_eval.result import EvalResult
    from rl_eval.settings import EvalSettings, EvaluationSection

__all__ = ["WatchOptions", "Watcher"]

_REFRESH_S: Final = 0.2
_VERSIONS: Final = 2**31


@dataclass(frozen=True)
class WatchOptions:
    """What is watched, and how."""

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
    """It cannot be evaluated, and that is its own fault."""


class _Stopped(Exception):
    """The watcher was asked to stop."""


@final
class Watcher:
    """Evaluates the checkpoints of a folder, each once.

    Args:
        settings: What to evaluate, without the checkpoint.
        options: Which checkpoints.
        say: Called with every line for the user.
        stopping: Asked often; when it says yes, the current evaluation is given up and continued by the next watcher.
        submitted: Called with every evaluation that begins.

    Raises:
        ConfigError: An option is wrong, or the output folder is somebody else's, or about something else.
        LogOwned: Another watcher writes to it, in this process or in another.
    """

    def __init__(
        self,
        settings: EvalSettings,
        options: WatchOptions,
        say: Callable[[str], None],
        stopping: Callable[[], bool],
        submitted: Callable[[EvalHandle], None],
    ) -> None:
        self._settings = settings
        self._key = check_key(options.key)
        self._retry_s = options.retry_s
        self._say = say
        self._stopping = stopping
        self._submitted = submitted
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
            self._staging = Staging(self._output / "checkpoints", self._journal.own)
            self._best = BestCheckpoint(self._output / "best")
        except BaseException:
            self._claim.release()
            raise
        self._group: EvalRunnerGroup | None = None
        self._told: set[str] = set()
        self._drawn: object = None

    # ------------------------------------------------------------------ the loop

    def run_once(self, poll_s: float) -> None:
        """Evaluate what is there: it is looked at twice, ``poll_s`` apart.

        Raises:
            ConfigError: Nothing matches the pattern, or the config cannot work.
            ClusterError: The machine cannot; the next watcher continues here.
        """
        with suppress(_Stopped):
            self._begin(poll_s, empty=False)
            self._turn()
            for name in self._folder.unsettled:
                self._say(f"{name} has just changed: left for the next call")

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
        """What has become of each checkpoint."""
        return self._journal

    @property
    def unfinished(self) -> bool:
        """Whether something that was seen has no entry yet: half-written, unreadable and young, or not reached."""
        return any(not self._journal.knows(seen) for seen in self._folder.seen)

    def _task(self) -> dict[str, Any]:
        return task_of(self._settings, self._key, self._num_held_out)

    def _take_over(self) -> None:
        """Make the folder ours, and remove what a killed watcher, or one of another task, has left to be removed."""
        if self._journal.superseded:
            for kind in ("evaluations", "held_out"):
                for checkpoint in self._journal.owned:
                    shutil.rmtree(self._output / kind / checkpoint, ignore_errors=True)
        self._journal.begin()
        sweep(self._output)

    def _copies(self) -> list[Staged]:
        return [staged for staged in self._staging.found() if staged.id in self._journal.owned]

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
        """Take the first of the two looks that show what is whole, and do in between what needs none.

        Args:
            poll_s: Seconds to the second.
            empty: Whether there may be nothing yet.

        Raises:
            ConfigError: There is nothing.
        """
        self._folder.look()
        if not self._folder.seen:
            if not empty and not self._journal.entries:
                raise ConfigError(f"no checkpoint is there: {self._folder.absence}")
            self._say(f"{self._folder.absence}; {len(self._journal.entries)} were evaluated earlier")
        self._resume()
        self._sleep(poll_s)

    def _resume(self) -> None:
        """Finish what another watcher had begun, also where the trainer has removed the checkpoint since."""
        for staged in self._copies():
            if staged.id not in self._journal.entries:
                if staged.is_intact():
                    self._handle(staged)
                else:
                    self._staging.drop(staged.id)
        self._tidy()
        self._publish()

    def _turn(self) -> None:
        for seen in self._folder.look():
            self._check_stop()
            if not self._journal.knows(seen) and (staged := self._stage(seen)):
                self._handle(staged)
        self._crown()

    def _stage(self, seen: Sighting) -> Staged | None:
        """Copy a checkpoint; None if there is nothing to evaluate."""
        try:
            staged = self._staging.take(self._folder.path(seen), seen)
        except OSError as error:
            raise ConfigError(f"{seen.name} cannot be copied to {self._output}: {error}") from error
        if staged is None:
            gone = not self._folder.path(seen).exists()
            self._say(
                f"{seen.name} was removed before it was evaluated"
                if gone
                else f"{seen.name} changed while it was copied: the next look decides"
            )
            return None
        if staged.id in self._journal.entries:
            self._journal.touch(staged)
            self._tidy()
            return None
        return staged

    # ------------------------------------------------------------------ one checkpoint

    def _handle(self, staged: Staged) -> None:
        """Evaluate a copy and commit what is found."""
        try:
            result = self._evaluate(staged, "evaluations", self._settings.evaluation)
        except _BadCheckpoint as error:
            self._give_up(staged, str(error))
            return
        entry = self._journal.record(staged, Score.of(result))
        self._say(f"{entry.seen}: {entry.selection}")
        self._tidy()
        self._publish()

    def _give_up(self, staged: Staged, reason: str) -> None:
        """Record a bad checkpoint, or leave it for later while it is young."""
        if time.time() - staged.seen.modified < self._retry_s:
            self._tell(f"{staged.seen.name} cannot be evaluated yet, and is tried again: {reason}")
            self._staging.drop(staged.id)
            return
        self._journal.record(staged, Score.unreadable(reason, self._settings.evaluation.first_index))
        self._say(f"{staged.seen}: skipped, it cannot be evaluated: {reason}")
        self._staging.drop(staged.id)
        self._publish()

    def _tidy(self) -> None:
        """Remove the copies that are needed no more: all but the leader's until it is the best, and the best's own."""
        leader, best = self._journal.leader, self._best.id
        for staged in self._copies():
            if staged.id in self._journal.entries and (leader is None or staged.id not in {leader.id} - {best}):
                self._staging.drop(staged.id)
        self._best.tidy(self._journal.owned)

    def _tell(self, line: str) -> None:
        """Say something once."""
        if line not in self._told:
            self._told.add(line)
            self._say(line)

    # ------------------------------------------------------------------ the best

    def _crown(self) -> None:
        """Test the leader on the held-out episodes, unless that was done, and keep it as the best."""
        leader = self._journal.leader
        if leader is not None and leader.id != self._best.id:
            self._check_stop()
            copies = {staged.id: staged for staged in self._copies()}
            if leader.id not in copies:
                self._tell(f"the copy of {leader.seen.name} is gone from {self._output}: it cannot be kept as the best")
                self._publish()
                return
            leader = self._test_again(leader, copies[leader.id])
            self._keep(leader, copies[leader.id])
        self._publish()

    def _test_again(self, leader: Entry, staged: Staged) -> Entry:
        if leader.held_out is not None or not self._num_held_out:
            return leader
        episodes = self._held_out_episodes()
        try:
            score = Score.of(self._evaluate(staged, "held_out", episodes))
        except _BadCheckpoint as error:
            score = Score.unreadable(str(error), episodes.first_index)
        return self._journal.record_held_out(leader, score)

    def _held_out_episodes(self) -> EvaluationSection:
        """Return the episodes that follow those of the selection.

        Raises:
            ConfigError: There are not so many.
        """
        selection = self._settings.evaluation
        first_index = selection.first_index + selection.num_episodes
        held_out = selection.model_copy(update={"num_episodes": self._num_held_out, "first_index": first_index})
        held_out.plan()
        return held_out

    def _keep(self, leader: Entry, staged: Staged) -> None:
        """Make the leader the best."""
        self._best.keep(staged, describe(leader, self._settings.evaluation, self._num_held_out))
        self._tidy()
        self._say(f"best: {leader.seen}: biased upward by the choice, selection {leader.selection}")
        if leader.held_out is not None:
            self._say(f"best: {leader.seen}: held-out {leader.held_out}")

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
            self._tell(f"matplotlib is not installed, so there is no {PNG_FILE}: pip install 'rl-eval[plot]'")
        self._drawn = (entries, best)

    # ------------------------------------------------------------------ evaluations

    def _evaluate(self, staged: Staged, kind: str, episodes: EvaluationSection) -> EvalResult:
        """Run an evaluation, or what is left of it.

        Raises:
            _BadCheckpoint: The checkpoint cannot be loaded.
            _Stopped: It was given up; its log has what finished.
            UsageError: The config cannot work, or the code has changed.
            ClusterError: It cannot run, and the checkpoint is not to blame.
        """
        self._journal.check(self._task())
        try:
            result = self._run(staged, kind, episodes)
        except LogMismatch as error:
            raise ConfigError(f"{error.differences}\nGive another --output") from error
        except (_BadCheckpoint, UsageError, ClusterError):
            raise
        except Exception as error:
            raise ClusterError(
                f"{staged.seen.name} was not evaluated, and is by the next call: {_one_line(error)}"
            ) from error
        finally:
            if self._key != WEIGHTS:
                self._stop_group()
        if result.stopped_early:
            self._check_stop()
            raise ClusterError(f"{staged.seen.name}: {result.reason}")
        return result

    def _run(self, staged: Staged, kind: str, episodes: EvaluationSection) -> EvalResult:
        group = self._warm_group(staged) if self._key == WEIGHTS else self._new_group(staged)
        handle = group.submit(
            num_episodes=episodes.num_episodes,
            first_index=episodes.first_index,
            run_dir=self._output / kind / staged.id,
        )
        self._submitted(handle)
        try:
            return self._wait(handle)
        except Exception as error:
            # Without warm runners the factory has loaded the checkpoint; whatever else fails is not its fault.
            if self._key != WEIGHTS and came_from_factory(error):
                raise _BadCheckpoint(_one_line(error)) from error
            raise

    def _wait(self, handle: EvalHandle) -> EvalResult:
        while not handle.done():
            if self._stopping():
                handle.cancel()
            with suppress(TimeoutError):
                handle.result(_REFRESH_S)
        return handle.result()

    def _warm_group(self, staged: Staged) -> EvalRunnerGroup:
        """Return runners that have the weights of a checkpoint; they serve one after the other."""
        path = self._folder.path(staged.seen)
        try:
            weights = load_weights_file(staged.path, self._settings.policy.weights_key)
        except ConfigError as error:
            raise _BadCheckpoint(str(error).replace(str(staged.path), str(path))) from error
        if self._group is None:
            self._group = EvalRunnerGroup(with_checkpoint(self._settings, WEIGHTS, None))
        # What a result says about itself: the trainer's file, which can be looked for when the copy is gone.
        self._group.settings = with_checkpoint(self._settings, WEIGHTS, str(path))
        try:
            self._group.sync_weights(weights, version=_version(staged.seen))
        except WeightsError as error:
            raise _BadCheckpoint(str(error)) from error
        return self._group

    def _new_group(self, staged: Staged) -> EvalRunnerGroup:
        self._group = EvalRunnerGroup(with_checkpoint(self._settings, self._key, str(staged.path)))
        return self._group

    def _stop_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.stop()


def _version(seen: Sighting) -> int:
    """Return the weights version of a checkpoint: its step, where that is one."""
    return seen.step if seen.step is not None and seen.step < _VERSIONS else 0


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
