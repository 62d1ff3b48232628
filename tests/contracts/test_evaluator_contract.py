"""What an evaluator promises wherever it runs: in the caller's thread, in one of its own, or in other processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluator_modules import Normalized, Parts, Scale
from evaluator_world import LIMIT_S, config, wait_for
from torch import nn
from waiting import eventually

from rl_eval import EvalConfig, EvalHandle, EvalPoint, EvalResult, Evaluator, evaluate
from rl_eval.errors import ClusterError, ConfigError, EvalError, EvaluatorBusy, UsageError, WeightsError
from rl_eval.execution.jobs import WeightsSync
from rl_eval.loggers import Logger
from rl_eval.weights import load_weights_file

WEIGHTS = Path(__file__).parents[2] / "configs" / "weights" / "cartpole_ppo_early.safetensors"
HERE = ("inline", "thread")
ELSEWHERE = ("ray", "service")


def _subjects(here: Sequence[str], *marks: Any) -> list[Any]:
    return [*here, *(pytest.param(name, marks=[pytest.mark.ray, *marks]) for name in ELSEWHERE)]


def _slow_service() -> Any:
    return pytest.param("service", marks=[pytest.mark.ray, pytest.mark.slow])


def _subject(request: pytest.FixtureRequest) -> Any:
    if request.param in ELSEWHERE:
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture(params=[*HERE, pytest.param("ray", marks=pytest.mark.ray), _slow_service()])
def backend(request: pytest.FixtureRequest) -> Any:
    """Every kind of evaluator; ``tests/cluster/test_service.py`` has the weights of every client of a service."""
    return _subject(request)


@pytest.fixture(params=_subjects(HERE, pytest.mark.slow))
def mostly(request: pytest.FixtureRequest) -> Any:
    """Every kind, in the long run: for what hardly depends on it, since new processes take seconds to start."""
    return _subject(request)


@pytest.fixture(params=_subjects(HERE[1:], pytest.mark.slow))
def beside(request: pytest.FixtureRequest) -> Any:
    """The kinds that evaluate beside their caller, in the long run."""
    return _subject(request)


_numbers = itertools.count()


def make(subject: str, *args: Any, **options: Any) -> Evaluator:
    """Create an evaluator of a kind."""
    if subject == "service":
        return Evaluator(*args, name=f"contract {next(_numbers)}", **options)
    return Evaluator(*args, backend=subject, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("rl_eval"):
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread


def group_of(evaluator: Evaluator) -> Any:
    return evaluator._engine._group  # type: ignore[attr-defined]


def returns(result: EvalResult) -> set[float]:
    return {record.episode_return for record in result.episodes}


def versions(result: EvalResult) -> set[int]:
    return {record.weights_version for record in result.episodes}


class Gate:
    """Holds evaluations up until it is opened."""

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


# ------------------------------------------------------------------------------ one result


def cartpole() -> EvalConfig:
    return (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("rl_eval.policies.mlp:make_mlp", weights=WEIGHTS, deterministic=False)
        .runners(num_envs_per_runner=4)
        .evaluation(num_episodes=20)
    )


def test_the_same_plan_gives_the_same_fingerprint(mostly: Any) -> None:
    """As ``evaluate`` gives, by whatever way it is asked for, with weights from the file and with weights sent."""
    expected = evaluate(cartpole()).fingerprint
    with make(mostly, cartpole()) as ev:
        assert ev.evaluate().fingerprint == expected
        assert ev.submit(load_weights_file(WEIGHTS)).result(LIMIT_S).fingerprint == expected


# ------------------------------------------------------------------------------ weights


def test_each_evaluation_has_the_weights_of_its_request(backend: Any) -> None:
    """As a module, or its state dict, or by part; what happens to the caller's module afterwards does not reach it.

    ``test_weights.py`` has all forms, which are the same weights before they are sent.
    """
    module = Parts()
    forms: list[Callable[[], Any]] = [
        lambda: module,
        module.state_dict,
        lambda: {"actor": module.actor},
        lambda: {"actor": module.actor.state_dict()},
    ]
    with make(backend, config(), Parts(-1.0), busy_policy="queue") as ev:
        assert returns(ev.evaluate()) == {-1.0}
        handles = []
        for value, form in enumerate(forms, 1):
            module.actor.become(float(value))
            handles.append(ev.submit(form(), step=10 * value))
            module.actor.become(99.0)
        again = ev.submit()
        for value, handle in enumerate(handles, 1):
            result = handle.result(LIMIT_S)
            assert (returns(result), versions(result)) == ({float(value)}, {value})
            assert (handle.step, handle.weights_version) == (10 * value, value)
        result = again.result(LIMIT_S)
        assert (returns(result), versions(result)) == ({float(len(forms))}, {len(forms)})
        assert (again.step, again.weights_version) == (10 * len(forms) + 1, len(forms))


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


def wrapped(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What training loops hold in a module's place."""
    compiled = torch.compile(module)
    parallel = nn.parallel.DistributedDataParallel(module)
    yield "compiled", compiled
    yield "state dict of compiled", compiled.state_dict()
    yield "parallel", parallel
    yield "state dict of parallel", parallel.state_dict()
    yield "compiled parallel", torch.compile(parallel)


@pytest.mark.process  # Before 2.5, torch starts processes that compile.
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch.*")
def test_wrappers_are_taken_off() -> None:
    """Of DistributedDataParallel and of ``torch.compile``: the policy knows nothing of them."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        module = Scale()
        with Evaluator(config(), Scale(-1.0), backend="thread") as ev:
            for value, (form, weights) in enumerate(wrapped(module), 1):
                module.become(float(value))
                assert returns(ev.evaluate(weights)) == {float(value)}, form
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("busy_policy", ["skip", "queue"])
def test_a_refused_request_copies_no_weights(gate: Gate, busy_policy: Any) -> None:
    """They are not even looked at."""

    class Watched(Scale):
        looked = 0

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            Watched.looked += 1
            return super().named_parameters(*args, **kwargs)

    module = Watched(3.0)
    with Evaluator(
        config(gate=str(gate.folder)), Scale(), backend="thread", busy_policy=busy_policy, max_queue=1
    ) as ev:
        ev.submit(module, 1)
        if busy_policy == "queue":
            ev.submit(module, 2)
        looked = Watched.looked
        assert looked
        with pytest.raises(EvaluatorBusy):
            ev.submit(module, 50)
        assert Watched.looked == looked
        gate.open()


# ------------------------------------------------------------------------------ busy


def test_a_busy_evaluator_refuses(beside: Any, gate: Gate) -> None:
    """A request beside a running one costs no step; when that is done, the next is accepted."""
    with make(beside, config(gate=str(gate.folder))) as ev:
        first = ev.submit(step=5)
        gate.entered()
        with pytest.raises(EvaluatorBusy, match="step 5 is still running"):
            ev.submit(step=100)
        assert not first.done()
        gate.open()
        assert first.result(LIMIT_S).status == "complete"
        assert ev.submit().step == 6


def test_a_queue_is_bounded_and_in_order(beside: Any, gate: Gate) -> None:
    """What was accepted is delivered, in the order of the requests."""
    steps: list[int] = []
    with make(
        beside,
        config(gate=str(gate.folder)),
        busy_policy="queue",
        max_queue=3,
        on_result=lambda point: steps.append(point.step),
    ) as ev:
        for step in range(4):
            ev.submit(step=step)
        for step in (4, 5):
            with pytest.raises(EvaluatorBusy):
                ev.submit(step=step)
        gate.open()
        assert ev.drain(LIMIT_S)
    assert steps == [0, 1, 2, 3]


def test_the_latest_replaces_what_waits_and_never_what_runs(beside: Any, gate: Gate) -> None:
    """The one at the gate and the last one have results; the handles of those between say what happened."""
    steps: list[int] = []
    with make(
        beside,
        config(gate=str(gate.folder)),
        busy_policy="latest",
        on_result=lambda point: steps.append(point.step),
    ) as ev:
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
            assert f"replaced by the request of step {step + 1}" in result.reason
    assert steps == [0, 4]


def test_rapid_requests_starve_nobody(beside: Any) -> None:
    """With ``latest`` results keep coming while requests pour in, steps rise, and the last one is among them."""
    steps: list[int] = []
    step = 0
    with make(
        beside,
        config().evaluation(determinism_check=0),
        busy_policy="latest",
        on_result=lambda p: steps.append(p.step),
    ) as ev:
        assert eventually(lambda: not ev.pending)
        deadline = time.monotonic() + LIMIT_S
        while len(steps) < 3:
            for _ in range(20):  # More than a short evaluation leaves time for.
                ev.submit(step=step)
                step += 1
            time.sleep(0.001)  # Where there is one core, the evaluation needs it now and then.
            assert time.monotonic() < deadline
        assert ev.drain(LIMIT_S)
    assert steps == sorted(set(steps))
    assert steps[-1] == step - 1
    assert len(steps) < step


def test_replaced_requests_keep_no_weights() -> None:
    """Beside a long evaluation there is one copy that waits, however many were replaced; and it is the right one."""
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


def test_evaluate_waits_for_its_turn(beside: Any, gate: Gate) -> None:
    """It is not refused, and returns after the callbacks."""
    seen: list[int] = []
    with make(
        beside,
        config(gate=str(gate.folder)),
        on_result=lambda point: seen.append(point.step),
    ) as ev:
        ev.submit(step=1)
        gate.entered()
        opening = threading.Timer(0.05, gate.open)
        opening.start()
        ev.evaluate(step=2)
        assert seen == [1, 2]
        opening.join()


# ------------------------------------------------------------------------------ pending


def test_what_is_not_pending_was_delivered(mostly: Any) -> None:
    """Always, also while other threads look."""
    over, steps = threading.Event(), []
    with make(mostly, config(), on_result=lambda point: steps.append(point.step)) as ev:

        def look() -> None:
            while not over.is_set():
                bool(ev.pending)
                time.sleep(0.0005)

        looker = threading.Thread(target=look)
        looker.start()
        try:
            for step in range(30):
                ev.submit(step=step)
                deadline = time.monotonic() + LIMIT_S
                while ev.pending:
                    time.sleep(0.0001)
                    assert time.monotonic() < deadline
                assert steps == list(range(step + 1))
        finally:
            over.set()
            looker.join()


def test_many_threads_may_submit_and_each_gets_its_own(beside: Any) -> None:
    """The weights say whose result it is."""
    wrong: list[Any] = []
    with make(beside, config(), Scale(), busy_policy="queue", max_queue=100) as ev:

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


# ------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("what", ["environment", "policy"])
def test_what_raises_for_ever_is_a_failed_result(mostly: Any, what: str) -> None:
    """Episodes fail, the evaluation does not: every attempt is a fault of the result."""
    broken = config(raises=True) if what == "environment" else config("evaluator_world:make_refusing")
    with make(mostly, broken) as ev:
        result = ev.submit().result(LIMIT_S)
        assert result.status == "failed"
        assert {one.outcome for one in result.episodes} == {"failed"}


def test_weights_that_do_not_fit_fail_their_own_evaluation(mostly: Any) -> None:
    """The next goes on with the weights that were there."""
    with make(mostly, config(), Scale(2.0)) as ev:
        misfits = ev.submit({"weight": torch.zeros(3, 3)})
        with pytest.raises(WeightsError, match="shape"):
            misfits.result(LIMIT_S)
        with pytest.raises(WeightsError, match="shape"):
            ev.evaluate({"weight": torch.zeros(3, 3)})
        with pytest.raises(WeightsError, match="must be an nn"):
            ev.submit("no weights")
        assert not ev.pending
        assert returns(ev.evaluate()) == {2.0}
        assert returns(ev.evaluate(Scale(5.0))) == {5.0}


def test_what_cannot_start_is_an_error_of_every_request(mostly: Any) -> None:
    """With the same words, and no wait."""
    with make(mostly, config("nowhere:policy")) as ev:
        for _ in range(2):
            with pytest.raises(ConfigError, match="nowhere"):
                ev.evaluate()


class _Raising(Logger):
    def log(self, point: EvalPoint) -> None:
        raise ValueError("logger")


def test_callbacks_that_raise_take_no_result_away(mostly: Any) -> None:
    """Every error is told once, in the order of the calls."""
    told: list[str] = []

    def on_result(point: EvalPoint) -> None:
        raise ValueError("on_result")

    def metrics_fn(records: Any) -> dict[str, float]:
        raise ValueError("metrics_fn")

    def on_error(error: BaseException) -> None:
        told.append(str(error))
        raise ValueError("on_error")

    with make(
        mostly, config(), on_result=on_result, metrics_fn=metrics_fn, on_error=on_error, loggers=[_Raising()]
    ) as ev:
        for _ in range(2):
            assert ev.evaluate().status == "complete"
    assert told == ["metrics_fn", "logger", "on_result"] * 2


def test_a_shutdown_ends_what_runs_and_what_waits(beside: Any) -> None:
    """Bounded: handles raise, who waits is told that nothing comes, and no error is made up."""
    told: list[BaseException] = []
    ev = make(beside, config(endless=True), busy_policy="queue", on_error=told.append)
    handles = [ev.submit() for _ in range(3)]
    waited: list[Any] = []
    waiting = threading.Thread(target=lambda: waited.append(ev.drain()))
    waiting.start()
    assert eventually(lambda: handles[0].progress().num_runners == 1)
    ev.shutdown()
    waiting.join(LIMIT_S)
    assert waited == [True]
    for handle in handles:
        with pytest.raises(ClusterError, match=r"stopped|shut down"):
            handle.result(LIMIT_S)
    assert not ev.pending
    assert told == []


def test_a_step_that_hangs_delays_the_shutdown_within_limits(
    beside: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can interrupt it in this process; who waits for its result is told all the same."""
    monkeypatch.setattr("rl_eval.execution.loop._STOP_TIMEOUT_S", 0.2)
    ev = make(beside, config(gate=str(gate.folder)))
    handle = ev.submit()
    gate.entered()
    ev.shutdown()
    with pytest.raises(ClusterError):
        handle.result(LIMIT_S)
    assert ev.drain(LIMIT_S)
    gate.open()


def test_shutdown_leaves_nothing_behind(mostly: Any) -> None:
    """No thread, no process; it may be called again, and whatever else is asked is refused."""
    before = set(threading.enumerate())
    ev = make(mostly, config())
    ev.evaluate(step=4)
    pids = [] if mostly == "service" else group_of(ev).foreach_runner(lambda runner: os.getpid())
    for _ in range(2):
        ev.shutdown()
    assert {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rl_eval")} == set()
    if mostly == "ray":
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    for ask in (ev.submit, ev.evaluate):
        with pytest.raises(UsageError, match="shut down"):
            ask()


# ------------------------------------------------------------------------------ handles


def test_a_handle_is_a_future(mostly: Any) -> None:
    """It can be awaited, watched, and asked how far it is."""
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


def test_a_handle_does_not_wait_longer_than_told_and_can_be_cancelled(beside: Any) -> None:
    """A task that gives up waiting leaves the evaluation alone; ``cancel`` ends it with a partial result."""
    with make(beside, config(endless=True)) as ev:
        handle = ev.submit()
        with pytest.raises(TimeoutError, match="not done after"):
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


def test_a_request_that_waits_can_be_cancelled(beside: Any, gate: Gate) -> None:
    """At once, without the one before it, and what was submitted after it has its result."""
    with make(beside, config(gate=str(gate.folder)), busy_policy="queue") as ev:
        first = ev.submit()
        gate.entered()
        second, third = ev.submit(), ev.submit()
        second.cancel()
        if beside != "thread":  # In this process the driver itself stands at the gate.
            assert "cancelled" in second.result(LIMIT_S).reason
            assert not first.done()
        gate.open()
        assert "cancelled" in second.result(LIMIT_S).reason
        assert [handle.result(LIMIT_S).status for handle in (first, third)] == ["complete"] * 2


def test_errors_are_of_the_kind_that_is_documented(mostly: Any) -> None:
    """Whatever a user does wrong here is an ``EvalError``."""
    with pytest.raises(EvalError):
        make(mostly, EvalConfig())
    with pytest.raises(ConfigError, match=r"policy\.policy is missing"):
        make(mostly, config(None))


def test_a_policy_and_its_architecture_are_the_callers_own(mostly: Any) -> None:
    """The live policy is copied: training it goes on without the evaluator's noticing."""
    module = Scale(7.0)
    with make(mostly, config(), module) as ev:
        module.become(8.0)
        assert returns(ev.evaluate()) == {7.0}
        assert returns(ev.evaluate(module)) == {8.0}
