"""A driver that dies inside any step of its log loses nothing that it had announced."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_eval.log import read_log
from tests.unit.log_world import ROOT, make_rows, start_driver

pytestmark = pytest.mark.process


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files need not reach a disk, where there is one: hundreds of forced writes take minutes."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


def die_everywhere(memory: Path, *worlds: tuple[str, str, int]) -> None:
    """Kill a driver in every n-th step, per world: what was there before, in what the death is, and n."""
    arguments = [str(word) for world in worlds for word in world]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.log_crashes", str(memory), *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    deaths = [line.split() for line in ran.stdout.splitlines()]
    for start, when, stride in worlds:
        announced = [number for world, _, number in deaths if world == f"{start}-{when}"]
        assert len(announced) > {"before": 30, "half": 5}[when] // stride
        assert len(set(announced)) > 2


def test_death_inside_a_step_of_writing(memory: Path) -> None:
    """Whichever system call was the last: the log is consistent, announced rows are there, and none is there twice."""
    die_everywhere(memory, ("fresh", "before", 7), ("damaged", "half", 1))


@pytest.mark.slow
def test_death_inside_every_step_of_writing(memory: Path) -> None:
    """Not one is left out."""
    die_everywhere(memory, *((start, when, 1) for start in ("fresh", "damaged") for when in ("before", "half")))


ENDLESS = """
import rl_eval.log.writer as w
w.encode([make_batch([])], ("height", "x"), "")
w.FLUSH_SECONDS = (0.0, 0.001)
log = EvaluationLog.open(sys.argv[1])
done = set(log.begin(make_manifest()).rows["index"].tolist())
print("open", flush=True)
for index in range(1000):
    if index not in done:
        log.append(make_batch([index], (make_fault(index),)))
        for batch in log.poll():
            print(*batch.rows["index"].tolist(), flush=True)
        time.sleep(0.001)
"""


@pytest.mark.slow
def test_death_at_random_moments(tmp_path: Path) -> None:
    """Killed again and again, a run goes on where it stopped; all that was ever announced stays."""
    moments, announced = random.Random(3), []
    for _ in range(6):
        process = start_driver(ENDLESS, str(tmp_path))
        assert process.stdout.readline() == "open\n"
        for _ in range(moments.randrange(4)):
            announced += [int(word) for word in process.stdout.readline().split()]
        time.sleep(moments.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        announced += [int(word) for word in process.stdout.read().split()]
        process.wait()
        process.stdin.close()
        process.stdout.close()
        contents = read_log(tmp_path)
        rows = contents.rows[contents.rows["index"].argsort()]
        assert rows.tobytes() == make_rows(rows["index"]).tobytes()
        assert set(announced) <= set(rows["index"].tolist())
        assert len(contents.faults) >= len(rows)
    assert len(announced) == len(set(announced)) > 10
