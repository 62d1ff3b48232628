"""Folders of log and result: chosen and checked before the evaluation starts, and never taken from another run.

So hours of episodes do not end in a file that cannot be written.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.printing import print_note, written
from rl_eval.cli.shared import absolute_path, absolute_place, option, shown
from rl_eval.errors import ClusterError, ConfigError, LogError, UsageError

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.log import LogContents
    from rl_eval.results.result import EvalResult


LogDir = Annotated[
    str | None,
    option(
        "DIR",
        "Folder or URI of the log, continued if a run is there. By default runs/TIME-NAME, to which runs/latest leads.",
        "--log-dir",
        parser=absolute_place,
    ),
]
Output = Annotated[
    Path | None,
    option(
        "DIR",
        "Folder of the result; by default that of the log. Without --log-dir, no log is kept then.",
        *("--output", "-o"),
        parser=absolute_path,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace another result that is in --output.")]

RUNS, LATEST = Path("runs"), "latest"
"""Where logs go by default, and the link in it to the last of them."""
_OUR_TARGET: Final = re.compile(r"\d{4}-\d\d-\d\d-\d{6}-[^/]+")
"""Name of a folder that :func:`_new_log_folder` made."""


@contextmanager
def claimed_folders(
    output: Path | None, run_dir: str | None, name: str, *, force: bool
) -> Iterator[tuple[str | None, Path | None]]:
    """Choose where log and result go.

    Without ``run_dir`` the log goes to a new folder in ``runs``, or nowhere if there is an ``--output``.
    """
    given = run_dir is not None or output is not None
    with nullcontext(run_dir) if given else _new_log_folder(name) as log_dir:
        yield log_dir, claim_folder(output, log_dir, force=force)


def claim_folder(output: Path | None, run_dir: str | None, *, force: bool = False) -> Path | None:
    """Create the folder of a result, and make sure that the result can be written there.

    Args:
        output: As the user gave it; else the result goes to the folder of the log, unless that is behind a URI.
        run_dir: Of the evaluation log, if there is one: an earlier result of the same run is replaced.
        force: Whether any result in ``output`` may be replaced.

    Returns:
        The folder; None for none.

    Raises:
        ConfigError: The folder cannot be used.
    """
    from rl_eval.results.files import RESULT_FILE, check_ours

    if force and output is None:
        raise ConfigError("--force replaces the result in --output: give --output, or leave --force out")
    folder = _folder_of(output, run_dir)
    if folder is None:
        return None
    check_ours(folder)
    if not force and (folder / RESULT_FILE).exists() and not _is_of_run(folder, run_dir):
        raise ConfigError(f"{shown(folder)} holds the result of another evaluation: give another --output, or --force")
    with written(f"the folder {shown(folder)}"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder {shown(folder)} cannot be written to: give another --output")
    return folder


def unsaved_folder(
    fingerprint: str, output: Path | None, run_dir: str | None, say: Callable[[str], None], *, force: bool = False
) -> Path | None:
    """Return where the result of a run that was complete before is still to be saved; None if that is nowhere.

    Args:
        fingerprint: Of the result.
        output: As the user gave it.
        run_dir: Of its log. If its folder can only be read, the result is not saved.
        say: Called with a line about that.
        force: Whether any result in ``output`` may be replaced.
    """
    folder = _folder_of(output, run_dir)
    if folder is None or _read_result(folder).get("fingerprint") == fingerprint:
        return None
    if output is None and not os.access(folder, os.W_OK | os.X_OK):
        say(f"{shown(folder)} cannot be written to: the result is printed, and not saved")
        return None
    return claim_folder(output, run_dir, force=force)


def _folder_of(output: Path | None, run_dir: str | None) -> Path | None:
    from rl_eval.log.storage import is_uri

    return output or (None if run_dir is None or is_uri(run_dir) else Path(run_dir))


def _is_of_run(folder: Path, run_dir: str | None) -> bool:
    """Return whether the result in a folder is that of a run, as far as it had come."""
    if run_dir is None or folder == _folder_of(None, run_dir):
        return run_dir is not None
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage

    manifest, saved = read_manifest(open_storage(run_dir)), _read_result(folder)
    if manifest is None:
        return False
    theirs = saved["plan"].get("fingerprint"), *(saved["provenance"].get(key) for key in ("identity", "weights"))
    return bool(theirs == (manifest.plan_fingerprint, manifest.identity, manifest.weights))


def _read_result(folder: Path) -> dict[str, Any]:
    """Return the contents of a result file; empty for anything else."""
    from rl_eval.results.files import RESULT_FILE, read_summary

    try:
        return read_summary(folder / RESULT_FILE)
    except UsageError:
        return {}


@contextmanager
def _new_log_folder(name: str) -> Iterator[str]:
    """Make ``runs/<time>-<name>`` for a log, with ``runs/latest`` leading there; if nothing finished, remove both."""
    now = datetime.datetime.now(datetime.timezone.utc).astimezone()
    folder = new_folder(RUNS.absolute() / f"{now:%Y-%m-%d-%H%M%S}-{name}")
    former = _lead_to(folder)
    try:
        yield str(folder)
    finally:
        if not any((*folder.glob("segments/*"), *folder.glob("result.json"))):
            shutil.rmtree(folder, ignore_errors=True)
            _lead_to(former)


def _lead_to(folder: Path) -> Path:
    """Point our link to a folder beside it, or remove it if that is not there; return where it led.

    A run works without the link, so errors are ignored. What another program put in its place stays.
    """
    link, former = folder.with_name(LATEST), folder.with_name("none")
    with suppress(OSError):
        if os.path.lexists(link):
            target = str(link.readlink())  # An error where it is no link.
            if not _OUR_TARGET.fullmatch(target):
                print_note(f"{RUNS / LATEST} points to {target}, which rl-eval did not make: it is not changed")
                return former
            former = folder.with_name(target)
        if folder.exists():
            temporary = link.with_name(f".{LATEST}.{os.getpid()}")
            temporary.symlink_to(folder.name)
            temporary.replace(link)
        else:
            link.unlink(missing_ok=True)
    return former


def new_folder(base: Path) -> Path:
    """Create and return the first of BASE, BASE-2, BASE-3, ... that is not there; no two processes get the same.

    Raises:
        UsageError: None can be created.
    """
    for folder in map(Path, _numbered(str(base))):
        # Only making it tells whether it is free.
        with written(f"the folder {shown(folder)}"), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("numbers do not end")


def _numbered(base: str) -> Iterator[str]:
    return itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))


def save_patiently(save: Callable[[], None], folder: Path) -> None:
    """Save a result; retry a failed write as often as the evaluation log does.

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
                how = "the same command with --log-dir saves it later, if the run has a log"
                raise ClusterError(f"the result cannot be saved in {shown(folder)}: {reason}; {how}") from error
        if failures == 1:
            print_note(f"the result cannot be saved yet ({reason}): trying again")
        time.sleep(pause)
    return None


# What a log holds already


def fresh_run_dir(run_dir: str, say: Callable[[str], None]) -> str:
    """Return the first of DIR, DIR-2, DIR-3, ... in which there is nothing yet; tell if it is not DIR."""
    from rl_eval.log.storage import is_uri

    # A query belongs to the file system, not to the folder.
    base, mark, query = run_dir.partition("?") if is_uri(run_dir) else (run_dir, "", "")
    names = (f"{name}{mark}{query}" for name in _numbered(base.rstrip("/") or base))
    chosen = next(name for name in names if _is_free(name))
    if chosen != run_dir:
        say(f"a run is there already; starting beside it, in {shown(chosen)}")
    return chosen


def _is_free(run_dir: str) -> bool:
    from rl_eval.log.storage import open_storage

    storage = open_storage(run_dir)
    try:
        return not any(storage.names(folder) for folder in ("", "owners", "segments"))
    except OSError as error:
        raise ConfigError(f"run_dir {storage.label} cannot be read: {error}") from error


def finished_result(run_dir: str, settings: EvalSettings, say: Callable[[str], None]) -> EvalResult | None:
    """Return the result of a run of these settings in which nothing is left to run.

    Args:
        run_dir: Folder or URI of its evaluation log, which need not exist.
        settings: What is evaluated. The log decides whether another run may be continued.
        say: Called with a line about what is there already.

    Raises:
        ConfigError: The folder holds a result without a log; or its URI, or the weights, cannot be opened.
        UsageError: The log contradicts the result beside it.
    """
    from rl_eval.log.storage import open_storage
    from rl_eval.results.loading import result_of_log

    label = open_storage(run_dir).label
    contents = _read_log(run_dir, label, say)
    if contents is None or _differs(contents, settings):
        return None
    finished, planned, share = len(contents.rows), contents.manifest.num_episodes, settings.evaluation.determinism_check
    state = f"continuing {label}: {finished:,} of {planned:,} episodes were finished"
    if finished < planned:
        say(state)
        return None
    result = result_of_log(contents, label)
    # A check that "auto" decided against counts as one.
    if not contents.determinism if share == "auto" else share and result.determinism.passed is None:
        say(f"{state}; some of them are run again, as a check")
        return None
    say(f"{label} is complete: nothing is left to run")
    return result


def _read_log(run_dir: str, label: str, say: Callable[[str], None]) -> LogContents | None:
    """Return what a log holds; None if there is none, or one that has to be repaired first."""
    from rl_eval.log import read_log
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage

    try:
        if read_manifest(open_storage(run_dir)) is not None:
            return read_log(run_dir)
    except LogError as error:
        say(str(error))
        return None
    except OSError:
        return None  # The log reports it when it is opened.
    folder = _folder_of(None, run_dir)
    if folder is not None and _read_result(folder):
        raise ConfigError(f"{label} holds a result without a log: give another --log-dir, or --fresh")
    return None


def _differs(contents: LogContents, settings: EvalSettings) -> bool:
    from rl_eval.log.manifest import code_differences, newest_code
    from rl_eval.policies.live import configured_weights
    from rl_eval.results.provenance import manifest_of

    ours, theirs = manifest_of(settings, settings.plan(), configured_weights(settings.policy)), contents.manifest
    return bool(theirs.differences(ours) or code_differences(newest_code(theirs, contents.amendments), ours.code))
