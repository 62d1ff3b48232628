"""Kills a driver inside every n-th step that its log takes on the disk, and continues what it left.

Usage: ``python -m tests.unit.log_crashes FOLDER fresh|damaged before|half N ...``; prints one line per death:
start and kind, the number of the step, and how many episodes had been announced.
Everything happens in forked children, so this process stays single-threaded.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_eval.log import EvaluationLog, ownership, read_log
from rl_eval.log.segments import encode
from tests.unit.log_world import make_batch, make_fault, make_manifest, make_rows

STEPS = ("open", "write", "fsync", "replace", "mkdir", "unlink")
"""Every system call by which the log changes a disk."""

BATCHES = [[0, 1, 2], [3, 4], [6, 5]]
FAULTS = {3: make_fault(3), 5: make_fault(5, charged=False)}
ALL = sorted(index for batch in BATCHES for index in batch)


def batch_of(indices: list[int]):
    return make_batch(indices, tuple(FAULTS[index] for index in indices if index in FAULTS))


def die_at(number: int, when: str) -> None:
    """End this process, as SIGKILL would, before one of its steps, or in the middle of one of its writes."""
    count = 0

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        def stepping(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if when == "half":
                    step(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(9)
            return step(*args, **kwargs)

        return stepping

    for name in ["write"] if when == "half" else STEPS:
        setattr(os, name, wrap(getattr(os, name)))
    Path.write_bytes = wrap(Path.write_bytes)  # Its system calls are made in C.


def drive(log_dir: Path, number: int, when: str, announce: int) -> None:
    """Write a log, and say through a pipe what was announced."""
    ownership.BEAT_SECONDS = 1000.0
    die_at(number, when)
    log = EvaluationLog.open(log_dir)
    done = set(log.begin(make_manifest()).rows["index"].tolist())
    for indices in BATCHES:
        if left := [index for index in indices if index not in done]:
            log.append(batch_of(left))
            log.flush(20)
            for batch in log.poll():
                os.pwrite(announce, b"".join(b"%d\n" % i for i in batch.rows["index"]), os.fstat(announce).st_size)
    log.close()


def go_on(log_dir: Path, announced: list[int], damaged: bool) -> None:
    """Continue, and check every promise."""
    ownership.BEAT_SECONDS = 0.01
    if (log_dir / "manifest.json").exists() and not damaged:
        assert set(announced) <= set(read_log(log_dir).rows["index"].tolist())
    log = EvaluationLog.open(log_dir)
    ownership.BEAT_SECONDS = 1000.0
    found = log.begin(make_manifest()).rows["index"].tolist()
    assert set(announced) <= set(found)
    assert len(found) == len(set(found))
    log.append(batch_of([index for index in ALL if index not in found]))
    log.flush(20)
    log.close()
    assert not [path for path in log_dir.rglob(".*") if path.is_file()]
    contents = read_log(log_dir)
    order = contents.rows["index"].argsort()
    assert contents.rows[order].tobytes() == make_rows(ALL).tobytes()
    assert contents.mismatches == ()
    assert FAULTS[3] in contents.faults or damaged
    assert contents.faults.count(FAULTS[3]) <= 1


def prepare(log_dir: Path) -> None:
    """Write a log that has lost one segment and holds another that is cut short."""
    log = EvaluationLog.open(log_dir)
    log.begin(make_manifest())
    for indices in BATCHES[:2]:
        log.append(batch_of(indices))
        log.flush(20)
    log.close()
    first, faults, _ = sorted((log_dir / "segments").iterdir())
    first.write_bytes(first.read_bytes()[:100])
    faults.unlink()


def in_child(job: Callable[[], None]) -> int:
    """Run something in a fork, and return its exit code."""
    child = os.fork()
    if not child:
        try:
            job()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, start: str, when: str, stride: int) -> None:
    template = folder / "template"
    shutil.rmtree(template, ignore_errors=True)
    if start == "damaged":
        assert in_child(lambda: prepare(template)) == 0
    encode([batch_of(ALL)], ("height", "x"), "")  # Loads what every child would load again.
    number, ended = 1, 9
    while ended == 9:
        ended, announced = die_and_go_on(folder, template, number, when)
        sys.stdout.write(f"{start}-{when} {number} {announced}\n")
        number += stride
    assert ended == 0


def die_and_go_on(folder: Path, template: Path, number: int, when: str) -> tuple[int, int]:
    """Return how the driver ended (9: in the step), and how many episodes it had announced."""
    log_dir, heard = folder / "run", folder / "heard"
    shutil.rmtree(log_dir, ignore_errors=True)
    heard.write_bytes(b"")
    if template.exists():
        shutil.copytree(template, log_dir)
    with heard.open("rb+") as pipe:
        ended = in_child(lambda: drive(log_dir, number, when, pipe.fileno()))
    announced = [int(line) for line in heard.read_text().split()]
    if in_child(lambda: go_on(log_dir, announced, template.exists())):
        left = "\n".join(sorted(map(str, log_dir.rglob("*"))))
        raise SystemExit(f"after death {when} step {number}, this was left:\n{left}")
    return ended, len(announced)


if __name__ == "__main__":
    for start, when, stride in zip(sys.argv[2::3], sys.argv[3::3], sys.argv[4::3], strict=True):
        main(Path(sys.argv[1]), start, when, int(stride))
