"""The life of a group on real actors: weights, handles, runners that come, go and die."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from machines import eventually
from workloads import MLP, cartpole

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.errors import ConfigError, EvalError, WeightsError
from rl_eval.policies.mlp import MLPActor
from rl_eval.weights import load_weights_file

pytestmark = pytest.mark.usefixtures("ray_cluster")


def pids_of(group: EvalRunnerGroup) -> list[int]:
    # A nested function travels by value; one of this module's could not be imported by the runners.
    return group.foreach_runner(lambda runner: runner.pid())


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def config(runners: int = 2, lanes: int = 4) -> EvalConfig:
    return cartpole().runners(num_runners=runners, num_envs_per_runner=lanes)


def test_evaluations_on_warm_runners_use_the_weights_of_their_turn() -> None:
    """Each evaluation has one weights version, and its own numbers."""
    early = load_weights_file("configs/weights/cartpole_ppo_early.safetensors")
    final = load_weights_file("configs/weights/cartpole_ppo_final.safetensors")
    with EvalRunnerGroup(config()) as group:
        assert group.weights_version == 0
        first = group.evaluate()
        assert group.sync_weights(final, version=50) == 50
        second = group.evaluate()
        assert group.sync_weights(early) == 51
        third = group.evaluate()
    assert [{record.weights_version for record in r.episodes} for r in (first, second, third)] == [{0}, {50}, {51}]
    assert second.mean_return == 500.0
    assert first.fingerprint == third.fingerprint != second.fingerprint
    assert first.provenance["weights"]["digest"] == third.provenance["weights"]["digest"]


def test_a_broadcast_waits_for_the_evaluation_before_it() -> None:
    """Weights sent while an evaluation runs do not reach its episodes, nor do later training steps."""
    module = MLPActor(4, 2)
    module.load_state_dict(load_weights_file("configs/weights/cartpole_ppo_early.safetensors"))
    with EvalRunnerGroup(config()) as group:
        group.sync_weights(module, version=1)
        alone = group.evaluate()
        handle = group.submit()
        with torch.no_grad():
            module.head.weight.zero_()
        assert group.sync_weights(module, version=2) == 2
        assert handle.done()
        assert handle.result().fingerprint == alone.fingerprint
        assert group.evaluate().mean_return < alone.mean_return


def test_handle_reports_progress_and_cancels_to_a_prefix() -> None:
    """A cancelled evaluation has a result over the finished prefix of the plan, and leaves the group usable."""
    with EvalRunnerGroup(config(lanes=1)) as group:
        handle = group.submit(num_episodes=5_000)
        with pytest.raises(TimeoutError):
            handle.result(timeout_s=0.01)
        assert eventually(lambda: handle.progress().num_prefix >= 4)
        handle.cancel()
        result = handle.result(timeout_s=30)
        progress = handle.progress()
        whole = group.evaluate(num_episodes=20)
    assert result.status == "partial"
    assert "cancelled" in result.reason
    assert 4 <= progress.num_prefix <= progress.num_finished < 5_000
    returns = [record.episode_return for record in result.episodes]
    counted = returns[: progress.num_prefix]
    assert result.mean_return == pytest.approx(np.mean(counted), rel=1e-12)
    assert [record.episode_return for record in whole.episodes][: len(counted)] == counted[:20]


def test_handles_are_answered_in_order_each_with_its_own_plan() -> None:
    """Several submitted evaluations wait for one another."""
    with EvalRunnerGroup(config()) as group:
        handles = [group.submit(num_episodes=5, seed=seed) for seed in (1, 2, 1)]
        first, second, third = (handle.result(timeout_s=60) for handle in handles)
    assert first.fingerprint == third.fingerprint != second.fingerprint


def test_foreach_runner_and_metrics() -> None:
    """A function runs where each runner lives; counters add up."""
    with EvalRunnerGroup(config().evaluation(determinism_check=0)) as group:
        group.evaluate(num_episodes=30)
        assert eventually(lambda: group.healthy_runner_ids == [0, 1])
        pids = pids_of(group)
        assert len(set(pids)) == 2
        assert os.getpid() not in pids
        metrics = group.get_metrics()
        assert metrics["episodes"] == 30
        assert metrics["num_healthy_runners"] == 2
        with pytest.raises(ZeroDivisionError):
            group.foreach_runner(lambda runner: 1 // 0)
        assert group.evaluate(num_episodes=3).status == "complete"


def test_runners_are_added_and_removed_while_an_evaluation_runs() -> None:
    """The fleet may change under an evaluation; its result does not."""
    expected = evaluate(config(runners=0, lanes=8).evaluation(num_episodes=400))
    with EvalRunnerGroup(config(runners=1, lanes=2).evaluation(num_episodes=400)) as group:
        handle = group.submit()
        assert eventually(lambda: handle.progress().num_finished > 5)
        group.add_runners(2)
        assert eventually(lambda: handle.done() or group.healthy_runner_ids == [0, 1, 2])
        group.remove_runners(1)
        result = handle.result(timeout_s=120)
        assert group.healthy_runner_ids == [0, 1]
    assert result.fingerprint == expected.fingerprint


def test_a_runner_killed_from_outside_is_replaced() -> None:
    """kill -9 in the middle of a run loses nothing, and its episodes are not charged."""
    expected = evaluate(config(runners=0, lanes=8).evaluation(num_episodes=600))
    with EvalRunnerGroup(config(lanes=2).evaluation(num_episodes=600)) as group:
        pids = pids_of(group)
        handle = group.submit()
        assert eventually(lambda: handle.progress().num_finished > 5)
        os.kill(pids[0], signal.SIGKILL)
        result = handle.result(timeout_s=120)
    assert result.status == "complete"
    assert result.fingerprint == expected.fingerprint
    assert {record.attempts for record in result.episodes} == {1}
    assert result.provenance["runners_lost"] == 1


def test_a_silent_runner_is_killed_and_replaced(tmp_path: Path) -> None:
    """A simulator that hangs in a step holds the evaluation no longer than its time limit allows."""
    mark = tmp_path / "hung"

    class HangsOnce(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            if not mark.exists():
                mark.touch()
                time.sleep(3600)
            return self.env.step(action)

    hanging = config().environment(lambda context: HangsOnce(gym.make("CartPole-v1")), env_kwargs={})
    result = evaluate(hanging.fault_tolerance(step_timeout_s=1.0))
    assert mark.exists()
    assert result.status == "complete"
    assert result.fingerprint == evaluate(config(runners=0)).fingerprint


def test_a_group_without_runners_left_says_why() -> None:
    """When restarts are used up, the evaluation ends with what it has."""

    def make(context: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    config_ = (
        EvalConfig()
        .environment(make)
        .policy(MLP)
        .runners(num_runners=2, runner_start_timeout_s=60)
        .fault_tolerance(max_runner_restarts=2)
        .evaluation(num_episodes=4)
    )
    with EvalRunnerGroup(config_) as group:
        result = group.evaluate()
    assert result.status == "failed"
    assert "4 of 4 episodes did not run: no runner is left" in result.reason


def test_stop_is_bounded_idempotent_and_leaves_no_process() -> None:
    """After stop() the runners' processes are gone, even in the middle of an evaluation, and calls say so."""
    group = EvalRunnerGroup(config(lanes=1))
    pids = pids_of(group)
    handle = group.submit(num_episodes=10_000)
    assert eventually(lambda: handle.progress().num_finished > 0)
    group.stop()
    group.stop()
    with pytest.raises(EvalError, match="stopped"):
        handle.result(timeout_s=1)
    with pytest.raises(EvalError, match="stopped"):
        group.evaluate()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


def test_an_evaluation_that_ends_as_it_should_makes_ray_report_no_lost_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray warns of memory and crashes where it cannot tell a runner's end from a death."""
    for _ in range(5):
        assert evaluate(config().evaluation(num_episodes=4)).status == "complete"

    @ray.remote(num_cpus=0)
    class Victim:
        def pid(self) -> int:
            return os.getpid()

    victim = Victim.remote()
    os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
    printed: list[str] = []
    # Ray's warnings come in order: before this one, all others have come.
    assert eventually(lambda: printed.append(capsys.readouterr().out) or "(raylet)" in "".join(printed))
    assert "".join(printed).count("(raylet)") == 1


def test_one_actor_module_imports_no_torch() -> None:
    """The process of a runner starts without torch: users' code decides what is imported first."""
    from rl_eval.backends.runner_actor import RunnerActor

    class Probe(RunnerActor):
        def loaded(self) -> bool:
            import sys

            return "torch" in sys.modules

    actor = ray.remote(num_cpus=1)(Probe).remote(b"", b"", 0, "group", "0", 1)
    assert ray.get(actor.loaded.remote()) is False
    ray.kill(actor)


def test_bad_weights_before_the_first_runner_is_up_are_an_error_like_any_other() -> None:
    """The broadcast fails; the group goes on with the weights it had."""
    with EvalRunnerGroup(config(runners=1)) as group:
        with pytest.raises(WeightsError, match="lack"):
            group.sync_weights({"nothing": torch.zeros(1)})
        result = group.evaluate(num_episodes=5)
    assert result.status == "complete"
    assert {record.weights_version for record in result.episodes} == {0}


def test_a_result_that_cannot_come_back_is_the_calls_error() -> None:
    """What cannot be unpickled here raises here; no runner is to blame."""

    def build(runner: Any) -> Any:
        class Explodes:
            def __reduce__(self):
                return int, ("no number",)

        return Explodes()

    with EvalRunnerGroup(config(runners=1)) as group:
        before = pids_of(group)
        with pytest.raises(Exception, match="no number"):
            group.foreach_runner(build)
        assert pids_of(group) == before


def test_a_function_that_cannot_travel_is_refused_and_nothing_else_suffers() -> None:
    """The caller hears of it; the group goes on."""
    lock = threading.Lock()
    with EvalRunnerGroup(config(runners=1)) as group:
        with pytest.raises(ConfigError, match="the function cannot be sent to a runner"):
            group.foreach_runner(lambda runner: lock)
        assert group.evaluate(num_episodes=3).status == "complete"


def test_the_time_limit_of_a_step_is_for_steps() -> None:
    """A function that the caller sends to the runners may take its time."""
    with EvalRunnerGroup(config(runners=1).fault_tolerance(step_timeout_s=0.2)) as group:
        group.evaluate(num_episodes=5)
        before = pids_of(group)
        group.foreach_runner(lambda runner: time.sleep(3))
        assert pids_of(group) == before
