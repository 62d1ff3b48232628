"""The life of a group on real actors: weights, handles, runners that come, go and die."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from numpy_world import config
from waiting import eventually
from workloads import MLP

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.cli.checks import check_cluster
from rl_eval.errors import ClusterError, ConfigError, EvalError, WeightsError
from rl_eval.integrations.rllib.workers import RolloutWorkers
from rl_eval.policies.mlp import MLPActor
from rl_eval.weights import load_weights_file
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("ray_cluster")

EARLY, FINAL = (Path(f"configs/weights/cartpole_ppo_{name}.safetensors") for name in ("early", "final"))


@pytest.fixture(scope="module")
def warm(ray_cluster: None) -> Iterator[EvalRunnerGroup]:
    """A group of two runners without torch, which tests leave as it was."""
    with EvalRunnerGroup(config().evaluation(determinism_check=0)) as group:
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        yield group


@pytest.fixture(scope="module")
def trained(ray_cluster: None) -> Iterator[EvalRunnerGroup]:
    """A group of two runners with a network, whose weights tests change.

    Bad weights before the first runner is up are an error like any other: the group goes on with those that it had.
    """
    with EvalRunnerGroup(config(num_episodes=20).policy(MLP, weights=EARLY)) as group:
        with refused(WeightsError, "body.0.bias"):
            group.sync_weights({"nothing": torch.zeros(1)})
        result = group.evaluate(num_episodes=5)
        assert result.status == "complete"
        assert {record.weights_version for record in result.episodes} == {0}
        yield group


def pids_of(group: EvalRunnerGroup) -> list[int]:
    # A nested function travels by value; one of this module's could not be imported by the runners.
    return group.foreach_runner(lambda runner: os.getpid())


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # The latter if it ends between opening and reading.
        return False


def test_evaluations_on_warm_runners_use_the_weights_of_their_turn(trained: EvalRunnerGroup) -> None:
    """Each evaluation has one weights version, and its own numbers, which are those of a network in this process."""
    early, final = load_weights_file(EARLY), load_weights_file(FINAL)
    start = trained.sync_weights(early)
    first = trained.evaluate()
    assert trained.sync_weights(final, version=start + 50) == start + 50
    second = trained.evaluate()
    assert trained.sync_weights(early) == start + 51
    third = trained.evaluate()
    versions = [{record.weights_version for record in result.episodes} for result in (first, second, third)]
    assert versions == [{start}, {start + 50}, {start + 51}]
    assert second.mean_return == 500.0
    assert first.fingerprint == third.fingerprint != second.fingerprint
    assert first.fingerprint == evaluate(config(0, 3, 20).policy(MLP, weights=EARLY)).fingerprint
    assert first.provenance["weights"]["digest"] == third.provenance["weights"]["digest"]


def test_a_broadcast_waits_for_the_evaluation_before_it(trained: EvalRunnerGroup) -> None:
    """Weights sent while an evaluation runs do not reach its episodes, nor do later training steps."""
    module = MLPActor(4, 2)
    module.load_state_dict(load_weights_file(EARLY))
    version = trained.sync_weights(module)
    alone = trained.evaluate()
    handle = trained.submit()
    with torch.no_grad():
        module.head.weight.zero_()
    assert trained.sync_weights(module) == version + 1
    assert handle.done()
    assert handle.result().fingerprint == alone.fingerprint
    assert trained.evaluate().mean_return < alone.mean_return


def test_handle_reports_progress_and_cancels_to_a_prefix(warm: EvalRunnerGroup) -> None:
    """A cancelled evaluation has a result over the finished prefix of the plan, and leaves the group usable."""
    handle = warm.submit(num_episodes=20_000)
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    assert eventually(lambda: handle.progress().num_prefix >= 4)
    handle.cancel()
    result = handle.result(timeout=30)
    progress = handle.progress()
    whole = warm.evaluate(num_episodes=20)
    assert result.status == "partial"
    assert "cancelled" in result.reason
    assert 4 <= progress.num_prefix <= progress.num_finished < 20_000
    returns = [record.episode_return for record in result.episodes]
    counted = returns[: progress.num_prefix]
    assert result.mean_return == pytest.approx(np.mean(counted), rel=1e-12)
    assert [record.episode_return for record in whole.episodes][: len(counted)] == counted[:20]


def test_handles_are_answered_in_order_each_with_its_own_plan(warm: EvalRunnerGroup) -> None:
    """Several submitted evaluations wait for one another."""
    handles = [warm.submit(num_episodes=5, seed=seed) for seed in (1, 2, 1)]
    first, second, third = (handle.result(timeout=60) for handle in handles)
    assert first.fingerprint == third.fingerprint != second.fingerprint


def test_foreach_runner_and_metrics(warm: EvalRunnerGroup) -> None:
    """A function runs where each runner lives, without torch if the policy needs none; counters add up."""
    assert eventually(lambda: warm.healthy_runner_ids == [0, 1])
    before = warm.get_metrics()["episodes"]
    warm.evaluate(num_episodes=30)
    pids = pids_of(warm)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids
    assert warm.foreach_runner(lambda runner: "torch" in __import__("sys").modules) == [False, False]
    metrics = warm.get_metrics()
    assert metrics["episodes"] == before + 30
    assert metrics["num_healthy_runners"] == 2


def test_a_call_can_wait_for_all_runners() -> None:
    """For those that start, and for one in the place of a lost one; a limit that is too short names those missing."""
    with EvalRunnerGroup(config().runners(num_runners=2)) as group:
        with refused(ClusterError, "timeout_s", value=0.0, runner=0):
            group.foreach_runner(lambda runner: os.getpid(), timeout_s=0.0)
        pids = group.foreach_runner(lambda runner: os.getpid(), timeout_s=120.0)
        os.kill(pids[1], signal.SIGKILL)
        again = RolloutWorkers(group).foreach_env(lambda env: os.getpid(), timeout_s=120.0)
    assert len(set(pids)) == 2
    assert again[0][0] == pids[0]
    assert len(again) == 2
    assert again[1][0] not in pids


def test_a_call_that_fails_is_its_callers_error_and_costs_no_runner(warm: EvalRunnerGroup) -> None:
    """Whether it raises there, cannot be sent there, or its result cannot be read here."""
    lock = threading.Lock()

    def unreadable(runner: Any) -> Any:
        class Explodes:
            def __reduce__(self):
                return int, ("no number",)

        return Explodes()

    before = pids_of(warm)
    with pytest.raises(ZeroDivisionError):
        warm.foreach_runner(lambda runner: 1 // 0)
    with refused(ConfigError, "the function"):
        warm.foreach_runner(lambda runner: lock)
    with pytest.raises(TypeError, match="cannot pickle"):
        warm.foreach_runner(lambda runner: __import__("threading").Lock())
    with pytest.raises(Exception, match="no number"):
        warm.foreach_runner(unreadable)
    assert pids_of(warm) == before
    assert warm.evaluate(num_episodes=3).status == "complete"


def test_a_cluster_of_the_caller_is_no_other_one(warm: EvalRunnerGroup) -> None:
    """A group uses the cluster that its caller is connected to; another address is refused."""
    with refused(ConfigError, "runners.address", value="127.0.0.1:9"):
        EvalRunnerGroup(config().runners(address="127.0.0.1:9"))
    assert ray.is_initialized()


def test_runners_are_added_and_removed_while_an_evaluation_runs(warm: EvalRunnerGroup) -> None:
    """The pool may change under an evaluation; its result does not."""
    handle = warm.submit(num_episodes=100_000)
    warm.add_runners(1)
    assert eventually(lambda: warm.healthy_runner_ids == [0, 1, 2])
    warm.remove_runners(1)
    assert warm.healthy_runner_ids == [0, 1]
    before = handle.progress().num_prefix
    assert eventually(lambda: handle.progress().num_prefix > before)
    handle.cancel()
    # The latest of the episodes that count are those of this process: nothing was lost or swapped on the way.
    returns = [record.episode_return for record in handle.result(timeout=60).episodes]
    returns = returns[: handle.progress().num_prefix]
    tail = min(100, len(returns))
    expected = evaluate(config(0, 8, tail).evaluation(first_index=len(returns) - tail, determinism_check=0))
    assert returns[-tail:] == [record.episode_return for record in expected.episodes]


def test_two_callers_cannot_remove_all_runners() -> None:
    """Each may remove one of the two; together they would leave none."""
    with EvalRunnerGroup(config(2)) as group, ThreadPoolExecutor(2) as callers:
        removals = [callers.submit(group.remove_runners, 1) for _ in range(2)]
        assert {type(removal.exception()) for removal in removals} == {type(None), ConfigError}


def test_a_runner_killed_from_outside_is_replaced(warm: EvalRunnerGroup) -> None:
    """kill -9 in the middle of a run loses nothing, its counters included, and its episodes are not charged."""
    pids, before, counted = pids_of(warm), warm._pool.restarts, warm.get_metrics()["episodes"]
    handle = warm.submit(num_episodes=1_000)
    assert eventually(lambda: handle.progress().num_finished > 5)
    os.kill(pids[0], signal.SIGKILL)
    result = handle.result(timeout=120)
    assert result.fingerprint == evaluate(config(0, 8, 1_000)).fingerprint
    assert eventually(lambda: warm._pool.restarts > before and warm.healthy_runner_ids == [0, 1])
    assert {record.attempts for record in result.episodes} == {1}
    assert result.provenance["runners_lost"] == 1
    assert warm.get_metrics()["episodes"] >= counted + 1_000


@pytest.mark.slow
def test_a_runner_that_hangs_in_a_step_is_replaced_and_one_that_works_for_its_caller_is_not(tmp_path: Path) -> None:
    """A simulator holds the evaluation no longer than the limit of a step; a function may take its time."""
    mark = tmp_path / "hung"

    class HangsOnce(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            if not mark.exists():
                mark.touch()
                time.sleep(3600)
            return self.env.step(action)

    hanging = config(1, num_episodes=20).environment(lambda context: HangsOnce(gym.make("CartPole-v1")), env_kwargs={})
    with EvalRunnerGroup(hanging.fault_tolerance(step_timeout_s=1.0)) as group:
        result = group.evaluate()
        assert mark.exists()
        assert result.status == "complete"
        assert result.provenance["runners_lost"] == 1
        assert result.fingerprint == evaluate(config(0, num_episodes=20)).fingerprint
        pids = pids_of(group)
        group.foreach_runner(lambda runner: time.sleep(1.5))
        assert pids_of(group) == pids


def test_a_group_without_runners_left_says_why() -> None:
    """When restarts are used up, the evaluation ends with what it has."""

    def make(context: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    config_ = (
        EvalConfig()
        .environment(make)
        .policy("numpy_world:lean")
        .runners(num_runners=1, runner_start_timeout_s=60)
        .fault_tolerance(max_runner_restarts=1)
        .evaluation(num_episodes=4)
    )
    with EvalRunnerGroup(config_) as group:
        result = group.evaluate()
    assert result.status == "failed"
    assert "4 of 4" in result.reason


def test_runners_that_end_in_order_leave_no_file() -> None:
    """Also where no agent watches them."""

    def recordings(runner: Any) -> list[Path]:
        files = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return [file for file in files if file.suffix == ".stack"]

    with EvalRunnerGroup(config(runners=1)) as group:
        [[stack]] = group.foreach_runner(recordings)
        assert stack.exists()
    assert not stack.parent.exists()


def test_stop_is_bounded_idempotent_and_leaves_no_process() -> None:
    """After stop() the runners' processes are gone, even in the middle of an evaluation, and calls say so."""
    group = EvalRunnerGroup(config(runners=1, lanes=1))
    pids = pids_of(group)
    handle = group.submit(num_episodes=20_000)
    assert eventually(lambda: handle.progress().num_finished > 0)
    group.stop()
    group.stop()
    with refused(ClusterError, "stop"):
        handle.result(timeout=1)
    with refused(EvalError, "stop"):
        group.evaluate()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_an_evaluation_that_ends_as_it_should_makes_ray_report_no_lost_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray warns of memory and crashes where it cannot tell a runner's end from a death."""
    with EvalRunnerGroup(config(runners=1, num_episodes=4)) as group:
        assert group.evaluate().status == "complete"
        runners = pids_of(group)

    @ray.remote(num_cpus=0)
    class Victim:
        def pid(self) -> int:
            return os.getpid()

    pid = ray.get((victim := Victim.remote()).pid.remote())
    os.kill(pid, signal.SIGKILL)
    printed: list[str] = []

    def warned(pid: int) -> bool:
        return re.search(rf"Worker PID: {pid}\b", "".join(printed)) is not None

    # Ray's warnings come in order: before this one, all others have come.
    assert eventually(lambda: printed.append(capsys.readouterr().out) or warned(pid))
    assert not any(warned(runner) for runner in runners)
    del victim


# ------------------------------------------------------------------------------ rl-eval doctor --ray


def checked(made: EvalConfig) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in check_cluster(made.build())]


def test_doctor_compares_runners_with_this_process() -> None:
    assert [level for level, _ in checked(config())] == ["ok", "ok"]


def test_doctor_reports_an_environment_that_works_on_ray_alone() -> None:
    driver = os.getpid()

    def on_a_runner() -> gym.Env[Any, Any]:
        if os.getpid() == driver:
            raise OSError("no simulator here")
        return gym.make("CartPole-v1")

    up, (level, text) = checked(config().environment(on_a_runner))
    assert up[0] == "ok"
    assert level == "problem"
    assert "no simulator here" in text
