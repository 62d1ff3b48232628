"""Ownership of an evaluation log by the driver with the newest claim.

A *driver* is the process that runs the evaluation and writes the log. Each driver creates a *claim*, a file with a
number, the *epoch*. A driver creates its claim only after the previous claim was released or the previous driver died.
On the same machine, the process id and the start time show whether the previous driver lives. On another machine, the
heartbeat, a counter in the claim, shows this. The driver is treated as dead if the counter does not change for some
intervals, so clocks are never compared. A driver that was only suspended finds the newer claim before its next write,
and stops writing.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal, final

from rl_eval.errors import LogError, LogFenced, LogOwned
from rl_eval.log.storage import Storage
from rl_eval.records.plain import parse_json, typed
from rl_eval.supervision.processes import machine_id, process_status

BEAT_SECONDS = 3.0
"""Seconds between two heartbeats."""

MISSED_BEATS = 3
"""Number of missed heartbeats after which a driver on another machine counts as dead."""

RunState = Literal["running", "stopped", "finished"]
"""State of a run: a driver writes its log, nobody does and episodes are missing, or all episodes have ended."""

_FOLDER: Final = "owners"
_NUMBER: Final = re.compile(r"\d{6,}")
"""Pattern of the name of a claim."""
_RACES: Final = 10


@dataclass(frozen=True)
class Claim:
    """Claim of a present or former writer of the log."""

    epoch: int
    host: str
    pid: int
    process: str
    """Start time of the process in the kernel's ticks. It shows whether a process id was reused."""
    machine: str
    """Ids of the boot and of the process namespace, which are equal for processes that see each other's process ids.
    Empty if unknown."""
    since: str
    beat: int = 0
    """Number of heartbeats."""
    segments: int = 0
    """Number of segments that were committed at the last heartbeat. If the log has fewer segments, some were lost."""
    released: bool = False
    token: str = ""
    """Unique string of the claim."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@final
class Ownership:
    """Exclusive write access to a log, until another process takes the log over."""

    def __init__(self, storage: Storage, name: str, claim: Claim) -> None:
        self._storage = storage
        self._name = name
        self._claim = claim

    @property
    def epoch(self) -> int:
        """Number of this claim; later claims have higher numbers."""
        return self._claim.epoch

    @property
    def session(self) -> str:
        """String that identifies this session of the log."""
        claim = self._claim
        return f"{claim.epoch} {claim.host} {claim.pid} {claim.process} {claim.since}"

    def check(self) -> None:
        """Check that this driver still owns the log.

        Raises:
            LogFenced: Another driver took the log over.
            LogError: The claim is missing.
            OSError: The claims cannot be listed.
        """
        newest = _newest(self._storage)
        if newest == self._name:
            return
        if newest is None or newest < self._name:
            problem = (
                f"the claim {self._name} of this driver is missing from {self._storage.label}: the folder or its files "
                "were removed while the evaluation ran. Nothing more is written"
            )
            raise LogError(problem, key="output", value=self._storage.label, fix="Start the run again.")
        raise self._fenced(_read(self._storage, newest))

    def beat(self, segments: int) -> None:
        """Write a heartbeat.

        Raises:
            LogFenced: Another driver took the log over.
            LogError: The claim is missing.
            OSError: The claim cannot be read or written.
        """
        self._rewrite(replace(self._claim, beat=self._claim.beat + 1, segments=segments))

    def release(self, segments: int) -> None:
        """Release the log, so that the next driver can claim it immediately. Raise the same errors as :meth:`beat`."""
        self._rewrite(replace(self._claim, segments=segments, released=True))

    def _rewrite(self, claim: Claim) -> None:
        self.check()
        there = _read(self._storage, self._name)
        if there and there.token != claim.token:  # The store let two processes create the same file.
            raise self._fenced(there)
        self._storage.write(self._name, _to_bytes(claim))
        self._claim = claim

    def _fenced(self, owner: Claim | None) -> LogFenced:
        return LogFenced(
            f"{self._storage.label} was taken over by {owner or 'another driver'}, because this driver (process "
            f"{self._claim.pid} on {self._claim.host}) was silent. This process writes no more records",
            key="output",
            value=self._storage.label,
        )


def take_ownership(storage: Storage) -> Ownership:
    """Claim a log.

    Raises:
        LogOwned: Another driver is writing the log; the message names the driver.
        OSError: The claim cannot be written.
    """
    for _ in range(_RACES):
        newest = _newest(storage)
        if newest is not None and (owner := _living_owner(storage, newest)):
            break
        claim = _own_claim(1 if newest is None else int(newest.rpartition("/")[2]) + 1)
        name = f"{_FOLDER}/{claim.epoch:06d}"
        # A driver that loses the race checks again, and finds the live winner.
        if storage.create(name, _to_bytes(claim)):
            return Ownership(storage, name, claim)
        owner = "one new driver after another"
    fix = "Wait until that process ends, stop it, or pass another output (--output)."
    raise LogOwned(f"{storage.label} is being written by {owner}", key="output", value=storage.label, fix=fix)


def writer_of(storage: Storage, *, watch: bool = False) -> str | None:
    """Return a description of the driver that may be writing a log; None if there is no such driver.

    Args:
        storage: The log.
        watch: Whether to wait for the heartbeats of a driver on another machine, as :func:`take_ownership` does.
            Otherwise such a driver is treated as alive.
    """
    newest = _newest(storage)
    if newest is not None and watch:
        return _living_owner(storage, newest)
    claim = None if newest is None else _read(storage, newest)
    return None if claim is None or _state(claim) == "dead" else str(claim)


def state_of(storage: Storage, *, whole: bool, watch: bool = False) -> RunState:
    """Return the state of a run with a log.

    Args:
        storage: The log.
        whole: Whether every episode of the plan and the determinism check are in the log.
        watch: As for :func:`writer_of`.
    """
    return "running" if writer_of(storage, watch=watch) is not None else "finished" if whole else "stopped"


def read_claims(storage: Storage) -> list[Claim]:
    """Return all claims that can be read, oldest first."""
    claims = [_read(storage, f"{_FOLDER}/{name}") for name in storage.names(_FOLDER)]
    return [claim for claim in claims if claim]


def _newest(storage: Storage) -> str | None:
    """Return the name of the newest claim; None if there is no claim."""
    return max((f"{_FOLDER}/{name}" for name in storage.names(_FOLDER) if _NUMBER.fullmatch(name)), default=None)


def _read(storage: Storage, name: str) -> Claim | None:
    """Return a claim; None if the file is missing or invalid, for example because it is not completely written yet."""
    try:
        return typed(Claim, parse_json(storage.read(name)))
    except (FileNotFoundError, ValueError):
        return None


def _to_bytes(claim: Claim) -> bytes:
    return json.dumps(asdict(claim), indent=1).encode()


def _living_owner(storage: Storage, name: str) -> str | None:
    """Return a description of the living owner of a claim; None if the claim was released or its driver is dead.

    If the driver is on another machine, wait for its next heartbeat. A driver without a heartbeat is treated as dead.
    """
    first = _read(storage, name)
    give_up = time.monotonic() + MISSED_BEATS * BEAT_SECONDS + BEAT_SECONDS / 3
    while True:
        claim = _read(storage, name)
        state = "unknown" if claim is None else _state(claim)
        if state == "dead":
            return None
        if state == "alive" or claim != first:
            return str(claim or "another driver")
        if time.monotonic() >= give_up:
            return None
        time.sleep(BEAT_SECONDS / 6)


def _state(claim: Claim) -> Literal["alive", "dead", "unknown"]:
    if claim.released:
        return "dead"
    if not claim.machine or claim.machine != machine_id():
        return "unknown"
    try:
        os.kill(claim.pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass  # The process exists and belongs to another user.
    process = _process(claim.pid)
    if process is None:
        return "unknown"
    return "alive" if process == claim.process else "dead"


def _own_claim(epoch: int) -> Claim:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    pid = os.getpid()
    token = secrets.token_hex(8)
    return Claim(epoch, socket.gethostname(), pid, _process(pid) or "", machine_id(), now, token=token)


def _process(pid: int) -> str | None:
    """Return the start time of a process; an empty string if the process has ended; None if its status is unknown."""
    status = process_status(pid)
    return None if status is None else "" if status.ended else str(status.born)
