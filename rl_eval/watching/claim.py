"""Exclusive use of an output folder by one watcher.

A watcher writes only to a folder that was empty, or that has the journal of an earlier watcher. One watcher at a time
has it: a lock of the kernel, which goes with its process, keeps other processes out, and a list the other watchers of
this one, which such a lock lets in.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Any, Final, final

from rl_eval.atomic_write import is_temporary
from rl_eval.errors import ConfigError, LogOwned
from rl_eval.watching.journal import JOURNAL_FILE, check_journal

__all__ = ["OutputClaim"]

_LOCK_FILE: Final = ".lock"

_claimed: Final[set[Path]] = set()
"""Folders that watchers of this process have."""
_guard: Final = threading.Lock()


@final
class OutputClaim:
    """The right to write to an output folder, until it is released or the process ends, however it does.

    Args:
        run_dir: The watched folder.
        output: The output folder; made if it is not there. Both are resolved.

    Raises:
        ConfigError: It holds what no watcher wrote, or cannot be written to.
        LogOwned: Another watcher has it.
    """

    def __init__(self, run_dir: Path, output: Path) -> None:
        _check_place(run_dir, output)
        _check_contents(output)
        self._output = output
        with _guard:
            if output in _claimed:
                raise _owned(output, "another watcher of this process")
            self._lock = _lock(output)
            _claimed.add(output)

    def release(self) -> None:
        """Let the next watcher in."""
        with _guard:
            _claimed.discard(self._output)
            self._lock.close()


def _check_place(run_dir: Path, output: Path) -> None:
    if run_dir.is_relative_to(output):
        raise ConfigError(
            f"--output {output} is the watched folder or one above it, whose contents are the trainer's: give a folder "
            f"of its own, such as {run_dir / 'eval'}"
        )


def _check_contents(output: Path) -> None:
    """Refuse a folder of somebody else, before anything is written to it."""
    if not output.is_dir():
        return
    names = {path.name for path in output.iterdir() if not is_temporary(path.name)} - {_LOCK_FILE}
    if JOURNAL_FILE in names:
        check_journal(output / JOURNAL_FILE)
    elif names:
        raise ConfigError(
            f"the output folder {output} holds {', '.join(sorted(names)[:3])}, and no {JOURNAL_FILE} of an earlier "
            "watcher: give --output a folder that is empty, or not there yet"
        )


def _lock(output: Path) -> Any:
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / _LOCK_FILE).open("a+")
    except OSError as error:
        raise ConfigError(f"the output folder {output} cannot be used: {error.strerror}") from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        lock.close()
        raise _owned(output, owner) from error
    except OSError as error:
        lock.close()
        raise ConfigError(f"the output folder {output} cannot be locked: {error.strerror}") from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    return lock


def _owned(output: Path, owner: str) -> LogOwned:
    return LogOwned(f"{output} is being written by {owner}: one watcher is enough; stop it, or give another --output")
