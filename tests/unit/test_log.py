"""What an evaluation log gives back, when it says that something is committed, and what it makes of damage."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_eval.atomic_write import temporary_name
from rl_eval.errors import ConfigError, LogError, LogMismatch
from rl_eval.log import EvaluationLog, LogContents, ownership, read_log, writer
from rl_eval.log.manifest import FORMAT
from rl_eval.log.segments import SegmentName, decode, encode, name_of
from rl_eval.log.storage import LocalStorage, open_storage
from rl_eval.records.episode import Batch, EpisodeTable, Pardon, set_aside_rows, used_attempts
from rl_eval.records.parquet import episode_columns, fault_columns, read_episodes, read_faults
from tests.refused import refused, untold
from tests.unit.log_world import NUM_EPISODES, make_batch, make_fault, make_infos, make_manifest, make_rows


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def write_log(log_dir: Path, *batches: Batch, **manifest: Any) -> LogContents:
    """Write a log in one session, one flush per batch; return what was there before."""
    with closing(EvaluationLog.open(log_dir)) as log:
        contents = log.begin(make_manifest(**manifest))
        for batch in batches:
            write(log, batch)
        return contents


def write(log: EvaluationLog, batch: Batch) -> None:
    log.append(batch)
    log.flush(10)


def segments(log_dir: Path, kind: str = "") -> list[Path]:
    return sorted(path for path in (log_dir / "segments").iterdir() if kind in path.name)


def assert_holds(contents, indices: list[int]) -> None:
    """The log holds these episodes, in this order, bit by bit."""
    assert contents.rows.tobytes() == make_rows(indices).tobytes()
    assert contents.infos.tobytes() == make_infos(indices).tobytes()


# ------------------------------------------------------------------------------ round trip


def test_what_was_written_comes_back(log_dir: Path) -> None:
    """Rows, infos, faults, totals, numerics and the manifest survive bit by bit, over several sessions."""
    faults = (make_fault(1), make_fault(4, attempt=2, charged=False, message="file \udcff", traceback=""))
    write_log(log_dir, make_batch([3, 1, 2], faults[:1]), make_batch([0], faults[1:]))
    write_log(log_dir, make_batch([9, 8]))
    contents = read_log(log_dir)
    assert_holds(contents, [3, 1, 2, 0, 9, 8])
    assert contents.faults == (faults[0], make_fault(4, attempt=2, charged=False, message="file \\udcff", traceback=""))
    assert contents.totals == {"env_steps": 6.0, "wall_seconds": 1.5}
    assert contents.numerics == {"isa": "AVX2"}
    assert contents.manifest == make_manifest()
    assert (contents.mismatches, contents.damaged) == ((), ())
    kinds = [SegmentName.parse(path.name).kind for path in segments(log_dir)]
    assert kinds == ["faults", "episodes"] * 2 + ["episodes"]  # An episode's faults are committed before it.


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 999), unique=True), st.integers(0, 5))
def test_a_segment_holds_any_rows_and_faults(indices: list[int], num_faults: int) -> None:
    """Encoding and decoding are inverse, for none as for many."""
    faults = tuple(make_fault(number, message="é" * number) for number in range(num_faults))
    files = encode([make_batch(indices, faults), make_batch([])], ("height", "x"), "me")
    assert [kind for kind, _ in files] == ["faults", "episodes"][num_faults == 0 :]
    decoded = [decode(name_of(data, 1, 2, kind), data) for kind, data in files]
    assert decoded[-1].rows.tobytes() == make_rows(indices).tobytes()
    assert decoded[-1].infos.tobytes() == make_infos(indices).tobytes()
    assert sum((segment.faults for segment in decoded), ()) == faults
    assert decoded[-1].header.totals == {"env_steps": float(len(indices)), "wall_seconds": 1.0}


def test_columns_come_back_from_tools_that_change_their_types() -> None:
    """A column that is null throughout, or dictionary-encoded, or of long strings, means the same."""
    columns = episode_columns(make_rows([1, 3]), make_infos([1, 3]), ("height", "x"))
    columns["outcome"] = columns["outcome"].dictionary_encode()
    columns["truncated_by"] = columns["truncated_by"].cast(pa.large_string())
    rows, _, keys = read_episodes(pa.table(columns))
    assert rows.tobytes() == make_rows([1, 3]).tobytes()
    assert keys == ("height", "x")
    columns["success_once"] = pa.nulls(2)
    assert read_episodes(pa.table(columns))[0]["success_once"].tolist() == [-1, -1]
    columns["outcome"] = pa.array(["completed", "exploded"])
    with pytest.raises(ValueError, match=r"outcome.*missing.*completed.*failed"):
        read_episodes(pa.table(columns))
    assert read_faults(pa.table(fault_columns(()))) == ()


def test_segments_are_tables_for_other_tools(log_dir: Path) -> None:
    """Pandas reads all episodes of a log from its folder: words for outcomes, null for what was not reported."""
    write_log(log_dir, make_batch([0, 1, 2]), make_batch([3], (make_fault(3),)))
    frame = pd.concat([pd.read_parquet(path) for path in segments(log_dir, "episodes")])
    assert frame["outcome"].tolist() == ["completed", "completed", "completed", "failed"]
    assert frame["info_height"].tolist() == [0, 1 / 3, 2 / 3, 1]
    assert frame["success_once"].isna().tolist() == [True, False, False, True]
    faults = pd.read_parquet(segments(log_dir, "faults")[0])
    assert faults["message"].tolist() == ["bad\nthing"]


def test_an_index_that_was_written_twice_counts_once(log_dir: Path) -> None:
    """The row that was written first counts; one that differs in its outcome is reported, other columns may differ."""
    again, other = make_batch([5, 2, 1]), make_batch([2])
    again.rows["step_seconds"] = 7
    again.rows["episode_return"][1] += 1e-9
    other.rows["attempts"] = 3
    write_log(log_dir, make_batch([2, 0, 1]))
    write_log(log_dir, again)
    write_log(log_dir, other)
    contents = read_log(log_dir)
    assert contents.rows["index"].tolist() == [2, 0, 1, 5]
    assert contents.rows[:3].tobytes() == make_rows([2, 0, 1]).tobytes()
    assert contents.infos.tobytes() == make_infos([2, 0, 1, 5]).tobytes()
    assert contents.mismatches == (2,)


def test_a_fault_that_happened_again_after_a_restart_counts_once(log_dir: Path) -> None:
    """The same end of the same attempt is one fault; a lost runner is another one each time, charged at last or not."""
    lost, charged = make_fault(5, cause="runner", charged=False), make_fault(5, cause="runner")
    more = make_fault(4, attempt=2), lost, lost, charged
    write_log(log_dir, make_batch([], (make_fault(4), lost)))
    write_log(log_dir, make_batch([], (make_fault(4, seconds=9.0), *more)))
    assert read_log(log_dir).faults == (make_fault(4), lost, *more)


def test_a_pardon_cancels_the_charged_fault_of_its_attempt(log_dir: Path) -> None:
    """Whether it was written with the fault or later. The fault of the log stays as it was written."""
    lost, charged, other = make_fault(5, charged=False), make_fault(5), make_fault(4)
    write_log(log_dir, make_batch([], (lost, charged, other)))
    write_log(log_dir, replace(make_batch([1]), pardons=(Pardon(5, 1, "excluded"), Pardon(4, 2, "another attempt"))))
    contents = read_log(log_dir)
    assert contents.faults == (lost, charged, other)
    table = EpisodeTable(NUM_EPISODES, ("height", "x"))
    table.fill(contents.rows, contents.infos, contents.faults, contents.pardons)
    assert table.faults == {5: [lost, replace(charged, charged=False, pardon="excluded")], 4: [other]}
    assert used_attempts(table) == ({5: 1, 4: 1}, {5: 1})


# ------------------------------------------------------------------------------ begin and continue


def test_a_run_continues_its_own_log(log_dir: Path) -> None:
    """Other settings that cannot change the result are no obstacle."""
    write_log(log_dir, make_batch([1]))
    contents = write_log(log_dir, config={"runners": {"num_runners": 7}}, provenance={})
    assert_holds(contents, [1])
    assert contents.manifest == make_manifest()


def test_another_evaluation_is_refused_with_the_difference(log_dir: Path) -> None:
    """Plan, identity, weights and info keys must be equal; the message shows only what differs, and the way out."""
    write_log(log_dir, make_batch([1]))
    other = {"environment": {"env": "CartPole-v1", "env_kwargs": {}}, "policy": "pkg:other"}
    with refused(LogMismatch, "output") as caught:
        write_log(log_dir, seed=1, identity=other, weights={"version": 9, "digest": "4567"}, info_keys=("height",))
    assert caught.value.differences.splitlines()[1:] == [
        "  seed: 0 -> 1",
        "  identity.environment.env_kwargs.g: 9.8 -> (absent)",
        '  identity.policy: "pkg:make" -> "pkg:other"',
        '  weights.digest: "0123" -> "4567"',
        '  info_keys: ["height", "x"] -> ["height"]',
    ]
    assert "--output" in caught.value.fix
    assert_holds(read_log(log_dir), [1])


def test_a_manifest_may_hold_what_json_changes(log_dir: Path) -> None:
    """Tuples, numbers as keys and objects are compared as they are written."""
    for _ in range(2):
        write_log(log_dir, identity={"sizes": (1, 2), "by_number": {2: "b", 10: "a"}, "path": Path("a")})
    assert read_log(log_dir).manifest.identity == {"sizes": [1, 2], "by_number": {"2": "b", "10": "a"}, "path": "a"}


def test_without_a_log_reading_says_so(log_dir: Path) -> None:
    """A folder that is absent, or holds something else, is no log."""
    for _ in range(2):
        with refused(LogError, "manifest.json"):
            read_log(log_dir)
        log_dir.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path / "file",
        lambda path: path / "file" / "below",
        lambda path: Path("/proc/rl_eval"),
        lambda path: "",
        lambda path: "nosuch://bucket/run",
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, make: Callable[[Path], str | Path]) -> None:
    """The message names the folder and the reason, and no password."""
    (tmp_path / "file").touch()
    with refused(ConfigError, "output") as caught:
        EvaluationLog.open(make(tmp_path))
    assert "secret" not in str(caught.value)
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)


# ------------------------------------------------------------------------------ commit


@pytest.fixture
def log(log_dir: Path) -> Iterator[EvaluationLog]:
    log = EvaluationLog.open(log_dir)
    log.begin(make_manifest())
    yield log
    log.close()
    assert "rl_eval-log" not in [thread.name for thread in threading.enumerate()]


def wait_for_batches(log: EvaluationLog, count: int) -> list[Batch]:
    """Poll until so many batches were announced."""
    got: list[Batch] = []
    pause = threading.Event()
    while len(got) < count:
        got += log.poll()
        pause.wait(0.01)
    return got


def test_batches_are_announced_in_order_when_they_are_in_the_log(
    log_dir: Path, log: EvaluationLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any call of flush the writer commits when it is due, and polling returns the very batches."""
    monkeypatch.setattr(writer, "FLUSH_SECONDS", (0.05, 0.1))
    batches = [make_batch([number]) for number in range(20)]
    for batch in batches[:10]:
        log.append(batch)
    got = wait_for_batches(log, 10)
    assert all(a is b for a, b in zip(got, batches, strict=False))
    assert_holds(read_log(log_dir), list(range(10)))
    for batch in batches[10:]:
        log.append(batch)
    got += wait_for_batches(log, 10)
    assert got == batches
    assert log.poll() == []


def test_nothing_is_announced_before_it_is_written(
    log_dir: Path, log: EvaluationLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a write is under way nobody hears of its episodes; appending does not wait for it."""
    entered, proceed = threading.Event(), threading.Event()
    write = LocalStorage.write

    def slow(self: LocalStorage, name: str, data: bytes) -> None:
        if name.startswith("segments"):
            entered.set()
            assert proceed.wait(20)
        write(self, name, data)

    monkeypatch.setattr(LocalStorage, "write", slow)
    log.append(make_batch([1]))
    flushing = threading.Thread(target=log.flush, args=(20,))
    flushing.start()
    assert entered.wait(10)
    log.append(make_batch([2]))
    assert log.poll() == []
    assert read_log(log_dir).rows.size == 0
    with refused(LogError, "output"):
        log.flush(0.05)
    proceed.set()
    flushing.join()
    log.flush(20)
    assert [batch.rows["index"].tolist() for batch in log.poll()] == [[1], [2]]


def test_closing_drops_what_was_not_flushed(log_dir: Path, log: EvaluationLog) -> None:
    """Closing twice is closing once; a flush after it says why it cannot."""
    write(log, make_batch([1]))
    log.append(make_batch([2]))
    log.close()
    log.close()
    with refused(LogError, "output"):
        log.flush(1)
    assert_holds(read_log(log_dir), [1])


def test_the_flush_interval_grows_with_the_age_of_the_session(log: EvaluationLog) -> None:
    """One second at first, five per cent of the age later, half a minute at last."""
    log.append(make_batch([1]))
    opened = log._opened
    intervals = []
    for age in (0, 10, 100, 400, 10_000):
        log._flushed_at = opened + age
        intervals.append(log._flush_due() - log._flushed_at)
    assert intervals == pytest.approx([1, 1, 5, 20, 30])
    log._flushed_at = opened


def test_flushing_inside_of_an_interrupted_append_does_not_block(log: EvaluationLog) -> None:
    """A signal handler may flush while the thread that it interrupted holds the lock of the log."""
    with log._changed:
        write(log, make_batch([1]))
    assert len(log.poll()) == 1


# ------------------------------------------------------------------------------ failing writes


def fail_writes(monkeypatch: pytest.MonkeyPatch, error: OSError, times: float) -> list[str]:
    """Let the next writes of segments fail; return the names that were tried."""
    write, tried = LocalStorage.write, []

    def failing(self: LocalStorage, name: str, data: bytes) -> None:
        if name.startswith("segments"):
            tried.append(name)
            if len(tried) <= times:
                raise error
        write(self, name, data)

    monkeypatch.setattr(LocalStorage, "write", failing)
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.001, 0.01))
    return tried


def test_a_write_that_fails_for_a_while_is_tried_again(
    log_dir: Path, log: EvaluationLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes go under the same name, faults are not written twice, and later batches wait their turn."""
    tried = fail_writes(monkeypatch, OSError(errno.EIO, os.strerror(errno.EIO)), 3)
    write(log, make_batch([1], (make_fault(1),)))
    write(log, make_batch([2]))
    assert len(set(tried)) == 3
    assert len(tried) == 6
    contents = read_log(log_dir)
    assert_holds(contents, [1, 2])
    assert contents.faults == (make_fault(1),)


def test_a_full_disk_ends_in_an_error_with_the_words_of_the_system(
    log_dir: Path, log: EvaluationLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a warning and the retries the log gives up, says so to whoever asks, and holds what it had announced."""
    write(log, make_batch([1]))
    tried = fail_writes(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), float("inf"))
    log.append(make_batch([2]))
    for _ in range(2):
        with refused(LogError, "output") as caught:
            log.flush(10)
        assert os.strerror(errno.ENOSPC) in str(caught.value)
    assert len(tried) == 1 + writer.RETRIES
    [warned] = [one for one in caplog.records if one.levelname == "WARNING"]
    assert os.strerror(errno.ENOSPC) in warned.getMessage()
    assert len(log.poll()) == 1
    with refused(LogError, "output"):
        log.poll()
    monkeypatch.undo()
    assert_holds(read_log(log_dir), [1])


def test_who_flushes_does_not_wait_for_the_next_retry(log: EvaluationLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was told to end tries at once, however long the back-off is; the last failure's reason is said."""
    fail_writes(monkeypatch, OSError(errno.EIO, os.strerror(errno.EIO)), 1)
    monkeypatch.setattr(writer, "RETRY_SECONDS", (1000, 1000))
    log.append(make_batch([2]))
    with refused(LogError, "output"):
        log.flush(0.1)
    log.flush(10)
    assert len(log.poll()) == 1


def test_rows_that_cannot_be_written_are_no_silence(log: EvaluationLog) -> None:
    """Whatever ends the writer, the driver hears of it."""
    batch = make_batch([1])
    batch.rows["outcome"] = 77
    with refused(LogError, "output"):
        write(log, batch)


def test_a_folder_that_is_removed_under_a_run_ends_it(log_dir: Path, log: EvaluationLog) -> None:
    """Nothing is written into a folder that does not hold the claim any more."""
    shutil.rmtree(log_dir)
    with refused(LogError, "output", value=str(log_dir)):
        write(log, make_batch([1]))
    assert not log_dir.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount file systems")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.process
def test_a_disk_without_room_for_a_claim(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is not the caller's mistake, and leaves nothing that the next driver would have to wait for."""
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 1000.0)
    log_dir = small_disk / "run"
    write_log(log_dir, make_batch([1]))
    ballast = small_disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    with refused(LogError, "output"):
        EvaluationLog.open(log_dir)
    ballast.unlink()
    write_log(log_dir, make_batch([2]))
    assert_holds(read_log(log_dir), [1, 2])


@pytest.mark.process
def test_a_file_system_that_is_read_only(small_disk: Path) -> None:
    """Reading works; writing is refused at once, by name."""
    log_dir = small_disk / "run"
    write_log(log_dir, make_batch([1]))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert_holds(read_log(log_dir), [1])
    with refused(ConfigError, "output"):
        EvaluationLog.open(log_dir)


def test_a_limit_on_file_sizes_is_an_error(log_dir: Path, log: EvaluationLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is cut short by the system leaves nothing under the segment's name."""
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.001, 0.01))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with refused(LogError, "output"):
            write(log, make_batch([1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(read_log(log_dir), [])


# ------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("damage", ["deleted", "cut"])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_damaged_segment_is_noticed_and_its_episodes_run_again(log_dir: Path, damage: str, position: int) -> None:
    """Reading names the file and the way out; continuing sets it aside; what remains is right."""
    write_log(log_dir, make_batch([0, 1]), make_batch([2, 3], (make_fault(3),)), make_batch([4, 5]))
    victim = segments(log_dir)[position]
    victim.unlink() if damage == "deleted" else victim.write_bytes(victim.read_bytes()[:-1])
    with refused(LogError, value=str(log_dir)) as caught:
        read_log(log_dir)
    assert caught.value.key.startswith(victim.name[:15])
    lost = {0: [0, 1], 1: [], 2: [2, 3], 3: [4, 5]}[position]
    left = [index for index in range(6) if index not in lost]
    contents = write_log(log_dir, *([make_batch(lost)] if lost else []))
    assert [name[:15] for name in contents.damaged] == [victim.name[:15]]
    assert_holds(contents, left)
    contents = read_log(log_dir)
    assert_holds(contents, left + lost)
    assert len(contents.damaged) == 1
    assert write_log(log_dir).damaged == ()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_change_of_a_segment_is_noticed(data: st.DataObject) -> None:
    """Wherever a bit flips, and however many bytes are missing or added: its episodes are not believed."""
    ((_, whole),) = encode([make_batch([0, 1])], ("height", "x"), "me")
    changed = bytearray(whole)
    if data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        changed = changed[: data.draw(st.integers(0, len(whole) - 1))] + data.draw(st.sampled_from([b"", whole]))
    assume(bytes(changed) != whole)
    name = name_of(whole, 1, 1, "episodes")
    assert decode(name, whole) is not None
    with pytest.raises(ValueError) as caught:
        decode(name, bytes(changed))
    assert type(caught.value) is ValueError, "not an error of the reader of tables: the bytes are checked first"


def test_a_damaged_manifest_is_an_error_when_there_are_segments(log_dir: Path) -> None:
    """Nobody guesses what the segments are about; without segments it is simply written again."""
    write_log(log_dir, make_batch([0]))
    path = log_dir / "manifest.json"
    whole = path.read_text()
    flipped = whole.replace("CartPole-v1", "CartPole-v0"), whole.replace('"num_episodes": 1000', '"num_episodes": 1001')
    for text in (whole[: len(whole) // 2], "", "[]", *flipped, None):
        path.unlink() if text is None else path.write_text(text)
        for call in (read_log, write_log):
            with refused(LogError, "manifest.json"):
                call(log_dir)
    segments(log_dir)[0].unlink()
    shutil.rmtree(log_dir / "owners")
    write_log(log_dir, make_batch([5]))
    assert_holds(read_log(log_dir), [5])


def test_a_log_of_a_later_version_is_refused_and_left_alone(log_dir: Path) -> None:
    """What this version cannot read is not damage."""
    write_log(log_dir, make_batch([0]))
    path = log_dir / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    for call in (read_log, write_log):
        with refused(LogError, "format") as caught:
            call(log_dir)
        assert caught.value.value == FORMAT + 1
        assert untold(str(caught.value), log_dir) == [], "of two runs, it does not say which"
        assert caught.value.fix
    assert len(segments(log_dir)) == 1


def test_a_segment_of_another_plan_is_refused(log_dir: Path) -> None:
    """A file that was copied in from a longer evaluation does not count."""
    write_log(log_dir, make_batch([0]))
    write_log(log_dir, make_batch([1000]))
    with refused(LogError, segments(log_dir)[-1].name, value=str(log_dir)):
        read_log(log_dir)


def test_left_over_temporary_files_are_ignored_and_removed(log_dir: Path) -> None:
    """A crash may leave them; files that are not the log's stay where they are."""
    write_log(log_dir, make_batch([0]))
    name = segments(log_dir)[0].name
    leftovers = [log_dir / "segments" / temporary_name(name), log_dir / temporary_name("manifest.json")]
    others = [log_dir / ".manifest.json.0123abcd", *(log_dir / name / "notes.txt" for name in ("segments", "damaged"))]
    (log_dir / "damaged").mkdir()
    for path in leftovers + others:
        path.write_bytes(b"half")
    assert_holds(read_log(log_dir), [0])
    write_log(log_dir, make_batch([1]))
    assert_holds(read_log(log_dir), [0, 1])
    assert [path.exists() for path in leftovers + others] == [False, False, True, True, True]


def test_rows_are_read_in_the_order_of_writing(log_dir: Path) -> None:
    """Many segments, read by several threads at once, keep their order."""
    order = np.random.default_rng(1).permutation(30).tolist()
    write_log(log_dir, *[make_batch([index]) for index in order])
    assert_holds(read_log(log_dir), order)


@pytest.mark.parametrize(
    "text", ['{"name": "my app"}', "[1]", "3", "text", '{"format": 1, "files": []}', f'{{\n  "format": {FORMAT}']
)
def test_a_manifest_of_another_program_is_left_alone(log_dir: Path, text: str) -> None:
    """Unless it is the beginning of a manifest, which a power cut may leave."""
    log_dir.mkdir(parents=True)
    path = log_dir / "manifest.json"
    path.write_text(text)
    if text.startswith("{\n"):
        write_log(log_dir, make_batch([5]))
        assert_holds(read_log(log_dir), [5])
        return
    with refused(ConfigError, "output", value=str(log_dir)):
        write_log(log_dir)
    assert path.read_text() == text
    assert [path.name for path in log_dir.iterdir()] == ["manifest.json"]


# ------------------------------------------------------------------------------ rows that are set aside


@pytest.mark.parametrize("one_flush", [False, True])
def test_a_row_that_is_set_aside_does_not_count_until_it_is_written_again(log_dir: Path, one_flush: bool) -> None:
    """Rows count from the last row without an outcome on; those before it are not compared with those after it."""
    aside = set_aside_rows([1, 2], np.arange(1000))
    withdrawn = Batch(aside, np.full((2, 2), np.nan))
    other = make_batch([2])
    other.rows["length"] += 1
    batches = [make_batch([0, 1]), other, withdrawn, make_batch([2, 3])]
    with closing(EvaluationLog.open(log_dir)) as log:
        log.begin(make_manifest())
        for batch in batches:
            log.append(batch) if one_flush else write(log, batch)
        log.flush(10)
    contents = read_log(log_dir)
    assert_holds(contents, [0, 2, 3])
    assert contents.set_aside.tobytes() == aside.tobytes()
    assert contents.mismatches == ()
