"""Who may write an evaluation log: one live driver, the next one after its death, and no late riser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_eval.errors import LogError, LogFenced, LogOwned
from rl_eval.log import EvaluationLog, ownership, read_log, storage, writer
from rl_eval.log.ownership import Claim, read_claims, take_ownership
from rl_eval.log.storage import LocalStorage, RemoteStorage, open_storage
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

OTHER_MACHINE = "import rl_eval.log.ownership as o; o._machine = lambda: 'another boot'; o.BEAT_SECONDS = 0.2\n"


@pytest.fixture
def drivers() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test starts; none survives it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def start(drivers: list[subprocess.Popen[str]], script: str, run_dir: Path) -> subprocess.Popen[str]:
    """Start a driver and wait until it has the log."""
    drivers.append(start_driver(script, str(run_dir)))
    assert drivers[-1].stdout.readline() == "open\n"
    return drivers[-1]


def tell(process: subprocess.Popen[str], text: str) -> None:
    process.stdin.write(text + "\n")
    process.stdin.flush()


def claim_of(run_dir: Path, epoch: int = 1) -> dict[str, Any]:
    return json.loads((run_dir / "owners" / f"{epoch:06d}").read_text())


def make_claim(run_dir: Path, **changes: Any) -> None:
    """Write the claim of a driver of this machine that never was."""
    fields: dict[str, Any] = {
        "epoch": 1, "host": "elsewhere", "pid": 2**22 + 1, "process": "12", "machine": ownership._machine(),
        "since": "then",
    }  # fmt: skip
    path = run_dir / "owners" / "000001"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields | changes))


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearts that beat five times a second."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.2)


# ------------------------------------------------------------------------------ on one machine


def test_a_second_driver_is_refused(tmp_path: Path, drivers: list[subprocess.Popen[str]]) -> None:
    """The message names process, host and time, and what to do; the first driver goes on undisturbed."""
    first = start(drivers, DRIVER, tmp_path)
    with pytest.raises(LogOwned, match=rf"is being written by process {first.pid} on .*, since 20.*: wait .*--run-dir"):
        EvaluationLog.open(tmp_path)
    tell(first, "1 2")
    assert first.stdout.readline() == "done\n"
    assert read_log(tmp_path).rows["index"].tolist() == [1, 2]


def test_a_stopped_driver_is_alive(tmp_path: Path, drivers: list[subprocess.Popen[str]]) -> None:
    """On its own machine the kernel knows better than a heart that does not beat."""
    first = start(drivers, DRIVER, tmp_path)
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(LogOwned, match=f"process {first.pid}"):
        EvaluationLog.open(tmp_path)


def test_the_log_of_a_killed_driver_is_taken_over_at_once(
    tmp_path: Path, drivers: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for heartbeats of a process that the kernel says is gone; a zombie is gone."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 1000.0)
    first = start(drivers, DRIVER, tmp_path)
    tell(first, "1 2")
    first.stdout.readline()
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    log = EvaluationLog.open(tmp_path)
    assert log.begin(make_manifest()).rows["index"].tolist() == [1, 2]
    log.close()
    assert [claim.epoch for claim in read_claims(open_storage(tmp_path))] == [1, 2]


@pytest.mark.parametrize("changes", [{}, {"pid": 1}, {"released": True, "machine": "another boot"}])
def test_a_process_number_alone_is_nobody(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that no process has, or another process has by now, or whose owner let go, keeps nobody out."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 1000.0)
    make_claim(tmp_path, **changes)
    EvaluationLog.open(tmp_path).close()


def test_the_same_process_may_not_write_twice(tmp_path: Path) -> None:
    """A log that is open in this process is open."""
    log = EvaluationLog.open(tmp_path)
    with pytest.raises(LogOwned, match=f"process {os.getpid()}"):
        EvaluationLog.open(tmp_path)
    log.close()
    EvaluationLog.open(tmp_path).close()


RACER = """
sys.stdin.readline()
try:
    log = EvaluationLog.open(sys.argv[1])
    print("won", flush=True)
except Exception as error:
    print(type(error).__name__, flush=True)
sys.stdin.readline()
"""


def test_of_racing_drivers_exactly_one_wins(tmp_path: Path, drivers: list[subprocess.Popen[str]]) -> None:
    """Whoever loses is told so; a dead driver's log is taken over by one only."""
    make_claim(tmp_path)
    drivers += [start_driver(RACER, str(tmp_path)) for _ in range(6)]
    for process in drivers:
        tell(process, "go")
    heard = sorted(process.stdout.readline().strip() for process in drivers)
    assert heard == ["LogOwned"] * 5 + ["won"]


def test_many_racers_in_one_moment(tmp_path: Path) -> None:
    """Threads that pass the same listing at once: still one."""
    for round_number in range(20):
        run_dir, barrier, outcomes = tmp_path / str(round_number), threading.Barrier(8), []

        def race(run_dir: Path = run_dir, barrier: threading.Barrier = barrier, outcomes: list[str] = outcomes) -> None:
            barrier.wait()
            try:
                take_ownership(LocalStorage(run_dir))
                outcomes.append("won")
            except LogOwned:
                outcomes.append("lost")

        threads = [threading.Thread(target=race) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["lost"] * 7 + ["won"]


# ------------------------------------------------------------------------------ from another machine


@pytest.mark.usefixtures("fast_beats")
def test_a_heart_that_beats_elsewhere_keeps_others_out(tmp_path: Path, drivers: list[subprocess.Popen[str]]) -> None:
    """A driver that cannot be asked is alive when its claim changes."""
    first = start(drivers, OTHER_MACHINE + DRIVER, tmp_path)
    with pytest.raises(LogOwned, match=f"process {first.pid}"):
        EvaluationLog.open(tmp_path)


@pytest.mark.usefixtures("fast_beats")
@pytest.mark.parametrize("text", ["", '{"epoch": 1', "{}", None])
def test_a_claim_that_stands_still_is_taken_over(tmp_path: Path, text: str | None) -> None:
    """Also one that its driver did not finish writing; whatever the clocks say."""
    make_claim(tmp_path, machine="another boot", since="2999-01-01T00:00:00+00:00")
    if text is not None:
        (tmp_path / "owners" / "000001").write_text(text)
    started = time.monotonic()
    EvaluationLog.open(tmp_path).close()
    assert time.monotonic() - started >= ownership.MISSED_BEATS * ownership.BEAT_SECONDS


LATE = (
    OTHER_MACHINE
    + """
log = EvaluationLog.open(sys.argv[1])
log.begin(make_manifest())
print("open", flush=True)
for line in sys.stdin:
    log.append(make_batch(map(int, line.split())))
    try:
        log.flush(20)
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
        log.close()
"""
)


def files_of(folder: Path) -> list[Path]:
    """Return the files that stay: a heartbeat is written under another name first."""
    return sorted(path for path in folder.rglob("*") if not path.name.startswith(".rl_eval-tmp."))


@pytest.mark.usefixtures("fast_beats")
def test_a_driver_that_wakes_up_late_writes_nothing(tmp_path: Path, drivers: list[subprocess.Popen[str]]) -> None:
    """Stopped, taken over from another machine, and woken: it finds the newer claim, and its batch is nowhere."""
    late = start(drivers, LATE, tmp_path)
    tell(late, "1 2")
    late.stdout.readline()
    os.kill(late.pid, signal.SIGSTOP)
    tell(late, "3")
    log = EvaluationLog.open(tmp_path)
    assert log.begin(make_manifest()).rows["index"].tolist() == [1, 2]
    before = files_of(tmp_path)
    os.kill(late.pid, signal.SIGCONT)
    heard = late.stdout.readline()
    assert heard.startswith("LogFenced ")
    assert f"was taken over by process {os.getpid()}" in heard
    late.stdin.close()
    late.wait(20)
    assert files_of(tmp_path) == before
    assert claim_of(tmp_path)["released"] is False
    log.append(make_batch([3]))
    log.flush(20)
    log.close()
    assert read_log(tmp_path).rows["index"].tolist() == [1, 2, 3]


@pytest.mark.usefixtures("fast_beats")
def test_an_idle_driver_notices_that_it_was_replaced(tmp_path: Path) -> None:
    """The heartbeat looks at the claims too, so a driver with nothing to write learns of it as well."""
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    LocalStorage(tmp_path).create("owners/000002", b"{}")
    log._thread.join(20)
    with pytest.raises(LogFenced, match="taken over by another driver"):
        log.poll()
    log.append(make_batch([1]))
    with pytest.raises(LogFenced, match="it writes nothing more"):
        log.flush(10)
    log.close()
    assert not (tmp_path / "segments").exists()


@pytest.mark.usefixtures("fast_beats")
def test_what_a_fenced_driver_wrote_late_is_compared(tmp_path: Path) -> None:
    """A write that was under way when the log changed hands lands; each index still counts once."""
    late = EvaluationLog.open(tmp_path)
    late.begin(make_manifest())
    make_claim(tmp_path)  # Its driver seems dead.
    late._owner.check = lambda: None  # type: ignore[method-assign]
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    log.append(make_batch([1, 2]))
    log.flush(10)
    late.append(make_batch([2, 3]))
    late.flush(10)
    for one in (log, late):
        one.close()
    contents = read_log(tmp_path)
    assert sorted(contents.rows["index"]) == [1, 2, 3]
    assert contents.mismatches == ()


@pytest.mark.usefixtures("fast_beats")
def test_the_heart_beats_while_writes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a while does not make a driver look dead."""
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    write = LocalStorage.write

    def failing(self: LocalStorage, name: str, data: bytes) -> None:
        if name.startswith("segments"):
            raise OSError("no room")
        write(self, name, data)

    monkeypatch.setattr(LocalStorage, "write", failing)
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.1, 0.1))
    log.append(make_batch([1]))
    with pytest.raises(LogError, match="no room"):
        log.flush(20)
    assert claim_of(tmp_path)["beat"] >= 3
    log.close()
    assert claim_of(tmp_path)["released"] is True


# ------------------------------------------------------------------------------ without exclusive creation


class Bucket:
    """Objects in memory, behind the part of ``pyarrow.fs`` that a remote storage uses."""

    type_name = "s3"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.before_put: list[Any] = []

    def open_output_stream(self, path: str) -> Any:
        bucket = self

        class Stream:
            def write(self, data: bytes) -> None:
                self.data = data

            def close(self) -> None:
                if bucket.before_put:
                    bucket.before_put.pop()()
                bucket.objects[path] = self.data

        return Stream()

    def open_input_file(self, path: str) -> Any:
        import io

        if path not in self.objects:
            raise FileNotFoundError(path)
        return io.BytesIO(self.objects[path])

    def get_file_info(self, selector: Any) -> list[Any]:
        from pyarrow import fs

        return [
            fs.FileInfo(path, fs.FileType.File)
            for path in list(self.objects)
            if path.rpartition("/")[0] == selector.base_dir
        ]

    def delete_file(self, path: str) -> None:
        del self.objects[path]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setattr(storage, "SETTLE_SECONDS", 0.2)
    return Bucket()


def test_racers_on_an_object_store_settle_who_wins(bucket: Bucket) -> None:
    """All write a claim, wait, and look: the first counts, the others leave no trace."""
    outcomes, barrier = [], threading.Barrier(6)

    def race() -> None:
        barrier.wait()
        try:
            outcomes.append(take_ownership(RemoteStorage(bucket, "b/run", "s3://b/run")))
        except LogOwned:
            outcomes.append(None)

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [owner for owner in outcomes if owner]
    assert len(winners) == 1
    winners[0].check()
    assert len(bucket.objects) == 1


def test_a_racer_that_was_held_up_for_long_leaves_one_owner(bucket: Bucket) -> None:
    """Its claim lands after the other looked and won. It began first, so it stays, and the other is told."""
    other = []

    def overtake() -> None:
        time.sleep(0.01)
        other.append(take_ownership(RemoteStorage(bucket, "b/run", "s3://b/run")))

    bucket.before_put.append(overtake)
    held_up = take_ownership(RemoteStorage(bucket, "b/run", "s3://b/run"))
    held_up.check()
    with pytest.raises(LogFenced):
        other[0].check()


def test_claims_are_released_on_an_object_store(bucket: Bucket) -> None:
    """A released claim is taken over at once, by the next number."""
    first = take_ownership(RemoteStorage(bucket, "b/run", "s3://b/run"))
    first.beat(3)
    first.release(4)
    second = take_ownership(RemoteStorage(bucket, "b/run", "s3://b/run"))
    assert second.epoch == 2
    claims = read_claims(RemoteStorage(bucket, "b/run", "s3://b/run"))
    assert [(claim.epoch, claim.segments, claim.released) for claim in claims] == [(1, 4, True), (2, 0, False)]
    assert isinstance(claims[0], Claim)
    with pytest.raises(LogFenced):
        first.beat(5)
