"""What TorchRL's own tests ask of its evaluators, asked of ours; ``RL_EVAL_SUBJECT=torchrl`` asks theirs the same.

Run ``RL_EVAL_SUBJECT=torchrl pytest tests/integrations/test_torchrl_evaluator.py`` to see which of these theirs fail.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, Transform, TransformedEnv, VecNormV2
from torchrl.modules import RandomPolicy
from torchrl_worlds import (
    SUBJECT,
    Constant,
    Evaluator,
    RayEvalWorker,
    bare_steps,
    cartpole,
    constant,
    make_constant,
    steps,
    weights_of,
)

pytestmark = [
    pytest.mark.timeout(240),
    # TorchRL and Ray warn of their own plans; what these tests are about is asserted.
    pytest.mark.filterwarnings("ignore"),
]

KEYS = {"eval/reward", "eval/reward_std", "eval/num_episodes", "eval/episode_length", "eval/fps", "eval/step"}


def rendering() -> Any:
    return GymEnv("CartPole-v1", render_mode="rgb_array")


def random_policy_of(env: Any) -> Any:
    return RandomPolicy(env.action_spec)


@pytest.fixture
def made() -> Any:
    """Create evaluators that are shut down whatever happens."""
    created: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        evaluator = Evaluator(*args, **kwargs)
        created.append(evaluator)
        return evaluator

    yield make
    for evaluator in created:
        evaluator.shutdown(timeout=5.0)


def finished(evaluator: Any) -> Any:
    """Wait for a result, and never for ever."""
    result = evaluator.wait(timeout=60.0)
    assert result is not None, "no result came within a minute"
    return result


# ------------------------------------------------------------------------------ one after the other


def test_evaluate_returns_every_key(made: Any) -> None:
    """The metrics have the documented names and are plain numbers."""
    result = made(steps(), constant(2.0), num_trajectories=3, max_steps=20).evaluate(step=7)
    assert set(result) >= KEYS
    assert isinstance(result["eval/reward"], float)
    assert result["eval/step"] == 7
    assert result["eval/num_episodes"] == 3


def test_the_reward_is_the_true_return(made: Any) -> None:
    """Five steps worth two each are worth ten, and five steps long."""
    result = made(steps(length=5), constant(2.0), num_trajectories=4, max_steps=20).evaluate()
    assert result["eval/reward"] == 10.0
    assert result["eval/reward_std"] == 0.0
    assert result["eval/episode_length"] == 5.0


def test_without_reward_sum_rewards_are_added(made: Any) -> None:
    """An environment without any transform is evaluated all the same."""
    result = made(bare_steps(length=4), constant(3.0), num_trajectories=2, max_steps=20).evaluate()
    assert result["eval/reward"] == 12.0


@pytest.mark.parametrize("kind", ["tensordict", "module"])
def test_weights_are_used(made: Any, kind: str) -> None:
    """Weights sent with a request are those evaluated, twice in a row, and the sent module stays whole."""
    evaluator = made(steps(), constant(1.0), num_trajectories=2, max_steps=20)
    trained = constant(3.0)
    weights = trained if kind == "module" else TensorDict.from_module(trained).data
    for _ in range(2):
        assert evaluator.evaluate(weights)["eval/reward"] == 15.0
    assert list(trained.state_dict()) == ["module.weight"]
    assert isinstance(trained.module.weight, nn.Parameter)


def test_a_callers_policy_keeps_its_parameters(made: Any) -> None:
    """The policy given stays a module with the same parameter objects and values."""
    policy = constant(1.0)
    parameter = policy.module.weight
    made(steps(), policy, num_trajectories=2, max_steps=20).evaluate(weights_of(4.0))
    assert policy.module.weight is parameter
    assert list(policy.state_dict()) == ["module.weight"]


def test_a_prefix_and_a_metrics_function(made: Any) -> None:
    """Names follow the prefix; the function's numbers are among them."""
    evaluator = made(
        steps(),
        constant(2.0),
        num_trajectories=3,
        max_steps=20,
        log_prefix="test",
        metrics_fn=lambda data: {"best": float(data["next", "episode_reward"].max())},
    )
    result = evaluator.evaluate()
    assert result["test/best"] == 10.0
    assert "test/reward" in result


def test_a_callback_gets_every_result_once(made: Any) -> None:
    """It gets a flat tensordict with the step and the metrics."""
    heard: list[Any] = []
    evaluator = made(steps(), constant(2.0), num_trajectories=2, max_steps=20, on_result=heard.append)
    evaluator.evaluate(step=3)
    assert len(heard) == 1
    assert heard[0]["eval/step"].item() == 3
    assert heard[0]["eval/reward"].item() == 10.0


def test_a_policy_factory_gets_the_environment(made: Any) -> None:
    """It is called once, with an environment that has specs."""
    given: list[Any] = []

    def factory(env: Any) -> Any:
        given.append(env.action_spec.shape)
        return constant(2.0)

    assert made(steps(), policy_factory=factory, num_trajectories=2, max_steps=20).evaluate()["eval/reward"] == 10.0
    assert given == [torch.Size([1])]


@pytest.mark.parametrize("mode", ["deterministic", "random"])
@pytest.mark.parametrize("given", ["policy", "policy_factory"])
def test_random_policies_act_at_random(made: Any, given: str, mode: str) -> None:
    """However actions are to be taken; an optional parameter of a factory is not the environment."""
    spec = cartpole().action_spec
    policy = RandomPolicy(spec) if given == "policy" else partial(RandomPolicy, spec)
    evaluator = made(cartpole, num_trajectories=20, max_steps=500, exploration_type=mode, **{given: policy})
    assert 12.0 < evaluator.evaluate()["eval/reward"] < 40.0


@pytest.mark.parametrize("given", ["policy", "policy_factory"])
def test_a_plain_module_is_wrapped(made: Any, given: str) -> None:
    """Its parameter is named like an observation; it gets new weights as it is."""
    policy = Constant(2.0) if given == "policy" else Constant
    evaluator = made(steps(), num_trajectories=2, max_steps=20, **{given: policy})
    assert evaluator.evaluate()["eval/reward"] == (10.0 if given == "policy" else 5.0)
    assert evaluator.evaluate(Constant(3.0))["eval/reward"] == 15.0


class Dumping(Transform):
    """Notes the steps at which it is dumped."""

    def __init__(self, path: Any) -> None:
        super().__init__()
        self.path = str(path)

    def dump(self, step: int | None = None, **_: Any) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{step} ")


@pytest.mark.parametrize("dump", [True, False])
def test_transforms_are_dumped_after_each_evaluation(made: Any, tmp_path: Any, dump: bool) -> None:
    """At its step, before ``evaluate`` returns."""
    path = tmp_path / "dumped"
    path.touch()
    env = TransformedEnv(steps()(), Compose(Dumping(path)))
    evaluator = made(env, constant(), num_trajectories=1, max_steps=20, dump_video=dump)
    for step in (3, 8):
        evaluator.evaluate(step=step)
        assert (str(step) in path.read_text().split()) is dump
    evaluator.trigger_eval(step=11)
    finished(evaluator)
    while evaluator.pending:
        time.sleep(0.01)
    assert path.read_text().split() == (["3", "8", "11"] if dump else [])


def test_steps_are_counted_or_given(made: Any) -> None:
    """Without a step the evaluator counts; a given one is reported."""
    evaluator = made(steps(), constant(), num_trajectories=1, max_steps=20)
    assert [evaluator.evaluate()["eval/step"] for _ in range(3)] == [0, 1, 2]
    assert evaluator.evaluate(step=50)["eval/step"] == 50


def test_extract_weights(made: Any) -> None:
    """They are a copy on the CPU."""
    policy = constant(2.0)
    weights = Evaluator.extract_weights(policy)
    policy.module.weight.data.fill_(9.0)
    assert weights["module", "weight"].item() == 2.0


def test_state_goes_on_counting(made: Any) -> None:
    """A restored evaluator goes on with the next step."""
    first = made(steps(), constant(), num_trajectories=1, max_steps=20)
    first.evaluate()
    first.evaluate()
    second = made(steps(), constant(), num_trajectories=1, max_steps=20)
    second.load_state_dict(first.state_dict())
    assert second.evaluate()["eval/step"] == 2


def test_unread_results_are_not_lost_by_saving_or_loading(made: Any) -> None:
    """State is neither saved nor replaced over a result that nobody has read."""
    evaluator = made(steps(), constant(), num_trajectories=1, max_steps=20)
    state = evaluator.state_dict()
    evaluator.trigger_eval()
    while evaluator.pending:
        time.sleep(0.01)
    with pytest.raises(Exception, match="unread"):
        evaluator.state_dict()
    with pytest.raises(Exception, match="unread"):
        evaluator.load_state_dict(state)
    assert evaluator.poll() is not None


# ------------------------------------------------------------------------------ beside the training


def test_trigger_and_wait(made: Any) -> None:
    """The result carries the step and the weights of its request."""
    evaluator = made(steps(), constant(1.0), num_trajectories=2, max_steps=20)
    assert evaluator.trigger_eval(weights_of(2.0), step=5) is True
    result = finished(evaluator)
    assert (result["eval/step"], result["eval/reward"]) == (5, 10.0)


def test_poll_waits_as_long_as_it_is_told(made: Any) -> None:
    """At once it has nothing or a result; with time it has the result."""
    evaluator = made(steps(seconds=0.02), constant(), num_trajectories=2, max_steps=20)
    assert evaluator.poll() is None
    evaluator.trigger_eval()
    assert evaluator.poll(timeout=60.0) is not None


@pytest.mark.parametrize("policy", ["error", "skip", "queue"])
def test_a_second_request_while_one_runs(made: Any, policy: str) -> None:
    """It is an error, is skipped, or waits in line, as configured; afterwards requests are accepted again."""
    evaluator = made(steps(seconds=0.05), constant(), num_trajectories=2, max_steps=20, busy_policy=policy)
    assert evaluator.trigger_eval(step=0) is True
    if policy == "error":
        with pytest.raises(RuntimeError, match="busy_policy='queue'"):
            evaluator.trigger_eval(step=1)
    else:
        assert evaluator.trigger_eval(step=1) is (policy == "queue")
    assert finished(evaluator)["eval/step"] == 0
    if policy == "queue":
        assert finished(evaluator)["eval/step"] == 1
    assert evaluator.trigger_eval(step=2) is True
    assert finished(evaluator)["eval/step"] == 2


def test_pending_tells_whether_a_result_is_to_come(made: Any) -> None:
    """False, True while it runs, False when it was read, and after the end."""
    evaluator = made(steps(seconds=0.05), constant(), num_trajectories=2, max_steps=20)
    assert not evaluator.pending
    evaluator.trigger_eval()
    assert evaluator.pending
    finished(evaluator)
    assert not evaluator.pending
    evaluator.trigger_eval()
    evaluator.shutdown(timeout=10.0)
    assert not evaluator.pending


def test_what_is_not_pending_can_be_read(made: Any) -> None:
    """The documented pattern ``if not pending: poll()`` yields the result, every time."""
    evaluator = made(steps(), constant(), num_trajectories=2, max_steps=20)
    for step in range(5):
        evaluator.trigger_eval(step=step)
        while evaluator.pending:
            time.sleep(0.001)
        result = evaluator.poll()
        assert result is not None
        assert result["eval/step"] == step


def test_no_thread_stays(made: Any) -> None:
    """Shutdown ends every thread that was started."""
    before = set(threading.enumerate())
    evaluator = made(steps(), constant(), num_trajectories=1, max_steps=20)
    evaluator.trigger_eval()
    finished(evaluator)
    evaluator.shutdown(timeout=10.0)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def test_shutdown_while_an_evaluation_runs(made: Any) -> None:
    """It does not wait for the hundreds of steps that are left."""
    evaluator = made(steps(length=2000, seconds=0.02), constant(), num_trajectories=2, max_steps=2000)
    evaluator.trigger_eval()
    started = time.monotonic()
    evaluator.shutdown(timeout=5.0)
    assert time.monotonic() - started < 20.0


def test_things_are_built_in_the_workers_thread(made: Any) -> None:
    """With factories nothing is built in the thread that trains."""
    where: list[str] = []

    def env() -> Any:
        where.append(threading.current_thread().name)
        return steps()()

    def policy(_: Any) -> Any:
        where.append(threading.current_thread().name)
        return constant(2.0)

    evaluator = made(env, policy_factory=policy, num_trajectories=1, max_steps=20)
    evaluator.trigger_eval()
    assert finished(evaluator)["eval/reward"] == 10.0
    assert len(where) >= 2  # An episode that runs again has an environment of its own.
    assert threading.main_thread().name not in where


# ------------------------------------------------------------------------------ batches, models, mistakes


@pytest.mark.parametrize("count", [5, 3, 2, 4])
def test_exactly_so_many_episodes_from_a_batched_environment(made: Any, count: int) -> None:
    """Four environments at a time give as many episodes as asked for, each counted once."""

    def batched() -> Any:
        return TransformedEnv(SerialEnv(4, bare_steps(length=6)), Compose(StepCounter(), RewardSum()))

    result = made(batched, constant(1.0), num_trajectories=count, max_steps=50).evaluate()
    assert result["eval/num_episodes"] == count
    assert result["eval/reward"] == 6.0
    assert result["eval/episode_length"] == 6.0


def test_a_gym_environment_has_true_lengths(made: Any) -> None:
    """On CartPole every step is worth one, so that length and return agree."""

    class Left(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            action = torch.zeros(*observation.shape[:-1], 2, dtype=torch.int64)
            action[..., 0] = 1
            return action

    from tensordict.nn import TensorDictModule

    policy = TensorDictModule(Left(), in_keys=["observation"], out_keys=["action"])
    result = made(cartpole, policy, num_trajectories=4, max_steps=100).evaluate()
    assert 5 < result["eval/reward"] < 15
    assert result["eval/reward"] == result["eval/episode_length"]


def test_several_models_by_name(made: Any) -> None:
    """``weights_dict`` takes the policy, and more than ``weights``, beside it or instead of it."""
    evaluator = made(steps(), constant(1.0), num_trajectories=1, max_steps=20)
    assert evaluator.evaluate(weights_dict={"policy": constant(2.0)})["eval/reward"] == 10.0
    assert evaluator.evaluate(weights_of(3.0))["eval/reward"] == 15.0
    assert evaluator.evaluate(weights_of(3.0), weights_dict={"policy": constant(4.0)})["eval/reward"] == 20.0
    evaluator.trigger_eval(weights_dict={"policy": constant(5.0)})
    assert finished(evaluator)["eval/reward"] == 25.0


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"policy": constant(), "policy_factory": make_constant},
        {"policy": constant(), "backend": "carrier pigeon"},
        {"policy": constant(), "busy_policy": "sometimes"},
    ],
    ids=["no policy", "two policies", "backend", "busy_policy"],
)
def test_mistakes_are_value_errors(made: Any, wrong: dict[str, Any]) -> None:
    """An impossible combination is refused at once."""
    with pytest.raises(ValueError):
        made(steps(), **wrong)


@pytest.mark.parametrize("backend", ["process", "ray"])
def test_other_processes_need_a_factory_of_environments(made: Any, backend: str) -> None:
    """A live environment cannot be built elsewhere."""
    with pytest.raises(ValueError):
        made(steps()(), policy_factory=make_constant, backend=backend, max_steps=20)


# ------------------------------------------------------------------------------ normalizers


def normalizing() -> Any:
    return TransformedEnv(
        GymEnv("Pendulum-v1"), Compose(VecNormV2(in_keys=["observation"]), StepCounter(), RewardSum())
    )


def torque() -> Any:
    from tensordict.nn import TensorDictModule

    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def test_an_evaluation_does_not_train_the_normalizer(made: Any) -> None:
    """The statistics that an evaluation uses are those that were sent, before and after it."""
    trained = normalizing()
    trained.rollout(50)
    before = {name: value.clone() for name, value in trained.transform[0].get_extra_state().items()}
    evaluator = made(normalizing, torque(), num_trajectories=2, max_steps=20)
    first = evaluator.evaluate(weights_dict={"env.transform[0]": trained.transform[0]})
    second = evaluator.evaluate()
    assert first["eval/reward"] == first["eval/reward"], "the reward is NaN"
    assert first["eval/num_episodes"] == second["eval/num_episodes"] == 2
    after = trained.transform[0].get_extra_state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_callers_environment_is_left_alone(made: Any) -> None:
    """A live environment keeps its normalizer unfrozen, and its statistics."""
    env = normalizing()
    env.rollout(50)
    count = env.transform[0].get_extra_state()["count.-|-.observation"].item()
    made(env, torque(), num_trajectories=1, max_steps=20).evaluate()
    assert env.transform[0].frozen is False
    assert env.transform[0].get_extra_state()["count.-|-.observation"].item() == count


# ------------------------------------------------------------------------------ processes


@pytest.mark.parametrize("backend", ["process", "ray"])
class TestOtherProcesses:
    """One cluster for all of them."""

    @pytest.fixture(autouse=True)
    def _cluster(self, ray_cluster: None) -> None:
        pass

    def test_evaluations_of_new_weights_are_new(self, made: Any, backend: str) -> None:
        """Four updates give four different results: synchronously, and beside the training."""
        extra = {"num_gpus": 0} if SUBJECT == "torchrl" or backend == "ray" else {}
        evaluator = made(
            steps(),
            policy_factory=make_constant,
            num_trajectories=3,
            max_steps=20,
            backend=backend,
            busy_policy="queue",
            **extra,
        )
        assert [evaluator.evaluate(weights_of(value))["eval/reward"] for value in (1.0, 2.0)] == [5.0, 10.0]
        for step, value in enumerate((3.0, 4.0)):
            evaluator.trigger_eval(weights_of(value), step=step)
        results = [finished(evaluator) for _ in range(2)]
        assert [result["eval/reward"] for result in results] == [15.0, 20.0]
        assert [result["eval/step"] for result in results] == [0, 1]
        assert evaluator.poll() is None

    def test_a_callback_is_called_here(self, made: Any, backend: str) -> None:
        """What is evaluated elsewhere is heard in this process."""
        heard: list[Any] = []
        extra = {"num_gpus": 0} if SUBJECT == "torchrl" or backend == "ray" else {}
        evaluator = made(
            steps(),
            policy_factory=make_constant,
            num_trajectories=2,
            max_steps=20,
            backend=backend,
            on_result=heard.append,
            **extra,
        )
        evaluator.evaluate(weights_of(2.0), step=4)
        assert [result["eval/step"].item() for result in heard] == [4]


class TestRayEvalWorker:
    """One cluster for all of them."""

    @pytest.fixture(autouse=True)
    def _cluster(self, ray_cluster: None) -> None:
        pass

    def test_submit_and_poll(self) -> None:
        """Nothing before a request; then one result, which is the return and says what it was taken over."""
        worker = RayEvalWorker(None, steps(length=5), make_constant, num_gpus=0)
        try:
            assert worker.poll() is None
            worker.submit(weights_of(2.0), 20)
            result = worker.poll(timeout=60.0)
            assert result is not None
            assert "frames" in result
            assert result["reward"] == 10.0
            assert worker.poll() is None
        finally:
            worker.shutdown()
        worker.shutdown()

    @pytest.mark.skipif(SUBJECT == "torchrl", reason="the documented shape, and the figure beside it, are ours")
    def test_frames_of_the_first_episode(self) -> None:
        """One after each step, of an environment that renders; the figure of TorchRL stands beside the return."""
        worker = RayEvalWorker(None, rendering, random_policy_of, num_episodes=3)
        try:
            worker.submit(None, 30)
            result = worker.poll(timeout=60.0)
        finally:
            worker.shutdown()
        assert result is not None
        count, *shape = result["frames"].shape
        assert shape == [400, 600, 3]
        assert 5 < count <= 30
        assert result["frames"].dtype == torch.uint8
        assert len(result["frames"].flatten(1).unique(dim=0)) > 1
        assert result["reward_per_step"] == 1.0
        assert result["reward"] == result["length"]

    @pytest.mark.slow
    def test_a_second_process_finds_it_by_name(self) -> None:
        """A handle from the name submits and polls for itself."""
        worker = RayEvalWorker(None, steps(length=5), make_constant, num_gpus=0, name="torchrl_worker")
        try:
            other = RayEvalWorker.from_name("torchrl_worker")
            other.submit(weights_of(3.0), 20)
            result = other.poll(timeout=60.0)
            assert result is not None
            assert result["reward"] == 15.0
            if SUBJECT != "torchrl":
                other.shutdown()  # Of TorchRL's handles any one ends the worker.
        finally:
            worker.shutdown()
