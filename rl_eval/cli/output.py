"""Output folder of a result; of existing files only those of the same run are overwritten.

Everything is checked before the evaluation starts, so that hours of episodes do not end in a file that cannot
be written.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rl_eval.cli.printing import print_note
from rl_eval.cli.shared import absolute_place, option, shown
from rl_eval.errors import ClusterError, ConfigError, UsageError

__all__ = [
    "Force",
    "LogDir",
    "claim_folder",
    "claimed_folder",
    "claimed_folders",
    "is_saved",
    "new_folder",
    "save_patiently",
    "unsaved_folder",
]

LogDir = Annotated[
    str | None,
    option(
        "DIR",
        "Folder or URI of the evaluation log. A run that is there is continued: only what is missing runs. "
        "The result is saved in a folder, too. By default a new folder in runs/, to which runs/latest leads.",
        "--log-dir",
        parser=absolute_place,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace another result that is in --output.")]

RUNS: Final = Path("runs")
"""Where logs go by default."""

LATEST: Final = "latest"
"""Link in it to the last of them."""
_OUR_TARGET: Final = re.compile(r"\d{4}-\d\d-\d\d-\d{6}-[^/]+")
"""Name of a folder that :func:`new_log_folder` made."""


@contextmanager
def new_log_folder(name: str) -> Iterator[str]:
    """Make ``runs/<time>-<name>`` for a log, and have ``runs/latest`` lead there; if nothing finished, it goes again.

    Raises:
        ConfigError: It cannot be made.
    """
    now = datetime.datetime.now(datetime.timezone.utc).astimezone()
    folder = new_folder(RUNS.absolute() / f"{now:%Y-%m-%d-%H%M%S}-{name}")
    link = folder.with_name(LATEST)
    former = _link(link, folder.name)
    if link.is_symlink() and not _OUR_TARGET.fullmatch(target := str(link.readlink())):
        print_note(f"{RUNS / LATEST} points to {target}, which rl-eval did not make: it is not changed")
    try:
        yield str(folder)
    finally:
        if not any((*folder.glob("segments/*"), *folder.glob("result.json"))):
            shutil.rmtree(folder, ignore_errors=True)
            _link(link, former)


def _link(link: Path, target: str | None) -> str | None:
    """Point our link to a folder beside it, or remove it; return its former target.

    The absence of the link harms nobody, so errors are ignored. What another program put in its place stays.
    """
    former = None
    with suppress(OSError):
        if link.is_symlink():
            former = str(link.readlink())
        if not _OUR_TARGET.fullmatch(former or "") and os.path.lexists(link):
            return None
        if target is None:
            link.unlink(missing_ok=True)
            return former
        temporary = link.with_name(f".{LATEST}.{os.getpid()}")
        temporary.symlink_to(target)
        temporary.replace(link)
    return former


@contextmanager
def claimed_folders(
    output: Path | None, run_dir: str | None, name: str, *, force: bool
) -> Iterator[tuple[str | None, Path | None]]:
    """Choose where log and result go; a new ``--output`` that is still empty in the end goes again."""
    with _claimed_log_folder(output, run_dir, name) as log_dir:
        made = None if output is None or output.exists() else output
        try:
            yield log_dir, claimed_folder(output, log_dir, force=force)
        finally:
            if made is not None:
                with suppress(OSError):
                    made.rmdir()


@contextmanager
def _claimed_log_folder(output: Path | None, run_dir: str | None, name: str) -> Iterator[str | None]:
    """Choose where the log goes: as given; nowhere, with ``--output`` alone; else a new folder of its own."""
    if run_dir is not None or output is not None:
        yield run_dir
        return
    with new_log_folder(name) as folder:
        yield folder


def claimed_folder(output: Path | None, run_dir: str | None, *, force: bool = False) -> Path | None:
    """Choose where a result is saved, and make sure that it can be; None for nowhere.

    As given; else in the log's folder, unless that is behind a URI.
    """
    if force and output is None:
        raise ConfigError("--force replaces the result in --output: give --output, or leave --force out")
    place = _run_folder(run_dir) if output is None else output
    if place is not None:
        claim_folder(place, run_dir, force=force)
    return place


def unsaved_folder(
    fingerprint: str, output: Path | None, run_dir: str | None, say: Callable[[str], None], *, force: bool = False
) -> Path | None:
    """Return where the result of a run that was complete before is still to be saved; None if that is nowhere.

    Args:
        fingerprint: Of the result.
        output: As the caller gave it.
        run_dir: Of its log. Where its folder can only be read, the result is not saved.
        say: Called with a line about that.
        force: Whether any result in ``output`` may be replaced.

    Raises:
        ConfigError: The folder cannot be used.
    """
    folder = _run_folder(run_dir) if output is None else output
    if folder is None or is_saved(fingerprint, folder):
        return None
    if output is None and not os.access(folder, os.W_OK | os.X_OK):
        say(f"{shown(folder)} cannot be written to: the result is printed, and not saved")
        return None
    claim_folder(folder, run_dir, force=force)
    return folder


def save_patiently(save: Callable[[], None], folder: Path) -> None:
    """Save a result; retry a failed write as often as the evaluation log does.

    Args:
        save: Writes the files.
        folder: Where they go.

    Raises:
        ClusterError: They cannot be written.
    """
    from rl_eval.log.storage import is_unusable
    from rl_eval.log.writer import retry_pause

    failures = 0
    while (error := _failure_of(save)) is not None:
        failures += 1
        reason = error.strerror or str(error)
        pause = None if is_unusable(error) else retry_pause(failures)
        if pause is None:
            raise ClusterError(
                f"the result cannot be saved in {shown(folder)}: {reason}. If the run has a log, the same command with "
                "--log-dir saves it later"
            ) from error
        if failures == 1:
            print_note(f"the result cannot be saved yet ({reason}): trying again")
        time.sleep(pause)


def _failure_of(save: Callable[[], None]) -> OSError | None:
    try:
        save()
    except OSError as error:
        return error
    return None


def new_folder(base: Path) -> Path:
    """Create and return the first of BASE, BASE-2, BASE-3, ... that is not there; no two processes get the same.

    Raises:
        ConfigError: None can be created.
    """
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(base, error) from error
    for folder in itertools.chain([base], (base.with_name(f"{base.name}-{number}") for number in itertools.count(2))):
        try:
            folder.mkdir()
        except FileExistsError:  # Only making it tells whether it is free.
            continue
        except OSError as error:
            raise _unusable(folder, error) from error
        return folder
    raise AssertionError("numbers do not end")


def claim_folder(folder: Path, run_dir: str | None = None, *, force: bool = False) -> None:
    """Make sure that a result can be written to a folder, and create it.

    Args:
        folder: Where the result goes.
        run_dir: Of the evaluation log, if there is one: an earlier result of the same run is replaced.
        force: Whether any result may be replaced.
    """
    from rl_eval.results.files import RESULT_FILE, check_ours

    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {shown(folder)} is a file: give a folder")
    check_ours(folder)
    if not force and (folder / RESULT_FILE).exists() and not _is_of_run(folder, run_dir):
        raise ConfigError(
            f"{shown(folder)} holds the result of an evaluation already: choose another folder with --output, or "
            "replace that result with --force"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder {shown(folder)} cannot be written to: choose another one with --output")


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the output folder {shown(folder)} cannot be created ({error.strerror}): choose another one with --output"
    )


def _run_folder(run_dir: str | None) -> Path | None:
    from rl_eval.log.storage import is_uri

    return None if run_dir is None or is_uri(run_dir) else Path(run_dir)


def _is_of_run(folder: Path, run_dir: str | None) -> bool:
    """Return whether the result in a folder is that of a run, as far as it had come."""
    if run_dir is None or folder == _run_folder(run_dir):
        return run_dir is not None
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage
    from rl_eval.results.files import RESULT_FILE

    manifest, saved = read_manifest(open_storage(run_dir)), _read_result(folder / RESULT_FILE)
    if manifest is None:
        return False
    theirs = saved["plan"].get("fingerprint"), *(saved["provenance"].get(key) for key in ("identity", "weights"))
    return bool(theirs == (manifest.plan_fingerprint, manifest.identity, manifest.weights))


def is_saved(fingerprint: str, folder: Path) -> bool:
    """Return whether a folder holds a result with this fingerprint already."""
    from rl_eval.results.files import RESULT_FILE

    return bool(_read_result(folder / RESULT_FILE).get("fingerprint") == fingerprint)


def _read_result(path: Path) -> dict[str, Any]:
    """Return the contents of a result file; empty for anything else."""
    from rl_eval.results.files import read_summary

    try:
        return read_summary(path)
    except UsageError:
        return {}
