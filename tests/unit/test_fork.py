"""Evaluators and groups in a fork of the process that made them: without their threads, nothing would ever be done."""

import os
import signal
from collections.abc import Callable

import pytest
from evaluator_world import config

from rl_eval import EvalRunnerGroup, Evaluator
from rl_eval.errors import UsageError

pytestmark = pytest.mark.process

RAISED, RETURNED = 7, 8


def in_a_fork(function: Callable[[], object]) -> int:
    """Return how a call ended in a child process; the child is ended by a signal if the call waits."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(30)
            function()
        except UsageError:
            os._exit(RAISED)
        except BaseException:
            os._exit(1)
        os._exit(RETURNED)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_evaluator_with_threads_raises_and_goes_on_in_its_own_process() -> None:
    with Evaluator(config(), backend="thread") as evaluator:
        expected = evaluator.evaluate().fingerprint
        assert in_a_fork(evaluator.evaluate) == RAISED
        assert in_a_fork(evaluator.submit) == RAISED
        assert in_a_fork(evaluator.drain) == RAISED
        assert in_a_fork(evaluator.shutdown) == RETURNED
        assert evaluator.evaluate().fingerprint == expected


def test_a_group_with_a_thread_raises_and_goes_on_in_its_own_process() -> None:
    with EvalRunnerGroup(config()) as group:
        expected = group.evaluate().fingerprint
        assert in_a_fork(group.evaluate) == RAISED
        assert in_a_fork(group.stop) == RETURNED
        assert group.evaluate().fingerprint == expected


def test_without_threads_a_fork_can_go_on() -> None:
    with Evaluator(config(), backend="inline") as evaluator:
        evaluator.evaluate()
        assert in_a_fork(evaluator.evaluate) == RETURNED
