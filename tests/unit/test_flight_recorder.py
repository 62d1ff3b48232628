"""The flight recorder: what one process writes, another reads after its death."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.supervision import flight_recorder
from rl_eval.supervision.flight_recorder import (
    ACT,
    NOW,
    RESET,
    SINCE,
    STEP,
    FlightRecorder,
    new_group,
    read_moment,
    remove_abandoned,
)
from rl_eval.supervision.processes import RUNNER_MARK, process_born, process_status, send_signal


def written(path: Path, recorder: FlightRecorder) -> Path:
    path.write_bytes(recorder.cells.tobytes())
    return path


def test_a_reading_is_what_was_written(tmp_path: Path) -> None:
    """Phase, lane, step and every lane's attempt come back, also at the edges of their ranges."""
    recorder = FlightRecorder(300)
    for lane in range(300):
        recorder.begin(lane, 2**31 - 1 - lane, lane, 1 + lane % 3)
    recorder.end(7)
    recorder.enter(STEP, 299, 10**9)
    moment = read_moment(str(written(tmp_path / "a.rec", recorder)))
    assert moment is not None
    assert (moment.phase, moment.lane, moment.step) == ("step", 299, 10**9)
    assert moment.current == moment.lanes[299]
    assert moment.lanes[299][1:4] == (2**31 - 300, 299, 3)
    assert [entry.live for entry in moment.lanes] == [lane != 7 for lane in range(300)]


def test_the_hot_path_writes_the_same_as_enter(tmp_path: Path) -> None:
    """A step is written as two stores: the mark of the lane plus its steps, and the time."""
    fast, slow = FlightRecorder(3), FlightRecorder(3)
    slow.enter(STEP, 2, 41)
    fast.cells[NOW] = FlightRecorder.mark(STEP, 2) + 41
    fast.clock[SINCE] = slow.clock[SINCE]
    assert fast.cells.tobytes() == slow.cells.tobytes()


def test_between_calls_nobody_is_current(tmp_path: Path) -> None:
    """While the policy acts, or nothing runs, no lane is named."""
    recorder = FlightRecorder(2)
    recorder.begin(0, 5, 55, 1)
    recorder.enter(ACT)
    acting = read_moment(str(written(tmp_path / "a.rec", recorder)))
    recorder.idle()
    idle = read_moment(str(written(tmp_path / "a.rec", recorder)))
    assert acting is not None
    assert idle is not None
    assert (acting.phase, acting.current, idle.phase, idle.current) == ("act", None, "idle", None)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 400, bytes(39)])
def test_what_is_not_a_recording_is_read_as_none(tmp_path: Path, content: bytes) -> None:
    """Junk, an empty file and a missing one return None, without an error."""
    path = tmp_path / "junk.rec"
    path.write_bytes(content)
    assert read_moment(str(path)) is None
    assert read_moment(str(tmp_path / "missing.rec")) is None


SCRIPT = """
import os, subprocess, sys, time
from rl_eval.supervision.flight_recorder import RESET, flight_recorder, install
residence = install("group-{pid}", "7", 2, "node")
recorder = flight_recorder(2)
recorder.begin(1, 37, 1234, 2)
recorder.enter(RESET, 1)
child = subprocess.Popen(["sh", "-c", "echo; sleep 60"], stdout=subprocess.PIPE)
child.stdout.readline()  # Now it has its environment.
print(residence.recorder, residence.stack, residence.mark, residence.born, child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.process
def test_a_killed_process_leaves_its_last_moment_its_stack_and_its_mark() -> None:
    """After kill -9 the file says what it was doing; its children carry its mark, and its group."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{pid}", str(os.getpid()))], stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    recorder, stack, mark, born, child = process.stdout.readline().split()
    try:
        assert process_born(process.pid) == int(born)
        assert process_status(process.pid).state in ("S", "R")
        assert os.getpgid(int(child)) == process.pid
        assert f"{RUNNER_MARK}={mark}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        process.send_signal(signal.SIGKILL)
        process.wait()
        moment = read_moment(recorder)
        assert moment is not None
        assert (moment.phase, moment.lane) == ("reset", 1)
        assert moment.current is not None
        assert moment.current[1:4] == (37, 1234, 2)
        assert 0 < time.perf_counter() - moment.since < 60
        assert Path(stack).exists()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        for path in (recorder, stack):
            Path(path).unlink()
        Path(recorder).parent.rmdir()


INSTALL = """
import resource, sys
from rl_eval.supervision.flight_recorder import install
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
print(install(sys.argv[2], "7", 10_000, "node").recorder)
"""


def installed(temporary: Path, largest_file: int = -1, group: str = "group") -> subprocess.CompletedProcess[str]:
    """Install a recorder of 400 kB in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", INSTALL, str(largest_file), group],
        env=os.environ | {"TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.process
def test_recordings_are_in_a_folder_that_nobody_else_can_enter_or_foresee(tmp_path: Path) -> None:
    """Entries of other users in the shared temporary folder are not followed, under any name."""
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o777)
    (tmp_path / f"rl_eval-{os.getuid()}").symlink_to(foreign)
    first, second = (Path(installed(tmp_path).stdout.strip()).parent for _ in range(2))

    assert first != second
    for folder in (first, second):
        assert folder.parent == tmp_path
        assert not folder.is_symlink()
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.getuid(), 0o700)
    assert not list(foreign.iterdir())


@pytest.mark.process
@pytest.mark.parametrize("next_run", ["on Ray", "in process"])
def test_the_next_run_removes_what_a_killed_evaluation_left(
    next_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A living runner keeps its folder; and so does a dead one whose evaluation lives: a node agent may read it."""
    script = """
import subprocess, sys, time
from rl_eval.supervision.flight_recorder import install
print(install(sys.argv[1], "7", 2, "node").recorder, flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    alive = new_group()
    dead = f"1-7-{alive.split('-')[2]}-a"
    runners, folders, children = [], [], []
    for group in (dead, dead, alive):  # In turn: the folder of a runner that has no lock yet would be removed.
        runner = subprocess.Popen([sys.executable, "-c", script, group], stdout=subprocess.PIPE, text=True, env=env)
        runners.append(runner)
        assert runner.stdout is not None
        folders.append(Path(runner.stdout.readline().strip()).parent)
        children.append(int(runner.stdout.readline()))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (tmp_path / "rl_eval-runner-1-7-link-a").symlink_to(foreign)
    (tmp_path / "rl_eval-runner-of-a-user").mkdir()
    try:
        for runner in (runners[0], runners[2]):
            runner.kill()
            runner.wait()
        if next_run == "on Ray":
            installed(tmp_path)
        else:
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            evaluate(EvalConfig().environment("CartPole-v1").policy("random").evaluation(num_episodes=1))
        assert [folder.exists() for folder in (*folders, foreign)] == [False, True, True, True]
        assert (tmp_path / "rl_eval-runner-of-a-user").exists()
        assert eventually_ended(children[0])
        assert [process_born(child) is not None for child in children[1:]] == [True, True]
    finally:
        for child in children:
            send_signal(child, signal.SIGKILL)
        for runner in runners:
            runner.kill()
            runner.communicate()


@pytest.mark.process
def test_a_recording_of_another_machines_evaluation_stays_for_a_minute_after_its_runner_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here shows whether that evaluation lives, so a node agent may be about to read the recording."""
    group = f"1-7-{'0' * 12}-a"
    folder = Path(installed(tmp_path, group=group).stdout.strip()).parent
    os.utime(folder, (0, 0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        remove_abandoned()
        assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(flight_recorder, "_YOUNG_S", -1.0)
    remove_abandoned()
    assert not folder.exists()


def eventually_ended(pid: int) -> bool:
    for _ in range(100):
        if (status := process_status(pid)) is None or status.ended:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.process
def test_the_space_of_a_recording_is_reserved(tmp_path: Path) -> None:
    """A store to a page that a full disk cannot hold would kill the runner later on, without a word."""
    recorder = Path(installed(tmp_path).stdout.strip())
    assert recorder.stat().st_blocks * 512 >= FlightRecorder.size(10_000)


@pytest.mark.process
def test_a_recording_that_has_no_room_is_an_error_at_the_start(tmp_path: Path) -> None:
    failed = installed(tmp_path, largest_file=4096)
    assert failed.returncode == 1
    assert "RunnerStartError: runner 7" in failed.stderr
    assert f"{tmp_path}: File too large" in failed.stderr


def test_marks_of_phases_differ() -> None:
    """Two phases or lanes never look alike."""
    marks = {FlightRecorder.mark(phase, lane) for phase in range(6) for lane in (0, 1, 1000)}
    assert len(marks) == 18
    assert FlightRecorder.mark(RESET, 0) != FlightRecorder.mark(STEP, 0)
