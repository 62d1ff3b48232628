"""The fault matrix: whatever an environment does to its process, the result is that of the undisturbed run."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import pytest
import ray
from waiting import eventually

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.backends import ray_actors
from rl_eval.backends.runner_actor import RunnerActor
from rl_eval.protocols import EnvContext
from rl_eval.supervision.processes import process_born
from rl_eval.testing import FaultyEnv

pytestmark = pytest.mark.usefixtures("ray_cluster")

EPISODES = 24
GUILTY = 7

DEADLINES = {"reset_timeout_s": 2.0, "step_timeout_s": 2.0}

DEATHS = ["raise", "os_exit", "segfault", "abort", "sigkill", "balloon"]
HANGS = ["sigstop", "loop", "sleep", "gil_sleep"]
RUNNERS = {"single_agent": 1, "vector": 4}


def config(runner: str = "vector", runners: int = 2, **fault: Any) -> EvalConfig:
    """Two runners on CartPole, in which one episode is guilty."""
    return (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"episodes": [GUILTY], **fault})
        .policy("numpy_world:lean")
        .runners(num_runners=runners, num_envs_per_runner=RUNNERS[runner], runner=runner)
        .evaluation(num_episodes=EPISODES)
        .fault_tolerance(**(DEADLINES if runners else {}))
    )


@cache
def undisturbed() -> str:
    return evaluate(config(runners=0).environment(env_kwargs={"episodes": []})).fingerprint


def gone(pid: int) -> bool:
    """Whether a process is gone; a stopped one is not."""
    return eventually(lambda: process_born(pid) is None, limit_s=30.0)


def struck(folder: Path) -> list[int]:
    """Return the processes that were struck."""
    return [int(mark.read_text()) for mark in folder.iterdir()]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where faults leave their marks; after the test no struck process is left."""
    yield tmp_path
    assert all(gone(pid) for pid in struck(tmp_path))


@pytest.fixture(autouse=True)
def _agents_are_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is without evidence if a node's agent does not answer in time, as where a busy machine is starting it."""
    monkeypatch.setattr(ray_actors, "_CRASH_REPORT_TIMEOUT_S", 120.0)


def check_recovered(result: EvalResult) -> None:
    assert result.status == "complete"
    assert [record.index for record in result.episodes] == list(range(EPISODES))
    assert result.fingerprint == undisturbed()
    innocent = [fault for fault in result.faults if fault.charged and fault.index != GUILTY]
    assert not innocent, innocent


def recovers(folder: Path, runner: str, kind: str, phase: str, **fault: Any) -> EvalResult:
    """Strike once, and expect the result of the undisturbed run."""
    result = evaluate(config(runner, kind=kind, phase=phase, folder=str(folder), **fault))
    assert len(struck(folder)) == 1
    check_recovered(result)
    return result


@pytest.mark.slow
def test_an_agent_that_is_killed_is_replaced(folder: Path) -> None:
    """The next one watches the runners that were there before, and ends the one that hangs."""
    with EvalRunnerGroup(config(kind="gil_sleep", phase="step", folder=str(folder))) as group:
        group.foreach_runner(id)
        (agent,) = group._backend._agents._agents.values()
        ray.kill(agent)
        result = group.evaluate()
    assert len(struck(folder)) == 1
    assert {fault.cause for fault in result.faults} == {"timeout"}
    check_recovered(result)


STRUCK = {3: "segfault", GUILTY: "gil_sleep", 14: "sigkill"}
"""Three episodes, each of which takes its process along once."""


def test_faults_in_steps_are_survived(folder: Path) -> None:
    """Guilty episodes are charged on evidence, run again with their seeds, and their faults have the stack.

    A process that vanishes may have been pre-empted: nobody is charged, and its episode has its first attempt again.
    """
    place = str(folder)

    def environment(context: EnvContext) -> Any:
        env = gym.make("CartPole-v1")
        for index, kind in STRUCK.items():
            env = FaultyEnv(env, kind=kind, phase="step", step=3, episodes=[index], folder=place)
        return env

    result = evaluate(config().environment(environment, env_kwargs={}))
    assert len(struck(folder)) == result.provenance["runners_lost"] == len(STRUCK)
    assert (result.status, result.fingerprint) == ("complete", undisturbed())
    assert [(fault.index, fault.cause, fault.phase) for fault in result.faults if fault.charged] == [
        (3, "env", "step"), (GUILTY, "timeout", "step"),
    ]  # fmt: skip
    for fault in (fault for fault in result.faults if fault.charged):
        record = result.episodes[fault.index]
        assert (fault.seed, fault.attempt, fault.step, record.attempts) == (record.seed, 1, 2, 2)
        assert "faulty_env.py" in fault.traceback
    killed = result.episodes[14]
    assert killed.attempts == 1
    assert ("runner", "step") in {(fault.cause, fault.phase) for fault in killed.faults}


def test_an_episode_that_always_takes_its_process_along_fails_alone() -> None:
    """All other episodes complete; the guilty one is failed with its reason, after its attempts."""
    result = evaluate(config(kind="os_exit", phase="step", step=3).fault_tolerance(max_attempts_per_episode=2))
    assert result.status == "partial"
    assert [record.index for record in result.episodes] == list(range(EPISODES))
    (failed,) = [record for record in result.episodes if record.outcome == "failed"]
    assert failed.index == GUILTY
    assert failed.attempts == 2
    assert [fault.attempt for fault in failed.faults if fault.charged] == [1, 2]
    expected = evaluate(config(runners=0))
    for record in result.episodes:
        if record.index != GUILTY:
            assert record.episode_return == expected.episodes[record.index].episode_return
            assert record.attempts == 1


def test_an_interrupt_in_a_runner_is_the_environments_fault(tmp_path: Path) -> None:
    """Nobody presses Ctrl-C in a runner's process: one that an environment raises, or sends, costs its attempt."""

    raised, sent = tmp_path / "raised", tmp_path / "sent"

    class Interrupts(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            if not raised.exists():
                raised.touch()
                raise KeyboardInterrupt
            if not sent.exists():
                sent.touch()
                os.kill(os.getpid(), signal.SIGINT)
                raise KeyboardInterrupt
            return self.env.step(action)

    interrupting = config().environment(lambda context: Interrupts(gym.make("CartPole-v1")), env_kwargs={})
    interrupting.fault_tolerance(reset_timeout_s=None, step_timeout_s=None)  # Which would start an agent, too.
    result = evaluate(interrupting.runners(num_runners=1, num_envs_per_runner=1).evaluation(num_episodes=4))
    assert result.status == "complete"
    assert result.fault_counts == {"KeyboardInterrupt": 2}
    assert result.provenance["runners_lost"] == 0


def test_any_exception_in_a_runner_is_the_environments_fault(tmp_path: Path) -> None:
    """It costs an attempt, as an error does, and no runner; nor does a process that the environment forks."""

    class Cancelled(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            try:
                tmp_path.joinpath("cancelled").touch(exist_ok=False)
                raise asyncio.CancelledError
            except FileExistsError:
                pass
            if (pid := os.fork()) == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
            return self.env.step(action)

    cancelled = config().environment(lambda context: Cancelled(gym.make("CartPole-v1")), env_kwargs={})
    result = evaluate(cancelled.runners(num_runners=1).evaluation(num_episodes=4, determinism_check=0))
    assert result.status == "complete"
    assert result.fault_counts == {"CancelledError": 1}
    assert result.provenance["runners_lost"] == 0


def test_a_runner_that_ray_ends_politely_is_gone_whatever_its_threads_do() -> None:
    """Ray asks the process to exit when the last handle of its actor is gone, and Python waits for other threads."""
    actor = ray.remote(num_cpus=0)(RunnerActor).remote(cloudpickle.dumps(None), "1-1-polite", "0", 1)
    process_info = ray.get(actor.settle.remote())
    ray.get(actor.__ray_call__.remote(lambda _: threading.Thread(target=lambda: time.sleep(1000)).start()))
    del actor
    assert gone(process_info.pid)


def test_children_of_a_dead_runner_are_ended(tmp_path: Path) -> None:
    """Simulators that run in processes of their own do not outlive the runner that started them."""
    simulators = config(kind="spawn", folder=str(tmp_path)).runners(num_runners=1, num_envs_per_runner=2)
    with EvalRunnerGroup(simulators) as group:
        group.evaluate(num_episodes=4)
        pids = group.foreach_runner(lambda runner: os.getpid())
    children = [int(mark.name.removeprefix("spawn-")) for mark in tmp_path.iterdir()]
    assert children
    assert all(gone(pid) for pid in [*pids, *children])


@pytest.mark.slow
def test_a_broken_machine_costs_no_episode(tmp_path: Path) -> None:
    """Every attempt fails on one of two runners, at once, and the other is slow: all complete, none is charged."""
    broke = tmp_path / "broke"

    class Slow(gym.Wrapper[Any, Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            assert eventually(broke.exists), "the other runner did not come up"
            time.sleep(0.01)
            return self.env.reset(**kwargs)

    class Broken(gym.Wrapper[Any, Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            broke.touch()
            raise OSError("no licence on this node")

    def environment(context: EnvContext) -> Any:
        return (Broken if context.runner_index == 0 else Slow)(gym.make("CartPole-v1"))

    settings = config().environment(environment, env_kwargs={}).evaluation(num_episodes=200, determinism_check=0)
    result = evaluate(settings.fault_tolerance(reset_timeout_s=None, step_timeout_s=None))
    assert (result.status, len(result.episodes)) == ("complete", 200)
    assert {record.runner for record in result.episodes} == {1}
    assert not [fault for fault in result.faults if fault.charged]
    assert "runner 0" in "".join(result.provenance["notes"])


# ------------------------------------------------------------------------------ all of it


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("phase", ["reset", "step"])
@pytest.mark.parametrize("kind", DEATHS + HANGS)
def test_every_fault_in_every_runner(folder: Path, runner: str, phase: str, kind: str) -> None:
    """Raised, exited, killed, stopped, looping, asleep, or out of memory: N records once each, the same bits."""
    recovers(folder, runner, kind, phase, step=3)


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", ["raise", "os_exit", "segfault", "sigkill", "sigstop", "loop", "gil_sleep"])
def test_every_fault_in_close(folder: Path, runner: str, kind: str) -> None:
    """What happens in close is no episode's fault: what it had finished counts."""
    closing = config(runner, kind=kind, phase="close", folder=str(folder)).environment(env_reuse="episode")
    result = evaluate(closing)
    assert len(struck(folder)) == 1
    check_recovered(result)
    assert {record.attempts for record in result.episodes} == {1}
    if result.provenance["runners_lost"]:  # Else the last environment of its lane closed when all was over.
        assert "in close" in result.provenance["losses"][0]
        found = [(fault.phase, fault.charged) for fault in result.faults]
        assert found in ([("close", False)], [])  # None where the runner held no other episode.


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", ["raise", "os_exit", "segfault", "sigkill", "sigstop", "loop", "gil_sleep"])
@pytest.mark.parametrize("env_reuse", ["lane", "episode"])
def test_every_fault_in_a_constructor(folder: Path, runner: str, kind: str, env_reuse: str) -> None:
    """Once, in whatever process comes first: while it starts, when another is up or not."""
    building = config(runner, kind=kind, phase="construct", folder=str(folder)).environment(env_reuse=env_reuse)
    result = evaluate(building)
    assert len(struck(folder)) == 1
    assert result.status == "complete"
    assert result.fingerprint == undisturbed()


@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("kind", ["raise", "os_exit", "segfault", "sigstop", "loop", "gil_sleep"])
@pytest.mark.parametrize("phase", ["reset", "step"])
def test_the_guilty_episode_alone_fails(tmp_path: Path, runner: str, phase: str, kind: str) -> None:
    """An episode that does it every time is failed after its attempts; every other one is untouched."""
    result = evaluate(config(runner, kind=kind, phase=phase, step=3).fault_tolerance(max_runner_restarts=1))
    assert result.status == "partial"
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [GUILTY]
    assert result.episodes[GUILTY].attempts == 3
    assert {record.attempts for record in result.episodes if record.index != GUILTY} == {1}
    assert len(result.episodes) == EPISODES
