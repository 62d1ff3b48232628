"""One test for each known defect of TorchRL 0.14.1's evaluators, named after its entry in docs/coming_from_torchrl.md.

``R`` are those of ``RayEvalWorker`` and ``Evaluator(backend="ray")``, ``E`` those of ``Evaluator``.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv, VecNormV2
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from torchrl_worlds import Constant, Steps, bare_steps, constant, make_constant, steps, weights_of

from rl_eval.errors import ConfigError, EvalError, UsageError, WeightsError
from rl_eval.integrations.torchrl import Evaluator, RayEvalWorker
from rl_eval.scheduling.plan import EpisodePlan

pytestmark = [
    pytest.mark.timeout(240),
    # TorchRL warns that batched and unbatched normalizers are experimental, and Ray of its own plans.
    pytest.mark.filterwarnings("ignore:Support of VecNormV2"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip"),
]


# ------------------------------------------------------------------------------ environments of these tests


class Unrenderable(Steps):
    """Fails when it is rendered."""

    def render(self, **_: Any) -> Any:
        raise NotImplementedError("nothing to see")


class Agents(EnvBase):
    """Two agents under one group; rewards of shape (2, 1), or of one agent, with nested or root flags."""

    def __init__(self, agents: int = 2, *, nested_done: bool = False) -> None:
        super().__init__(device="cpu", batch_size=[])
        self._agents, self._nested = agents, nested_done
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        done = Composite(done=flag, terminated=flag.clone())
        self.observation_spec = Composite(observation=Unbounded(shape=(1,)))
        self.action_spec = Unbounded(shape=(1,))
        self.reward_spec = Composite(agents=Composite(reward=Unbounded(shape=(agents, 1))))
        self.done_spec = Composite(agents=done) if nested_done else done
        self._taken = 0

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        self._taken = 0
        never = {name: torch.zeros(1, dtype=torch.bool) for name in ("done", "terminated")}
        return TensorDict({"observation": torch.zeros(1), **({"agents": never} if self._nested else never)}, [])

    def _step(self, tensordict: Any) -> TensorDict:
        self._taken += 1
        over = torch.tensor([self._taken >= 5])
        ends = {"done": over, "terminated": over.clone()}
        return TensorDict(
            {
                "observation": torch.zeros(1),
                "agents": {
                    "reward": tensordict["action"].expand(self._agents, 1).clone(),
                    **(ends if self._nested else {}),
                },
                **({} if self._nested else ends),
            },
            [],
        )


class TwoRewards(Steps):
    """Has a reward to count, and one for show."""

    def __init__(self) -> None:
        super().__init__(length=5)
        self.reward_spec = Composite(reward=Unbounded(shape=(1,)), shown=Unbounded(shape=(1,)))

    def _step(self, tensordict: Any) -> TensorDict:
        return super()._step(tensordict).set("shown", torch.full((1,), 100.0))


class Dropping(nn.Module):
    """Drops its output at random while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(0.5)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.dropout(observation * 0 + self.weight)


def dropping(env: Any = None) -> TensorDictModule:
    return TensorDictModule(Dropping(), in_keys=["observation"], out_keys=["action"])


def normalized() -> Any:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(VecNormV2(in_keys=["observation"]), StepCounter(20)))


def torque(env: Any = None) -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def trained_normalizer() -> Any:
    env = normalized()
    env.set_seed(0)
    env.rollout(100, break_when_any_done=False)
    return env.transform[0]


def count_of(normalizer: Any) -> int:
    return int(normalizer.get_extra_state()["count.-|-.observation"])


# ------------------------------------------------------------------------------ fixtures


@pytest.fixture
def made() -> Iterator[Callable[..., Any]]:
    """Create evaluators that are shut down whatever happens."""
    created: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        kind = kwargs.pop("kind", Evaluator)
        created.append(kind(*args, **kwargs))
        return created[-1]

    yield make
    for one in created:
        one.shutdown()


@pytest.fixture
def evaluator(made: Any) -> Any:
    """An evaluator in a thread, of episodes of five steps."""
    return made(steps(length=5), constant(1.0), num_trajectories=4, max_steps=20)


@pytest.fixture(scope="module")
def worker(ray_cluster: None) -> Iterator[Any]:
    """A worker of ten episodes of five steps, in an environment that cannot be rendered."""
    shared = RayEvalWorker(None, lambda: Unrenderable(length=5), make_constant, num_episodes=10)
    yield shared
    shared.shutdown()


@pytest.fixture
def other_worker(ray_cluster: None, made: Any) -> Callable[..., Any]:
    """Create workers of a test's own."""
    return lambda *args, **kwargs: made(*args, kind=RayEvalWorker, **kwargs)


def asked(one: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Submit to a worker and wait."""
    one.submit(*args, **kwargs)
    result = one.poll(timeout=300.0)
    assert result is not None, "no result came"
    return result


def finished(one: Any) -> dict[str, Any]:
    """Wait for an evaluator's result, and never for ever."""
    result = one.wait(timeout=300.0)
    assert result is not None, "no result came"
    return result


# ------------------------------------------------------------------------------ RayEvalWorker, backend="ray"


def test_r01_reward_is_the_return(worker: Any) -> None:
    """Five steps worth two are worth ten, and a cut after three steps is worth six."""
    assert asked(worker, weights_of(2.0), 20)["reward"] == 10.0
    assert asked(worker, weights_of(2.0), 3)["reward"] == 6.0


def test_r02_a_request_is_a_sample_with_its_spread(worker: Any) -> None:
    """It says over how many episodes, how long they were, how they spread, how fast it was."""
    result = asked(worker, weights_of(2.0), 20)
    assert (result["count"], result["length"], result["reward_std"]) == (10, 5.0, 0.0)
    assert result["env_steps_per_second"] > 0
    assert result["episode_return_min"] == result["episode_return_max"] == 10.0
    assert np.isnan(result["episode_return_ci_low"])  # Ten equal returns say nothing of others.


def test_r03_no_episode_is_cut_by_another(other_worker: Any) -> None:
    """Of four environments that step together each runs to its own end: the mean is that of the plan."""
    lengths = (5, 50)
    batched = other_worker(None, lambda: SerialEnv(4, bare_steps(lengths=lengths)), make_constant, num_episodes=16)
    expected = [int(np.random.default_rng(seed).choice(lengths)) for seed in EpisodePlan(16, 0).seeds]
    result = asked(batched, weights_of(1.0), 100)
    assert result["reward"] == np.mean(expected)
    assert set(expected) == set(lengths)


def test_r04_nothing_is_stepped_past_its_end(worker: Any) -> None:
    """Without breaking at the first end, episodes still end at their own: the environment would raise otherwise."""
    result = asked(worker, weights_of(1.0), 100, break_when_any_done=False)
    assert (result["length"], result["num_faults"]) == (5.0, 0)


def test_r05_ends_are_told_apart(other_worker: Any, made: Any) -> None:
    """A truncated episode is no terminated one, and nested flags end an episode."""
    cut = other_worker(None, bare_steps(length=5, truncates=True), make_constant, num_episodes=2)
    result = asked(cut, None, 20)
    assert (result["terminated_rate"], result["truncated_rate"]) == (0.0, 1.0)
    nested = made(
        lambda: Agents(1, nested_done=True),
        constant(2.0),
        num_trajectories=2,
        reward_keys=("next", "agents", "reward"),
        done_keys=("next", "agents", "done"),
    )
    result = nested.evaluate()
    assert (result["eval/reward"], result["eval/terminated_rate"]) == (10.0, 1.0)


def test_r06_agents_are_not_averaged(other_worker: Any) -> None:
    """Rewards of several agents are refused, and the message names the key and its shape."""
    with pytest.raises(ConfigError, match=r"'agents', 'reward'.*\(2, 1\)"):
        asked(other_worker(None, Agents, make_constant), weights_of(1.0), 20)


def test_r07_nothing_is_rendered_unasked(worker: Any) -> None:
    """An environment whose ``render`` raises is evaluated."""
    assert asked(worker, weights_of(1.0), 20)["num_faults"] == 0


def test_r08_no_frames_are_carried(worker: Any) -> None:
    """The key is there, for those who look; videos are files that ``videos`` writes by replay."""
    assert asked(worker, weights_of(1.0), 20)["frames"] is None


def test_r09_the_policy_is_in_eval_mode(other_worker: Any) -> None:
    """Dropout does nothing."""
    assert asked(other_worker(None, bare_steps(length=20), dropping, num_episodes=4), None, 100)["reward"] == 20.0


def test_r10_normalizers_are_frozen_in_actors(made: Any, ray_cluster: None) -> None:
    """Two evaluations on one actor give the same, since neither changes the statistics."""
    one = made(normalized, policy_factory=torque, num_trajectories=2, backend="ray")
    normalizer = trained_normalizer()
    first = one.evaluate(torque(), weights_dict={"env.transform[0]": normalizer})
    assert one.evaluate()["eval/reward"] == first["eval/reward"]
    local = made(normalized, policy_factory=torque, num_trajectories=2)
    here = local.evaluate(torque(), weights_dict={"env.transform[0]": normalizer})
    assert here["eval/reward"] == pytest.approx(first["eval/reward"], rel=1e-5)


def test_r11_episodes_follow_from_a_seed(other_worker: Any) -> None:
    """The same request gives the same numbers; another root seed gives other episodes."""
    maker = bare_steps(lengths=tuple(range(1, 100)))
    one = other_worker(None, maker, make_constant, num_episodes=5, seed=3)
    first, second = (asked(one, weights_of(1.0), 200)["reward"] for _ in range(2))
    assert first == second
    assert (
        asked(other_worker(None, maker, make_constant, num_episodes=5, seed=4), weights_of(1.0), 200)["reward"] != first
    )


def test_r12_a_new_request_ends_the_old_one(other_worker: Any) -> None:
    """Of three requests in a row the last one's result arrives, without the hours that the others would take."""
    slow = other_worker(None, bare_steps(length=100_000, seconds=0.01), make_constant, num_episodes=2)
    for _ in range(2):
        slow.submit(weights_of(1.0), 100_000)
    assert asked(slow, weights_of(3.0), 2)["reward"] == 6.0


def test_r13_after_an_error_it_works_again(worker: Any) -> None:
    """The error is raised once, by the poll of its request."""
    worker.submit({"nonsense": torch.zeros(2)}, 20)
    with pytest.raises(WeightsError, match="nonsense"):
        worker.poll(timeout=300.0)
    assert worker.poll() is None
    assert asked(worker, weights_of(4.0), 20)["reward"] == 20.0


def killing_once(path: str) -> Any:
    class Killing(Steps):
        def _step(self, tensordict: Any) -> TensorDict:
            if not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super()._step(tensordict)

    return lambda: Killing(length=5)


def test_r14_a_dead_actor_is_replaced(other_worker: Any, tmp_path: Path) -> None:
    """An environment kills its process once; all episodes complete in the next one."""
    result = asked(other_worker(None, killing_once(str(tmp_path / "killed")), make_constant, num_episodes=6), None, 20)
    assert (tmp_path / "killed").exists()
    assert (result["count"], result["reward"], result["num_failed_episodes"]) == (6, 5.0, 0)


def test_r15_shutdown_does_not_wait_for_a_hung_environment(other_worker: Any) -> None:
    """A step of ten minutes does not hold it up."""
    hung = other_worker(None, bare_steps(length=5, seconds=600.0), make_constant, num_episodes=1)
    hung.submit(None, 20)
    hung.poll(timeout=5.0)
    started = time.monotonic()
    hung.shutdown()
    assert time.monotonic() - started < 30.0


def test_r16_no_gpu_is_asked_for_unasked(worker: Any) -> None:
    """On a cluster without GPUs it works, and the default says so."""
    for kind in (RayEvalWorker, Evaluator):
        assert inspect.signature(kind).parameters["num_gpus"].default == 0
    assert asked(worker, weights_of(1.0), 20)["reward"] == 5.0


def test_r17_init_fn_comes_before_torch(other_worker: Any) -> None:
    """What it saw is left in the environment variables of its process, and the environment's factory looks."""

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
        from torchrl_worlds import constant

        return constant(1.0)

    assert asked(other_worker(initialize, build, build_policy, num_episodes=2), None, 20)["reward"] == 5.0


def test_r18_a_policy_without_parameters(other_worker: Any) -> None:
    """A function on tensordicts is a policy."""

    def make(env: Any) -> Any:
        return lambda data: data.set("action", torch.full((*data.batch_size, 1), 3.0))

    assert asked(other_worker(None, bare_steps(length=5), make, num_episodes=2), None, 20)["reward"] == 15.0


def test_r19_no_weights_are_those_it_has(other_worker: Any) -> None:
    """At first the factory's own, later those sent last."""
    one = other_worker(None, bare_steps(length=5), make_constant, num_episodes=2)
    assert asked(one, None, 20)["reward"] == 5.0
    assert asked(one, weights_of(2.0), 20)["reward"] == 10.0
    assert asked(one, None, 20)["reward"] == 10.0


def test_r20_results_carry_the_version_of_their_weights(worker: Any) -> None:
    """It grows with every request that sends some."""
    versions = [asked(worker, weights_of(value), 20)["weights_version"] for value in (1.0, 2.0)]
    assert versions[1] == versions[0] + 1


def test_r21_named_workers_have_clients_of_their_own(other_worker: Any) -> None:
    """Two clients submit at once, and each polls what it asked for; what one leaves does not end the worker."""
    first = other_worker(None, bare_steps(length=5), make_constant, num_episodes=2, name="defect_r21")
    second = RayEvalWorker.from_name("defect_r21")
    first.submit(weights_of(1.0), 20)
    second.submit(weights_of(2.0), 20)
    assert (first.poll(timeout=300.0)["reward"], second.poll(timeout=300.0)["reward"]) == (5.0, 10.0)
    second.shutdown()
    assert asked(first, weights_of(3.0), 20)["reward"] == 15.0
    with pytest.raises(UsageError, match="reward_keys"):
        RayEvalWorker.from_name("defect_r21", reward_keys=("next", "other"))


def test_r22_options_of_the_actor_are_checked() -> None:
    """One given twice, or that does not exist, is named."""
    with pytest.raises(ValueError, match="num_gpus"):
        Evaluator(steps(), policy_factory=make_constant, backend="ray", ray_kwargs={"num_gpus": 1})
    with pytest.raises(ValueError, match=r"num_cpu.*did you mean 'num_cpus'"):
        RayEvalWorker(None, steps(), make_constant, num_cpu=2)


def test_r23_the_ray_backend_honours_what_it_is_given(made: Any, ray_cluster: None) -> None:
    """The number of episodes, the metrics function, a live policy, sampling; what it cannot do is an error by name."""
    one = made(
        steps(length=5),
        constant(2.0),
        num_trajectories=7,
        backend="ray",
        metrics_fn=lambda data: {"longest": int(data["next", "step_count"].max())},
    )
    result = one.evaluate()
    assert (result["eval/num_episodes"], result["eval/longest"], result["eval/reward"]) == (7, 5, 10.0)
    for name in ("frames_per_batch", "collector_cls", "collector_kwargs", "weight_sync_schemes"):
        with pytest.raises(ValueError, match=name):
            Evaluator(steps(), constant(), backend="ray", **{name: {"x": 1}})


def test_r24_lengths_are_true(made: Any, ray_cluster: None) -> None:
    """A limit of a hundred does not make five steps a hundred."""
    one = made(steps(length=5), policy_factory=make_constant, num_trajectories=2, max_steps=100, backend="ray")
    assert one.evaluate()["eval/episode_length"] == 5.0


def test_r25_no_limit_is_no_limit(made: Any, ray_cluster: None) -> None:
    """Without ``max_steps`` episodes end by themselves, also asynchronously."""
    one = made(steps(length=300), policy_factory=make_constant, num_trajectories=2, backend="ray")
    one.trigger_eval()
    assert finished(one)["eval/episode_length"] == 300.0


def test_r26_an_evaluation_in_between_loses_nothing(made: Any, ray_cluster: None) -> None:
    """What was triggered and not read is still there after an ``evaluate``, under its own step."""
    one = made(steps(length=5), policy_factory=make_constant, num_trajectories=2, backend="ray")
    one.trigger_eval(weights_of(2.0), step=1)
    assert one.evaluate(weights_of(3.0), step=2)["eval/reward"] == 15.0
    result = finished(one)
    assert (result["eval/step"], result["eval/reward"]) == (1, 10.0)


# ------------------------------------------------------------------------------ Evaluator


def test_e01_a_process_returns_results_of_the_weights_it_was_sent(made: Any, ray_cluster: None) -> None:
    """Four updates, four returns."""
    one = made(steps(length=5), policy_factory=make_constant, num_trajectories=3, backend="process")
    assert [one.evaluate(weights_of(value))["eval/reward"] for value in (1.0, 2.0, 3.0, 4.0)] == [5.0, 10.0, 15.0, 20.0]


def test_e02_short_episodes_are_not_preferred(made: Any) -> None:
    """With eight environments the sample is that of the plan, which has about as many long episodes as short ones."""
    expected = [int(np.random.default_rng(seed).choice((10, 100))) for seed in EpisodePlan(64, 0).seeds]
    results = [
        made(steps(lengths=(10, 100)), constant(1.0), num_trajectories=64, num_envs=count).evaluate()["eval/reward"]
        for count in (8, 1)
    ]
    assert results == [np.mean(expected)] * 2
    assert abs(np.mean(expected) - 55.0) < 4 * 45.0 / 8.0


def test_e03_the_global_exploration_type_is_neither_set_nor_read(made: Any) -> None:
    """While an evaluation runs the training's mode is its own, and the actions are deterministic under it."""
    from torchrl.modules import ProbabilisticActor, TanhNormal

    class Wide(nn.Module):
        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return observation * 0 + 0.5, observation * 0 + 2.0

    policy = ProbabilisticActor(
        TensorDictModule(Wide(), in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    one = made(steps(length=50, seconds=0.002), policy, num_trajectories=4)
    with set_exploration_type(ExplorationType.RANDOM):
        one.trigger_eval()
        seen = set()
        while one.pending:
            seen.add(exploration_type())
            time.sleep(0.001)
        result = finished(one)
    assert seen == {ExplorationType.RANDOM}
    assert result["eval/reward_std"] == 0.0
    assert result["eval/reward"] == pytest.approx(50 * np.tanh(0.5), rel=1e-5)


def test_e04_an_error_reaches_the_caller(made: Any) -> None:
    """It is raised by ``evaluate`` and by ``wait``, or given to ``on_error``; nothing stays pending."""
    one = made(steps(length=5, fails_at=3), constant(), num_trajectories=2)
    with pytest.raises(RuntimeError, match="the simulator broke"):
        one.evaluate()
    one.trigger_eval()
    with pytest.raises(EvalError, match="the simulator broke"):
        one.wait(timeout=300.0)
    assert not one.pending
    assert one.trigger_eval() is True
    told: list[BaseException] = []
    other = made(steps(length=5, fails_at=3), constant(), num_trajectories=2, on_error=told.append)
    other.trigger_eval()
    other.wait(timeout=300.0)
    assert len(told) == 1


def test_e05_when_nothing_is_pending_the_result_is_there(evaluator: Any) -> None:
    """Twenty times out of twenty."""
    for step in range(20):
        evaluator.trigger_eval(step=step)
        while evaluator.pending:
            time.sleep(0)
        assert evaluator.poll()["eval/step"] == step


def test_e06_one_of_many_simultaneous_requests_is_accepted(made: Any) -> None:
    """Eight threads ask at once; exactly one is told yes."""
    one = made(steps(length=20, seconds=0.01), constant(), num_trajectories=2)
    barrier, answers = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        answers.append(one.trigger_eval())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 7 + [True]
    finished(one)


def test_e07_results_come_oldest_first(made: Any) -> None:
    """As the documentation of ``poll`` says; each is there once."""
    one = made(steps(length=5), constant(), num_trajectories=1, busy_policy="queue")
    for step in range(4):
        one.trigger_eval(step=step)
    assert [finished(one)["eval/step"] for _ in range(4)] == [0, 1, 2, 3]
    assert one.poll() is None


def test_e08_callbacks_are_not_lost_and_not_silenced(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A metric that is text reaches the callback; what the callback raises is logged, and the result is there."""
    heard: list[Any] = []

    def hear(result: Any) -> None:
        heard.append(result)
        raise ArithmeticError("the logger is full")

    one = made(
        steps(length=5), constant(), num_trajectories=1, on_result=hear, metrics_fn=lambda data: {"note": "fine"}
    )
    one.trigger_eval()
    assert finished(one)["eval/note"] == "fine"
    end = time.monotonic() + 30.0
    while "ArithmeticError: the logger is full" not in caplog.text:  # It is logged by the thread that called it.
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(heard) == 1
    assert set(heard[0].keys()) >= {"eval/note", "eval/reward"}


def test_e09_a_refused_request_copies_nothing(made: Any) -> None:
    """Weights without data cannot be copied, so that trying would raise."""
    one = made(steps(length=20, seconds=0.01), constant(), num_trajectories=2)
    one.trigger_eval()
    assert one.trigger_eval(constant().to("meta")) is False
    finished(one)


def test_e10_a_refused_request_consumes_no_step(made: Any) -> None:
    """Steps of accepted requests follow each other."""
    one = made(steps(length=20, seconds=0.01), constant(), num_trajectories=2)
    one.trigger_eval()
    assert one.trigger_eval() is False
    assert one.trigger_eval() is False
    assert finished(one)["eval/step"] == 0
    one.trigger_eval()
    assert finished(one)["eval/step"] == 1


def test_e11_statistics_travel_and_without_them_there_is_no_number(made: Any) -> None:
    """An evaluation without statistics is an error, as is sending empty ones; with them it equals TorchRL's rollout."""
    one = made(normalized, torque(), num_trajectories=3)
    with pytest.raises(ConfigError, match="uninitialized VecNormV2"):
        one.evaluate()
    with pytest.raises(WeightsError, match="uninitialized VecNormV2"):
        one.evaluate(weights_dict={"env.transform[0]": normalized().transform[0]})
    normalizer = trained_normalizer()
    result = one.evaluate(torque(), weights_dict={"env.transform[0]": normalizer})
    env = TransformedEnv(GymEnv("Pendulum-v1"), Compose(normalizer.frozen_copy(), StepCounter(20)))
    returns = []
    for seed in EpisodePlan(3, 0).seeds:
        env.set_seed(int(seed), static_seed=True)
        with torch.no_grad():
            returns.append(env.rollout(20, torque())["next", "reward"].sum().item())
    assert result["eval/reward"] == pytest.approx(np.mean(returns), rel=1e-5)


def test_e12_the_callers_environment_is_not_changed(made: Any) -> None:
    """Its normalizer stays unfrozen, with its statistics; those inside a batched environment are frozen as well."""
    env = normalized()
    env.rollout(50)
    before = count_of(env.transform[0])
    one = made(env, torque(), num_trajectories=2)
    assert one.evaluate()["eval/reward"] == one.evaluate()["eval/reward"]
    assert (env.transform[0].frozen, count_of(env.transform[0])) == (False, before)
    with pytest.raises(ConfigError, match="uninitialized VecNormV2"):
        made(lambda: SerialEnv(2, normalized), torque(), num_trajectories=2).evaluate()


@pytest.mark.parametrize("training", [True, False])
def test_e13_the_callers_policy_keeps_its_mode(made: Any, training: bool) -> None:
    """It is evaluated in eval mode, and given back as it was, also after an error."""
    policy = dropping().train(training)
    assert made(steps(length=20), policy, num_trajectories=2).evaluate(policy)["eval/reward"] == 20.0
    with pytest.raises(EvalError):
        made(steps(fails_at=2), policy, num_trajectories=2).evaluate(policy)
    assert all(part.training is training for part in policy.modules())


def test_e14_done_keys_are_used(made: Any) -> None:
    """A nested flag ends episodes, and one that does not exist is an error, not an evaluation without an end."""
    nested = {"reward_keys": ("next", "agents", "reward"), "num_trajectories": 2}
    one = made(lambda: Agents(1, nested_done=True), constant(), done_keys=("next", "agents", "done"), **nested)
    assert one.evaluate()["eval/episode_length"] == 5.0
    with pytest.raises(ConfigError, match="done"):
        made(lambda: Agents(1, nested_done=True), constant(), done_keys=("next", "gone", "done"), **nested).evaluate()


def test_e15_the_step_limit_holds_beside_a_step_counter(made: Any) -> None:
    """An environment without an end, with a counter that has no limit, ends at ``max_steps``."""
    one = made(steps(length=10**9), constant(), num_trajectories=2, max_steps=30)
    assert one.evaluate()["eval/episode_length"] == 30.0


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_e16_policy_factories_get_the_environment_everywhere(made: Any, ray_cluster: None, backend: str) -> None:
    """One with a parameter is called with it, one without is called without."""

    def by_env(env: Any) -> Any:
        assert env.action_spec.shape == (1,)
        return constant(2.0)

    for factory in (by_env, lambda: constant(2.0)):
        one = made(steps(length=5), policy_factory=factory, num_trajectories=1, backend=backend)
        assert one.evaluate()["eval/reward"] == 10.0


def test_e17_no_step_is_thrown_away(made: Any) -> None:
    """One episode of twenty steps takes twenty steps, and so does the speed count."""
    result = made(steps(length=20), constant(), num_trajectories=1).evaluate()
    assert result["eval/num_env_steps_sampled"] == 20
    assert result["eval/fps"] == pytest.approx(20 / result["eval/wall_seconds"])


def test_e18_an_evaluation_can_be_ended(made: Any) -> None:
    """One without an end is over soon after shutdown, and no thread goes on stepping."""
    before = set(threading.enumerate())
    one = made(steps(length=10**9, seconds=0.01), constant(), num_trajectories=2)
    one.trigger_eval()
    started = time.monotonic()
    one.shutdown()
    assert time.monotonic() - started < 20.0
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not one.pending


def test_e19_there_is_more_than_a_mean(evaluator: Any) -> None:
    """Range, median, interval, ends, failures, versions, times."""
    names = {
        *(f"episode_return_{what}" for what in ("min", "max", "median", "iqm", "ci_low", "ci_high")),
        *("discounted_return_mean", "terminated_rate", "truncated_rate", "success_rate", "num_env_steps_sampled"),
        *("weights_version", "wall_seconds", "num_failed_episodes", "num_faults", "reward_std"),
    }
    assert {f"eval/{name}" for name in names} <= set(evaluator.evaluate())


def test_e20_the_reward_that_was_chosen_counts(made: Any) -> None:
    """Not the one that ``RewardSum`` sums; and agents are not added together."""

    def summed() -> Any:
        return TransformedEnv(TwoRewards(), RewardSum(in_keys=["shown"], out_keys=["episode_reward"]))

    assert (
        made(summed, constant(2.0), num_trajectories=1, reward_keys=("next", "reward")).evaluate()["eval/reward"]
        == 10.0
    )
    assert (
        made(summed, constant(2.0), num_trajectories=1, reward_keys=("next", "shown")).evaluate()["eval/reward"]
        == 500.0
    )
    with pytest.raises(ConfigError, match="agent"):
        made(Agents, constant(), num_trajectories=1, reward_keys=("next", "agents", "reward")).evaluate()


def test_e21_checkpoints_meet_the_same_episodes(made: Any) -> None:
    """Two evaluations start from the same seeds, in one evaluator and in another."""
    maker = steps(lengths=tuple(range(1, 200)))
    one, two = (made(maker, constant(), num_trajectories=6, seed=5) for _ in range(2))
    assert one.evaluate()["eval/reward"] == one.evaluate()["eval/reward"] == two.evaluate()["eval/reward"]
    assert (
        made(maker, constant(), num_trajectories=6, seed=6).evaluate()["eval/reward"] != one.evaluate()["eval/reward"]
    )


def test_e22_two_callers_do_not_mix(made: Any) -> None:
    """Evaluations from two threads at once each get the return of their own weights."""
    one = made(steps(length=10, seconds=0.001), constant(), num_trajectories=2)
    found: dict[float, list[float]] = {1.0: [], 2.0: []}

    def evaluate(value: float) -> None:
        for _ in range(5):
            found[value].append(one.evaluate(weights_of(value))["eval/reward"])

    threads = [threading.Thread(target=evaluate, args=(value,)) for value in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1.0: [10.0] * 5, 2.0: [20.0] * 5}


def test_e23_actors_share_the_work(made: Any, ray_cluster: None) -> None:
    """Two actors give what one gives."""
    maker = steps(lengths=tuple(range(1, 50)))
    results = [
        made(maker, policy_factory=make_constant, num_trajectories=20, backend="ray", num_runners=count).evaluate()
        for count in (1, 2)
    ]
    assert results[0]["eval/reward"] == results[1]["eval/reward"]


def test_e24_a_recorder_in_the_environment_is_refused(made: Any, tmp_path: Path) -> None:
    """It would keep every frame; the message says what records instead."""
    from torchrl.record import CSVLogger, VideoRecorder

    def recording(path: str) -> Any:
        return TransformedEnv(
            GymEnv("CartPole-v1", from_pixels=False),
            VideoRecorder(CSVLogger("x", log_dir=path), tag="v", in_keys=["observation"]),
        )

    with pytest.raises(ConfigError, match=r"VideoRecorder.*videos="):
        made(lambda: recording(str(tmp_path)), constant(), num_trajectories=1).evaluate()


def test_e25_nothing_warns(made: Any) -> None:
    """Creating one and evaluating once is silent."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(steps(length=5), constant(), num_trajectories=1).evaluate()


def test_e26_the_actor_stays(made: Any, ray_cluster: None) -> None:
    """An evaluation without weights, and then one with, happen in one process."""

    def tagged() -> Any:
        class Tagged(Steps):
            def _step(self, tensordict: Any) -> TensorDict:
                return super()._step(tensordict).set("reward", torch.tensor([float(os.getpid())], dtype=torch.float32))

        return Tagged(length=1)

    one = made(tagged, policy_factory=make_constant, num_trajectories=1, backend="process")
    assert one.evaluate()["eval/reward"] == one.evaluate(weights_of(2.0))["eval/reward"] != float(os.getpid())


def test_e27_the_default_is_deterministic_and_rewards_are_not_scaled(made: Any) -> None:
    """The signature says it, and an environment with frame skip reports what it paid."""
    assert inspect.signature(Evaluator).parameters["exploration_type"].default == "deterministic"

    def skipping() -> Any:
        return GymEnv("CartPole-v1", frame_skip=2)

    class Left(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.zeros(len(observation), dtype=torch.int64), 2)

    policy = TensorDictModule(Left(), in_keys=["observation"], out_keys=["action"])
    result = made(skipping, policy, num_trajectories=3).evaluate()
    assert result["eval/reward"] > result["eval/episode_length"]


def test_e28_what_earlier_versions_got_wrong(made: Any) -> None:
    """Weights leave parameters in place, the default is to skip, shutdown can be repeated, no weights are no error."""
    policy = constant(1.0)
    parameter = policy.module.weight
    one = made(steps(length=5, seconds=0.002), policy, num_trajectories=2)
    one.evaluate(TensorDict.from_module(constant(2.0)).data)
    assert policy.module.weight is parameter
    assert list(policy.state_dict()) == ["module.weight"]
    assert one.trigger_eval(None) is True
    assert one.trigger_eval(None) is False
    finished(one)
    one.shutdown()
    one.shutdown()


def test_constant_is_a_module() -> None:
    """The policy of these tests has one weight, so that a return tells which weights it is of."""
    assert [name for name, _ in Constant(3.0).named_parameters()] == ["weight"]
