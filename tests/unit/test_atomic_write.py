"""Files appear whole or not at all, and nothing but our own leftovers is ever swept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.atomic_write import is_temporary, sweep, temporary_name, write_atomically, write_bytes, write_text


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


WRITER = """
import sys, time
from pathlib import Path
from rl_eval.atomic_write import write_atomically

def write(temporary):
    temporary.write_text("half")
    print("half", flush=True)
    time.sleep(600)

write_atomically(Path(sys.argv[1]), write)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_over_an_older_one_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    write_text(path, "old")
    write_bytes(path, b"new")

    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["file"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_content_is_on_disk_before_the_file_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events = tmp_path / "file", []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        events.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(path, "text")

    (temporary, named), (folder, renamed) = events
    assert is_temporary(temporary)
    assert not named
    assert (folder, renamed) == (tmp_path.name, True)


def test_two_threads_that_write_one_file_do_not_meet(tmp_path: Path) -> None:
    path, both, failed = tmp_path / "file", threading.Barrier(2), []

    def write(temporary: Path, text: str) -> None:
        temporary.write_text(text)
        both.wait()
        if temporary.read_text() != text:
            failed.append(text)

    texts = ["a" * 100, "b" * 10]
    threads = [
        threading.Thread(target=write_atomically, args=(path, lambda file, text=text: write(file, text)))
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert path.read_text() in texts
    assert names(tmp_path) == ["file"]


def test_temporary_names_keep_the_suffix_and_fit_the_file_system(tmp_path: Path) -> None:
    longest = "é" * 125 + ".npz"
    write_atomically(tmp_path / longest, lambda temporary: np.savez(temporary, a=np.arange(3)))

    assert names(tmp_path) == [longest]
    assert np.load(tmp_path / longest)["a"].tolist() == [0, 1, 2]
    assert Path(temporary_name("model.zip")).suffix == ".zip"


@pytest.mark.process
def test_sweep_removes_what_a_killed_writer_left_and_nothing_else(tmp_path: Path) -> None:
    other = [
        ".hidden",
        ".manifest.json.0123abcd",
        ".rl_eval-tmp",
        ".rl_eval-tmp.notes",
        "rl_eval-tmp.0123456789abcdef.a",
    ]
    for name in other:
        (tmp_path / name).write_text("not ours")
    folder = tmp_path / temporary_name("folder")
    folder.mkdir()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / "file"], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    (left,) = set(names(tmp_path)) - {*other, folder.name}

    sweep(tmp_path)
    assert (tmp_path / left).read_text() == "half", "its writer lives"

    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    sweep(tmp_path)
    assert names(tmp_path) == sorted([*other, folder.name])


def test_sweeping_a_folder_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    sweep(tmp_path / "missing")
    assert names(tmp_path) == []


def test_saving_a_result_removes_what_a_killed_save_left(tmp_path: Path) -> None:
    left, other = tmp_path / temporary_name("result.json"), tmp_path / ".result.json.4711"
    for path in (left, other):
        path.write_text("half")
    evaluate(EvalConfig().environment("CartPole-v1").policy(zeros).evaluation(num_episodes=1)).save(tmp_path)

    assert names(tmp_path) == sorted([other.name, "episodes.parquet", "result.json"])
