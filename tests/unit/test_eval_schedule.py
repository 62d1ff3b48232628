"""The laws of the schedule in a training loop: what is evaluated, what never twice, and what a restart repeats."""

import threading
import time

import numpy as np
import pytest
from evaluator_modules import Scale
from evaluator_world import config
from hypothesis import given
from hypothesis import strategies as st

from rl_eval import Evaluator
from rl_eval.errors import EvalError, EvaluatorBusy, UsageError
from rl_eval.training.schedule import EvalSchedule
from tests.refused import refused


class FakeHandle:
    def __init__(self, step):
        self.step, self.finished, self.error, self.delivered = step, threading.Event(), None, True

    def done(self):
        return self.finished.is_set()

    def exception(self):
        return self.error

    def result(self, timeout=None):
        assert self.finished.wait(timeout)
        if self.error is not None:
            raise self.error
        return f"result of {self.step}"


class FakeEvaluator:
    """Runs so many evaluations at a time; they end when the test says so."""

    def __init__(self, capacity=1):
        self.capacity, self.running, self.accepted, self.refused = capacity, [], [], 0

    def submit(self, weights=None, step=None):
        if len(self.running) >= self.capacity:
            self.refused += 1
            raise EvaluatorBusy("busy")
        handle = FakeHandle(step)
        self.running.append(handle)
        self.accepted.append((step, weights))
        return handle

    def end_first(self):
        if self.running:
            self.running.pop(0).finished.set()

    def end_all(self):
        while self.running:
            self.end_first()

    @property
    def steps(self):
        return [step for step, _ in self.accepted]


class Eager(FakeEvaluator):
    """Each evaluation has ended when ``submit`` returns, as in the inline backend."""

    def submit(self, weights=None, step=None):
        handle = super().submit(weights, step)
        self.end_all()
        return handle


class Untouchable:
    """Weights that must not be looked at."""

    def __getattribute__(self, name):
        raise AssertionError(f"the weights were touched: {name}")


# ------------------------------------------------------------------------------ examples


def test_weights_that_are_not_due_or_refused_are_not_touched():
    """Copying them is the evaluator's part, once it has accepted."""
    schedule = EvalSchedule(every_steps=10)
    assert not schedule.update(FakeEvaluator(), Untouchable(), 5)
    assert not schedule.update(FakeEvaluator(capacity=0), Untouchable(), 15)


def test_steps_of_numpy_are_steps():
    """And what is not an integer is an error."""
    assert EvalSchedule(every_steps=1e4).every_steps == 10_000
    schedule, evaluator = EvalSchedule(every_steps=np.int64(10)), Eager()
    assert schedule.update(evaluator, None, np.int64(10))
    assert type(schedule.state_dict()["last_step"]) is int
    with pytest.raises(TypeError):
        schedule.due(20.0)


# ------------------------------------------------------------------------------ the end


def test_weights_that_changed_after_the_last_step_are_evaluated():
    """Many algorithms update once more after their last step; a second finish has nothing to add."""
    schedule, evaluator = EvalSchedule(every_steps=10), Eager()
    schedule.update(evaluator, "before", 20)
    assert schedule.finish(evaluator, "after", 20) == "result of 20"
    assert schedule.finish(evaluator, "after", 20) == "result of 20"
    assert evaluator.accepted == [(20, "before"), (20, "after")]


def test_without_final_the_end_only_waits():
    schedule, evaluator = EvalSchedule(every_steps=10, final=False), FakeEvaluator()
    assert schedule.finish(evaluator, None, 5) is None
    schedule.update(evaluator, None, 11)
    threading.Timer(0.05, evaluator.end_all).start()
    assert schedule.finish(evaluator, None, 15) == "result of 11"
    assert evaluator.steps == [11]


def test_the_final_policy_waits_for_its_turn():
    schedule, evaluator = EvalSchedule(every_steps=10), FakeEvaluator()
    schedule.update(evaluator, None, 10)
    stop = threading.Event()

    def work():
        while not stop.wait(0.02):
            evaluator.end_first()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert schedule.finish(evaluator, None, 15) == "result of 15"
    finally:
        stop.set()
        worker.join()
    assert evaluator.steps == [10, 15]
    assert schedule.unfinished == ()


@pytest.mark.parametrize(
    ("capacity", "unfinished", "steps"), [(1, (10, 15), [10]), (2, (10, 15), [10, 15])], ids=["refused", "queued"]
)
def test_the_wait_is_bounded_and_says_what_is_missing(capacity, unfinished, steps):
    """Whether the final policy was refused to the end, or accepted and not finished."""
    schedule, evaluator = EvalSchedule(every_steps=10), FakeEvaluator(capacity)
    schedule.update(evaluator, None, 10)
    start = time.monotonic()
    assert schedule.finish(evaluator, None, 15, timeout_s=0.2) is None
    assert time.monotonic() - start < 30
    assert schedule.unfinished == unfinished
    assert evaluator.steps == steps


# ------------------------------------------------------------------------------ restarts


def test_what_a_shutdown_ended_is_due_again():
    """A handler of SIGTERM shuts down, writes the checkpoint, and the loop is restored later; the end tells of it."""
    schedule, evaluator = EvalSchedule(every_steps=10, final=False), FakeEvaluator()
    schedule.update(evaluator, None, 10)
    error = evaluator.running[0].error = EvalError("stopped")
    evaluator.end_all()
    with pytest.raises(EvalError) as caught:
        schedule.finish(evaluator, None, 10)
    assert caught.value is error
    restored = EvalSchedule(every_steps=10)
    restored.load_state_dict(schedule.state_dict())
    assert restored.due(10)


def test_what_was_submitted_before_going_back_no_longer_counts():
    """It ends after the checkpoint was restored, and changes nothing."""
    schedule, evaluator = EvalSchedule(every_steps=10), FakeEvaluator()
    state = schedule.state_dict()
    schedule.update(evaluator, None, 10)
    schedule.load_state_dict(state)
    evaluator.end_all()
    assert schedule.state_dict() == state
    assert schedule.due(10)


def test_results_of_the_past_are_let_go():
    """A long training does not keep every result alive."""
    schedule, evaluator = EvalSchedule(every_steps=1), Eager()
    for step in range(100):
        schedule.update(evaluator, None, step)
    assert len(schedule._open) <= 1


@pytest.mark.parametrize("every", [0, -1, 0.5, float("nan"), "10", None])
def test_an_interval_that_is_not_a_whole_number_of_steps_is_refused(every):
    with refused(UsageError, "every_steps"):
        EvalSchedule(every_steps=every)


def test_an_evaluation_is_done_when_its_result_is_delivered():
    """A kill before would lose the point, so the step is due again after a restore."""
    schedule, evaluator = EvalSchedule(every_steps=10, final=False), FakeEvaluator()
    schedule.update(evaluator, None, 10)
    (handle,) = evaluator.running
    handle.delivered = False
    evaluator.end_all()
    assert schedule.state_dict() == {"last_step": None}
    schedule.finish(evaluator, None, 10, timeout_s=0.0)
    assert schedule.unfinished == (10,)
    handle.delivered = True
    assert schedule.state_dict() == {"last_step": 10}


@pytest.mark.parametrize("state", [{}, {"last_step": "10"}, {"step": 3}])
def test_a_strange_state_is_refused(state):
    with refused(UsageError, "last_step"):
        EvalSchedule().load_state_dict(state)


# ------------------------------------------------------------------------------ laws

WORLD = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(0, 60)),
        st.tuples(st.just("back"), st.integers(0, 60)),
        st.tuples(st.just("end"), st.just(0)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=60,
)


@given(world=WORLD, every=st.integers(1, 40), capacity=st.integers(0, 3))
def test_no_interval_is_evaluated_twice_and_none_is_missed(world, every, capacity):
    """Whatever the loop does: forwards by any stride, backwards, with evaluations that take any time.

    Safety: accepted steps lie in ever later intervals; nothing else is submitted. Liveness: whenever the loop looks
    from a later interval than the last accepted one, it submits, and a free evaluator accepts.
    """
    schedule, evaluator, step, last = EvalSchedule(every_steps=every), FakeEvaluator(capacity), 0, 0
    for event, amount in world:
        if event in ("train", "back"):
            step = max(0, step + (amount if event == "train" else -amount))
            free, refused = len(evaluator.running) < capacity, evaluator.refused
            later = step // every > last // every
            assert schedule.due(step) == schedule.due(step) == later
            accepted = schedule.update(evaluator, step, step)
            assert accepted == (later and free)
            assert evaluator.refused - refused == (later and not free)
            last = step if accepted else last
        elif event == "end":
            evaluator.end_first()
        else:
            # The evaluator ends with its trainer: what was under way is lost, and done again.
            state, evaluator.running = schedule.state_dict(), []
            schedule = EvalSchedule(every_steps=every)
            schedule.load_state_dict(state)
            assert state["last_step"] is None or state["last_step"] <= last
            last = state["last_step"] or 0
    assert all(step == weights for step, weights in evaluator.accepted)


@given(
    strides=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    every=st.integers(1, 40),
    crash=st.integers(0, 39),
    kept=st.integers(0, 39),
    slow=st.booleans(),
)
def test_a_crash_loses_no_point_of_the_curve(strides, every, crash, kept, slow):
    """A loop that checkpoints, crashes later and is restored has every point that it has without the crash."""
    steps = np.cumsum(strides).tolist()
    crash, kept = min(crash, len(steps) - 1), min(kept, crash, len(steps) - 1)
    finished = []

    def run(schedule, evaluator, some):
        for step in some:
            schedule.update(evaluator, None, step)
            if not slow:
                finished.extend(handle.step for handle in evaluator.running)
                evaluator.end_all()

    schedule, evaluator = EvalSchedule(every_steps=every), FakeEvaluator(capacity=100)
    run(schedule, evaluator, steps[: kept + 1])
    state = schedule.state_dict()
    run(schedule, evaluator, steps[kept + 1 : crash + 1])
    restored, evaluator = EvalSchedule(every_steps=every, final=False), FakeEvaluator(capacity=100)
    restored.load_state_dict(state)
    run(restored, evaluator, steps[kept:])
    finished.extend(handle.step for handle in evaluator.running)
    evaluator.end_all()
    restored.finish(evaluator, None, steps[-1], timeout_s=0.0)

    undisturbed, other = EvalSchedule(every_steps=every), Eager()
    for step in steps:
        undisturbed.update(other, None, step)
    wanted = {step // every for step in other.steps if slow is False or step >= steps[kept]}
    assert wanted <= {step // every for step in finished}
    assert evaluator.steps == sorted(set(evaluator.steps))


@given(jumps=st.lists(st.integers(0, 25), max_size=30), every=st.integers(1, 20), final=st.booleans())
def test_the_last_point_is_the_final_policy(jumps, every, final):
    """Whether or not the last step was due."""
    schedule, evaluator, step = EvalSchedule(every_steps=every, final=final), Eager(), 0
    for jump in jumps:
        step += jump
        schedule.update(evaluator, None, step)
    before = list(evaluator.steps)
    result = schedule.finish(evaluator, None, step)
    again = schedule.finish(evaluator, None, step)
    if final:
        assert evaluator.steps == [*before, step]
        assert result == again == f"result of {step}"
    else:
        assert evaluator.steps == before
        assert result == (f"result of {before[-1]}" if before else None)


# ------------------------------------------------------------------------------ beside a real evaluator


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_a_training_loop_with_an_evaluator(backend):
    """Every accepted policy has its own number, the last one included, and arrives with its step."""
    module, points, accepted = Scale(), [], []
    schedule = EvalSchedule(every_steps=100)
    with Evaluator(config(), module, backend=backend, on_result=points.append) as evaluator:
        for step in range(0, 1_000, 70):
            if schedule.update(evaluator, module.become(float(step)), step):
                accepted.append(step)
        result = schedule.finish(evaluator, module, step)
    assert schedule.unfinished == ()
    assert [point.step for point in points] == [*accepted, step]
    assert [point.result.mean_return for point in points] == [*accepted, step]
    assert points[-1].result.fingerprint == result.fingerprint
    assert accepted[0] == 140
