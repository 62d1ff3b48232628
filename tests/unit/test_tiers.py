"""The watch over the tiers of the tests, and the selection of slow tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SAMPLE = """
import multiprocessing, os, subprocess, pytest

def fork():
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)

def spawn():
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    child.join()

@pytest.fixture
def server():
    subprocess.run(["true"])

def test_runs(): subprocess.run(["true"])
def test_forks(): fork()
def test_spawns(): spawn()
def test_swallows():
    try:
        os.system("true")
    except BaseException:
        pass
def test_uses(server): pass
def test_describes(): subprocess.run(["git", "--version"])
def test_does_nothing(): pass
@pytest.mark.process
def test_may_run(): subprocess.run(["true"]), fork(), spawn()
@pytest.mark.ray
def test_may_too(server): pass
"""

OUTCOMES = {
    "FAILED": {"runs", "forks", "spawns", "swallows"},
    "ERROR": {"uses"},
    "PASSED": {"describes", "does_nothing", "may_run", "may_too"},
}


@pytest.mark.process
def test_a_test_that_starts_a_process_without_a_mark_fails(tmp_path: Path) -> None:
    """Whether the test or a fixture starts it; programs that describe the machine do not count."""
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  process\n  ray\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-n0", "-p", "tests.conftest", "-p", "no:randomly"]
    ran = subprocess.run(
        [*command, "--rootdir", tmp_path, "-c", tmp_path / "pytest.ini", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    found = {outcome: set(re.findall(rf"^{outcome} .*::test_(\w+)", ran.stdout, re.MULTILINE)) for outcome in OUTCOMES}
    assert found == OUTCOMES, ran.stdout + ran.stderr
    assert "mark it with pytest.mark.process or pytest.mark.ray" in ran.stdout


def test_the_selection_of_slow_tests_names_slow_tests() -> None:
    """``.ci/slow`` names files and functions that are there, also those that it leaves out."""
    for line in (ROOT / ".ci" / "slow").read_text().splitlines():
        path, _, name = line.removeprefix("--deselect=").partition("[")[0].partition("::")
        source = (ROOT / path).read_text()
        assert "mark.slow" in source, line
        assert not name or f"def {name}(" in source, line
