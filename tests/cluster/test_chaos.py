"""Evaluations while somebody kills runners, agents and whole nodes every few seconds.

``RL_EVAL_CHAOS_S=600 pytest -m slow tests/cluster/test_chaos.py`` keeps it up for ten minutes.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from machines import add_node, many_nodes
from waiting import eventually
from workloads import cartpole

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.supervision.processes import process_status

pytestmark = pytest.mark.ray

SECONDS = float(os.environ.get("RL_EVAL_CHAOS_S", "60"))
NODES = 3
MARK = f"RL_EVAL_CHAOS={os.getpid()}-{time.time_ns()}"


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without room for runners, and three nodes with room for one each."""
    with many_nodes(NODES) as nodes:
        yield nodes


def config(runners: int) -> EvalConfig:
    settings = cartpole(attempt_rates=[0.05]).evaluation(num_episodes=1_500)
    if not runners:
        return settings.runners(num_envs_per_runner=16)
    return settings.runners(
        num_runners=runners,
        num_envs_per_runner=4,
        runner_start_timeout_s=60.0,
        runtime_env={"env_vars": dict([MARK.split("=")])},
    ).fault_tolerance(step_timeout_s=10.0, reset_timeout_s=10.0, runner_timeout_s=15.0, max_runner_restarts=50)


def processes(kind: str) -> list[int]:
    """Return the processes of an actor class in this test's clusters, and in nobody else's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                ours = MARK.encode() in entry.joinpath("environ").read_bytes()
                if ours and entry.joinpath("cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                    found.append(int(entry.name))
    return found


def resident_mib() -> float:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Chaos:
    """Kills something again and again.

    The pauses are a quarter to all of the time in which the runners start, so that a slow machine does not spend the
    whole test starting them.
    """

    def __init__(self, cluster: Any, seed: int, start_s: float) -> None:
        self.cluster = cluster
        self.start_s = start_s
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.victims: set[int] = set()

    def reign(self, over: threading.Event) -> None:
        while not over.wait(self.rng.uniform(0.25, 1.0) * self.start_s):
            what = self.rng.choice(["runner", "runner", "stop", "agent", "node", "raylet"])
            with suppress(OSError):
                getattr(self, what)()
                self.done[what] += 1

    def runner(self) -> None:
        self.strike("RunnerActor", signal.SIGKILL)

    def stop(self) -> None:
        self.strike("RunnerActor", signal.SIGSTOP)

    def agent(self) -> None:
        self.strike("NodeAgent", signal.SIGKILL)

    def node(self) -> None:
        """A node goes, and another comes."""
        self.cluster.remove_node(self.rng.choice(self.workers()), allow_graceful=False)
        add_node(self.cluster)

    def raylet(self) -> None:
        """A node dies of itself, and another comes."""
        node = self.rng.choice(self.workers())
        (raylet,) = node.all_processes["raylet"]
        os.kill(raylet.process.pid, signal.SIGKILL)
        time.sleep(1.0)
        self.cluster.remove_node(node, allow_graceful=False)
        add_node(self.cluster)

    def workers(self) -> list[Any]:
        return [node for node in self.cluster.list_all_nodes() if node is not self.cluster.head_node]

    def strike(self, kind: str, number: int) -> None:
        if candidates := processes(kind):
            victim = self.rng.choice(candidates)
            self.victims.add(victim)
            os.kill(victim, number)


class Evaluations(threading.Thread):
    """Evaluates again and again; Ray's nodes can only be started in the main thread."""

    def __init__(self, group: EvalRunnerGroup, expected: str, over: threading.Event) -> None:
        super().__init__()
        self.group = group
        self.expected = expected
        self.over = over
        self.wrong: list[str] = []
        self.memory: list[float] = []

    def run(self) -> None:
        began = time.monotonic()
        try:
            while time.monotonic() - began < SECONDS and not self.wrong:
                result = self.group.submit().result(timeout=300)
                self.memory.append(resident_mib())
                if result.status != "complete" or result.fingerprint != self.expected:
                    self.wrong.append(f"{result.status}: {result.reason}, fingerprint {result.fingerprint}")
        except BaseException as error:
            self.wrong.append(repr(error))
        self.over.set()


@pytest.mark.slow
@pytest.mark.timeout(int(SECONDS) + 600)
def test_chaos(cluster: Any) -> None:
    """Every evaluation is complete and has the undisturbed fingerprint; nothing leaks."""
    expected = evaluate(config(0)).fingerprint
    began, over = time.monotonic(), threading.Event()
    with EvalRunnerGroup(config(NODES)) as group:
        undisturbed = group.submit()
        eventually(lambda: undisturbed.progress().num_runners == NODES, limit_s=120.0)
        chaos = Chaos(cluster, seed=0, start_s=time.monotonic() - began)
        assert undisturbed.result().fingerprint == expected
        evaluations = Evaluations(group, expected, over)
        evaluations.start()
        chaos.reign(over)
        evaluations.join()
        assert not evaluations.wrong
        assert group.evaluate().fingerprint == expected
        restarts = group.get_metrics()["num_runner_restarts"]
    memory = evaluations.memory
    print(  # noqa: T201  # The figures of a long run.
        f"\n{len(memory)} evaluations, {restarts:.0f} runners replaced; {dict(chaos.done)}; "
        f"runners start in {chaos.start_s:.1f} s; {memory[0]:.0f} to {memory[-1]:.0f} MiB"
    )
    assert sum(chaos.done.values()) > SECONDS / (chaos.start_s + 5.0)
    late = memory[len(memory) // 4 :]
    assert late[-1] < 1.25 * min(late) + 50
    eventually(lambda: not (processes("RunnerActor") or processes("NodeAgent")), limit_s=30.0)
    assert not processes("RunnerActor")
    assert not processes("NodeAgent")
    assert not [pid for pid in chaos.victims if (status := process_status(pid)) and status.stopped]
