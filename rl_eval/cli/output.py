"""Folders of the log and the result, chosen and checked before the evaluation starts.

The check ensures that the result can be written after hours of episodes. Folders of other runs are never used.
"""

from __future__ import annotations

import datetime
import fcntl
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
        "Folder or URI of the log. If it contains a run, the run is resumed. [default: runs/TIME-NAME, linked as "
        "runs/latest]",
        "--log-dir",
        parser=absolute_place,
    ),
]
Output = Annotated[
    Path | None,
    option(
        "DIR",
        "Folder of the result. If it is passed without --log-dir, no log is written. [default: the log folder]",
        *("--output", "-o"),
        parser=absolute_path,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the result of another run in --output.")]

RUNS, LATEST = Path("runs"), "latest"
"""Default folder of logs, and the name of the link in it that points to the newest log."""
_OUR_TARGET: Final = re.compile(r"\d{4}-\d\d-\d\d-\d{6}-[^/]+")
"""Name of a folder created by :func:`_new_log_folder`."""


@contextmanager
def claimed_folders(
    output: Path | None, log_dir: str | None, name: str, *, force: bool
) -> Iterator[tuple[str | None, Path | None]]:
    """Choose the folders of the log and the result.

    Without ``--log-dir`` and ``--output``, the log goes to a new folder in ``runs``. With only ``--output``, no log is
    written.
    """
    given = log_dir is not None or output is not None
    with nullcontext(log_dir) if given else _new_log_folder(name) as chosen:
        folder = claim_folder(output, chosen, force=force)
        with nullcontext() if output is None else _locked(output):
            yield chosen, folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a result, so that no other run replaces the result. A log has its own lock.

    Raises:
        ConfigError: Another run has locked the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem, fix = (
                f"another run is writing to {shown(folder)}",
                "Pass another --output, or wait until that run ends.",
            )
            raise ConfigError(problem, key="--output", value=shown(folder), fix=fix) from None
        except OSError:
            pass  # Some file systems have no locks.
        yield
    finally:
        os.close(descriptor)


def claim_folder(output: Path | None, log_dir: str | None, *, force: bool = False) -> Path | None:
    """Create the folder of a result, and check that it is writable.

    Args:
        output: Value of ``--output``. If it is None, the folder of the log is used, unless the log is at a URI.
        log_dir: Folder of the evaluation log, or None. An earlier result of the same run is replaced.
        force: Whether any result in ``output`` may be replaced.

    Returns:
        The folder, or None if the result is not saved.

    Raises:
        ConfigError: The folder cannot be used.
        UsageError: The folder cannot be created.
    """
    from rl_eval.results.files import RESULT_FILE, check_ours

    if force and output is None:
        raise ConfigError("--force needs --output", key="--force", value=force, fix="Pass --output, or omit --force.")
    folder = _folder_of(output, log_dir)
    if folder is None:
        return None
    check_ours(folder)
    if not force and (folder / RESULT_FILE).exists() and not _is_of_run(folder, log_dir):
        fix = "Pass another --output, or --force to replace it."
        problem = f"{shown(folder)} contains the result of another evaluation"
        raise ConfigError(problem, key="--output", value=shown(folder), fix=fix)
    with written(shown(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        problem, fix = f"the output folder {shown(folder)} is not writable", "Pass another --output."
        raise ConfigError(problem, key="--output", value=shown(folder), fix=fix)
    return folder


def unsaved_folder(
    fingerprint: str, output: Path | None, log_dir: str | None, say: Callable[[str], None], *, force: bool = False
) -> Path | None:
    """Return the folder in which to save the result of a complete run; None if no save is needed or possible.

    Args:
        fingerprint: Fingerprint of the result.
        output: Value of ``--output``.
        log_dir: Folder of the log of the run. Without ``output``, nothing is saved if this folder is read-only.
        say: Prints a note to the user.
        force: Whether any result in ``output`` may be replaced.
    """
    folder = _folder_of(output, log_dir)
    if folder is None or _read_result(folder).get("fingerprint") == fingerprint:
        return None
    if output is None and not os.access(folder, os.W_OK | os.X_OK):
        say(f"{shown(folder)} is not writable: the result is printed but not saved")
        return None
    return claim_folder(output, log_dir, force=force)


def _folder_of(output: Path | None, log_dir: str | None) -> Path | None:
    from rl_eval.log.storage import is_uri

    return output or (None if log_dir is None or is_uri(log_dir) else Path(log_dir))


def _is_of_run(folder: Path, log_dir: str | None) -> bool:
    """Whether the result in a folder belongs to the run of a log, even if it was saved before the run was complete."""
    if log_dir is None or folder == _folder_of(None, log_dir):
        return log_dir is not None
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage

    manifest, saved = read_manifest(open_storage(log_dir)), _read_result(folder)
    return manifest is not None and manifest.is_of(saved["plan"].get("fingerprint"), saved["provenance"])


def _read_result(folder: Path) -> dict[str, Any]:
    """Return the contents of the result file in a folder; empty if there is no readable result file."""
    from rl_eval.results.files import RESULT_FILE, read_summary

    try:
        return read_summary(folder / RESULT_FILE)
    except UsageError:
        return {}


@contextmanager
def _new_log_folder(name: str) -> Iterator[str]:
    """Create ``runs/<time>-<name>`` for a log and link it as ``runs/latest``; if no episode finished, undo both."""
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
    """Point the link ``latest`` at a folder, or remove the link if the folder does not exist.

    A run works without the link, so errors are ignored. A link that another program created does not change.

    Args:
        folder: Target, in the same folder as the link.

    Returns:
        The former target of the link, or a path that does not exist if there was no link or the link did not change.
    """
    link, former = folder.with_name(LATEST), folder.with_name("none")
    with suppress(OSError):
        if os.path.lexists(link):
            target = str(link.readlink())  # Raises if it is not a link.
            if not _OUR_TARGET.fullmatch(target):
                print_note(
                    f"{RUNS / LATEST} points to {target}, which rl-eval did not create, so the link does not change"
                )
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
                fix = "If the run has a log, the same command with --log-dir saves the result later."
                problem = f"the result cannot be saved in {shown(folder)}: {reason}"
                raise ClusterError(problem, key=shown(folder), value=reason, fix=fix) from error
        if failures == 1:
            print_note(f"the result cannot be saved yet ({reason}); retrying")
        time.sleep(pause)
    return None


# Contents of an existing log


def fresh_log_dir(log_dir: str, say: Callable[[str], None]) -> str:
    """Return the first of DIR, DIR-2, DIR-3, ... that is empty or does not exist; print a note if it is not DIR."""
    from rl_eval.log.storage import is_uri

    # A query belongs to the file system, not to the folder.
    base, mark, query = log_dir.partition("?") if is_uri(log_dir) else (log_dir, "", "")
    names = (f"{name}{mark}{query}" for name in _numbered(base.rstrip("/") or base))
    chosen = next(name for name in names if _is_free(name))
    if chosen != log_dir:
        say(f"{shown(log_dir)} already has a run; starting a new one in {shown(chosen)}")
    return chosen


def _is_free(log_dir: str) -> bool:
    from rl_eval.log.storage import open_storage

    storage = open_storage(log_dir)
    try:
        return not any(storage.names(folder) for folder in ("", "owners", "segments"))
    except OSError as error:
        raise ConfigError(
            f"log_dir {storage.label} cannot be read: {error}", key="log_dir", value=storage.label
        ) from error


def finished_result(log_dir: str, settings: EvalSettings, say: Callable[[str], None]) -> EvalResult | None:
    """Return the result of a complete run; None if something is left to run, or if the log has other settings.

    Args:
        log_dir: Folder or URI of the evaluation log of the run; the log may not exist.
        settings: Settings of this command. If they differ from those of the log, the difference is checked when the log
            is opened.
        say: Prints a note about the existing run.

    Raises:
        ConfigError: The folder contains a result without a log, or the URI or the weights cannot be opened.
        UsageError: The log contradicts the result beside it.
    """
    from rl_eval.log.storage import open_storage
    from rl_eval.results.loading import result_of_log

    label = open_storage(log_dir).label
    contents = _read_log(log_dir, label, say)
    if contents is None or _differs(contents, settings):
        return None
    finished, planned, share = len(contents.rows), contents.manifest.num_episodes, settings.evaluation.determinism_check
    state = f"continuing {label}: {finished:,} of {planned:,} episodes were finished"
    if finished < planned:
        say(state)
        return None
    result = result_of_log(contents, label)
    # If "auto" decided against a check, that decision counts as a check.
    if not contents.determinism if share == "auto" else share and result.determinism.passed is None:
        say(f"{state}; some of them run again as a determinism check")
        return None
    say(f"{label} is complete; nothing is left to run")
    return result


def _read_log(log_dir: str, label: str, say: Callable[[str], None]) -> LogContents | None:
    """Return the contents of a log; None if it does not exist or needs repair."""
    from rl_eval.log import read_log
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage

    try:
        if read_manifest(open_storage(log_dir)) is not None:
            return read_log(log_dir)
    except LogError as error:
        say(str(error))
        return None
    except OSError:
        return None  # The evaluation reports the error when it opens the log.
    folder = _folder_of(None, log_dir)
    if folder is not None and _read_result(folder):
        fix = "Pass another --log-dir, or --fresh to use a new folder."
        raise ConfigError(f"{label} contains a result without a log", key="--log-dir", value=label, fix=fix)
    return None


def _differs(contents: LogContents, settings: EvalSettings) -> bool:
    from rl_eval.log.manifest import code_differences, newest_code
    from rl_eval.policies.live import configured_weights
    from rl_eval.results.provenance import manifest_of

    ours, theirs = manifest_of(settings, settings.plan(), configured_weights(settings.policy)), contents.manifest
    return bool(theirs.differences(ours) or code_differences(newest_code(theirs, contents.amendments), ours.code))
