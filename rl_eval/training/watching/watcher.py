"""Loop of the watcher: evaluate new checkpoints, write the curve, and test the best checkpoint on held-out episodes.

After every scan, the watcher selects the complete checkpoints without a score, in the order of training. It copies each
one, evaluates the copy with a separate evaluation log, and writes the score to the journal. Then the candidate for the
best is evaluated on held-out episodes. After a ``kill -9``, the next watcher repeats the interrupted step. This is
safe: a copy is renamed when it is complete, an evaluation continues its log, and all other files are written from the
journal.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import sweep, write_bytes, write_text
from rl_eval.config.model_files import described
from rl_eval.config.policy_sources import digest_of, scheme_of
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import ClusterError, ConfigError, LogMismatch, UsageError, WeightsError
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.handle import EvalHandle, result_unless
from rl_eval.policies import came_from_factory
from rl_eval.policies.subject import Subject
from rl_eval.records.plain import with_leaf
from rl_eval.results.source_code import code_of
from rl_eval.training.watching.checkpoints import (
    Checkpoint,
    CheckpointFolder,
    companion_files,
    companions_of,
    compile_step_pattern,
    copy_checkpoint,
    without_companions,
)
from rl_eval.training.watching.curve import curve_csv, curve_png, curve_rows, describe
from rl_eval.training.watching.journal import PENDING, UNREADABLE, CheckpointScore, Entry, Journal, claim_output
from rl_eval.weights import load_weights_file

WEIGHTS: Final = "policy.weights"
_KWARGS: Final = "policy.policy_kwargs."
_REFRESH_S: Final = 0.2
_CONTINUES: Final = "Free disk space, or check the permissions. The next call continues."
_VERSIONS: Final = 2**31


@dataclass(frozen=True)
class WatchOptions:
    """Options of a watcher."""

    folder: Path
    """Folder of the training run."""
    pattern: str
    """Glob of checkpoints, relative to ``folder``."""
    output: Path
    """Folder for all files that the watcher writes."""
    key: str = WEIGHTS
    """Config key whose value is the path of a checkpoint: ``policy.weights``, or ``policy.policy_kwargs.NAME``."""
    step_pattern: str | None = None
    """Regular expression whose first group is the training step; by default the last number in the name."""
    held_out: int | None = None
    """Number of held-out episodes; 0 for no held-out test. By default, ``evaluation.num_episodes``."""
    retry_s: float = 60.0
    """A checkpoint that cannot be loaded is tried again, until this number of seconds after its last change."""


class _BadCheckpoint(ClusterError):
    """The policy could not be loaded from a checkpoint."""


class _Stopped(Exception):
    """The watcher was asked to stop."""


@final
class Watcher:
    """Watcher of a folder, which evaluates every checkpoint once.

    Args:
        settings: Settings of the evaluations, without the checkpoint.
        options: Options of the watcher.
        log: Prints a line to the user.
        stopping: Called often. If it returns true, the current evaluation is cancelled; the next watcher continues it.
        submitted: Called with the handle of every evaluation that starts.

    Raises:
        ConfigError: An option is wrong, or the output folder contains files of another program or another evaluation.
        LogOwned: Another watcher writes to the output folder.
    """

    def __init__(
        self,
        settings: EvalSettings,
        options: WatchOptions,
        log: Callable[[str], None],
        stopping: Callable[[], bool],
        submitted: Callable[[EvalHandle], None],
    ) -> None:
        self._key = _check_key(options.key)
        self._settings = settings if self._key == WEIGHTS else without_companions(settings)
        self._retry_s = options.retry_s
        self._log = log
        self._stopping = stopping
        self._submitted = submitted
        self._home = Path.cwd()
        self._output = options.output.resolve()
        self._incoming = self._output / "checkpoints" / ".incoming"
        """Folder in which a checkpoint is copied; it is renamed when the copy is complete."""
        episodes = settings.evaluation
        self._selection: dict[str, Any] = {"num_episodes": episodes.num_episodes, "first_index": episodes.first_index}
        self._held_out: dict[str, Any] = {
            "num_episodes": episodes.num_episodes if options.held_out is None else options.held_out,
            "first_index": episodes.first_index + episodes.num_episodes,
        }
        if self._held_out["num_episodes"]:
            with_values(settings, evaluation=self._held_out).plan()
        folder, pattern = options.folder.resolve(), compile_step_pattern(options.step_pattern)
        self._folder = CheckpointFolder(folder, options.pattern, pattern, self._output)
        self._group: EvalRunnerGroup | None = None
        self._companion_files: frozenset[str] = frozenset()
        """Files in the watched folder that may belong to a model, at the last scan."""
        self._logged: set[str] = set()
        self._claim = claim_output(folder, self._output)
        try:
            self.journal = Journal(self._output, self._task())
            """Journal of the checkpoints and their evaluations."""
            self.journal.save()
            sweep(self._output)
            shutil.rmtree(self._incoming, ignore_errors=True)
        except BaseException:
            self._claim.close()
            raise

    # ------------------------------------------------------------------ the loop

    def run(self, poll_s: float, *, once: bool = False) -> None:
        """Evaluate the existing checkpoints and all new ones, until ``stopping`` returns true.

        Args:
            poll_s: Seconds between two scans.
            once: Scan twice, evaluate the checkpoints that are complete in the second scan, and return.

        Raises:
            ConfigError: The config cannot work, or ``once`` is set and there is no checkpoint.
            ClusterError: The evaluations cannot run; the next watcher continues them.
        """
        with suppress(_Stopped), _written(self._output):
            before, known = len(self.journal.curve), self._scores()
            self._folder.scan()
            if not self._folder.found:
                if once and not before:
                    problem = f"there is no checkpoint: {self._folder.absence}"
                    raise ConfigError(problem, key="CHECKPOINTS", value=str(self._folder.folder))
                self._log(f"{self._folder.absence}; {before} checkpoints were evaluated earlier")
            self._resume()
            self._sleep(poll_s)
            self._turn()
            while not once:
                self._sleep(poll_s)
                self._turn()
            if self._folder.found and self._scores() == known and not self.unfinished:
                self._log(f"nothing new: {before} checkpoints are in {self._output / 'curve.csv'}")
            for name in self._folder.unstable:
                self._log(f"{name} is new or has just changed; the next `rl-eval watch` evaluates it")

    def _scores(self) -> set[tuple[str, CheckpointScore]]:
        return {(entry.id, entry.selection) for entry in self.journal.curve}

    def close(self) -> None:
        """Stop the runners, and unlock the output folder."""
        self._stop_group()
        self._claim.close()

    @property
    def curve(self) -> list[dict[str, Any]]:
        """Rows of ``curve.csv``, as JSON values."""
        return curve_rows(self.journal.curve, self.journal.best)

    @property
    def unfinished(self) -> bool:
        """Whether a checkpoint of the last scan has no score.

        The checkpoint is not complete, or could not be loaded and is tried again, or was not reached before the watcher
        stopped.
        """
        return any(not self.journal.knows(checkpoint) for checkpoint in self._folder.found.values())

    def _task(self) -> dict[str, Any]:
        """Return the settings that all points of a curve share, and the digests of policy and environment ``code``."""
        settings = self._with_checkpoint(None)
        common = {"held_out": self._held_out["num_episodes"], "as": self._key}
        return {**settings.identity(), **settings.plan().to_dict(), **common, "code": code_of(settings)}

    def _sleep(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s
        self._check_stop()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _REFRESH_S))
            self._check_stop()

    def _check_stop(self) -> None:
        if self._stopping():
            raise _Stopped

    def _log_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            self._log(line)

    def _resume(self) -> None:
        """Finish pending evaluations from the copies, because the trainer may have removed its checkpoints."""
        pending = [entry for entry in self.journal.entries.values() if entry.selection.status == PENDING]
        for entry in sorted(pending, key=lambda entry: entry.info.order):
            if self._has_copy(entry):
                self._evaluate_checkpoint(entry)
            else:  # The watcher was killed before it renamed the copy, or a power cut damaged the copy.
                self.journal.drop(entry)
        self._publish()

    def _turn(self) -> None:
        stable = self._folder.scan()
        self._drop_incomplete()
        for checkpoint in stable:
            self._check_stop()
            if not self.journal.knows(checkpoint) and (entry := self._take(checkpoint)):
                self._evaluate_checkpoint(entry)
        self._choose_best()

    def _drop_incomplete(self) -> None:
        """Drop the entries of models that were copied before their normalizer appeared. They are evaluated again."""
        files = frozenset() if self._key == WEIGHTS else companion_files(self._folder.folder, self._settings)
        if files == self._companion_files:
            return
        self._companion_files = files
        for entry in list(self.journal.entries.values()):
            source = self._folder.folder / entry.info.name
            if not entry.companions and (late := companions_of(source, self._settings)):
                names = ", ".join(path.name for path in late.values())
                self._log(f"{entry.info.name} was evaluated before {names} appeared, and is evaluated again")
                if entry.id == self.journal.best:
                    self.journal.best = None
                self.journal.drop(entry)

    # ------------------------------------------------------------------ copies

    def _copy_of(self, entry: Entry) -> Path:
        return self._output / "checkpoints" / entry.id / Path(entry.info.name).name

    def _has_copy(self, entry: Entry) -> bool:
        with suppress(OSError):
            return digest_of(self._copy_of(entry)) == entry.digest
        return False

    def _take(self, checkpoint: Checkpoint) -> Entry | None:
        """Copy a checkpoint, and return its entry; return None if there is nothing to evaluate."""
        source = self._folder.folder / checkpoint.name
        companions = {} if self._key == WEIGHTS else companions_of(source, self._settings)
        try:
            digest = copy_checkpoint(source, checkpoint, companions, self._incoming)
        except OSError as error:
            problem = f"{checkpoint.name} cannot be copied to {self._output}: {error}"
            raise ClusterError(problem, key="--output", value=str(self._output), fix=_CONTINUES) from error
        if digest is None:
            fate = "changed while it was copied; the next scan tries again" if source.exists() else "was removed"
            self._log(f"{checkpoint.name} {fate}")
            return None
        entry = Entry(checkpoint, digest, companions)
        known = self.journal.entries.get(entry.id)
        if known is not None and known.selection.status != PENDING:  # Its contents have not changed.
            self.journal.put(replace(known, info=checkpoint))
            shutil.rmtree(self._incoming, ignore_errors=True)
            return None
        for kind in ("checkpoints", "evaluations", "held_out"):  # Left by a watcher of another task.
            shutil.rmtree(self._output / kind / entry.id, ignore_errors=True)
        self.journal.put(entry)
        self._incoming.rename(self._copy_of(entry).parent)
        return entry

    def _tidy(self) -> None:
        """Remove the copies of checkpoints with a score, except those of the best one and of the candidate."""
        candidate = self.journal.candidate
        kept = {self.journal.best, candidate.id if candidate else None}
        for home in (self._output / "checkpoints").iterdir():
            entry = self.journal.entries.get(home.name)
            if entry is not None and entry.selection.status != PENDING and entry.id not in kept:
                shutil.rmtree(home, ignore_errors=True)

    # ------------------------------------------------------------------ scores

    def _evaluate_checkpoint(self, entry: Entry) -> None:
        """Evaluate a copy, and put the score into the journal."""
        try:
            score = self._evaluate(entry, "evaluations", self._selection)
        except _BadCheckpoint as error:
            if time.time() - entry.modified < self._retry_s:
                self._log_once(f"{entry.info.name} cannot be evaluated yet, and is tried again: {error}")
                shutil.rmtree(self._copy_of(entry).parent, ignore_errors=True)
                self.journal.drop(entry)
                return
            score = CheckpointScore(UNREADABLE, str(error), self._selection["first_index"])
        self.journal.put(replace(entry, selection=score))
        self._log(f"{entry.info}: {score}" if score.fingerprint else f"{entry.info}: skipped, {score}")
        self._tidy()
        self._publish()

    def _choose_best(self) -> None:
        """Test the candidate on the held-out episodes, and make it the best."""
        candidate = self.journal.candidate
        if candidate is None or candidate.id == self.journal.best:
            return
        self._check_stop()
        if not self._has_copy(candidate):
            problem = f"the copy of {candidate.info.name} in {self._output} is missing"
            self._log_once(f"{problem}, so this checkpoint cannot become the best")
            return
        if candidate.held_out is None and self._held_out["num_episodes"]:
            candidate = replace(candidate, held_out=self._evaluate(candidate, "held_out", self._held_out))
        self.journal.best = candidate.id
        self.journal.put(candidate)
        self._tidy()
        self._publish()
        self._log(f"best: {candidate.info}, which has the highest {candidate.selection}. This mean is biased upward")
        if candidate.held_out is not None:
            self._log(f"best: {candidate.info}, on held-out episodes: {candidate.held_out}")

    def _publish(self) -> None:
        """Write the files for users: ``curve.csv``, ``best.json`` and ``curve.png``."""
        entries, best = self.journal.curve, self.journal.best
        if not entries:
            return
        write_text(self._output / "curve.csv", curve_csv(entries, best))
        if best in self.journal.entries:
            entry = self.journal.entries[best]
            described = describe(entry, self._copy_of(entry).relative_to(self._output).as_posix())
            write_text(self._output / "best.json", json.dumps(described, indent=2, allow_nan=False) + "\n")
        title = f"{self._settings.identity()['environment']['env']}, {self._folder.folder.name}"
        try:
            write_bytes(self._output / "curve.png", curve_png(entries, best, title))
        except ImportError:
            self._log_once("matplotlib is not installed, so there is no curve.png: pip install 'rl-eval[plot]'")

    # ------------------------------------------------------------------ evaluations

    def _evaluate(self, entry: Entry, kind: str, episodes: dict[str, Any]) -> CheckpointScore:
        """Run an evaluation, or its remaining episodes.

        Raises:
            _BadCheckpoint: The checkpoint cannot be loaded.
            _Stopped: The evaluation was cancelled; its log has the finished episodes.
            UsageError: The config cannot work, or the code has changed.
            ClusterError: The evaluation cannot run, and the checkpoint is not the reason.
        """
        self.journal.check(self._task())
        try:
            weights = self._load_weights(entry) if self._key == WEIGHTS else {}
            group = self._group = self._group or self._new_group(entry)
            # Results name the trainer's files, which may still exist when the copies are removed.
            subject = self._theirs(group.settings.policy, entry)
            handle = group.submit(**episodes, **weights, output=self._output / kind / entry.id, subject=subject)
            self._submitted(handle)
            result = result_unless(handle, self._stopping, _REFRESH_S)
        except Exception as error:
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if isinstance(error, WeightsError) or (self._key != WEIGHTS and came_from_factory(error)):
                raise _BadCheckpoint(self._with_their_path(line, entry)) from error
            if isinstance(error, LogMismatch):
                problem, fix = f"{error.differences}\n", "Pass another --output."
                raise ConfigError(problem, key="--output", value=str(self._output), fix=fix) from error
            if isinstance(error, UsageError | ClusterError):
                raise
            problem = f"{entry.info.name} was not evaluated: {line}"
            raise ClusterError(problem, key=entry.info.name, fix="The next rl-eval watch tries again.") from error
        finally:
            if self._key != WEIGHTS:
                self._stop_group()
        if result.stopped_early:
            self._check_stop()
            raise ClusterError(f"{entry.info.name}: {result.reason}", key=entry.info.name)
        return CheckpointScore.of(result)

    def _load_weights(self, entry: Entry) -> dict[str, Any]:
        """Return arguments of ``submit``: the weights of a checkpoint, and its step as the version."""
        copied, step = self._copy_of(entry), entry.info.step
        try:
            weights = load_weights_file(copied, self._settings.policy.weights_key)
        except ConfigError as error:
            raise _BadCheckpoint(self._with_their_path(f"{error}{_advice(copied)}", entry)) from error
        return {"weights": weights, "version": step if step is not None and step < _VERSIONS else 0}

    def _new_group(self, entry: Entry) -> EvalRunnerGroup:
        """Return new runners for all checkpoints, or just for this one if the policy's factory loads the checkpoint."""
        if self._key == WEIGHTS:
            return EvalRunnerGroup(self._with_checkpoint(None))
        copied = self._copy_of(entry)
        companions = {name: copied.parent / file.name for name, file in entry.companions.items()}
        return EvalRunnerGroup(self._with_checkpoint(copied, companions))

    def _theirs(self, copied: PolicySection, entry: Entry) -> Subject:
        """Return the policy with the paths of the trainer's files."""
        theirs = self._with_checkpoint(self._folder.folder / entry.info.name, entry.companions).policy
        return Subject(theirs if self._key == WEIGHTS else copied.named_as(theirs.policy_kwargs))

    def _with_checkpoint(self, path: Path | None, companions: dict[str, Path] | None = None) -> EvalSettings:
        """Return settings with the paths of a checkpoint and of its companions."""
        section, text = self._settings.policy, None if path is None else str(path)
        if self._key == WEIGHTS:
            return with_values(self._settings, policy={"weights": text, "weights_key": text and section.weights_key})
        kwargs = with_leaf(section.policy_kwargs, self._key.removeprefix(_KWARGS).split("."), text)
        beside = {name: str(file) for name, file in (companions or {}).items()}
        return with_values(self._settings, policy={"policy_kwargs": kwargs | beside})

    def _with_their_path(self, text: str, entry: Entry) -> str:
        return text.replace(str(self._copy_of(entry)), str(self._folder.folder / entry.info.name))

    def _stop_group(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.stop()
            os.chdir(self._home)  # An environment may have changed it, and the next policy may read relative paths.


def _check_key(key: str) -> str:
    if key == WEIGHTS or (key.startswith(_KWARGS) and all(key.removeprefix(_KWARGS).split("."))):
        return key
    fix = f"Pass {WEIGHTS}, or {_KWARGS}NAME for an argument of the factory."
    raise ConfigError(f"--as {key}: a checkpoint cannot be the value of this key", key="--as", value=key, fix=fix)


@contextmanager
def _written(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"a file in the output folder {output} cannot be written: {error}"
        raise ClusterError(problem, key="--output", value=str(output), fix=_CONTINUES) from error


def _advice(path: Path) -> str:
    """Return a hint for a file that is a model of a library; an empty string for any other file."""
    scheme = scheme_of(described(path))
    if scheme is None or "@" in scheme.form:
        return ""
    return f". The file is a whole model, not only weights: set policy.policy to {scheme.named(path)}"
