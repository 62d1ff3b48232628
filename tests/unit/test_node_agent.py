"""The node agent on real processes: ended at their deadlines, examined after their deaths, with all they started."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually, gone

from rl_eval.supervision import processes
from rl_eval.supervision.flight_recorder import ALL_LANES, LaneEntry, Moment
from rl_eval.supervision.node_agent import Deadlines, NodeAgent
from rl_eval.supervision.processes import RUNNER_MARK, ProcessInfo, end_marked, process_status

LIMIT_S = 60.0

PRELUDE = """
import ctypes, os, subprocess, sys, time
from rl_eval.supervision.flight_recorder import ACT, RESET, STEP, flight_recorder, install
from rl_eval.supervision.flight_recorder import CLOSE, CONSTRUCT
residence = install("group-{group}", "{name}", 2, "node")
recorder = flight_recorder(2)
recorder.begin(1, 37, 1234, 2)
def tell(*more):
    print(residence.pid, residence.born, residence.mark, residence.recorder, residence.stack, *more, flush=True)
"""


def no_ray() -> None:
    """Ray does not end the runner."""


class Runner:
    """A process that records like a runner."""

    numbers = 0

    def __init__(self, script: str) -> None:
        Runner.numbers += 1
        text = PRELUDE.replace("{group}", str(os.getpid())).replace("{name}", str(Runner.numbers)) + script
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        )
        assert self.process.stdout is not None
        pid, born, mark, recorder, stack, *self.more = self.process.stdout.readline().split()
        self.process_info = ProcessInfo("node", int(pid), int(born), mark, recorder, stack)

    def gone(self) -> bool:
        return self.process.poll() is not None


@pytest.fixture
def deadlines() -> Deadlines:
    return Deadlines(reset_s=0.5, step_s=0.3, runner_s=1.5)


@pytest.fixture
def agent(deadlines: Deadlines) -> Iterator[NodeAgent]:
    agent = NodeAgent(deadlines)
    yield agent
    agent.stop()


@pytest.fixture
def runner(agent: NodeAgent) -> Iterator[Callable[[str], Runner]]:
    started: list[Runner] = []

    def start(script: str) -> Runner:
        started.append(Runner(script))
        agent.watch(len(started), started[-1].process_info, no_ray)
        return started[-1]

    yield start
    for runner in started:
        if not runner.gone():
            runner.process.kill()
        runner.process.wait()
        assert runner.process.stdout is not None
        runner.process.stdout.close()


def group_gone(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return True
    return False


HANGS = [
    ("STEP", "while True: pass"),
    ("STEP", "time.sleep(600)"),
    ("STEP", "while True: ctypes.PyDLL(None).sleep(600)"),
    ("RESET", "while True: ctypes.PyDLL(None).sleep(600)"),
    ("CONSTRUCT", "while True: pass"),
    ("CLOSE", "time.sleep(600)"),
    ("ACT", "time.sleep(600)"),
]


@pytest.mark.process
def test_a_hang_is_ended_at_its_deadline_and_its_stack_is_kept(
    runner: Callable[[str], Runner], agent: NodeAgent
) -> None:
    """Whether it holds the interpreter's lock or not, the process is gone and its stack names the place."""
    script = "def guilty():\n    tell()\n    {hang}\nrecorder.enter({phase}, 1, 17)\nguilty()"
    # All at once, since each takes as long as its limit.
    hung = [runner(script.format(phase=phase, hang=hang)) for phase, hang in HANGS]
    for number, ((phase, _), one) in enumerate(zip(HANGS, hung, strict=True), 1):
        assert eventually(one.gone)
        assert one.process.returncode == -signal.SIGKILL
        found = agent.crash_report(number, one.process_info, no_ray)
        assert found.cause == "deadline"
        assert "fault_tolerance." in found.detail
        assert found.moment is not None
        assert (found.moment.phase, found.moment.lane, found.moment.step) == (phase.lower(), 1, 17)
        assert "guilty" in found.stack
        assert not Path(one.process_info.recorder).exists()


@pytest.mark.process
def test_a_stopped_process_is_ended_and_said_to_be_stopped(runner: Callable[[str], Runner], agent: NodeAgent) -> None:
    """SIGSTOP is not the fault of the episode; between steps no step takes too long, and yet nothing goes on."""
    phases = ("recorder.enter(STEP, 1)", "recorder.enter(ACT)", "recorder.idle()")
    stopped = [runner(f"{phase}\ntell()\nos.kill(os.getpid(), 19)") for phase in phases]
    for number, one in enumerate(stopped, 1):
        assert eventually(one.gone)
        assert agent.crash_report(number, one.process_info, no_ray).cause == "stopped"


@pytest.mark.process
@pytest.mark.parametrize("death", ["ctypes.string_at(0)", "os.abort()"])
def test_a_fatal_signal_leaves_its_word(runner: Callable[[str], Runner], agent: NodeAgent, death: str) -> None:
    """SIGSEGV and SIGABRT are written down with a stack before the process dies."""
    dead = runner(f"def guilty():\n    {death}\nrecorder.enter(STEP, 1, 3)\ntell()\nguilty()")
    assert eventually(dead.gone)
    found = agent.crash_report(1, dead.process_info, no_ray)
    assert found.cause == "signal"
    assert found.detail
    assert "guilty" in found.stack


@pytest.mark.process
@pytest.mark.parametrize("death", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_silent_death_leaves_its_moment_only(runner: Callable[[str], Runner], agent: NodeAgent, death: str) -> None:
    """Exit and kill leave no word, but the recorder says what was going on."""
    dead = runner(f"recorder.enter(STEP, 1, 3)\ntell()\n{death}")
    assert eventually(dead.gone)
    found = agent.crash_report(1, dead.process_info, no_ray)
    assert found.cause == "vanished"
    assert found.moment is not None
    assert found.moment.current is not None
    assert found.moment.current.index == 37


# Long enough for a machine that is busy itself.
@pytest.mark.process
@pytest.mark.parametrize("deadlines", [Deadlines(reset_s=2.0, step_s=2.0, runner_s=2.0)])
def test_a_busy_runner_is_left_alone(runner: Callable[[str], Runner]) -> None:
    """Steps within the limit, and idleness, are not a hang, for any total duration."""
    steps = """
tell()
until = time.perf_counter() + 2.5
while time.perf_counter() < until:
    recorder.enter(STEP, 1, 1)
    time.sleep(0.05)
recorder.idle()
os._exit(42)
"""
    working, idle = runner(steps), runner("recorder.idle()\ntell()\ntime.sleep(2.5)\nos._exit(42)")
    assert [one.process.wait(LIMIT_S) for one in (working, idle)] == [42, 42]


@pytest.mark.process
def test_a_living_runner_is_ended_by_its_autopsy(runner: Callable[[str], Runner], agent: NodeAgent) -> None:
    """A terminated runner has a crash report of its last activity."""
    silent = runner("def idling():\n    tell()\n    time.sleep(600)\nrecorder.idle()\nidling()")
    found = agent.crash_report(1, silent.process_info, no_ray)
    assert eventually(silent.gone)
    assert found.moment is not None
    assert found.moment.phase == "idle"
    assert "idling" in found.stack


@pytest.mark.process
@pytest.mark.parametrize("session", ["False", "True"])
def test_what_a_dead_runner_had_started_is_ended(
    runner: Callable[[str], Runner], agent: NodeAgent, session: str
) -> None:
    """Simulator processes die with their runner, also in a session of their own, and also when they are stopped."""
    script = f"""
children = [subprocess.Popen(["sleep", "600"], start_new_session={session}) for _ in range(2)]
os.kill(children[1].pid, 19)
if not {session} and (grandchild := os.fork()) == 0:
    time.sleep(600)
tell(*(child.pid for child in children))
os.kill(os.getpid(), 9)
"""
    dead = runner(script)
    children = [int(pid) for pid in dead.more]
    assert len(children) == 2
    assert eventually(dead.gone)
    agent.crash_report(1, dead.process_info, no_ray)
    assert eventually(lambda: all(map(gone, children)))
    # Until its last zombie is collected, a group is still there.
    assert eventually(lambda: group_gone(dead.process_info.pid))


@pytest.mark.process
def test_a_process_that_still_loads_its_program_is_ended() -> None:
    """At that moment, the kernel shows no variables of it."""
    environment = {**os.environ, RUNNER_MARK: "loading"}
    for _ in range(50):
        started = [subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) for _ in range(4)]
        end_marked("loading")
        assert all(process.wait(60) == -signal.SIGKILL for process in started)


@pytest.mark.process
def test_a_process_that_was_started_without_variables_does_not_delay_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a young process can still be loading its program."""
    monkeypatch.setattr(processes, "_LOAD_S", 600.0)
    monkeypatch.setattr(processes, "_YOUNG_S", 0.0, raising=False)
    bare = subprocess.Popen(["sleep", "600"], env={})
    try:
        assert eventually(lambda: b"sleep" in Path(f"/proc/{bare.pid}/cmdline").read_bytes())
        search = threading.Thread(target=end_marked, args=("nobody",), daemon=True)
        search.start()
        search.join(60)
        assert not search.is_alive()
    finally:
        bare.kill()
        bare.wait()


@pytest.mark.process
def test_another_process_with_the_same_pid_is_not_touched(agent: NodeAgent, tmp_path: Path) -> None:
    """A reused pid is detected by its start time."""
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        former = ProcessInfo(
            "node", bystander.pid, 1, "no-such-mark", str(tmp_path / "x.rec"), str(tmp_path / "x.stack")
        )
        found = agent.crash_report(9, former, no_ray)
        assert (found.cause, found.moment) == ("vanished", None)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.process
def test_stop_ends_everything(runner: Callable[[str], Runner], agent: NodeAgent) -> None:
    """After stop no watched process lives, not even a stopped one, nor one that is announced too late."""
    alive, stopped = runner("tell()\ntime.sleep(600)"), runner("tell()\nos.kill(os.getpid(), 19)")
    assert eventually(lambda: process_status(stopped.process_info.pid).stopped)
    agent.stop()
    assert eventually(lambda: alive.gone() and stopped.gone())
    assert not Path(alive.process_info.recorder).parent.exists()
    late = runner("tell()\ntime.sleep(600)")
    assert eventually(late.gone)
    assert not Path(late.process_info.recorder).exists()
    assert agent.crash_report(3, late.process_info, no_ray).cause == "vanished"


@pytest.mark.process
def test_ray_is_asked_first_to_end_a_runner(agent: NodeAgent) -> None:
    """It prints a page about a process that ends in another way."""
    asked: list[int] = []
    runner = Runner("recorder.enter(STEP, 1, 2); tell(); time.sleep(1000)")

    def by_ray() -> None:
        asked.append(runner.process_info.pid)
        runner.process.terminate()

    agent.watch(1, runner.process_info, by_ray)
    assert eventually(runner.gone)
    assert asked == [runner.process_info.pid]
    assert runner.process.returncode == -signal.SIGTERM
    assert runner.process.stdout is not None
    runner.process.stdout.close()


@pytest.mark.process
def test_an_agent_that_cannot_watch_any_more_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its waiting caller gets an error, and replaces it."""

    def breaks(*args: Any) -> None:
        raise IndexError("an empty status file")

    monkeypatch.setattr("rl_eval.supervision.node_agent.living", breaks)
    agent = NodeAgent(Deadlines(step_s=1.0))
    here = ProcessInfo("node", os.getpid(), 0, "no-such-mark", str(tmp_path / "r"), str(tmp_path / "s"))
    agent.watch(1, here, no_ray)
    with pytest.raises(RuntimeError) as caught:
        agent.wait_closed()
    assert isinstance(caught.value.__cause__, IndexError)
    agent._reaper.stop()


def moment(phase: Any, since: float, started: float = 0.0) -> Moment:
    return Moment(phase, 0, 0, since, (LaneEntry(True, 0, 0, 1, started),))


@pytest.mark.parametrize(
    ("deadlines", "phase", "seconds", "key"),
    [
        (Deadlines(), "step", 1e9, ""),
        (Deadlines(step_s=2), "step", 1.9, ""),
        (Deadlines(step_s=2), "step", 2.1, "step_timeout_s=2"),
        (Deadlines(step_s=2), "reset", 1e9, ""),
        (Deadlines(reset_s=2), "step", 1e9, ""),
        (Deadlines(reset_s=2), "reset", 2.1, "reset_timeout_s=2"),
        (Deadlines(reset_s=2), "construct", 2.1, "reset_timeout_s=2"),
        (Deadlines(reset_s=2), "close", 2.1, "reset_timeout_s=2"),
        (Deadlines(reset_s=2, step_s=2), "act", 1e9, ""),
        (Deadlines(runner_s=2), "act", 2.1, "runner_timeout_s=2"),
        (Deadlines(runner_s=2), "idle", 1e9, ""),
        (Deadlines(step_s=5, runner_s=2), "step", 2.1, "runner_timeout_s=2"),
        (Deadlines(episode_s=100), "step", 99, ""),
        (Deadlines(episode_s=100), "step", 102, "episode_timeout_s=100"),
        (Deadlines(episode_s=100), "act", 102, ""),
    ],
)
def test_each_deadline_is_for_its_phase(deadlines: Deadlines, phase: str, seconds: float, key: str) -> None:
    """Step and reset have their own limits, a runner one for all, an attempt one for its environment's calls."""
    passed = deadlines.passed(moment(phase, since=1000.0, started=1000.0), 1000.0 + seconds)
    assert (key in passed) if key else passed == ""


def test_an_attempt_past_its_limit_ends_a_call_for_all_slots() -> None:
    lanes = LaneEntry(True, 0, 0, 1, 900.0), LaneEntry(False, 1, 1, 1, 0.0)
    shared = Moment("step", ALL_LANES, 0, 1000.0, lanes)
    for passed, seconds in (False, 0.0), (True, 3.0):
        assert bool(Deadlines(episode_s=100).passed(shared, 1000.0 + seconds)) == passed


def test_an_attempt_past_its_limit_is_the_runners_business_between_steps() -> None:
    """A runner that still steps ends the attempt itself: no quick step is to blame."""
    deadlines = Deadlines(episode_s=100)
    assert deadlines.passed(moment("step", since=1000.0, started=0.0), 1000.5) == ""
    assert "episode_timeout_s" in deadlines.passed(moment("step", since=1000.0, started=0.0), 1001.5)


AGENT = """
import functools, json, sys
from rl_eval.supervision import node_agent
from rl_eval.supervision.node_agent import Deadlines, NodeAgent
from rl_eval.supervision.processes import ProcessInfo
node_agent.OrphanReaper = functools.partial(node_agent.OrphanReaper, round_s=0.02)
agent = NodeAgent(Deadlines())
agent.watch(1, ProcessInfo(**json.loads(sys.argv[1])), print)
print("watching", flush=True)
agent.wait_closed()
"""


@pytest.mark.process
@pytest.mark.parametrize("death", ["kill", "stop"])
def test_children_are_ended_even_when_the_agent_died_first(death: str) -> None:
    """A killed driver takes agent and runners along; what runners had started, and one that is stopped, go too."""
    runner = Runner('child = subprocess.Popen(["sleep", "600"])\ntell(child.pid)\ntime.sleep(600)')
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = json.dumps(asdict(runner.process_info))
    agent = subprocess.Popen([sys.executable, "-c", AGENT, told], stdout=subprocess.PIPE, env=env)
    assert agent.stdout is not None
    agent.stdout.readline()
    agent.kill()
    agent.wait()
    agent.stdout.close()
    child = int(runner.more[0])
    assert process_status(child).state == "S"
    runner.process.send_signal(signal.SIGKILL if death == "kill" else signal.SIGSTOP)
    runner.process.wait()
    assert runner.process.stdout is not None
    runner.process.stdout.close()
    assert eventually(lambda: gone(child))
    assert eventually(lambda: not Path(runner.process_info.recorder).exists())
