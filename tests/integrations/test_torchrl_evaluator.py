"""TorchRL's ``Evaluator`` and ``RayEvalWorker``: their arguments, keys and shapes, with returns that are known.

What every evaluator promises is tested in ``tests/contracts/test_evaluator_contract.py``.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, GymEnv, RewardSum, SerialEnv, StepCounter, Transform, TransformedEnv
from torchrl.modules import RandomPolicy
from torchrl_worlds import (
    Constant,
    Steps,
    cartpole,
    constant,
    normalized,
    steps,
    torque,
    weights_of,
)

from rl_eval.errors import ConfigError, UsageError, WeightsError
from rl_eval.integrations.torchrl import Evaluator, RayCollector, RayEvalWorker
from rl_eval.integrations.torchrl.arguments import ABSENT, ArgumentError
from rl_eval.integrations.torchrl.evaluator import EvaluationFailed, EvaluationPending
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused

pytestmark = [
    pytest.mark.timeout(240),
    # TorchRL warns that batched and unbatched normalizers are experimental, and Ray of its own plans.
    pytest.mark.filterwarnings("ignore:Support of VecNormV2"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip"),
]


class Agents(Steps):
    """Rewards of shape (agents, 1) under a group, where the flags may be too."""

    def __init__(self, agents: int = 2, *, nested_done: bool = False) -> None:
        super().__init__()
        self._agents, self._moved = agents, ("done", "terminated") if nested_done else ()
        self.reward_spec = Composite(agents=Composite(reward=Unbounded(shape=(agents, 1))))
        if nested_done:
            self.done_spec = Composite(agents=self.full_done_spec.clone())

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        return super()._reset().update(self.full_done_spec.zero())

    def _step(self, tensordict: Any) -> TensorDict:
        data = super()._step(tensordict)
        data["agents", "reward"] = data.pop("reward").expand(self._agents, 1).clone()
        for name in self._moved:
            data["agents", name] = data.pop(name)
        return data


class TwoRewards(Steps):
    """Has a reward to count, and one for show."""

    def __init__(self) -> None:
        super().__init__(length=5)
        self.reward_spec = Composite(reward=Unbounded(shape=(1,)), shown=Unbounded(shape=(1,)))

    def _step(self, tensordict: Any) -> TensorDict:
        return super()._step(tensordict).set("shown", torch.full((1,), 100.0))


@pytest.fixture
def made() -> Iterator[Callable[..., Any]]:
    """Create evaluators that are shut down whatever happens."""
    created: list[Any] = []

    def make(*args: Any, kind: Any = Evaluator, **kwargs: Any) -> Any:
        created.append(kind(*args, **kwargs))
        return created[-1]

    yield make
    for one in created:
        one.shutdown()


def finished(one: Any) -> dict[str, Any]:
    """Wait for an evaluator's result, and never for ever."""
    result = one.wait(timeout=120.0)
    assert result is not None, "no result came"
    return result


# ------------------------------------------------------------------------------ arguments and keys


def test_the_arguments_are_those_of_torchrl() -> None:
    """Each of TorchRL's is taken, in its order, or is in the table of those without a counterpart, as in the docs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Importing them warns of TorchRL's own deprecations.
        from torchrl.collectors import Evaluator as TheirEvaluator
        from torchrl.collectors.distributed import RayCollector as TheirCollector
    page = (Path(__file__).parents[2] / "docs" / "coming_from_torchrl.md").read_text()
    for ours, theirs in ((Evaluator, TheirEvaluator), (RayCollector, TheirCollector)):
        assert [name for name in ABSENT[ours.__name__] if f"`{name}`" not in page] == []
        names = list(inspect.signature(theirs.__init__).parameters)[1:]
        taken = [name for name in inspect.signature(ours).parameters if name in names]
        assert taken == [name for name in names if name not in ABSENT[ours.__name__]]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"policy": None}, "policy"),
        ({"policy_factory": constant}, "policy_factory"),
        ({"backend": "carrier pigeon"}, "backend"),
        ({"busy_policy": "sometimes"}, "busy_policy"),
        ({"exploration_type": "wild"}, "exploration_type"),
        ({"reward_keys": ("reward", "x")}, "reward_keys"),
        ({"init_fn": constant}, "init_fn"),
        ({"backend": "ray", "ray_kwargs": {"num_gpus": 1}}, "ray_kwargs"),
        ({"backend": "ray", "ray_kwargs": {"num_cpu": 1}}, "ray_kwargs"),
        *(({name: {"x": 1}}, name) for name in ABSENT["Evaluator"]),
    ],
)
def test_mistakes_are_value_errors_that_name_the_argument(options: dict[str, Any], key: str) -> None:
    with refused(ArgumentError, key) as caught:
        Evaluator(steps(), **{"policy": constant(), **options})
    assert isinstance(caught.value, ValueError)
    assert key in str(caught.value)


def test_other_mistakes(made: Any) -> None:
    """Another process cannot be given a live environment, and what is not TorchRL's is no argument."""
    for backend in ("process", "ray"):
        with refused(ArgumentError, "env"):
            made(steps()(), policy_factory=constant, backend=backend)
    with refused(ArgumentError, "env", value="CartPole-v1"):
        made("CartPole-v1", constant())
    with pytest.raises(TypeError, match="colour"):
        made(steps(), constant(), colour=1)
    with refused(ArgumentError, "remote_kwargs", value="num_cpu") as caught:
        RayEvalWorker(None, steps(), constant, num_cpu=2)
    assert "'num_cpus'" in str(caught.value)
    with refused(ConfigError, "env", value="CartPoleEnv"):
        made(lambda: GymEnv("CartPole-v1")._env.unwrapped, constant()).evaluate()


def test_evaluate_returns_every_key(made: Any) -> None:
    """The documented names as plain numbers, the true return, and the metrics of rl_eval; nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = made(steps(length=5), constant(2.0), num_trajectories=4, max_steps=20).evaluate(step=7)
    expected = {"reward": 10.0, "reward_std": 0.0, "num_episodes": 4, "episode_length": 5.0, "step": 7}
    assert {name: result[f"eval/{name}"] for name in expected} == expected
    assert isinstance(result["eval/reward"], float)
    assert result["eval/num_env_steps_sampled"] == 20
    assert result["eval/fps"] == pytest.approx(20 / result["eval/wall_seconds"])
    assert {"eval/episode_return_ci_low", "eval/weights_version", "eval/num_faults"} <= set(result)


def test_a_prefix_and_a_metrics_function(made: Any) -> None:
    """Names follow the prefix; the function gets one row per episode, and is told of a key that there is not."""
    seen: list[Any] = []

    def measure(data: Any) -> dict[str, Any]:
        seen.append(data)
        return {"best": float(data["next", "episode_reward"].max())}

    options: dict[str, Any] = {"num_trajectories": 3, "log_prefix": "test"}
    result = made(steps(truncates=True), constant(2.0), metrics_fn=measure, **options).evaluate()
    assert result["test/best"] == result["test/reward"] == 10.0
    rows = {key: seen[0]["next", key].flatten().tolist() for key in seen[0]["next"].keys()}  # noqa: SIM118 - of a tensordict
    ends = {"done": [True] * 3, "terminated": [False] * 3, "truncated": [True] * 3}
    assert rows == {"episode_reward": [10.0] * 3, "step_count": [5] * 3, **ends}
    with refused(ArgumentError, "metrics_fn") as caught:
        made(steps(), constant(), metrics_fn=lambda data: {"x": data["next", "pixels"]}, **options).evaluate()
    assert "pixels" in caught.value.value


@pytest.mark.parametrize("without", ["max_steps", "step counter"])
def test_limits(made: Any, without: str) -> None:
    """An environment without an end ends at ``max_steps``, with a counter that has no limit, and without any."""
    make = partial(Steps, length=10**9) if without == "step counter" else steps(length=300)
    limit = None if without == "max_steps" else 30
    result = made(make, constant(), num_trajectories=2, max_steps=limit).evaluate()
    assert result["eval/episode_length"] == (limit or 300)


def test_nested_flags_end_an_episode(made: Any) -> None:
    """Also a nested reward is counted; a key that does not exist is an error, not an evaluation without an end."""
    nested = {"reward_keys": ("next", "agents", "reward"), "num_trajectories": 2}
    make = partial(Agents, 1, nested_done=True)
    result = made(make, constant(2.0), done_keys=("next", "agents", "done"), **nested).evaluate()
    assert (result["eval/reward"], result["eval/episode_length"], result["eval/terminated_rate"]) == (10.0, 5.0, 1.0)
    with refused(ConfigError, "done_key", value="('gone', 'done')"):
        made(make, constant(), done_keys=("next", "gone", "done"), **nested).evaluate()


def test_the_reward_that_was_chosen_counts(made: Any) -> None:
    """Not the one that ``RewardSum`` sums; and agents are not added together, and not averaged."""

    def summed() -> Any:
        return TransformedEnv(TwoRewards(), RewardSum(in_keys=["shown"], out_keys=["episode_reward"]))

    for key, expected in (("reward", 10.0), ("shown", 500.0)):
        result = made(summed, constant(2.0), num_trajectories=1, reward_keys=("next", key)).evaluate()
        assert result["eval/reward"] == expected
    with refused(ConfigError, "reward_key", value="(2, 1)"):
        made(Agents, constant(), num_trajectories=1, reward_keys=("next", "agents", "reward")).evaluate()


@pytest.mark.parametrize("count", [2, 5])
def test_batched_environments_are_taken_apart(made: Any, count: int) -> None:
    """Their factories make single ones: each episode runs to its own end, and the mean is that of the plan."""
    lengths = (5, 50)

    def batched() -> Any:
        return TransformedEnv(SerialEnv(4, partial(Steps, lengths=lengths)), Compose(StepCounter(), RewardSum()))

    result = made(batched, constant(1.0), num_trajectories=count, max_steps=100).evaluate()
    expected = [int(np.random.default_rng(seed).choice(lengths)) for seed in EpisodePlan(count, 0).seeds]
    assert result["eval/num_episodes"] == count
    assert result["eval/reward"] == result["eval/episode_length"] == np.mean(expected)


# ------------------------------------------------------------------------------ policies and weights


@pytest.mark.parametrize("factory", [lambda env: constant(2.0 * env.action_spec.shape[0]), partial(constant, 2.0)])
def test_policy_factories_get_the_environment_if_they_take_one(made: Any, factory: Any) -> None:
    assert made(steps(), policy_factory=factory, num_trajectories=1).evaluate()["eval/reward"] == 10.0


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
    evaluator = made(steps(), num_trajectories=2, **{given: Constant(2.0) if given == "policy" else Constant})
    assert evaluator.evaluate()["eval/reward"] == (10.0 if given == "policy" else 5.0)
    assert evaluator.evaluate(Constant(3.0))["eval/reward"] == 15.0
    with refused(ConfigError, "policy", value="['input']"):
        made(steps(), torch.nn.Linear(1, 1)).evaluate()


def test_models_by_name(made: Any) -> None:
    """Weights may be a module or a tensordict; ``weights_dict`` takes precedence; other names are errors."""
    evaluator = made(steps(), policy := constant(1.0), num_trajectories=1)
    parameter = policy.module.weight
    copied = Evaluator.extract_weights(trained := constant(3.0))
    trained.module.weight.data.fill_(9.0)
    for name, weights in (("weights", copied), ("weights", constant(3.0)), ("weights_dict", {"policy": constant(3.0)})):
        assert evaluator.evaluate(**{name: weights})["eval/reward"] == 15.0
    assert evaluator.evaluate(weights_of(3.0), weights_dict={"policy": constant(4.0)})["eval/reward"] == 20.0
    assert evaluator.evaluate()["eval/reward"] == 20.0
    evaluator.trigger_eval(weights_dict={"policy": constant(5.0)}, step=9)
    assert finished(evaluator)["eval/reward"] == 25.0
    for weights, models, key in (
        (None, {"critic": constant()}, "weights_dict"),
        ({}, None, "_extra_state"),
        ({"module.weight": torch.ones(2)}, None, "policy.module.weight"),
    ):
        with refused(WeightsError, key):
            evaluator.evaluate(weights, weights_dict=models)
    assert policy.module.weight is parameter  # The caller's, which TorchRL replaces.
    assert list(policy.state_dict()) == ["module.weight"]


@pytest.mark.parametrize("training", [True, False])
def test_the_callers_policy_keeps_its_mode(made: Any, training: bool) -> None:
    """It is evaluated in eval mode, without dropout, and given back as it was, also after an error."""
    policy = constant(dropout=True).train(training)
    assert made(steps(length=20), policy, num_trajectories=2).evaluate(policy)["eval/reward"] == 20.0
    with refused(EvaluationFailed, "status", value="failed"):
        made(steps(fails_at=2), policy, num_trajectories=2).evaluate(policy)
    assert all(part.training is training for part in policy.modules())


# ------------------------------------------------------------------------------ environments of the caller


def test_statistics_travel_and_without_them_there_is_no_number(made: Any) -> None:
    """Missing or empty ones are errors; with them it equals TorchRL's rollout, twice: an evaluation moves none."""
    one = made(normalized, torque(), num_trajectories=3)
    with refused(ConfigError, "environment.env", value="VecNormV2"):
        one.evaluate()
    for place, wrong, key in ((0, normalized().transform[0], "weights_dict"), (7, torque(), "_extra_state")):
        with refused(WeightsError, key) as caught:
            one.evaluate(weights_dict={f"env.transform[{place}]": wrong})
        assert f"env.transform[{place}]" in str(caught.value)
    trained = normalized()
    trained.set_seed(0)
    trained.rollout(100, break_when_any_done=False)
    normalizer = trained.transform[0]
    result = one.evaluate(torque(), weights_dict={"env.transform[0]": normalizer})
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(normalizer.frozen_copy(), StepCounter(20)))
    returns = []
    for seed in EpisodePlan(3, 0).seeds:
        env.set_seed(int(seed), static_seed=True)
        with torch.no_grad():
            returns.append(env.rollout(20, torque())["next", "reward"].sum().item())
    assert result["eval/reward"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert one.evaluate()["eval/reward"] == result["eval/reward"]


def test_the_callers_environment_is_not_changed(made: Any) -> None:
    """Its normalizer stays unfrozen, with its statistics; those inside a batched environment are frozen as well."""
    env = normalized()
    env.rollout(50)
    before = {name: value.clone() for name, value in env.transform[0].get_extra_state().items()}
    made(env, torque(), num_trajectories=1).evaluate()
    assert env.transform[0].frozen is False
    assert all(torch.equal(before[name], value) for name, value in env.transform[0].get_extra_state().items())
    with refused(ConfigError, "environment.env", value="VecNormV2"):
        made(lambda: SerialEnv(2, normalized), torque(), num_trajectories=2).evaluate()


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
    env = TransformedEnv(Steps(), Compose(Dumping(path)))
    evaluator = made(env, constant(), num_trajectories=1, dump_video=dump)
    for step in (3, 8):
        evaluator.evaluate(step=step)
        assert (str(step) in path.read_text().split()) is dump
    evaluator.trigger_eval(step=11)
    finished(evaluator)
    assert path.read_text().split() == (["3", "8", "11"] if dump else [])


def test_a_recorder_in_the_environment_is_refused(made: Any, tmp_path: Path) -> None:
    """It would keep every frame; the message names what records instead."""
    from torchrl.record import CSVLogger, VideoRecorder

    def recording() -> Any:
        recorder = VideoRecorder(CSVLogger("x", log_dir=str(tmp_path)), tag="v", in_keys=["observation"])
        return TransformedEnv(GymEnv("CartPole-v1"), recorder)

    with refused(ConfigError, "env", value="VideoRecorder"):
        made(recording, constant(), num_trajectories=1).evaluate()


# ------------------------------------------------------------------------------ results


def test_a_callback_gets_every_result_once(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    """As a flat tensordict, also a metric that is text; what it raises is logged, and the result is there."""
    heard: list[Any] = []

    def hear(result: Any) -> None:
        heard.append(result)
        raise ArithmeticError("the logger is full")

    one = made(steps(), constant(2.0), num_trajectories=1, on_result=hear, metrics_fn=lambda data: {"note": "fine"})
    assert one.evaluate(step=3)["eval/note"] == "fine"
    one.trigger_eval(step=4)
    assert finished(one)["eval/step"] == 4
    one.shutdown()  # What a callback raises is logged by its thread.
    assert [(result["eval/step"].item(), result["eval/reward"].item()) for result in heard] == [(3, 10.0), (4, 10.0)]
    assert heard[0]["eval/note"] == "fine"
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["the logger is full"] * 2


def test_an_error_reaches_the_caller_once(made: Any) -> None:
    """It is raised by ``evaluate`` and by ``wait``, or given to ``on_error``; nothing stays pending."""
    one = made(steps(fails_at=3), constant(), num_trajectories=2)
    with refused(EvaluationFailed, "status", value="failed") as caught:
        one.evaluate()
    assert isinstance(caught.value, RuntimeError)
    assert "the simulator broke" in str(caught.value)
    one.trigger_eval()
    with refused(EvaluationFailed, "status", value="failed"):
        one.wait(timeout=120.0)
    assert not one.pending
    assert one.wait(timeout=1.0) is None
    errors: list[BaseException] = []
    other = made(steps(fails_at=3), constant(), num_trajectories=2, on_error=errors.append)
    other.trigger_eval()
    assert other.wait(timeout=120.0) is None
    assert len(errors) == 1


def test_waiting_in_a_callback_is_refused(made: Any) -> None:
    """It would wait for itself."""
    raised: list[BaseException] = []
    one = made(steps(), constant(), num_trajectories=1, on_result=lambda _: one.wait(), on_error=raised.append)
    one.evaluate()
    assert isinstance(raised[0], UsageError)


@pytest.mark.parametrize("policy", ["error", "skip", "queue"])
def test_a_second_request_while_one_runs(made: Any, policy: str) -> None:
    """It is an error, is skipped, or waits in line, as configured; steps of those accepted follow each other."""
    evaluator = made(steps(seconds=0.05), constant(), num_trajectories=2, busy_policy=policy)
    assert evaluator.poll() is None
    assert evaluator.trigger_eval() is True
    assert evaluator.pending
    if policy == "error":
        with refused(EvaluationPending, "step", value=1) as caught:
            evaluator.trigger_eval()
        assert isinstance(caught.value, RuntimeError)
    else:
        assert evaluator.trigger_eval() is (policy == "queue")
    accepted = 2 if policy == "queue" else 1
    assert [finished(evaluator)["eval/step"] for _ in range(accepted)] == list(range(accepted))
    assert evaluator.poll() is None
    assert evaluator.trigger_eval() is True
    assert finished(evaluator)["eval/step"] == accepted
    evaluator.trigger_eval()
    evaluator.shutdown(timeout=10.0)
    assert not evaluator.pending
    assert evaluator.wait() is None


def test_what_is_not_pending_can_be_read(made: Any) -> None:
    """The documented pattern ``if not pending: poll()`` yields the result, every time."""
    evaluator = made(steps(), constant(), num_trajectories=2)
    for step in range(20):
        evaluator.trigger_eval(step=step)
        while evaluator.pending:
            time.sleep(0)
        assert evaluator.poll()["eval/step"] == step


def test_an_evaluation_in_between_loses_nothing(made: Any) -> None:
    """What was triggered and not read is there after an ``evaluate``, under its own step; the state waits for it."""
    first, second = (made(steps(), constant(), num_trajectories=2) for _ in range(2))
    state = first.state_dict()
    first.trigger_eval(weights_of(2.0), step=1)
    assert first.evaluate(weights_of(3.0), step=2)["eval/reward"] == 15.0
    for call in (first.state_dict, partial(first.load_state_dict, state)):
        with refused(EvaluationPending, "state", value=1):
            call()
    result = finished(first)
    assert (result["eval/step"], result["eval/reward"]) == (1, 10.0)
    second.load_state_dict(first.state_dict())
    assert second.evaluate()["eval/step"] == 3
    second.load_state_dict({"step_counter": 50})  # TorchRL's own.
    assert second.evaluate()["eval/step"] == 50


# ------------------------------------------------------------------------------ processes


def test_processes_take_the_same_arguments(made: Any, ray_cluster: None) -> None:
    """A live policy, a metrics function, callbacks of this process, new weights; statistics stay as they were sent."""
    heard: list[Any] = []
    options: dict[str, Any] = {"num_trajectories": 7, "backend": "process", "on_result": heard.append}
    longest = made(
        steps(length=5), constant(2.0), metrics_fn=lambda data: {"longest": data["next", "step_count"].max()}, **options
    )
    result = longest.evaluate()
    assert (result["eval/num_episodes"], int(result["eval/longest"]), result["eval/reward"]) == (7, 5, 10.0)
    longest.trigger_eval(weights_of(3.0), step=4)
    assert finished(longest)["eval/reward"] == 15.0
    assert [one["eval/step"].item() for one in heard] == [0, 4]
    trained = normalized()
    trained.rollout(50)
    statistics = {"env.transform[0]": trained.transform[0]}
    there = made(normalized, policy_factory=torque, num_trajectories=2, backend="ray")
    here = made(normalized, torque(), num_trajectories=2)
    expected = here.evaluate(weights_dict=statistics)["eval/reward"]
    assert there.evaluate(weights_dict=statistics)["eval/reward"] == pytest.approx(expected, rel=1e-5)
    assert there.evaluate()["eval/reward"] == pytest.approx(expected, rel=1e-5)


class Unrenderable(Steps):
    """Fails when it is rendered."""

    def render(self, **_: Any) -> Any:
        raise NotImplementedError("nothing to see")


def asked(one: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Submit to a worker and wait."""
    one.submit(*args, **kwargs)
    result = one.poll(timeout=120.0)
    assert result is not None, "no result came"
    return result


def test_a_worker_answers_with_the_return(made: Any, ray_cluster: None) -> None:
    """Over all episodes, up to the limit of the request; without weights those that it has; no frame unasked."""
    worker = made(None, lambda: Unrenderable(length=5), constant, kind=RayEvalWorker, num_episodes=10)
    assert worker.poll() is None
    result = asked(worker, None, 20, break_when_any_done=False)
    expected = {"reward": 5.0, "reward_std": 0.0, "reward_per_step": 1.0, "length": 5.0, "count": 10, "frames": None}
    assert {name: result[name] for name in expected} == expected
    assert asked(worker, weights_of(2.0), 3)["reward"] == 6.0
    assert asked(worker, None, None)["reward"] == 10.0
    worker.submit({"nonsense": torch.zeros(2)}, 20)
    with refused(WeightsError, "policy.nonsense"):
        worker.poll(timeout=120.0)
    assert worker.poll() is None
    assert asked(worker, weights_of(4.0), 20)["reward"] == 20.0
    worker.shutdown()
    worker.shutdown()
    with refused(UsageError, "shutdown"):
        worker.submit(None, 20)


def test_frames_of_the_first_episode(made: Any, ray_cluster: None) -> None:
    """One after each step, of an environment that renders."""
    worker = made(
        None,
        partial(GymEnv, "CartPole-v1", render_mode="rgb_array"),
        lambda env: RandomPolicy(env.action_spec),
        kind=RayEvalWorker,
        num_episodes=3,
    )
    result = asked(worker, None, 30)
    count, *shape = result["frames"].shape
    assert shape == [400, 600, 3]
    assert 5 < count <= 30
    assert result["frames"].dtype == torch.uint8
    assert len(result["frames"].flatten(1).unique(dim=0)) > 1
    assert result["reward"] == result["length"]


def test_init_fn_comes_before_torch(made: Any, ray_cluster: None) -> None:
    """What it saw is left in the environment variables of its process; a function on tensordicts is a policy."""

    def initialize() -> None:
        import os
        import sys

        os.environ["RL_EVAL_TEST_TORCH_WAS_THERE"] = str("torch" in sys.modules)

    def build() -> Any:
        import os

        from torchrl_worlds import Steps

        assert os.environ["RL_EVAL_TEST_TORCH_WAS_THERE"] == "False", "torch was imported before init_fn"
        return Steps(length=5)

    def build_policy(env: Any) -> Any:
        import torch

        return lambda data: data.set("action", torch.full((*data.batch_size, 1), 3.0))

    worker = made(initialize, build, build_policy, kind=RayEvalWorker, num_episodes=2)
    assert asked(worker, None, 20)["reward"] == 15.0


@pytest.mark.slow
def test_a_worker_is_found_by_its_name(made: Any, ray_cluster: None) -> None:
    """Clients poll what they asked for, and what one leaves does not end the worker."""
    first = made(None, partial(Steps, length=5), constant, kind=RayEvalWorker, num_episodes=2, name="torchrl_worker")
    second = RayEvalWorker.from_name("torchrl_worker")
    first.submit(weights_of(1.0), 20)
    second.submit(weights_of(2.0), 20)
    assert (first.poll(timeout=120.0)["reward"], second.poll(timeout=120.0)["reward"]) == (5.0, 10.0)
    second.shutdown()
    assert asked(first, weights_of(3.0), 20)["reward"] == 15.0
    with refused(ArgumentError, "reward_keys"):
        RayEvalWorker.from_name("torchrl_worker", reward_keys=("next", "other"))
