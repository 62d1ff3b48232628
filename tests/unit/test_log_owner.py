"""Who may write an evaluation log: one live driver, the next one after its death, and none that was replaced."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from rl_eval.errors import LogError, LogFenced, LogOwned
from rl_eval.log import EvaluationLog, ownership, read_log, writer
from rl_eval.log.ownership import read_claims, take_ownership
from rl_eval.log.storage import LocalStorage, ObjectStorage, Storage
from rl_eval.supervision.processes import machine_id
from tests.refused import refused
from tests.unit.log_world import make_batch, make_manifest, start_driver

DRIVER = """
log = EvaluationLog.open(sys.argv[1])
log.begin(make_manifest())
print("open", flush=True)
for line in sys.stdin:
    log.append(make_batch(map(int, line.split())))
    log.flush(20)
    print("done", flush=True)
"""


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_sleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of whoever waits for heartbeats."""
    clock = Clock()
    monkeypatch.setattr(ownership, "time", clock)
    return clock


@pytest.fixture(params=["disk", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "disk" else ObjectStorage(MemoryStore(), "memory://")


def make_claim(storage: Storage, **changes: Any) -> None:
    """Write the claim of a driver of this machine that never was."""
    fields: dict[str, Any] = {
        "epoch": 1, "host": "elsewhere", "pid": 2**22 + 1, "process": "12", "machine": machine_id(),
        "since": "then",
    }  # fmt: skip
    storage.write("owners/000001", json.dumps(fields | changes).encode())


def claim_of(log_dir: Path) -> dict[str, Any]:
    return json.loads((log_dir / "owners" / "000001").read_text())


# ------------------------------------------------------------------------------ on one machine


@pytest.mark.process
def test_a_driver_keeps_others_out_until_it_is_dead(tmp_path: Path, clock: Clock) -> None:
    """The kernel reports a stopped process as alive and a zombie as dead, so that no driver waits for heartbeats."""
    process = start_driver(DRIVER, str(tmp_path))
    try:
        assert process.stdout.readline() == "open\n"
        with refused(LogOwned, "output", value=str(tmp_path)):
            EvaluationLog.open(tmp_path)
        process.stdin.write("1 2\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        os.kill(process.pid, signal.SIGSTOP)
        with refused(LogOwned, "output", value=str(tmp_path)):
            EvaluationLog.open(tmp_path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        log = EvaluationLog.open(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert log.begin(make_manifest()).rows["index"].tolist() == [1, 2]
    log.close()
    assert [claim.epoch for claim in read_claims(LocalStorage(tmp_path))] == [1, 2]
    assert clock.now == 0


@pytest.mark.parametrize("changes", [{}, {"pid": 1}, {"released": True, "machine": "another boot"}])
def test_a_process_number_alone_is_nobody(storage: Storage, changes: dict[str, Any], clock: Clock) -> None:
    """A number that no process has, or another process has by now, or whose owner let go, keeps nobody out."""
    make_claim(storage, **changes)
    assert take_ownership(storage).epoch == 2
    assert clock.now == 0


def test_the_same_process_may_not_write_twice(tmp_path: Path) -> None:
    """A log that is open in this process is open; a closed one is free at once."""
    log = EvaluationLog.open(tmp_path)
    with refused(LogOwned, "output", value=str(tmp_path)):
        EvaluationLog.open(tmp_path)
    log.close()
    EvaluationLog.open(tmp_path).close()


def test_of_racing_drivers_exactly_one_wins(storage: Storage) -> None:
    """Whoever passes the same listing at once, and whether the log is new, or a dead driver's."""
    for number in range(10):
        barrier, outcomes = threading.Barrier(8), []

        def race(barrier: threading.Barrier = barrier, outcomes: list[Any] = outcomes) -> None:
            barrier.wait()
            try:
                outcomes.append(take_ownership(storage))
            except LogOwned:
                outcomes.append(None)

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = filter(None, outcomes)
        assert winner.epoch == number + 1
        winner.check()
        winner.release(0)


def test_an_upload_whose_answer_was_lost_is_ones_own() -> None:
    """The store refuses the repeated upload, since the first one had arrived."""
    storage = ObjectStorage(MemoryStore(), "memory://")
    assert storage.create("owners/000001", b"me")
    assert storage.create("owners/000001", b"me")
    assert not storage.create("owners/000001", b"you")
    assert storage.read("owners/000001") == b"me"


# ------------------------------------------------------------------------------ from another machine


@pytest.fixture
def elsewhere(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> ownership.Ownership:
    """A driver that this machine cannot ask."""
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "machine_id", lambda: "another boot")
        return take_ownership(storage)


def test_a_heart_that_beats_elsewhere_keeps_others_out(
    storage: Storage, elsewhere: ownership.Ownership, clock: Clock
) -> None:
    """A driver that cannot be asked is alive when its claim changes."""
    clock.on_sleep = lambda: clock.now > ownership.BEAT_SECONDS and elsewhere.beat(7)
    with refused(LogOwned, "output", value=storage.label):
        take_ownership(storage)
    elsewhere.check()


@pytest.mark.parametrize("text", ["", '{"epoch": 1', "{}", None])
def test_a_claim_that_stands_still_is_taken_over(
    storage: Storage, elsewhere: ownership.Ownership, clock: Clock, text: str | None
) -> None:
    """Also one that its driver did not finish writing; and that driver, if it was only asleep, is told."""
    if text is not None:
        storage.write("owners/000001", text.encode())
    assert take_ownership(storage).epoch == 2
    assert ownership.MISSED_BEATS * ownership.BEAT_SECONDS <= clock.now < 20
    for call in (elsewhere.check, lambda: elsewhere.beat(1), lambda: elsewhere.release(1)):
        with refused(LogFenced, "output"):
            call()


def test_a_released_claim_is_taken_over_at_once(storage: Storage, elsewhere: ownership.Ownership, clock: Clock) -> None:
    """It holds how many segments there were."""
    elsewhere.beat(3)
    elsewhere.release(4)
    take_ownership(storage)
    claims = read_claims(storage)
    assert [(claim.epoch, claim.segments, claim.released) for claim in claims] == [(1, 4, True), (2, 0, False)]
    assert clock.now == 0


def test_a_store_that_lets_two_create_one_claim_is_found_out(storage: Storage, elsewhere: ownership.Ownership) -> None:
    """The one whose claim was overwritten is told at its next heartbeat, and leaves the other's claim alone."""
    make_claim(storage, token="other")
    with refused(LogFenced, "output"):
        elsewhere.beat(1)
    assert read_claims(storage)[0].token == "other"


# ------------------------------------------------------------------------------ the writer


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EvaluationLog]:
    """A driver that is asleep, and was taken for dead."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 1000.0)
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    log.append(make_batch([1, 2]))
    log.flush(20)
    make_claim(LocalStorage(tmp_path))
    yield log
    log.close()


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_driver_that_wakes_up_late_writes_nothing(tmp_path: Path, late: EvaluationLog) -> None:
    """It finds the newer claim before its next write, and its batch is nowhere."""
    log = EvaluationLog.open(tmp_path)
    assert log.begin(make_manifest()).rows["index"].tolist() == [1, 2]
    before = files_of(tmp_path)
    late.append(make_batch([3]))
    with refused(LogFenced, "output"):
        late.flush(20)
    late.close()
    assert files_of(tmp_path) == before
    log.append(make_batch([3]))
    log.flush(20)
    log.close()
    assert read_log(tmp_path).rows["index"].tolist() == [1, 2, 3]


def test_what_a_fenced_driver_wrote_late_is_compared(tmp_path: Path, late: EvaluationLog) -> None:
    """A write that was under way when the log changed hands lands; each index still counts once."""
    late._owner.check = lambda: None  # type: ignore[method-assign]
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    for one, indices in ((log, [3, 4]), (late, [4, 5])):
        one.append(make_batch(indices))
        one.flush(10)
    log.close()
    contents = read_log(tmp_path)
    assert sorted(contents.rows["index"]) == [1, 2, 3, 4, 5]
    assert contents.mismatches == ()


def test_an_idle_driver_notices_that_it_was_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat looks at the claims too, so a driver with nothing to write learns of it as well."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.02)
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    LocalStorage(tmp_path).create("owners/000002", b"{}")
    log._thread.join(20)
    with refused(LogFenced, "output"):
        log.poll()
    log.close()


def test_the_heart_beats_while_writes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a while does not make a driver look dead."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.02, 0.02))
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    write = LocalStorage.write

    def failing(self: LocalStorage, name: str, data: bytes) -> None:
        if name.startswith("segments"):
            raise OSError("no room")
        write(self, name, data)

    monkeypatch.setattr(LocalStorage, "write", failing)
    log.append(make_batch([1]))
    with refused(LogError, "output"):
        log.flush(20)
    assert claim_of(tmp_path)["beat"] >= 3
    log.close()
    assert claim_of(tmp_path)["released"] is True
