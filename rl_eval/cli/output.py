"""Folder of a run, with its log and its result, chosen and checked before the evaluation starts.

The check ensures that the result can be written after hours of episodes. The folder of another run is never used.
"""

from __future__ import annotations

import datetime
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rl_eval.cli.printing import print_note, written
from rl_eval.cli.shared import absolute_place, advanced, option, shown
from rl_eval.errors import ClusterError, ConfigError, EnvError, LogError, PolicyUnavailable, RunnerStartError

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.log import LogContents
    from rl_eval.log.manifest import Manifest
    from rl_eval.results.result import EvalResult


Output = Annotated[
    str | None,
    option(
        "DIR",
        "Folder or URI of the run, with its log. The same command again continues the run, or prints its result. "
        "[default: runs/TIME-NAME]",
        *("--output", "-o"),
        parser=absolute_place,
    ),
]
Force = Annotated[bool, advanced(None, "Replace another run in --output. The same run is continued.", "--force")]

RUNS, LATEST = Path("runs"), "latest"
"""Default folder of runs, and the name of the link in it that points to the newest run."""


@contextmanager
def run_folder(output: str | None, name: str) -> Iterator[str]:
    """Return the folder of a run, by default a new one in ``runs``, and link it as ``runs/latest``.

    If no episode finishes, a new folder and the link are removed again.

    Raises:
        ConfigError: The folder is not writable.
        UsageError: The folder contains files of another program, or it cannot be created.
    """
    from rl_eval.log.storage import is_uri

    if output is not None and is_uri(output):
        yield output
        return
    now = datetime.datetime.now(datetime.timezone.utc).astimezone()
    folder = new_folder(RUNS.absolute() / f"{now:%Y-%m-%d-%H%M%S}-{name}") if output is None else Path(output)
    _check_writable(folder)
    undo = _link_latest(folder)
    try:
        yield str(folder)
    finally:
        if not any((*folder.glob("segments/*"), *folder.glob("result.json"))):
            if output is None:
                shutil.rmtree(folder, ignore_errors=True)
            undo()


def _check_writable(folder: Path) -> None:
    """Create a folder, and check that a result can be saved in it after hours of episodes."""
    from rl_eval.results.files import check_ours

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{shown(folder)} is a file", key="--output", value=shown(folder), fix="Pass a folder.")
    check_ours(folder)
    with written(shown(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        problem, fix = f"the output folder {shown(folder)} is not writable", "Pass another --output."
        raise ConfigError(problem, key="--output", value=shown(folder), fix=fix)


def folder_to_save(output: str, fingerprint: str, say: Callable[[str], None]) -> Path | None:
    """Return the folder in which to save the result of a run; None if it is saved there, or cannot be.

    Args:
        output: Folder or URI of the run. Beside a log at a URI, no result is saved.
        fingerprint: Fingerprint of the result; empty for a run that has not ended.
        say: Prints a note to the user.
    """
    from rl_eval.log.storage import is_uri
    from rl_eval.results.files import RESULT_FILE, summary_in

    folder = Path(output)
    if is_uri(output) or (fingerprint and summary_in(folder / RESULT_FILE).get("fingerprint") == fingerprint):
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        say(f"{shown(folder)} is not writable: the result is printed but not saved")
        return None
    return folder


def _link_latest(folder: Path) -> Callable[[], None]:
    """Point the link ``runs/latest`` at the folder of a run; return a function that restores the link.

    A run works without the link, so errors are ignored. A link to something that is not a run does not change.
    """
    link = (RUNS / LATEST).absolute()
    if link.is_relative_to(folder):  # The link would lead into itself.
        return lambda: None
    with suppress(OSError):
        former = link.readlink() if os.path.lexists(link) else None  # Raises if it is not a link.
        if former is not None and not _may_move(link.parent / former):
            print_note(f"{RUNS / LATEST} points to {former}, which is not a run, so the link does not change")
            return lambda: None
        _point(link, Path(os.path.relpath(folder, link.parent)))
        return lambda: _point(link, former)
    return lambda: None


def short_name(folder: Path) -> str:
    """Return the path of the folder of a run, or ``runs/latest`` if it is a shorter name of this folder."""
    link = RUNS / LATEST
    names = [shown(folder), *([str(link)] if link.resolve() == folder.resolve() else [])]
    return min(names, key=len)


def _may_move(former: Path) -> bool:
    """Whether a link to this target may change, because the target is a run, is empty, or does not exist."""
    from rl_eval.results.files import RESULT_FILE, is_log_folder

    return (former / RESULT_FILE).exists() or is_log_folder(former) or not former.exists() or not any(former.iterdir())


def _point(link: Path, target: Path | None) -> None:
    """Point a link at a target, or remove the link."""
    with suppress(OSError):
        if target is None:
            link.unlink(missing_ok=True)
            return
        link.parent.mkdir(exist_ok=True)
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        temporary.symlink_to(target)
        temporary.replace(link)


def new_folder(base: Path) -> Path:
    """Create and return the first of BASE, BASE-2, BASE-3, ... that does not exist.

    Two processes never create the same folder.

    Raises:
        UsageError: The folder cannot be created.
    """
    for folder in map(Path, _numbered(str(base))):
        # Only an attempt to create the folder shows whether its name is free.
        with written(shown(folder)), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def _numbered(base: str) -> Iterator[str]:
    return itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))


def save_patiently(save: Callable[[], None], folder: Path) -> None:
    """Save a result; retry failed writes like the evaluation log does.

    Raises:
        ClusterError: The files cannot be written.
    """
    from rl_eval.log.storage import is_unusable
    from rl_eval.log.writer import retry_pause

    for failures in itertools.count(1):
        try:
            return save()
        except OSError as error:
            reason = error.strerror or str(error)
            pause = None if is_unusable(error) else retry_pause(failures)
            if pause is None:
                fix = "The episodes are in the log; the same command with the same --output saves the result later."
                problem = f"the result cannot be saved in {shown(folder)}: {reason}"
                raise ClusterError(problem, key=shown(folder), value=reason, fix=fix) from error
        if failures == 1:
            print_note(f"the result cannot be saved yet ({reason}); retrying")
        time.sleep(pause)
    return None


# Contents of an existing run


def earlier_result(
    output: str, settings: EvalSettings, say: Callable[[str], None], *, force: bool, accept_code_change: bool
) -> EvalResult | None:
    """Return the result of a complete run in a folder; None if something is left to run.

    Args:
        output: Folder or URI of the run; it may not exist.
        settings: Settings of this command.
        say: Prints a note about the existing run.
        force: Whether to remove another run from the folder.
        accept_code_change: Whether a run with other code is the same run.

    Raises:
        LogMismatch: The folder contains another run, and ``force`` is false.
        ConfigError: The run is complete, and another policy answers at the server; or the folder contains a result
            without a log that is not complete, or cannot be opened.
        UsageError: The log contradicts the result beside it.
    """
    from rl_eval.log.storage import is_uri, open_storage
    from rl_eval.log.writer import other_run
    from rl_eval.policies.subject import configured_weights
    from rl_eval.records.guarantee import is_served
    from rl_eval.results.files import RESULT_FILE, is_log_folder, summary_in
    from rl_eval.results.provenance import manifest_of

    label = open_storage(output).label
    contents = _read_log(output, say)
    has_log = contents is not None or is_uri(output) or is_log_folder(Path(output))
    saved = {} if has_log else summary_in(Path(output, RESULT_FILE))
    if contents is None and not saved:
        return None
    ours = manifest_of(settings, settings.plan(), configured_weights(settings.policy))
    theirs = _manifest_of(saved, ours) if contents is None else contents.manifest
    amendments = () if contents is None else contents.amendments
    if other := other_run(label, theirs, ours, amendments, accept=accept_code_change):
        if not force:
            raise other
        _remove_run(output, label)
        return None
    if contents is None:
        return _saved_result(output, label)
    found = _finished(contents, label, settings, say)
    if found is None or not is_served(contents.numerics):
        return found
    from rl_eval.execution.group import EvalRunnerGroup

    say("asking the server whether it still has this policy")
    try:
        with EvalRunnerGroup(settings, threaded=settings.runners.num_runners > 0) as group:
            return group.submit(output=output, accept_code_change=accept_code_change).result()
    except (PolicyUnavailable, RunnerStartError, EnvError) as error:
        note = f"it was not checked that the server still has the policy of this run: {error.problem}"
        print_note(note)
        found.provenance["notes"] = [*found.provenance["notes"], note]
        return found


def _read_log(output: str, say: Callable[[str], None]) -> LogContents | None:
    """Return the contents of a log; None if it does not exist or needs repair."""
    from rl_eval.log import read_log
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage

    try:
        if read_manifest(open_storage(output)) is not None:
            return read_log(output)
    except LogError as error:
        say(str(error))
    except OSError:
        pass  # The evaluation reports the error when it opens the log.
    return None


def _manifest_of(saved: Mapping[str, Any], ours: Manifest) -> Manifest:
    """Return the manifest that the log of a saved result would have."""
    plan, provenance = dict(saved["plan"]), saved["provenance"]
    found = {key: provenance[key] for key in ("identity", "weights", "code") if key in provenance}
    return replace(ours, plan_fingerprint=plan.pop("fingerprint"), **plan, **found)


def _saved_result(output: str, label: str) -> EvalResult:
    from rl_eval.results.result import EvalResult

    result = EvalResult.load(output)
    if result.status == "partial":
        problem, fix = f"{label} contains an unfinished result, but no log", "Pass another --output."
        raise ConfigError(problem, key="--output", value=label, fix=fix)
    return result


def _finished(
    contents: LogContents, label: str, settings: EvalSettings, say: Callable[[str], None]
) -> EvalResult | None:
    from rl_eval.results.loading import result_of_log

    finished, planned, share = len(contents.rows), contents.manifest.num_episodes, settings.evaluation.determinism_check
    state = f"continuing {label}: {finished:,} of {planned:,} episodes were finished"
    if finished < planned and contents.ended_by is None:
        say(state)
        return None
    result = result_of_log(contents, label)
    # If "auto" decided against a check, that decision counts as a check.
    if not contents.determinism if share == "auto" else share and result.determinism.passed is None:
        say(f"{state}; some of them run again as a determinism check")
        return None
    say(f"{label} is complete; nothing is left to run")
    return result


def _remove_run(output: str, label: str) -> None:
    """Remove the log and the result of another run.

    Raises:
        ConfigError: The run is at a URI.
        LogOwned: A process is writing the log.
    """
    from rl_eval.log import EvaluationLog
    from rl_eval.log.manifest import MANIFEST_FILE
    from rl_eval.log.storage import is_uri
    from rl_eval.log.writer import FOLDERS
    from rl_eval.results.files import EPISODES_FILE, RESULT_FILE

    if is_uri(output):
        problem, fix = f"--force does not remove a run at a URI: {label}", "Remove it, or pass another --output."
        raise ConfigError(problem, key="--force", value=label, fix=fix)
    EvaluationLog.open(output).close()
    folder = Path(output)
    for name in (RESULT_FILE, EPISODES_FILE, MANIFEST_FILE):
        (folder / name).unlink(missing_ok=True)
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
