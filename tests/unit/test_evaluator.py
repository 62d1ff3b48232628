"""Decisions and deliveries of an evaluator, with evaluations that end on cue.

``tests/contracts/test_evaluator_contract.py`` has the laws of all kinds of evaluators.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluator_world import LIMIT_S, config

from rl_eval import EvalHandle, EvalPoint, EvalResult, Evaluator, evaluate
from rl_eval.errors import ClusterError, ConfigError, EvaluatorBusy, UsageError, WeightsError
from rl_eval.training.delivery import Delivery, Submission
from rl_eval.training.loggers import Logger
from tests.refused import refused


def headlines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the first line of each logged message; a traceback may follow it."""
    return [message.splitlines()[0] for message in caplog.messages]


class Cue:
    """Stands in for a group: its evaluations end when the test says so."""

    def __init__(self, result: EvalResult) -> None:
        self.result = result
        self.handles: list[EvalHandle] = []
        self.weights: list[Any] = []
        self.cancelled: list[tuple[int, bool]] = []
        self.refusal: Exception | None = None
        self.stopped = 0
        self.before_callback: Callable[[], object] = lambda: None

    def submit(
        self, *, weights: Any, version: int | None, follow_up: Any, held: Any, on_submitted: Callable[[EvalHandle], Any]
    ) -> EvalHandle:
        if self.refusal is not None:
            raise self.refusal
        position = len(self.handles)
        handle = EvalHandle(
            lambda: pytest.fail("no progress today"),
            lambda reason, unless_started: self.cancelled.append((position, unless_started)),
            lambda timeout_s: None,
            version or 0,
        )
        add = handle.add_done_callback

        def add_later(function: Callable[[EvalHandle], object]) -> None:
            hold, self.before_callback = self.before_callback, lambda: None
            hold()
            add(function)

        handle.add_done_callback = add_later  # type: ignore[method-assign]
        self.handles.append(handle)
        self.weights.append(weights)
        on_submitted(handle)
        return handle

    def apply_to_one(self, function: Callable[[Any], object]) -> None:
        """There is no runner."""

    def end(self, position: int, error: BaseException | None = None) -> None:
        if error is None:
            self.handles[position].set_result(self.result)
        else:
            self.handles[position].set_error(error)

    def stop(self) -> None:
        self.stopped += 1
        for handle in self.handles:
            if not handle.done():
                handle.set_error(ClusterError("the group was stopped before this was done", key="stop"))


class Hold:
    """A callback that waits until the test lets it continue."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self.held, self.go, self.first = threading.Event(), threading.Event(), first

    def __call__(self, point: EvalPoint) -> None:
        self.first()
        self.held.set()
        assert self.go.wait(LIMIT_S)


@pytest.fixture(scope="module")
def result() -> EvalResult:
    return evaluate(config())


@pytest.fixture
def cue(result: EvalResult, monkeypatch: pytest.MonkeyPatch) -> Cue:
    made = Cue(result)
    monkeypatch.setattr("rl_eval.training.evaluator.EvalRunnerGroup", lambda settings, policy, threaded: made)
    return made


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), thread


def settled(evaluator: Evaluator) -> None:
    """Wait until everything is delivered."""
    assert evaluator.drain(LIMIT_S)


# ------------------------------------------------------------------------------ who is refused, and who is replaced


def test_a_queue_has_room_for_so_many(cue: Cue) -> None:
    """One runs, ``max_queue`` wait; the next is refused until one is done. A refusal costs no step and no version."""
    with Evaluator(config(), busy_policy="queue", max_queue=2) as ev:
        for step in range(3):
            assert ev.submit("weights").step == step
        for _ in range(2):
            with refused(EvaluatorBusy, "step", value=3):
                ev.submit("weights")
        cue.end(0)
        assert ev.submit("weights").step == 3
        with pytest.raises(EvaluatorBusy):
            ev.submit()
        assert (cue.weights, ev.weights_version) == (["weights"] * 4, 4)


def test_weights_may_have_a_number_of_their_own(cue: Cue) -> None:
    with Evaluator(config(), busy_policy="queue") as ev:
        assert ev.submit("weights", version=17).weights_version == 17
        assert ev.submit("weights").weights_version == 18
        with refused(UsageError, "version", value=3):
            ev.submit(version=3)


def test_an_evaluation_that_is_waited_for_is_neither_refused_nor_replaced(cue: Cue) -> None:
    """``evaluate`` waits for its turn, whatever else is asked."""
    with Evaluator(config(), busy_policy="latest") as ev:
        ev.submit(None, 1)
        outcome: list[Any] = []
        waiting = threading.Thread(target=lambda: outcome.append(ev.evaluate(None, 2)))
        waiting.start()
        while len(cue.handles) < 2:
            threading.Event().wait(0.001)
        ev.submit(None, 3)
        ev.submit(None, 4)
        assert cue.cancelled == [(2, True)]
        for position in range(4):
            cue.end(position)
        waiting.join(LIMIT_S)
        assert outcome == [cue.result]


def test_what_the_group_refuses_costs_nothing(cue: Cue) -> None:
    """Weights that are none: the request is not counted, and the one that waits is not replaced."""
    with Evaluator(config(), busy_policy="latest") as ev:
        ev.submit("weights", 5)
        ev.submit("weights", 6)
        cue.refusal = WeightsError("none", key="weights")
        with refused(WeightsError, "weights"):
            ev.submit("none", 9)
        cue.refusal = None
        assert ev.weights_version == 2
        assert cue.cancelled == []
        cue.end(0)
        cue.end(1)
        settled(ev)
        assert not ev.pending
        assert ev.submit().step == 7


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"busy_policy": "lates"}, "busy_policy"),
        ({"backend": "threads"}, "backend"),
        ({"max_queue": 0}, "max_queue"),
        ({"loggers": 3}, "loggers"),
        ({"on_result": 3}, "on_result"),
        ({"videos": "best"}, "videos"),
        ({"detached": True}, "detached"),
        ({"client": "a"}, "client"),
        ({"output": "a"}, "output"),
        ({"idle_timeout_s": 3.0}, "idle_timeout_s"),
        ({"name": "some", "backend": "thread"}, "backend"),
        ({"name": "some", "after": print}, "after"),
    ],
)
def test_a_wrong_argument_is_named(cue: Cue, options: dict[str, Any], key: str) -> None:
    """At once, and not at the first result; arguments of a service are not ignored without a name."""
    with refused(ConfigError, key):
        Evaluator(config(), **options)


def test_the_backend_follows_from_the_number_of_runners_and_the_other_way_round(cue: Cue) -> None:
    """``ray`` without a number means one runner; both must not contradict each other."""
    with Evaluator(config(), backend="ray") as ev:
        assert ev.settings.runners.num_runners == 1
    with Evaluator(config().runners(num_runners=3).build()) as ev:
        assert ev.settings.runners.num_runners == 3
    with refused(ConfigError, "backend", value="inline"):
        Evaluator(config().runners(num_runners=2), backend="inline")


# ------------------------------------------------------------------------------ nothing is lost, nothing hangs


def test_a_request_whose_end_crosses_the_shutdown_is_closed(cue: Cue) -> None:
    """The shutdown comes between the acceptance of a request and its first watcher: nobody waits for ever."""
    ev = Evaluator(config())
    ending = threading.Thread(target=ev.shutdown)

    def cross() -> None:
        ending.start()
        ending.join(0.5)

    cue.before_callback = cross
    ev.submit()
    ending.join(LIMIT_S)
    settled(ev)
    assert not ev.pending


def test_results_come_in_the_order_of_the_requests_whoever_asks(cue: Cue) -> None:
    """A request that ends before its submitter has looked away is delivered before those after it."""
    steps: list[int] = []
    with Evaluator(config(), busy_policy="queue", on_result=lambda point: steps.append(point.step)) as ev:
        other = threading.Thread(target=lambda: (ev.submit(None, 2), cue.end(1)))

        def overtake() -> None:
            cue.end(0)
            other.start()
            other.join(0.5)

        cue.before_callback = overtake
        ev.submit(None, 1)
        other.join(LIMIT_S)
        settled(ev)
        assert steps == [1, 2]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("where", ["on_result", "metrics_fn", "logger", "on_error", "everywhere"])
def test_whatever_callbacks_raise_the_result_is_delivered(cue: Cue, where: str, error: Any) -> None:
    """And the error reaches ``on_error``, once."""
    told: list[BaseException] = []

    def raising(*anything: Any) -> Any:
        raise error(where)

    class Raising(Logger):
        log = raising

    def note(raised: BaseException) -> None:
        told.append(raised)
        if where in ("on_error", "everywhere"):
            raise error("on_error")

    everywhere = where == "everywhere"
    points: list[EvalPoint] = []
    listeners = [raising] if everywhere or where in ("on_result", "on_error") else []
    ev = Evaluator(
        config(),
        on_result=[*listeners, points.append],
        metrics_fn=raising if everywhere or where == "metrics_fn" else None,
        loggers=[Raising()] if everywhere or where == "logger" else (),
        on_error=note,
    )
    with ev:
        for _ in range(2):
            ev.submit()
            cue.end(-1)
            settled(ev)
    assert [point.result for point in points] == [cue.result] * 2
    assert [type(one) for one in told] == [error] * (6 if everywhere else 2)


def test_an_error_surfaces_where_it_is_documented(cue: Cue, caplog: pytest.LogCaptureFixture) -> None:
    """Without ``on_error`` it is logged, unless ``evaluate`` raises it; a handle raises its own besides."""

    def raising(point: EvalPoint) -> None:
        raise ValueError("callback")

    with Evaluator(config(), on_result=raising) as ev, caplog.at_level(logging.ERROR, "rl_eval.training.delivery"):
        handle = ev.submit()
        cue.end(0, ClusterError("first"))
        settled(ev)
        with pytest.raises(ClusterError, match="first"):
            handle.result(LIMIT_S)
        ev.submit()
        cue.end(1)
        settled(ev)
        assert headlines(caplog) == ["ClusterError: first", "ValueError: callback"]
        cue_ends = threading.Timer(0.05, lambda: cue.end(2, ClusterError("third")))
        cue_ends.start()
        with pytest.raises(ClusterError, match="third"):
            ev.evaluate()
        assert not ev.pending
        assert len(caplog.messages) == 2


def test_an_error_from_before_the_shutdown_is_told_and_the_shutdowns_own_is_not(cue: Cue) -> None:
    """What failed while an earlier result was being delivered is not mistaken for what the shutdown ended."""
    told: list[str] = []
    hold = Hold()
    ev = Evaluator(config(), busy_policy="queue", on_result=hold, on_error=lambda error: told.append(str(error)))
    for _ in range(3):
        ev.submit()
    cue.end(0)
    assert hold.held.wait(LIMIT_S)
    cue.end(1, WeightsError("its own"))
    ending = threading.Thread(target=ev.shutdown)
    ending.start()
    while not cue.stopped:
        threading.Event().wait(0.001)
    hold.go.set()
    ending.join(LIMIT_S)
    assert told == ["its own"]


def test_a_callback_may_shut_down(cue: Cue, caplog: pytest.LogCaptureFixture) -> None:
    """As one that has seen enough does: every wait ends, and what has no result is said, but is no error.

    The end of a ``with``, a second shutdown, may come while the callback still runs.
    """
    told: list[BaseException] = []
    hold = Hold(lambda: ev.shutdown())  # noqa: PLW0108 - made below
    ev = Evaluator(config(), busy_policy="queue", on_result=hold, on_error=told.append)
    handles = [ev.submit(step=step) for step in (10, 20, 30)]
    cue.end(0)
    assert hold.held.wait(LIMIT_S)
    ev.shutdown(timeout_s=0.01)
    hold.go.set()
    ev.shutdown()
    assert handles[0].result(LIMIT_S) is cue.result
    with refused(ClusterError, "stop"):
        handles[1].result(LIMIT_S)
    settled(ev)
    with refused(UsageError, "shutdown"):
        ev.submit()
    assert told == []
    assert "20, 30" in caplog.text


def test_a_callback_that_ends_the_delivery_gets_the_results_that_are_there(cue: Cue) -> None:
    """All are acknowledged before the client leaves its service, so the next client does not receive them again."""
    acknowledged: list[int | None] = []
    left: list[int] = []
    hold = Hold()

    def stop(point: EvalPoint) -> None:
        if point.step == 1:
            hold(point)
            delivery.end(LIMIT_S, lambda: left.append(len(acknowledged)))

    delivery = Delivery(stop, None, None, "", ())
    delivery.begin(lambda handle: acknowledged.append(handle.step), None, threaded=True)
    for position, step in enumerate((1, 2)):
        request = Submission(step, True)
        cue.submit(weights=None, version=None, follow_up=None, held=None, on_submitted=request.submitted)
        delivery.expect(request)
        cue.end(position)
    hold.go.set()
    assert delivery.drain(LIMIT_S)
    delivery.flush(LIMIT_S)
    assert (acknowledged, left) == ([1, 2], [2])


def test_a_request_that_is_cancelled_before_it_starts_gives_no_point(tmp_path: Path) -> None:
    """It has a result, without episodes."""
    steps: list[int] = []
    gate = tmp_path / "gate"
    gate.mkdir()
    with Evaluator(config(gate=str(gate)), busy_policy="queue", on_result=lambda point: steps.append(point.step)) as ev:
        _, second, _ = (ev.submit(step=step) for step in (10, 20, 30))
        second.cancel("not needed")
        assert second.result(LIMIT_S).status == "failed"
        (gate / "open").touch()
        settled(ev)
    assert steps == [10, 30]


def test_an_interrupt_ends_the_wait_of_evaluate(cue: Cue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation continues."""

    def interrupt(self: EvalHandle, timeout: float | None = None) -> EvalResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(EvalHandle, "result", interrupt)
    ev = Evaluator(config())
    with pytest.raises(KeyboardInterrupt):
        ev.evaluate()
    assert ev.pending
    ev.shutdown()


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_all_callbacks_get_a_point_before_any_gets_the_next(backend: Any) -> None:
    """Although the first callback submits the next request."""
    seen: list[tuple[str, int]] = []

    def first(point: EvalPoint) -> None:
        seen.append(("first", point.step))
        if point.step == 1:
            ev.submit(step=2)

    receivers = [first, lambda point: seen.append(("second", point.step))]
    with Evaluator(config(), backend=backend, busy_policy="queue", on_result=receivers) as ev:
        ev.submit(step=1)
        settled(ev)
    assert seen == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


def test_an_interruption_in_a_callback_loses_no_other_point() -> None:
    """Inline, where the callback runs in the caller's thread."""
    steps: list[int] = []

    def interrupted(point: EvalPoint) -> None:
        steps.append(point.step)
        if point.step == 1:
            ev.submit(step=2)
            raise SystemExit

    with Evaluator(config(), backend="inline", on_result=interrupted) as ev:
        with pytest.raises(SystemExit):
            ev.submit(step=1)
        settled(ev)
    assert steps == [1, 2]


def test_a_callback_of_the_inline_backend_may_shut_down(caplog: pytest.LogCaptureFixture) -> None:
    class Kept(Logger):
        closed = False

        def log(self, point: EvalPoint) -> None: ...

        def close(self) -> None:
            self.closed = True

    logger = Kept()
    ev = Evaluator(config(), backend="inline", on_result=lambda point: ev.shutdown(), loggers=logger)
    assert ev.evaluate(step=1).status == "complete"
    assert logger.closed
    assert not caplog.messages


ENDS = """
import time
from evaluator_world import config
from rl_eval import Evaluator

def slow(point):
    time.sleep(0.3)
    print(point.step)

done = Evaluator(config(), busy_policy="queue", on_result=slow)
for handle in [done.submit(step=step) for step in (1, 2)]:
    handle.result(60)
running = Evaluator(config(endless=True))
running.submit(step=3)
"""


@pytest.mark.process
def test_the_end_of_the_process_delivers_finished_results_and_warns_of_others() -> None:
    """Without a shutdown, a thread of the evaluator could abort the process in native code."""
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-c", ENDS], env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, ["1", "2"]), ended.stderr
    assert "steps 3" in ended.stderr


def test_a_callback_may_submit_but_not_wait_for_itself(cue: Cue) -> None:
    """The next request may come from ``on_result``; to wait there could never end."""
    told: list[BaseException] = []
    steps: list[int] = []

    def chain(point: EvalPoint) -> None:
        steps.append(point.step)
        if point.step == 0:
            ev.submit()
            cue.end(1)
            ev.drain()

    with Evaluator(config(), on_result=chain, on_error=told.append) as ev:
        ev.submit()
        cue.end(0)
        settled(ev)
    assert steps == [0, 1]
    (error,) = told
    assert isinstance(error, UsageError)


def test_a_callback_that_hangs_delays_the_shutdown_and_nothing_else(cue: Cue, caplog: pytest.LogCaptureFixture) -> None:
    """After its limit, the shutdown returns with a warning, and waiting threads continue."""
    hold = Hold()
    ev = Evaluator(config(), on_result=hold, busy_policy="queue")
    handles = [ev.submit(step=step) for step in (10, 20)]
    cue.end(0)
    cue.end(1)
    assert hold.held.wait(LIMIT_S)
    ev.shutdown(0.05)
    assert "10, 20" in caplog.text
    assert not any(handle.delivered for handle in handles)
    waiting = threading.Thread(target=ev.drain)
    waiting.start()
    waiting.join(LIMIT_S / 2)
    assert not waiting.is_alive()
    hold.go.set()


@pytest.mark.parametrize("policy", ["skip", "queue", "latest"])
def test_a_callback_that_is_slower_than_the_evaluations_holds_them_up(
    cue: Cue, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than so many results wait for it, whatever the policy; evaluate() waits for its turn as ever."""
    monkeypatch.setattr("rl_eval.training.delivery._BACKLOG", 5)
    hold, steps = Hold(), []
    with Evaluator(config(), on_result=[hold, lambda point: steps.append(point.step)], busy_policy=policy) as ev:
        for step in range(5):
            ev.submit(None, step)
            cue.end(-1)
        for step in range(5, 20):
            with refused(EvaluatorBusy, "step", value=step):
                ev.submit(None, step)
        assert len(cue.handles) == 5
        assert steps == []
        hold.go.set()
        settled(ev)
        ev.submit(None, 1000)
        cue.end(-1)
        settled(ev)
    assert steps == [0, 1, 2, 3, 4, 1000]


def test_a_logger_that_hangs_is_told_the_newest_step_only(cue: Cue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused requests tell it where training is; what it has not heard does not pile up.

    Progress that cannot be told ends nothing.
    """
    monkeypatch.setattr("rl_eval.training.delivery._PROGRESS_S", 0.01)
    hold, heard, told = Hold(), [], threading.Event()

    class Slow(Logger):
        def log(self, point: EvalPoint) -> None:
            hold(point)

        def reached(self, step: int) -> None:
            heard.append(step)

    with Evaluator(config(), loggers=Slow(), on_error=lambda error: told.set()) as ev:
        ev.submit(None, 0)
        assert told.wait(LIMIT_S)
        cue.end(0)
        assert hold.held.wait(LIMIT_S)
        ev.submit(None, 1)
        for step in range(2, 1000):
            with pytest.raises(EvaluatorBusy):
                ev.submit(None, step)
        hold.go.set()
        cue.end(1)
        settled(ev)
    assert heard == [0, 999]


# ------------------------------------------------------------------------------ points and state


@pytest.mark.parametrize("prefix", ["held_out", ""])
def test_points_carry_all_metrics_with_the_prefix(cue: Cue, prefix: str) -> None:
    """Those of ``metrics_fn`` too, which sees the finished episodes."""
    seen: list[Any] = []
    points: list[EvalPoint] = []

    def measure(records: Any) -> dict[str, float]:
        seen.append([record.index for record in records])
        return {"longest": max(record.length for record in records)}

    with Evaluator(config(), metrics_fn=measure, log_prefix=prefix, on_result=points.append) as ev:
        ev.submit("weights", 7)
        cue.end(0)
        settled(ev)
    (point,) = points
    start = f"{prefix}/" if prefix else ""
    named = {f"{start}{key}": value for key, value in cue.result.metrics.items()}
    assert point.metrics == named | {f"{start}longest": float(cue.result.episodes[0].length)}
    assert (point.step, point.weights_version, seen) == (7, 1, [[0, 1]])


def test_a_state_is_refused_while_a_result_could_be_lost(cue: Cue) -> None:
    """What is no state is refused as well, and changes nothing."""
    with Evaluator(config()) as ev:
        ev.load_state_dict({"step": 5, "weights_version": 3})
        for wrong in ({}, {"step": 1}, {"step": 1.5, "weights_version": 0}, None, [1, 2]):
            with refused(UsageError, "state"):
                ev.load_state_dict(wrong)  # type: ignore[arg-type]
        state = ev.state_dict()
        assert state == {"step": 5, "weights_version": 3}
        ev.submit()
        for call in (ev.state_dict, lambda: ev.load_state_dict(state)):
            with refused(UsageError, "state", value=1):
                call()
        cue.end(0)
        settled(ev)
        assert ev.state_dict()["step"] == 6


# ------------------------------------------------------------------------------ after an evaluation


@pytest.mark.parametrize("backend", ["thread", "inline"])
def test_after_is_called_with_a_runner_before_the_result_is_delivered(backend: Any) -> None:
    """With the step; what it raises is reported, and costs no result."""
    seen: list[Any] = []

    def after(runner: Any, step: int) -> None:
        seen.append((step, len(runner.foreach_env(str))))
        if step == 8:
            raise ValueError("disk full")

    reports: Any = {"on_result": lambda point: seen.append(point.step), "on_error": seen.append}
    with Evaluator(config(), after=after, backend=backend, **reports) as ev:
        for step in (3, 8):
            ev.evaluate(step=step)
        assert ev.drain()
    assert seen[:3] == [(3, 1), 3, (8, 1)]
    assert isinstance(seen[3], ValueError)
    assert seen[4] == 8
