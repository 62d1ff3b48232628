"""The same log on an object store: a local server speaks S3, and the log speaks to it as to the real one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_eval.errors import ConfigError, LogError, LogMismatch, LogOwned
from rl_eval.log import EvaluationLog, ownership, read_log
from rl_eval.log.storage import LocalStorage, ObjectStorage, Storage, open_storage
from tests.refused import refused
from tests.unit.log_world import make_batch, make_fault, make_manifest, make_rows, start_driver

server = pytest.importorskip("moto.server", reason="needs moto[server], which the test extra brings")

DRIVER = """
log = EvaluationLog.open(sys.argv[1])
log.begin(make_manifest())
for line in sys.stdin:
    log.append(make_batch(map(int, line.split()), (make_fault(int(line.split()[0])),)))
    log.flush(20)
    print(*[index for batch in log.poll() for index in batch.rows["index"]], flush=True)
log.append(make_batch([9]))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """Address of a fresh S3 server."""
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    yield "{}:{}".format(*moto.get_host_and_port())
    moto.stop()


@pytest.fixture
def uri(host: str, request: pytest.FixtureRequest) -> str:
    """URI of a run folder in a bucket of its own."""
    import boto3

    bucket = f"bucket{abs(hash(request.node.name))}"
    keys = {"aws_access_key_id": "me", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://{host}", **keys).create_bucket(Bucket=bucket)
    return f"s3://me:secret@{bucket}/runs/one?scheme=http&endpoint_override={host}&region=us-east-1"


@pytest.fixture(params=["disk", "S3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "disk" else open_storage(request.getfixturevalue("uri"))


def test_files_of_a_disk_and_of_a_store_are_alike(storage: Storage) -> None:
    """Names of one folder, whole contents, a later write over an earlier one, moves over another file."""
    assert storage.names("") == storage.names("segments") == []
    with pytest.raises(FileNotFoundError, match="segments/a"):
        storage.read("segments/a")
    for name, data in (("segments/b", b"1"), ("segments/a", b""), ("segments/deep/c", b"3"), ("top", b"4")):
        storage.write(name, data)
    storage.write("segments/b", b"2")
    assert [name for name in storage.names("") if name != "segments"] == ["top"]
    assert [name for name in storage.names("segments") if name != "deep"] == ["a", "b"]
    assert (storage.read("segments/a"), storage.read("segments/b")) == (b"", b"2")
    storage.move("segments/b", "top")
    assert (storage.read("top"), "b" in storage.names("segments")) == (b"2", False)
    storage.sweep("segments")
    assert "a" in storage.names("segments")


def test_of_many_that_create_a_file_one_succeeds(storage: Storage) -> None:
    """The disk, or the store, decides; whoever comes later changes nothing."""
    barrier, outcomes = threading.Barrier(8), []

    def create(data: bytes) -> None:
        barrier.wait()
        outcomes.append((storage.create("owners/000001", data), data))

    threads = [threading.Thread(target=create, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [data for created, data in outcomes if created]
    assert storage.read("owners/000001") == winner
    assert storage.names("owners") == ["000001"]
    assert not storage.create("owners/000001", b"late")


@pytest.mark.process
def test_run_kill_continue(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed driver's log is taken over at once, holds what was announced, and is continued to the end.

    The next driver forgets to close the log and ends all the same.
    """
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 1000.0)
    first = start_driver(DRIVER, uri)
    try:
        for line in ("0 1 2", "4 3"):
            first.stdin.write(f"{line}\n")
            first.stdin.flush()
            assert first.stdout.readline() == f"{line}\n"
        with refused(LogOwned, "output", value=open_storage(uri).label):
            EvaluationLog.open(uri)
    finally:
        first.kill()
        first.communicate()
    second = start_driver(DRIVER, uri)
    assert second.communicate("5\n", timeout=60)[0] == "5\n"
    assert second.returncode == os.EX_OK
    contents = read_log(uri)
    assert contents.rows.tobytes() == make_rows([0, 1, 2, 4, 3, 5]).tobytes()
    assert contents.faults == (make_fault(0), make_fault(4), make_fault(5))
    assert contents.totals["env_steps"] == 6
    assert [segment[:15] for segment in open_storage(uri).names("segments")] == [
        "000001-00000001", "000001-00000002", "000001-00000003", "000001-00000004",
        "000002-00000001", "000002-00000002",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["deleted", "flipped"])
def test_damage(uri: str, damage: str) -> None:
    """A damaged object is named without its credentials, set aside by the next run, and its episodes run again."""
    log = EvaluationLog.open(uri)
    log.begin(make_manifest())
    for indices in ([0, 1], [2], [3]):
        log.append(make_batch(indices))
        log.flush(20)
    log.close()
    files = open_storage(uri)
    victim = f"segments/{files.names('segments')[1]}"
    data = bytearray(files.read(victim))
    data[len(data) // 2] ^= 4
    key = victim.removeprefix("segments/")
    if damage == "deleted":
        key = f"{key[:15]}-...parquet"
        files.move(victim, "elsewhere")
    else:
        files.write(victim, bytes(data))
    with refused(LogError, key, value=files.label) as caught:
        read_log(uri)
    assert "secret" not in str(caught.value)
    log = EvaluationLog.open(uri)
    contents = log.begin(make_manifest())
    assert contents.rows["index"].tolist() == [0, 1, 3]
    assert len(contents.damaged) == 1
    with refused(LogMismatch, "output"):
        log.begin(make_manifest(seed=7))
    log.append(make_batch([2]))
    log.flush(20)
    log.close()
    assert read_log(uri).rows.tobytes() == make_rows([0, 1, 3, 2]).tobytes()


def test_what_cannot_be_used_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No log, no bucket, no such option, no package: the message names the place and the reason, and no secret."""
    with refused(LogError, "manifest.json"):
        read_log(uri)
    with refused(ConfigError, "output"):
        EvaluationLog.open("s3://me:secret@nobucket/" + uri.partition("/runs/")[2])
    with refused(ConfigError, "output") as caught:
        open_storage(f"{uri}&nosuch=hidden1")
    assert not {"secret", "hidden1"} & set(str(caught.value).replace("=", "@").split("@"))
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with refused(ConfigError, "output"):
        open_storage(uri)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="obstore takes credentials from boto3 on Python 3.11 and later")
def test_a_profile_of_the_user_gives_the_credentials(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither the URI nor the environment holds a key, and boto3 is installed."""
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = me\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    storage = open_storage(uri.replace("me:secret@", ""))
    assert isinstance(storage, ObjectStorage)
    assert storage.create("owners/000001", b"me")


@pytest.mark.parametrize("address", ["gs://bucket/runs/one", "abfs://container@account.dfs.core.windows.net/runs/one"])
def test_other_stores_are_known(address: str) -> None:
    """Their addresses are those of their own tools; nothing is asked before it is used."""
    storage = open_storage(address)
    assert isinstance(storage, ObjectStorage)
    assert storage._store.prefix == address.partition("://")[2].partition("/")[2]
