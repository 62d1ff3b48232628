"""Slots in processes of their own: rows of any runner, faults that end one process, and nothing that is left."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from waiting import eventually, gone

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError, EnvError
from rl_eval.records.episode import Lease, RunReport
from rl_eval.runners.subprocess_slots import SubprocessEvalRunner
from rl_eval.testing import EvalRunnerContract
from tests.refused import refused

pytestmark = pytest.mark.process


class Walk(gym.Env[Any, Any]):
    """Walks a random number of steps; some episodes wait in each step for a file, the gate."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, gate: str | None = None, odd_info: bool = False) -> None:
        self.gate = gate
        self.odd_info = odd_info

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.slow = self.gate is not None and bool(self.np_random.random() < 0.5)
        self.left = int(self.np_random.integers(2, 7))
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action: Any) -> Any:
        while self.slow and not Path(str(self.gate)).exists():
            time.sleep(0.005)
        self.left -= 1
        info = {"slow": self.slow, **({"odd": (i for i in ())} if self.odd_info else {})}
        return self.np_random.normal(size=3).astype(np.float32), float(action.sum()), self.left == 0, False, info


def config(lanes: int = 3, num_episodes: int = 12, *, runner: str = "subprocess", **env_kwargs: Any) -> EvalConfig:
    made = EvalConfig().environment("rl_eval.testing:faulty", env_kwargs={"env": "CartPole-v1", **env_kwargs})
    made.policy("rl_eval.testing:make_gru", deterministic=False)
    made.runners(runner=runner, num_envs_per_runner=lanes)
    return made.evaluation(num_episodes=num_episodes, max_episode_steps=30, determinism_check=0)


@functools.cache
def reference() -> str:
    return evaluate(config(runner="vector")).fingerprint


def steer(observations: Any) -> Any:
    return np.tanh(observations[:, :2])


@contextmanager
def running(made: EvalConfig, **tolerance: Any) -> Iterator[SubprocessEvalRunner]:
    settings = made.build()
    section = settings.fault_tolerance.model_copy(update=tolerance)
    runner = SubprocessEvalRunner(settings.model_copy(update={"fault_tolerance": section}), 0)
    try:
        yield runner
    finally:
        runner.stop()


def leases(made: EvalConfig) -> list[Lease]:
    plan = made.build().plan()
    return [Lease(plan[index], 1) for index in range(len(plan))]


def until(runner: Any, reports: list[RunReport], done: Callable[[list[RunReport]], bool]) -> list[RunReport]:
    deadline = time.monotonic() + 60
    while not done(reports):
        assert time.monotonic() < deadline
        reports.append(runner.run((), 0.1))
    return reports


def finished(count: int) -> Callable[[list[RunReport]], bool]:
    return lambda reports: sum(len(report.rows) + len(report.faults) for report in reports) >= count


# ------------------------------------------------------------------------------ rows


def told(result: Any) -> list[tuple[Any, ...]]:
    return sorted((at.index, at.attempt, at.phase, at.step, at.error_type, at.message) for at in result.faults)


def test_rows_are_those_of_any_runner() -> None:
    """A recurrent policy that samples; exceptions cost the same attempts, and have the same words."""
    wild = {"attempt_rates": [0.5], "within_steps": 10}
    ours, theirs = (evaluate(config(2, runner=runner, **wild)) for runner in ("subprocess", "vector"))
    assert ours.fingerprint == theirs.fingerprint == reference()
    assert told(ours) == told(theirs) != []
    assert all("in _strike" in fault.traceback for fault in ours.faults)


@pytest.mark.parametrize(
    ("kind", "phase", "word"),
    [
        ("sigkill", "step", "SIGKILL"),
        pytest.param("os_exit", "reset", "status 13", marks=pytest.mark.slow),
        pytest.param("exit", "step", "13", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_is_a_fault_of_its_episode(kind: str, phase: str, word: str) -> None:
    """However it dies; the runner lives, and the episode runs again with its seed."""
    result = evaluate(config(2, kind=kind, phase=phase, episodes=[5], attempts=[1]))
    assert result.fingerprint == reference()
    assert [(fault.index, fault.cause, fault.phase) for fault in result.faults] == [(5, "env", phase)]
    assert word in result.faults[0].message


@pytest.mark.slow
def test_a_constructor_that_ends_its_process_once_is_tried_again(tmp_path: Path) -> None:
    """The first environment, which tells the spaces, and any later one."""
    made = config(2, kind="segfault", phase="construct", episodes=None, folder=str(tmp_path))
    assert evaluate(made).fingerprint == reference()


@pytest.mark.slow
def test_the_determinism_check_has_environments_of_its_own() -> None:
    """A new environment for each episode that runs again, in the same process; and one per episode on request."""
    result = evaluate(config(num_episodes=4).evaluation(determinism_check=1.0))
    assert result.determinism is not None
    assert result.determinism.checked == 4
    assert result.determinism.passed
    renewed = evaluate(config(num_episodes=4).environment(env_reuse="episode"))
    assert renewed.fingerprint == result.fingerprint


def test_a_slow_slot_stalls_nobody(tmp_path: Path) -> None:
    """While some episodes stand still in a step, all others complete."""
    gate = tmp_path / "gate"
    made = EvalConfig().environment(Walk, env_kwargs={"gate": str(gate)}).policy(steer)
    made.runners(runner="subprocess", num_envs_per_runner=3).evaluation(num_episodes=12, info_keys=["slow"])
    plan = leases(made)
    slow = [lease for lease in plan if np.random.default_rng(lease.seed).random() < 0.5]
    fast = [lease for lease in plan if lease not in slow]
    assert len(slow) >= 2
    with running(made) as runner:
        reports = until(runner, [runner.run([*slow[:2], *fast], 0.1)], finished(len(fast)))
        done = {int(row["index"]) for report in reports for row in report.rows}
        assert done == {lease.index for lease in fast}
        assert set(reports[-1].progress["index"].tolist()) == {lease.index for lease in slow[:2]}
        gate.touch()
        until(runner, reports, finished(len(fast) + 2))


# ------------------------------------------------------------------------------ deadlines, abort and the end


@pytest.mark.slow
def test_a_step_that_hangs_ends_its_process_alone() -> None:
    """Its episode is charged by name of the limit."""
    made = config(2, 5, kind="sleep", episodes=[0], attempts=[1], step=2)
    with running(made, step_timeout_s=0.5) as runner:
        reports = until(runner, [runner.run(leases(made), 0.1)], finished(5))
        (fault,) = [fault for report in reports for fault in report.faults]
        assert (fault.index, fault.cause, fault.phase) == (0, "timeout", "step")
        assert "step_timeout_s=0.5" in fault.message
        assert sorted(int(row["index"]) for report in reports for row in report.rows) == [1, 2, 3, 4]


class Stuck(Walk):
    """Hangs while a file does not exist, and then creates it: in the constructor, or in the first step."""

    def __init__(self, where: str, mark: str) -> None:
        super().__init__()
        self.where, self.mark = where, Path(mark)
        self._wait("constructor")

    def _wait(self, where: str) -> None:
        if self.where == where and not self.mark.exists():
            with contextlib.suppress(OSError):
                self.mark.touch()
            time.sleep(600)

    def step(self, action: Any) -> Any:
        self._wait("step")
        return super().step(action)


def stuck(where: str, mark: Path) -> EvalConfig:
    made = EvalConfig().environment(Stuck, env_kwargs={"where": where, "mark": str(mark)}).policy(steer)
    made.runners(num_runners=0, runner="subprocess", num_envs_per_runner=2).evaluation(num_episodes=6)
    return made.evaluation(determinism_check=0)


def test_limits_of_calls_work_without_ray(tmp_path: Path) -> None:
    made = stuck("step", tmp_path / "mark").fault_tolerance(step_timeout_s=1.0)
    result = evaluate(made)
    assert [(fault.cause, fault.phase) for fault in result.faults] == [("timeout", "step")]
    assert result.fingerprint == evaluate(made).fingerprint
    assert result.status == "complete"


@pytest.mark.parametrize(
    ("section", "key"), [("fault_tolerance", "reset_timeout_s"), ("runners", "runner_start_timeout_s")]
)
def test_a_first_constructor_that_hangs_is_ended(tmp_path: Path, section: str, key: str) -> None:
    """It is tried again."""
    made = stuck("constructor", tmp_path / "mark").set(f"{section}.{key}", 2.0)
    result = evaluate(made)
    assert (result.status, result.faults) == ("complete", [])
    assert result.fingerprint == evaluate(made).fingerprint


def test_a_constructor_that_always_hangs_is_an_error_within_its_limit() -> None:
    made = stuck("constructor", Path("/dev/null/none")).runners(runner_start_timeout_s=1.0)
    with pytest.raises(EnvError) as caught:
        evaluate(made)
    assert "runners.runner_start_timeout_s" in (caught.value.key, getattr(caught.value.__cause__, "key", None))


@pytest.mark.slow
def test_calls_reach_the_environments_where_they_live_and_none_is_left() -> None:
    """Each in a process of its own, which knows that it is remote, and which ends with the runner."""
    made = EvalConfig().environment(Walk, env_kwargs={"odd_info": True}).policy(steer)
    made = made.runners(runner="subprocess", num_envs_per_runner=3).evaluation(num_episodes=6, info_keys=["slow"])
    with running(made) as runner:
        until(runner, [runner.run(leases(made), 0.1)], finished(6))
        pids = runner.foreach_env(lambda env: os.getpid())
        assert len({*pids, os.getpid()}) == 4
        with pytest.raises(ZeroDivisionError):
            runner.foreach_env(lambda env: 1 / 0)
        assert runner.foreach_env(lambda env: env.left) == [0, 0, 0]
    assert all(map(gone, pids))
    with refused(ConfigError, "environment.env", value="NoSuch-v0"), running(config(1, 1, env="NoSuch-v0")):
        pass


@pytest.mark.parametrize("how", ["gil_sleep", pytest.param("sleep", marks=pytest.mark.slow)])
def test_the_death_of_a_runner_ends_its_processes(how: str, tmp_path: Path) -> None:
    """Also those that are busy in a step, and hold the interpreter's lock."""
    script = f"""
import sys, time
sys.path.append({str(Path(__file__).parents[1] / "cluster")!r})
from tests.unit.test_subprocess_slots import config, leases, running
made = config(2, 2, kind={how!r}, episodes=[0, 1])
with running(made) as runner:
    runner.run(leases(made), 0.1)
    while not runner.run((), 0.5).progress["step"].all() and not runner._actions:
        pass
    print(*[slot.pid for slot in runner._slots], flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(map(gone, pids))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert eventually(lambda: all(map(gone, pids)), 20.0)


# ------------------------------------------------------------------------------ observers


class Shown:
    """Policy whose outputs are the observations that it saw."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        self.outputs = np.array(observations)
        return np.tanh(observations[:, :2]), None


class Watcher:
    """Checks that action and outputs of each step belong to the observation before it."""

    def __init__(self, env: Any) -> None:
        self.checked = 0

    def on_episode_start(self, spec: Any, attempt: int, observation: Any) -> None:
        self.seen, self.checked = observation, 0

    def on_step(self, observation: Any, action: Any, *rest: Any) -> None:
        assert action.tobytes() == np.tanh(self.seen[:2]).tobytes()
        assert rest[-1].tobytes() == self.seen.tobytes()
        self.seen = observation
        self.checked += 1

    def on_episode_end(self, record: Any) -> Any:
        return self.checked


@pytest.mark.slow
def test_observers_see_the_pass_that_chose_the_action() -> None:
    """Although others have acted between an action and what it leads to."""
    made = EvalConfig().environment(Walk).policy(Shown()).runners(runner="subprocess", num_envs_per_runner=3)
    result = evaluate(made.evaluation(num_episodes=9, observers=[Watcher], determinism_check=0))
    assert not result.notes
    assert result.artifacts == {record.index: {"Watcher": record.length} for record in result.episodes}


# ------------------------------------------------------------------------------ time, pipes and close


class SimulatorError(Exception):
    """Error that can be pickled, but not unpickled."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{code} at {place}")


class Odd(Walk):
    """A walk with one oddity: slow construction, infos that do not arrive, a helper process, or a bad ``close``."""

    def __init__(self, oddity: str, note: str = "") -> None:
        super().__init__()
        self.oddity = oddity
        if oddity == "slow to build":
            time.sleep(1.5)
        if oddity == "forks":
            helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
            helper.start()
            Path(note).write_text(str(helper.pid))

    def step(self, action: Any) -> Any:
        *others, info = super().step(action)
        if self.oddity == "forks":
            os.kill(os.getpid(), signal.SIGKILL)
        return *others, info | ({"error": SimulatorError(3, "joint")} if self.oddity == "odd info" else {})

    def close(self) -> None:
        if self.oddity == "exits in close":
            os._exit(1)
        if self.oddity == "leaves in close":
            sys.exit(1)
        if self.oddity == "hangs in close":
            time.sleep(600)


class Ponders:
    """Policy whose passes take longer than a step may."""

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        time.sleep(2.5 * live.any())
        return steer(observations), None


def odd(oddity: str, policy: Any = steer, **env_kwargs: Any) -> EvalConfig:
    made = EvalConfig().environment(Odd, env_kwargs={"oddity": oddity, **env_kwargs}).policy(policy)
    return made.runners(runner="subprocess", num_envs_per_runner=2).evaluation(num_episodes=4, determinism_check=0)


@pytest.mark.parametrize("reuse", ["lane", "episode"])
def test_construction_is_no_time_of_an_episode(reuse: Any) -> None:
    made = odd("slow to build").environment(env_reuse=reuse).fault_tolerance(episode_timeout_s=1.0)
    assert not evaluate(made).faults


@pytest.mark.slow
def test_the_imports_of_a_process_are_no_time_of_a_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process imports the module of the environment, which takes longer than a reset may."""
    (tmp_path / "slow_to_import.py").write_text(
        "import time\ntime.sleep(3)\nfrom test_subprocess_slots import Walk\nclass Late(Walk):\n    pass\n"
    )
    for folder in (tmp_path, Path(__file__).parent):
        monkeypatch.syspath_prepend(folder)
    late = importlib.import_module("slow_to_import").Late
    made = odd("none").environment(late, env_kwargs={})
    with running(made, reset_timeout_s=2.0) as runner:
        reports = until(runner, [runner.run(leases(made))], finished(4))
    assert not any(report.faults for report in reports)


@pytest.mark.slow
def test_the_time_of_the_policy_is_no_time_of_a_step() -> None:
    made = odd("none", Ponders()).evaluation(num_episodes=2, max_episode_steps=2)
    with running(made, step_timeout_s=2.0) as runner:
        reports = until(runner, [runner.run(leases(made))], finished(2))
    assert not any(report.faults for report in reports)


def test_an_info_that_cannot_be_unpickled_is_left_out() -> None:
    made = odd("odd info").evaluation(info_keys=["slow"])
    assert evaluate(made).fingerprint == evaluate(made.runners(runner="vector")).fingerprint


def test_a_process_that_the_environment_forked_does_not_hold_up_its_fault(tmp_path: Path) -> None:
    made = odd("forks", note=str(tmp_path / "pid")).runners(num_envs_per_runner=1)
    result = evaluate(made.evaluation(num_episodes=1).fault_tolerance(max_attempts_per_episode=1))
    helper = int((tmp_path / "pid").read_text())
    os.kill(helper, signal.SIGKILL)  # It has outlived the evaluation.
    assert [fault.phase for fault in result.faults] == ["step"]


@pytest.mark.parametrize(
    "oddity", ["exits in close", "leaves in close", pytest.param("hangs in close", marks=pytest.mark.slow)]
)
def test_a_bad_close_costs_no_episode_an_attempt(oddity: str) -> None:
    made = odd(oddity).environment(env_reuse="episode")
    with running(made, reset_timeout_s=5.0 if oddity == "hangs in close" else None) as runner:
        reports = until(runner, [runner.run(leases(made))], finished(4))
    assert not any(report.faults for report in reports)
    returns = {row["index"]: row["episode_return"] for report in reports for row in report.rows}
    plain = evaluate(odd("none").runners(runner="vector")).episodes
    assert returns == {record.index: record.episode_return for record in plain}


@pytest.mark.slow
def test_a_step_that_hangs_ends_at_the_limit_of_any_call() -> None:
    """``runner_timeout_s`` limits calls of environments in processes, too."""
    made = config(2, num_episodes=4, kind="sleep", phase="step", episodes=[1], attempts=[1], seconds=600.0)
    with running(made, runner_timeout_s=3.0) as runner:
        reports = until(runner, [runner.run(leases(made))], finished(4))
    assert [(fault.cause, fault.phase) for report in reports for fault in report.faults] == [("timeout", "step")]


# ------------------------------------------------------------------------------ the contract


@pytest.mark.slow
class TestContract(EvalRunnerContract):
    """All that a runner owes, which takes some hundred processes."""

    runner = SubprocessEvalRunner
    lane_counts = (1, 3)
    num_episodes = 6

    # It counts in this process; that the processes of slots end with their runner is tested above.
    test_stop_closes_every_environment = None  # type: ignore[assignment]
