"""Error of a runner's call as a value: Ray prints the traceback of every error that its caller has not read in time."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import cloudpickle

from rl_eval.errors import EvalError, summary_of

__all__ = ["Failure", "errors_returned"]

Args = ParamSpec("Args")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way to the driver."""

    pickled: bytes
    """Empty if it cannot be pickled."""
    summary: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Pack an error."""
        try:
            return cls(cloudpickle.dumps(error), summary_of(error))
        except Exception:
            return cls(b"", summary_of(error))

    def error(self) -> Exception:
        """Return the error; one of another type with its text, where it cannot be unpickled."""
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = None
        return error if isinstance(error, Exception) else EvalError(self.summary)


def errors_returned(method: Callable[Args, Value]) -> Callable[Args, Value | Failure]:
    """Decorate a method of an actor so that it returns a :class:`Failure` in place of raising."""

    @functools.wraps(method)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Value | Failure:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            return Failure.of(error)

    return call
