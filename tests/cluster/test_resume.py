"""A driver that is killed, at any moment, and continued: every episode once, the same bits, little work done twice."""

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from workloads import cartpole

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.log import EvaluationLog, read_log
from rl_eval.records.episode import ROW, Batch, Fault
from rl_eval.testing import faulty

pytestmark = pytest.mark.process

LANES = 8

# Drivers are forked, which costs little, but not from this process: threads of Ray in it may be anywhere in their work.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "pyarrow.parquet", __name__])


def config(episodes: int = 300, **faults: Any) -> EvalConfig:
    settings = cartpole(**faults).runners(num_envs_per_runner=LANES)
    return settings.evaluation(num_episodes=episodes, max_episode_steps=30)


class Witness(gym.Wrapper[Any, Any, Any, Any]):
    """Writes down which episodes begin, in a file of its process."""

    def __init__(self, env: gym.Env[Any, Any], folder: str) -> None:
        super().__init__(env)
        self._folder = Path(folder)

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write(f"{index}\n")
        self.env.get_wrapper_attr("begin_episode")(index, seed, attempt)


def witnessed(context: Any) -> Witness:
    folder = context.pop("folder")
    return Witness(faulty(context), folder)


@pytest.fixture(scope="module", autouse=True)
def _server() -> None:
    """It has imported everything before the first driver is killed."""
    first = SERVER.Process(target=int)
    first.start()
    first.join()


def driven(config_: EvalConfig, folder: Path) -> Any:
    """Run an evaluation in a child process, and return the process."""
    child = SERVER.Process(target=evaluate, args=(config_,), kwargs={"output": folder})
    child.start()
    return child


def killed(child: Any) -> bool:
    """Kill a driver; return whether it was still at work."""
    child.kill()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return bool(child.exitcode)


def finished(folder: Path) -> set[int]:
    try:
        return set(read_log(folder).rows["index"].tolist())
    except Exception:
        return set()


def kill_until_complete(config_: EvalConfig, folder: Path, kills: int, longest_s: float, seed: int) -> int:
    """Kill drivers at random moments, then let one finish; return the number of kills that struck."""
    rng, struck = random.Random(seed), 0
    for _ in range(kills):
        child = driven(config_, folder)
        time.sleep(rng.uniform(0.0, longest_s))
        struck += killed(child)
        before = finished(folder)
        assert len(before) <= config_.build().evaluation.num_episodes
    return struck


def check_continued(config_: EvalConfig, folder: Path) -> None:
    expected = evaluate(config_)
    result = evaluate(config_, output=folder)
    assert result.status == expected.status
    assert [record.index for record in result.episodes] == list(range(len(expected.plan)))
    assert result.fingerprint == expected.fingerprint
    assert not result.audit_mismatches


def test_a_continued_run_does_only_what_is_missing(tmp_path: Path) -> None:
    """A finished log is not run again; a log of half the plan has the other half run."""
    whole = evaluate(config(60), output=tmp_path / "log")
    again = evaluate(config(60), output=tmp_path / "log")
    assert again.fingerprint == whole.fingerprint
    assert again.timing.env_steps == whole.timing.env_steps
    assert again.status == "complete"


def test_killed_drivers_lose_nothing_that_was_flushed(tmp_path: Path) -> None:
    """Kill -9 at random moments, then continue: the table of an undisturbed run."""
    flaky = config(500, attempt_rates=[0.2])
    assert kill_until_complete(flaky, tmp_path, kills=3, longest_s=0.4, seed=1) > 0
    check_continued(flaky, tmp_path)


def test_what_is_in_the_log_is_not_run_again(tmp_path: Path) -> None:
    """After each kill only episodes begin that were not committed: what was in flight, or not yet flushed."""
    seen = tmp_path / "seen"
    seen.mkdir()
    watched = config(3_000).environment(witnessed, env_kwargs={"env": "CartPole-v1", "folder": str(seen)})
    watched.evaluation(determinism_check=0)  # It runs episodes again on purpose, and a fast machine comes to it.
    rng = random.Random(0)
    for _ in range(2):
        committed = finished(tmp_path / "log")
        child = driven(watched, tmp_path / "log")
        while finished(tmp_path / "log") <= committed and child.is_alive():
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 0.3))
        killed(child)
        began = {int(line) for file in seen.glob(str(child.pid)) for line in file.read_text().split()}
        assert began or len(committed) == 3_000
        assert began.isdisjoint(committed)
    assert finished(tmp_path / "log")


def test_progress_counts_what_is_in_the_log_and_a_cancelled_run_leaves_it_there(tmp_path: Path) -> None:
    """Nobody hears of an episode that a reader of the log does not find."""
    with EvalRunnerGroup(config(20_000)) as group:
        handle = group.submit(output=tmp_path)
        told: set[int] = set()
        while len(told) < 3:
            told.add(count := handle.progress().num_finished)
            assert len(finished(tmp_path)) >= count
            time.sleep(0.02)
        handle.cancel()
        partial = handle.result(timeout=60)
    assert partial.status == "partial"
    assert finished(tmp_path) == {record.index for record in partial.episodes}


def test_attempts_that_were_charged_stay_charged(tmp_path: Path) -> None:
    """An episode that used up two attempts before the driver died has one left, and its faults are told once."""
    never = config(40, attempt_rates=[1.0] * 3, within_steps=3)
    first = driven(never.fault_tolerance(max_attempts_per_episode=3), tmp_path)
    first.join()
    assert first.exitcode == 0
    result = evaluate(never, output=tmp_path)
    assert result.status == "failed"
    assert {record.attempts for record in result.episodes} == {3}
    assert all([fault.attempt for fault in record.faults] == [1, 2, 3] for record in result.episodes)


@pytest.mark.parametrize("spent", [1, 3])
def test_what_had_no_attempt_left_is_given_up(tmp_path: Path, spent: int) -> None:
    """A driver that died between the last fault and the row leaves an episode that is failed, and is not run again."""
    plan = config(3)
    manifest_run = evaluate(plan, output=tmp_path / "template")
    log = EvaluationLog.open(tmp_path / "log")
    log.begin(read_log(tmp_path / "template").manifest)
    seeds = manifest_run.plan.seeds.tolist()
    faults = tuple(
        Fault(index, seeds[index], attempt, "env", "step", 1, "OSError", "gone", "trace", 0, "host", 0.1)
        for index in range(spent)
        for attempt in (1, 2, 3)
    )
    log.append(Batch(np.zeros(0, ROW), np.zeros((0, 0)), faults))
    log.flush(30)
    log.close()
    result = evaluate(plan, output=tmp_path / "log")
    assert [record.index for record in result.episodes if record.outcome == "failed"] == list(range(spent))
    assert result.status == ("failed" if spent == 3 else "partial")
    assert {record.attempts for record in result.episodes if record.outcome == "failed"} == {3}
    assert len(result.faults) == 3 * spent


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills(tmp_path: Path) -> None:
    """Kill -9 at 200 random moments over several plans; each continued run is the undisturbed one."""
    struck = 0
    for round_ in itertools.count():
        # A fast machine finishes a plan before all its kills have struck.
        flaky = config(25_000, attempt_rates=[0.1]).evaluation(seed=round_)
        struck += kill_until_complete(flaky, tmp_path / str(round_), kills=40, longest_s=2.5, seed=round_)
        check_continued(flaky, tmp_path / str(round_))
        if struck >= 200:
            break


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from workloads import cartpole
from rl_eval import evaluate
config = cartpole().runners(num_runners=2, num_envs_per_runner=4).evaluation(num_episodes=4000)
evaluate(config, output={folder!r})
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_killed_drivers_of_ray_runners(tmp_path: Path) -> None:
    """The same with runners of their own: they end with their driver, and the next one's do the rest."""
    rng, script = random.Random(0), SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "log"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env
        )
        before, deadline = len(finished(tmp_path / "log")), time.monotonic() + 120
        while child.poll() is None and time.monotonic() < deadline and len(finished(tmp_path / "log")) == before:
            time.sleep(0.1)
        time.sleep(rng.uniform(0.0, 1.0))
        child.kill()
        child.wait()
    plan = cartpole().evaluation(num_episodes=4000).runners(num_envs_per_runner=LANES)
    check_continued(plan, tmp_path / "log")
