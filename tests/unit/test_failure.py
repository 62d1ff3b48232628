"""Errors of calls on their way from a runner's process to the driver."""

import pickle
import threading
from typing import Any

import pytest

from rl_eval.backends.runner_actor import Failure, errors_returned
from rl_eval.errors import EvalError, PolicyError


class Picky(Exception):
    """Can be pickled, and not be read again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Holding(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


@errors_returned
def fail(error: Exception | None) -> Any:
    if error is not None:
        raise error
    return "fine"


def arrived(error: Exception) -> Exception:
    failure = fail(error)
    assert isinstance(failure, Failure)
    return pickle.loads(pickle.dumps(failure)).error()  # type: ignore[no-any-return]


def test_an_error_arrives_as_it_is() -> None:
    """With type and text; what does not raise returns its value."""
    assert fail(None) == "fine"
    error = arrived(PolicyError("wrong shape"))
    assert type(error) is PolicyError
    assert str(error) == "wrong shape"


@pytest.mark.parametrize(("error", "text"), [(Picky("a", "b"), "Picky: a b"), (Holding(), "Holding: it holds a lock")])
def test_an_error_that_cannot_travel_is_told_in_its_words(error: Exception, text: str) -> None:
    """Whether writing or reading it fails."""
    found = arrived(error)
    assert type(found) is EvalError
    assert str(found) == text
