"""The same log on an object store: a local server speaks S3, and pyarrow speaks to it as to the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rl_eval.errors import ConfigError, LogError, LogMismatch, LogOwned
from rl_eval.log import EvaluationLog, ownership, read_log, storage
from rl_eval.log.storage import open_storage
from tests.unit.log_world import make_batch, make_fault, make_manifest, make_rows, start_driver

pytest.importorskip("moto.server", reason="needs moto[server], which the test extra brings")

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""

DRIVER = """
import rl_eval.log.storage as storage
storage.SETTLE_SECONDS = 0.1
log = EvaluationLog.open(sys.argv[1])
log.begin(make_manifest())
for line in sys.stdin:
    log.append(make_batch(map(int, line.split()), (make_fault(int(line.split()[0])),)))
    log.flush(20)
    print(*[index for batch in log.poll() for index in batch.rows["index"]], flush=True)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a fresh S3 server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        host, port = process.stdout.readline().split()
        yield f"{host.replace('0.0.0.0', '127.0.0.1')}:{port}"
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


@pytest.fixture
def uri(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of a run folder in a bucket of its own."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(storage, "SETTLE_SECONDS", 0.1)
    query = f"scheme=http&endpoint_override={server}&region=us-east-1"
    from pyarrow import fs

    bucket = f"bucket{abs(hash(request.node.name))}"
    made, path = fs.FileSystem.from_uri(f"s3://me:secret@{bucket}?{query}&allow_bucket_creation=true")
    made.create_dir(path)
    return f"s3://me:secret@{bucket}/runs/one?{query}"


def write_log(uri: str, *batches) -> None:
    log = EvaluationLog.open(uri)
    log.begin(make_manifest())
    for batch in batches:
        log.append(batch)
        log.flush(20)
    log.close()


def segments(uri: str) -> list[str]:
    return open_storage(uri).names("segments")


def test_run_kill_continue(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed driver's log is taken over at once, holds what was announced, and is continued to the end."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 1000.0)
    first = start_driver(DRIVER, uri)
    try:
        for line in ("0 1 2", "4 3"):
            first.stdin.write(f"{line}\n")
            first.stdin.flush()
            assert first.stdout.readline() == f"{line}\n"
        with pytest.raises(LogOwned, match=rf"^s3://\*\*\*@bucket.* is being written by process {first.pid} on"):
            EvaluationLog.open(uri)
    finally:
        first.kill()
        first.wait()
        first.stdin.close()
        first.stdout.close()
    log = EvaluationLog.open(uri)
    assert log.begin(make_manifest()).rows["index"].tolist() == [0, 1, 2, 4, 3]
    log.append(make_batch([5]))
    log.flush(20)
    log.close()
    contents = read_log(uri)
    assert contents.rows.tobytes() == make_rows([0, 1, 2, 4, 3, 5]).tobytes()
    assert contents.faults == (make_fault(0), make_fault(4))
    assert contents.totals["env_steps"] == 6
    assert [segment[:15] for segment in segments(uri)] == [
        "000001-00000001", "000001-00000002", "000001-00000003", "000001-00000004", "000002-00000001",
    ]  # fmt: skip


def test_another_machine_watches_the_heart(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim of a driver that cannot be asked is taken over when it stands still, not before."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.3)
    log = EvaluationLog.open(uri)
    monkeypatch.setattr(ownership, "_machine", lambda: "another boot")
    with pytest.raises(LogOwned):
        EvaluationLog.open(uri)
    log._storage.write = None  # type: ignore[method-assign]  The driver dies.
    log._thread.join(20)
    started = time.monotonic()
    EvaluationLog.open(uri).close()
    assert time.monotonic() - started >= 0.9


@pytest.mark.parametrize("damage", ["deleted", "truncated", "flipped"])
def test_damage(uri: str, damage: str) -> None:
    """A damaged object is named without its credentials, set aside by the next run, and its episodes run again."""
    write_log(uri, make_batch([0, 1]), make_batch([2]), make_batch([3]))
    files = open_storage(uri)
    victim = f"segments/{segments(uri)[1]}"
    data = bytearray(files.read(victim))
    data[len(data) // 2] ^= 4
    if damage == "deleted":
        files._fs.delete_file(files._path(victim))
    else:
        files.write(victim, bytes(data) if damage == "flipped" else bytes(data[:-9]))
    with pytest.raises(LogError, match=r"^s3://\*\*\*@bucket.*000001-00000002.* is damaged") as caught:
        read_log(uri)
    assert "secret" not in str(caught.value)
    log = EvaluationLog.open(uri)
    contents = log.begin(make_manifest())
    assert contents.rows["index"].tolist() == [0, 1, 3]
    assert len(contents.damaged) == 1
    log.append(make_batch([2]))
    log.flush(20)
    log.close()
    assert read_log(uri).rows.tobytes() == make_rows([0, 1, 3, 2]).tobytes()


def test_another_evaluation_is_refused(uri: str) -> None:
    """As on a disk."""
    write_log(uri, make_batch([0]))
    log = EvaluationLog.open(uri)
    with pytest.raises(LogMismatch, match="seed: 0 -> 7"):
        log.begin(make_manifest(seed=7))
    log.close()


def test_what_cannot_be_used_is_refused(uri: str) -> None:
    """No log, no bucket: the message names the place and the reason."""
    with pytest.raises(LogError, match="holds no evaluation log"):
        read_log(uri)
    with pytest.raises(ConfigError, match=r"run_dir s3://\*\*\*@nobucket/.* cannot be used: .*NO_SUCH_BUCKET"):
        EvaluationLog.open("s3://me:secret@nobucket/" + uri.partition("/runs/")[2])


def test_the_writer_ends_before_the_process_does(uri: str) -> None:
    """A driver that forgets to close its log ends all the same, without a crash in pyarrow's own exit."""
    script = """
import rl_eval.log.storage as storage
storage.SETTLE_SECONDS = 0.1
log = EvaluationLog.open(sys.argv[1])
log.begin(make_manifest())
log.append(make_batch([0]))
"""
    process = start_driver(script, uri)
    process.stdin.close()
    process.stdout.close()
    assert process.wait(60) == os.EX_OK
