"""``rl-eval run`` with runners on Ray: what SIGTERM and SIGKILL leave behind, and what the next run makes of it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rl_eval
from rl_eval.log import read_log
from tests.refused import untold
from tests.unit.cli_world import call, environment, start

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MARK = "RL_EVAL_TEST_MARK"
RAYS_OWN = ("DashboardAgent", "dashboard/agent.py", "RuntimeEnvAgent", "runtime_env/agent/main.py")
"""Services of a Ray node; they may take a minute to notice that it is gone."""


def descendants(mark):
    """Return the processes that were started with a mark in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text().strip("\0"))
            except OSError:
                pass
    return [command for command in found if not any(name in command for name in RAYS_OWN)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_run_is_continued_and_leaves_no_process(folder, monkeypatch, number):
    """What was in the log is not run again, and the result is that of an undisturbed run."""
    mark = str(folder)
    monkeypatch.setenv(MARK, mark)
    args = ["run", "toy.yaml", "--output", "runs", "--num-episodes", 200]
    slow = ["--set", f"environment.env_kwargs={{pause_s: 0.005, slow: {folder}/slow}}"]
    Path("slow").touch()
    process = start(*args, *slow, "--num-runners", 2, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list(Path("runs/segments").glob("[0-9]*-episodes-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(60)
    process.stderr.close()
    assert process.returncode == (143 if number == signal.SIGTERM else -number)
    monkeypatch.delenv(MARK)
    end = time.monotonic() + 30
    while left := descendants(mark):
        assert time.monotonic() < end, left
        time.sleep(0.2)
    before = len(read_log("runs").rows)
    assert 0 < before < 200
    Path("slow").unlink()
    outcome = call(*args, *slow)
    assert outcome.exit_code == 0, outcome.output
    assert any(untold(line, "runs", before, 200) == [] for line in outcome.stderr.splitlines())
    assert call(*args, "--output", "undisturbed").exit_code == 0
    assert rl_eval.load("runs").fingerprint == rl_eval.load("undisturbed").fingerprint
    assert read_log("runs").mismatches == ()


def children(pid, name):
    """Return the children of a process whose command has a name."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if name in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


@pytest.mark.parametrize("agent", [False, True], ids=["the raylet", "its agent"])
def test_a_local_cluster_that_dies_is_an_error_and_the_log_continues(folder, agent):
    """Ray's client would end the process with 1, which is a partial result; the raylet dies with its agent, too."""
    args = ["run", "toy.yaml", "--output", "runs", "--num-episodes", 200]
    slow = ["--set", f"environment.env_kwargs={{pause_s: 0.005, slow: {folder}/slow}}"]
    Path("slow").touch()
    process = start(*args, *slow, "--num-runners", 2, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not list(Path("runs/segments").glob("[0-9]*-episodes-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    (raylet,) = children(process.pid, "raylet/raylet")
    os.kill(children(raylet, "DashboardAgent")[0] if agent else raylet, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 4, told
    assert "--output runs" in told.splitlines()[-1]
    before = len(read_log("runs").rows)
    assert 0 < before < 200
    Path("slow").unlink()
    assert call(*args, *slow).exit_code == 0
    assert call(*args, "--output", "undisturbed").exit_code == 0
    assert rl_eval.load("runs").fingerprint == rl_eval.load("undisturbed").fingerprint
    assert read_log("runs").mismatches == ()


def test_in_python_a_cluster_that_dies_raises_and_another_one_can_be_started(folder):
    """The process goes on: training, for example, whose evaluations ran on it."""
    Path("script.py").write_text("""
import os, signal, sys
from pathlib import Path

import rl_eval
from rl_eval.errors import ClusterDied
from tests.cluster.test_cli import children

config = rl_eval.EvalConfig.from_yaml("toy.yaml").runners(num_runners=1)
with rl_eval.EvalRunnerGroup(config.environment(env_kwargs={"pause_s": 0.01})) as group:
    handle = group.submit(num_episodes=1_000)
    while not handle.progress().num_finished:
        pass
    os.kill(children(os.getpid(), "raylet/raylet")[0], signal.SIGKILL)
    try:
        handle.result(60)
    except ClusterDied:
        print("died", flush=True)
print(rl_eval.evaluate(config).status)
""")
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in ("died", "complete")] == ["died", "complete"]


def test_a_runner_that_passes_a_deadline_makes_ray_print_nothing(folder):
    """Ray would guess that the process ran out of memory; the fault has the cause."""
    Path("hang").touch()
    hangs = f"environment.env_kwargs={{hang: {folder}/hang}}"
    args = ["run", "toy.yaml", "--num-runners", 1, "--set", hangs, "--set", "fault_tolerance.step_timeout_s=1"]
    process = start(*args, "-o", "out", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, told = process.communicate(timeout=180)
    result = rl_eval.load("out")
    assert result.provenance["runners_lost"] > 0
    assert "(raylet)" not in told


def test_a_local_cluster_that_cannot_start_is_a_cluster_error(folder, monkeypatch):
    """Here it has no room for the names of its sockets."""
    monkeypatch.setenv("RAY_TMPDIR", f"{folder}/{'x' * 107}")
    process = start("run", "toy.yaml", "--num-runners", 1, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, told = process.communicate(timeout=180)
    assert process.returncode == 4, told
    assert "Traceback" not in told


def test_an_error_of_two_runners_is_one_line(folder):
    """Ray prints tracebacks of errors that nobody has read: the second runner's is read as well."""
    Path("shapeless.py").write_text("def act(observations):\n    return 0\n")
    args = ["run", "--env", "CartPole-v1", "--policy", "shapeless:act", "--runners", 2, "-n", 100]
    for _ in range(3):  # Which of the two is first, and how far the other is, differs.
        process = start(*args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        _, told = process.communicate(timeout=120)
        assert process.returncode == 3, told
        assert told.splitlines()[-1].startswith("error: ")
        assert told.count("()") == 1
        assert "Traceback" not in told
        assert "Unhandled" not in told
