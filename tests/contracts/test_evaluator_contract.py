"""Laws of evaluators, wherever they run: in the caller's thread, in another, in other processes, behind other names."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pytest
import torch
from evaluator_modules import Normalized, Scale
from evaluator_world import LIMIT_S, Line, config, wait_for
from torch import nn
from waiting import eventually

from rl_eval import EvalConfig, EvalHandle, EvalResult, Evaluator, evaluate
from rl_eval.errors import ClusterError, ConfigError, EvaluatorBusy, UsageError, WeightsError
from rl_eval.execution.jobs import WeightsSync
from rl_eval.weights import load_weights_file
from tests.refused import refused

WEIGHTS = Path(__file__).parents[2] / "configs" / "weights" / "cartpole_ppo_early.safetensors"
HERE = ("inline", "thread")
ELSEWHERE = ("ray", "service")
OTHERS = ("torchrl",)
"""Classes with the names of another library; skipped where the library is not installed."""


def _kinds(here: Sequence[str], *marks: Any) -> list[Any]:
    return [*here, *(pytest.param(name, marks=[pytest.mark.ray, *marks]) for name in ELSEWHERE)]


def _kind(request: pytest.FixtureRequest) -> Any:
    if request.param in ELSEWHERE:
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(params=[*_kinds(HERE, pytest.mark.slow), *OTHERS])
def facade(request: pytest.FixtureRequest) -> Any:
    """Every way to ask for evaluations; new processes, which take seconds to start, only in the long run."""
    return _kind(request)


@pytest.fixture(params=[*_kinds(HERE[1:], pytest.mark.slow), *OTHERS])
def beside(request: pytest.FixtureRequest) -> Any:
    """Every way to evaluate beside the caller."""
    return _kind(request)


@pytest.fixture(params=_kinds(HERE, pytest.mark.slow))
def mostly(request: pytest.FixtureRequest) -> Any:
    """Every evaluator of ours."""
    return _kind(request)


@pytest.fixture(params=_kinds(HERE[1:], pytest.mark.slow))
def ours(request: pytest.FixtureRequest) -> Any:
    """Every evaluator of ours that works beside its caller."""
    return _kind(request)


_numbers = itertools.count()


def make(kind: str, *args: Any, **options: Any) -> Evaluator:
    """Create an evaluator of a kind."""
    if kind == "service":
        return Evaluator(*args, name=f"contract {next(_numbers)}", **options)
    return Evaluator(*args, backend=kind, **options)  # type: ignore[arg-type]


@final
class Facade:
    """One way to ask for evaluations of two episodes whose return is the weight of the policy."""

    def __init__(self, kind: str, busy_policy: str = "queue", **environment: Any) -> None:
        self.points: list[tuple[int, float]] = []
        """Step and mean return of every delivered result."""
        self.errors: list[BaseException] = []
        self.evaluator: Any
        given: Any
        if kind == "torchrl":
            envs = pytest.importorskip("torchrl.envs")
            from tensordict.nn import TensorDictModule

            from rl_eval.integrations import torchrl

            self.policy = lambda weight: TensorDictModule(Scale(weight), ["observation"], ["action"])
            given = self.policy(-1.0)
            self.evaluator = torchrl.Evaluator(
                lambda: envs.GymWrapper(Line(**environment)),
                given,
                num_trajectories=2,
                num_envs=1,
                busy_policy={"skip": "error"}.get(busy_policy, busy_policy),
                on_result=lambda found: self.points.append((int(found["eval/step"]), float(found["eval/reward"]))),
                on_error=self.errors.append,
            )
            self.ask = self.evaluator.trigger_eval
        else:
            self.policy = Scale  # type: ignore[assignment]
            given = Scale(-1.0)
            self.evaluator = make(
                kind,
                config(**environment),
                given,
                busy_policy=busy_policy,
                on_result=lambda point: self.points.append((point.step, point.result.mean_return)),
                on_error=self.errors.append,
            )
            self.ask = self.evaluator.submit
        _train(given)

    def __enter__(self) -> Facade:
        return self

    def __exit__(self, *error: object) -> None:
        self.evaluator.shutdown()

    def submit(self, weight: float | None = None, step: int | None = None) -> None:
        """Submit a module, which the trainer changes afterwards."""
        module = None if weight is None else self.policy(weight)
        self.ask(module, step)
        _train(module)

    def settle(self) -> None:
        assert eventually(lambda: not self.evaluator.pending)


def _train(module: Any) -> None:
    """Change a module, if any, as its trainer does afterwards."""
    for parameter in [] if module is None else module.parameters():
        parameter.data.fill_(99.0)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("rl_eval"):
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread


def group_of(evaluator: Evaluator) -> Any:
    return evaluator._group  # type: ignore[attr-defined]


def returns(result: EvalResult) -> set[float]:
    return {record.episode_return for record in result.episodes}


def versions(result: EvalResult) -> set[int]:
    return {record.weights_version for record in result.episodes}


class Gate:
    """Stops evaluations until it is opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entered(self) -> None:
        """Wait until an episode waits at the gate."""
        wait_for(self.folder / "entered")

    def open(self) -> None:
        (self.folder / "open").touch()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.open()


# ------------------------------------------------------------------------------ every facade


@pytest.mark.parametrize("facade", [*HERE, pytest.param("ray", marks=pytest.mark.ray), *OTHERS], indirect=True)
def test_each_evaluation_has_the_weights_of_its_request(facade: str) -> None:
    """In the order of the requests, with their steps; a request without weights has those before it.

    Policies and weights are copied: what their trainer does with them afterwards does not reach the evaluator.
    """
    with Facade(facade) as asked:
        asked.submit()
        for value in (1.0, 2.0, 3.0):
            asked.submit(value, int(10 * value))
        asked.submit()
        asked.settle()
    assert asked.points == [(0, -1.0), (10, 1.0), (20, 2.0), (30, 3.0), (31, 3.0)]
    assert asked.errors == []


def test_what_is_not_pending_was_delivered(facade: str) -> None:
    with Facade(facade) as asked:
        for step in range(20):
            asked.submit(step=step)
            deadline = time.monotonic() + LIMIT_S
            while asked.evaluator.pending:
                time.sleep(0.0001)
                assert time.monotonic() < deadline
            assert [one for one, _ in asked.points] == list(range(step + 1))


def test_weights_that_do_not_fit_fail_their_own_evaluation(facade: str) -> None:
    """The next one has the weights that were there."""
    with Facade(facade) as asked:
        asked.submit(2.0)
        asked.ask({name: torch.zeros(3, 3) for name in asked.policy(0.0).state_dict()})
        asked.settle()
        asked.submit()
        asked.settle()
    assert [mean for _, mean in asked.points] == [2.0, 2.0]
    assert [type(error) for error in asked.errors] == [WeightsError]


def test_an_environment_that_always_raises_gives_no_number(facade: str) -> None:
    with Facade(facade, raises=True) as asked:
        asked.submit()
        asked.settle()
    assert all(math.isnan(mean) for _, mean in asked.points)
    assert len(asked.points) + len(asked.errors) == 1


def test_a_state_continues_the_steps(facade: str) -> None:
    """It is refused while a result could be lost."""
    with Facade(facade) as asked:
        asked.submit(step=41)
        asked.settle()
        state = asked.evaluator.state_dict()
    with Facade(facade) as asked:
        asked.evaluator.load_state_dict(state)
        asked.submit()
        asked.settle()
    assert asked.points == [(42, -1.0)]


def test_shutdown_leaves_nothing_behind(facade: str) -> None:
    """No thread and no process; a second call does nothing, and requests are refused."""
    before = set(threading.enumerate())
    with Facade(facade) as asked:
        asked.submit()
        asked.settle()
        pids = group_of(asked.evaluator).foreach_runner(lambda runner: os.getpid()) if facade == "ray" else []
        for _ in range(2):
            asked.evaluator.shutdown()
        assert not {one for one in set(threading.enumerate()) - before if one.name.startswith("rl_eval")}
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        for ask in (asked.submit, asked.evaluator.evaluate):
            with pytest.raises(UsageError):
                ask()


def test_a_busy_evaluator_refuses(beside: str, gate: Gate) -> None:
    """A refused request costs no step; afterwards requests are accepted again."""
    with Facade(beside, "skip", gate=str(gate.folder)) as asked:
        asked.submit(step=5)
        gate.entered()
        with refused(EvaluatorBusy, "step", value=100):
            asked.submit(step=100)
        gate.open()
        asked.settle()
        asked.submit()
        asked.settle()
    assert [step for step, _ in asked.points] == [5, 6]


def test_a_shutdown_ends_what_runs_and_what_waits(beside: str) -> None:
    """Within limits, and without an error."""
    with Facade(beside, endless=True) as asked:
        for _ in range(3):
            asked.submit()
        assert asked.evaluator.pending
        asked.evaluator.shutdown()
        assert not asked.evaluator.pending
    assert (asked.points, asked.errors) == ([], [])


# ------------------------------------------------------------------------------ one result


def test_the_same_plan_gives_the_same_fingerprint(mostly: Any) -> None:
    """As ``evaluate`` gives, with weights from the file and with weights sent."""
    cartpole = (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("rl_eval.policies.mlp:make_mlp", weights=WEIGHTS, deterministic=False)
        .runners(num_envs_per_runner=4)
        .evaluation(num_episodes=20)
    )
    expected = evaluate(cartpole).fingerprint
    with make(mostly, cartpole) as ev:
        assert ev.evaluate().fingerprint == expected
        assert ev.submit(load_weights_file(WEIGHTS)).result(LIMIT_S).fingerprint == expected


def test_normalizers_travel_and_are_frozen(mostly: Any) -> None:
    """Running statistics and extra state arrive; an evaluation changes neither, here nor there."""
    module = Normalized()
    module.offset = 10.0
    module(torch.randn(50, 1) * 3 + 5)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items() if name != "_extra_state"}
    expected = float((1 - module.norm.running_mean) / torch.sqrt(module.norm.running_var + 1e-5)) + 10
    with make(mostly, config(), Normalized()) as ev:
        for _ in range(2):
            (value,) = returns(ev.evaluate(module))
            assert value == pytest.approx(expected, rel=1e-6)
    assert module.training
    assert module.offset == 10.0
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in before.items())


@pytest.mark.process  # Before 2.5, torch starts processes that compile.
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch.*")
def test_wrappers_are_taken_off() -> None:
    """Those of DistributedDataParallel and of ``torch.compile``."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = Scale()
        compiled, parallel = torch.compile(module), nn.parallel.DistributedDataParallel(module)
        forms = (compiled, parallel, compiled.state_dict(), parallel.state_dict(), torch.compile(parallel))
        with Evaluator(config(), Scale(-1.0), backend="thread") as ev:
            for value, form in enumerate(forms, 1):
                module.become(float(value))
                assert returns(ev.evaluate(form)) == {float(value)}, type(form)
    finally:
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------ busy


@pytest.mark.parametrize("busy_policy", ["skip", "queue"])
def test_a_refused_request_copies_no_weights(gate: Gate, busy_policy: Any) -> None:
    """They are not even read; a queue has room for ``max_queue`` requests."""

    class Watched(Scale):
        reads = 0

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            Watched.reads += 1
            return super().named_parameters(*args, **kwargs)

    module, options = Watched(3.0), {"busy_policy": busy_policy, "max_queue": 1}
    with Evaluator(config(gate=str(gate.folder)), Scale(), backend="thread", **options) as ev:
        ev.submit(module, 1)
        if busy_policy == "queue":
            ev.submit(module, 2)
        reads = Watched.reads
        assert reads
        with pytest.raises(EvaluatorBusy):
            ev.submit(module, 50)
        assert Watched.reads == reads
        gate.open()


def test_the_latest_replaces_what_waits_and_never_what_runs(ours: Any, gate: Gate) -> None:
    """The one at the gate and the last one have results; the handles of those between report the replacement."""
    steps: list[int] = []
    on_result = lambda point: steps.append(point.step)  # noqa: E731
    with make(ours, config(gate=str(gate.folder)), busy_policy="latest", on_result=on_result) as ev:
        running = ev.submit(step=0)
        gate.entered()
        replaced = [ev.submit(step=step) for step in (1, 2, 3)]
        ev.submit(step=4)
        gate.open()
        assert ev.drain(LIMIT_S)
        assert running.result(LIMIT_S).status == "complete"
        for step, handle in enumerate(replaced, 1):
            result = handle.result(LIMIT_S)
            assert (len(result.episodes), result.status) == (0, "failed")
            assert f"step {step + 1}" in result.reason
    assert steps == [0, 4]


def test_rapid_requests_starve_no_result(ours: Any) -> None:
    """With ``latest`` results keep coming during many requests, steps rise, and the last one is among them."""
    steps: list[int] = []
    step = 0
    setting = config().evaluation(determinism_check=0)
    with make(ours, setting, busy_policy="latest", on_result=lambda point: steps.append(point.step)) as ev:
        assert eventually(lambda: not ev.pending)
        deadline = time.monotonic() + LIMIT_S
        while len(steps) < 3:
            for _ in range(20):  # More than a short evaluation leaves time for.
                ev.submit(step=step)
                step += 1
            time.sleep(0.001)  # On one core the evaluation needs it now and then.
            assert time.monotonic() < deadline
        assert ev.drain(LIMIT_S)
    assert steps == sorted(set(steps))
    assert steps[-1] == step - 1
    assert len(steps) < step


def test_replaced_requests_keep_no_weights() -> None:
    """One copy waits beside a long evaluation, however many were replaced; and it is the right one."""
    with Evaluator(config(endless=True), Scale(), backend="thread", busy_policy="latest") as ev:
        first = ev.submit()
        loop = group_of(ev)._loop
        handles = [ev.submit(Scale(float(value))) for value in range(1, 30)]
        assert all(handle.result(LIMIT_S).status == "failed" for handle in handles[:-1])
        assert eventually(lambda: sum(isinstance(job, WeightsSync) for job in list(loop._waiting)) == 1)
        last = ev.submit()  # Replaces it, without weights of its own: those that were submitted last are kept.
        assert handles[-1].result(LIMIT_S).status == "failed"
        first.cancel()
        assert eventually(lambda: last.progress().num_runners == 1)
        assert last.weights_version == 29
        (weight,) = group_of(ev).published_weights.snapshot.buffer[:4].view("float32")
        assert weight == 29.0
        last.cancel()


def test_many_threads_may_submit_and_each_gets_its_own_result(ours: Any) -> None:
    wrong: list[Any] = []
    with make(ours, config(), Scale(), busy_policy="queue", max_queue=100) as ev:

        def submit(first: int) -> None:
            module = Scale()
            handles = []
            for value in range(first, first + 5):
                handles.append((float(value), ev.submit(module.become(float(value)), step=value)))
            for value, handle in handles:
                result = handle.result(LIMIT_S)
                if (returns(result), handle.step, versions(result)) != ({value}, value, {handle.weights_version}):
                    wrong.append((value, handle.step, returns(result)))

        threads = [threading.Thread(target=submit, args=(100 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ev.weights_version == 20
    assert wrong == []


# ------------------------------------------------------------------------------ mistakes


def test_what_is_not_weights_is_an_error_at_once(mostly: Any) -> None:
    """And a policy that always raises is a failed result."""
    with make(mostly, config("evaluator_world:make_refusing")) as ev:
        with refused(WeightsError, "weights", value="str"):
            ev.submit("no weights")
        assert not ev.pending
        result = ev.submit().result(LIMIT_S)
        assert result.status == "failed"
        assert {one.outcome for one in result.episodes} == {"failed"}


def test_what_cannot_start_is_an_error_of_every_request(mostly: Any) -> None:
    with make(mostly, config("nowhere:policy")) as ev:
        for _ in range(2):
            with refused(ConfigError, "policy.policy", value="nowhere:policy"):
                ev.evaluate()
    for wrong, key in ((EvalConfig(), "environment.env"), (config(None), "policy.policy")):
        with refused(ConfigError, key):
            make(mostly, wrong)


def test_a_step_that_hangs_delays_the_shutdown_within_limits(
    ours: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be interrupted in this process; handles raise, and waits end, all the same."""
    monkeypatch.setattr("rl_eval.execution.loop._STOP_TIMEOUT_S", 0.2)
    ev = make(ours, config(gate=str(gate.folder)), busy_policy="queue")
    handles = [ev.submit() for _ in range(2)]
    gate.entered()
    ev.shutdown()
    for handle in handles:
        with refused(ClusterError) as caught:
            handle.result(LIMIT_S)
        assert caught.value.key in {"stop", "name"}, "of the group, or of the service"
    assert ev.drain(LIMIT_S)
    gate.open()


# ------------------------------------------------------------------------------ handles


def test_a_handle_is_a_future(mostly: Any) -> None:
    """It can be awaited, watched, and asked for its progress."""
    seen: list[EvalHandle] = []

    async def twice() -> list[EvalResult]:
        return [await ev.submit(step=3), await asyncio.wait_for(ev.submit(), LIMIT_S)]

    with make(mostly, config()) as ev:
        first, second = asyncio.run(twice())
        assert first.fingerprint == second.fingerprint
        handle = ev.submit()
        handle.add_done_callback(seen.append)
        result = handle.result(LIMIT_S)
        assert eventually(lambda: seen == [handle])
        assert (handle.done(), handle.exception(), handle.step) == (True, None, 5)
        progress = handle.progress()
        assert (progress.num_finished, progress.num_episodes, progress.mean_return) == (2, 2, result.mean_return)
        handle.cancel()
        assert handle.result() is result


def test_a_handle_waits_no_longer_than_asked_and_can_be_cancelled(ours: Any) -> None:
    """A task that gives up waiting leaves the evaluation alone; ``cancel`` ends it with a partial result."""
    with make(ours, config(endless=True)) as ev:
        handle = ev.submit()
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.01)

        async def impatient() -> None:
            await asyncio.wait_for(handle, 0.01)

        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(impatient())
        assert not handle.done()
        assert eventually(lambda: handle.progress().num_runners == 1)
        handle.cancel("seen enough")
        result = handle.result(LIMIT_S)
        assert "seen enough" in result.reason
        assert len(result.episodes) == 0
        assert eventually(lambda: not ev.pending)


def test_a_request_that_waits_can_be_cancelled(ours: Any, gate: Gate) -> None:
    """At once, without the one before it; the one after it has its result."""
    with make(ours, config(gate=str(gate.folder)), busy_policy="queue") as ev:
        first = ev.submit()
        gate.entered()
        second, third = ev.submit(), ev.submit()
        second.cancel()
        if ours != "thread":  # In this process the control loop itself stands at the gate.
            assert "cancelled" in second.result(LIMIT_S).reason
            assert not first.done()
        gate.open()
        assert "cancelled" in second.result(LIMIT_S).reason
        assert [handle.result(LIMIT_S).status for handle in (first, third)] == ["complete"] * 2
