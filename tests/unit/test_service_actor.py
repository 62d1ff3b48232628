"""A service without Ray: whatever it has accepted gets an answer."""

import pickle
import threading

import cloudpickle
import numpy as np
import pytest

from rl_eval import EvalConfig
from rl_eval.errors import EvalError
from rl_eval.handle import EvalHandle
from rl_eval.service.actor import EvalService

LIMIT_S = 30.0
"""Far beyond what anything here takes; reached only by what hangs."""


def always_left(observations):
    return np.zeros(len(observations), np.int64)


@pytest.fixture
def service():
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=1).policy(always_left)
    made = EvalService("one", "here", detached=True, idle_timeout_s=600.0)
    made.open(cloudpickle.dumps((config.build(), None, None)), max_queue=4)
    yield made
    made.close()


def answers(service, session, *names):
    """Wait for the answers to these requests."""
    found = {}
    while not found.keys() >= set(names):
        arrived = service.collect("me", session, list(found), LIMIT_S)
        assert arrived, "no answer will come"
        found |= {answer.request: pickle.loads(answer.outcome) for answer in arrived}
    return [found[name] for name in names]


class Strange(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Mute(Exception):
    """Has neither a text nor a pickle."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (RuntimeError("can't start new thread"), (RuntimeError, "can't start new thread")),
        (OSError(28, "No space left on device"), (OSError, "No space left")),
        (Strange(1, 2), (EvalError, "Strange: 1 and 2")),
        (Mute(), (EvalError, "Mute: its text cannot be had")),
    ],
)
def test_a_request_that_cannot_begin_is_answered_with_its_error(service, monkeypatch, error, arrives):
    """Whatever its kind, and the next request runs."""
    session = service.connect("me", True).session

    def refuse(**given):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(service._group, "submit", refuse)
        service.submit("me", session, "first", 1, 0, None)
        service.submit("me", session, "second", 2, 0, None)
    service.submit("me", session, "third", 3, 0, None)
    first, second, third = answers(service, session, "first", "second", "third")
    for outcome in (first, second):
        assert type(outcome) is arrives[0]
        assert arrives[1] in str(outcome)
    assert third.status == "complete"
    assert service._running is None


def test_a_cancelled_request_is_answered_although_its_empty_result_cannot_be_made(service, monkeypatch):
    """It was taken out of the queue, so nobody else will answer."""
    session = service.connect("me", True).session
    monkeypatch.setattr(service, "_dispatch", lambda: None)  # So that it waits.
    service.submit("me", session, "waiting", 1, 0, None)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_eval.evaluation.Evaluation", full)
    service.cancel("me", session, "waiting", "not needed", unless_started=True)
    (outcome,) = answers(service, session, "waiting")
    assert isinstance(outcome, OSError)


def refuse_once(function, calls):
    """Return a function that raises the first time it is called."""

    def call(*args):
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("no room")
        return function(*args)

    return call


def test_the_next_request_runs_although_the_books_of_a_finished_one_cannot_be_kept(service, monkeypatch):
    """Whoever waits has the result, too."""
    session, calls = service.connect("me", True).session, []
    monkeypatch.setattr(service._clients, "settle", refuse_once(service._clients.settle, calls))
    service.submit("me", session, "first", 1, 0, None)
    service.submit("me", session, "second", 2, 0, None)
    first, second = answers(service, session, "first", "second")
    assert (first.status, second.status, len(calls)) == ("complete", "complete", 2)
    assert service._running is None


def test_a_result_that_cannot_be_taken_is_answered_with_the_error(service, monkeypatch):
    """And the next request runs."""
    session, calls = service.connect("me", True).session, []
    monkeypatch.setattr(EvalHandle, "exception", refuse_once(EvalHandle.exception, calls))
    service.submit("me", session, "first", 1, 0, None)
    service.submit("me", session, "second", 2, 0, None)
    first, second = answers(service, session, "first", "second")
    assert isinstance(first, MemoryError)
    assert second.status == "complete"
    assert service._running is None
