"""Runner in a separate process. Its calls return errors as values.

An actor's process imports this module first. So this module does not import torch or the runner;
:meth:`RunnerActor.start` imports them. An error is returned, not raised, because Ray prints the traceback of every
error that its caller does not read in time.
"""

from __future__ import annotations

import functools
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import cloudpickle

from rl_eval.backends.requests import RunnerRequest, SetWeights, Stop, answer
from rl_eval.errors import EvalError, summary_of
from rl_eval.supervision.caller import change_to, current_folder, end_fork, expect_no_ctrl_c, survivable
from rl_eval.supervision.flight_recorder import flight_recorder, install
from rl_eval.supervision.processes import ProcessInfo, end_after_main_thread, erase_recordings

if TYPE_CHECKING:
    from rl_eval.runners import Runner
    from rl_eval.weights import WeightsSnapshot


Args = ParamSpec("Args")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Failure:
    """Pickled error of a call, for the control loop."""

    pickled: bytes
    """Pickle of the error; empty if the error cannot be pickled."""
    summary: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Pack an error."""
        try:
            return cls(cloudpickle.dumps(error), summary_of(error))
        except Exception:
            return cls(b"", summary_of(error))

    def error(self) -> Exception:
        """Return the error. If it cannot be unpickled, return an :class:`EvalError` with its summary."""
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            error = None
        return error if isinstance(error, Exception) else EvalError(self.summary)


def errors_returned(method: Callable[Args, Value]) -> Callable[Args, Value | Failure]:
    """Decorate a method of an actor to return a :class:`Failure` instead of raising."""

    @functools.wraps(method)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Value | Failure:
        try:
            return method(*args, **kwargs)
        except survivable() as error:
            return Failure.of(error)
        finally:
            end_fork()

    return call


class RunnerActor:
    """Actor with one runner.

    Args:
        init_fn: Pickle of the user's ``init_fn``: a function, its ``"module:attr"``, or None. The function is called
            before all other code of the user.
        group: Name of the group, for its flight recorders.
        name: Name of the runner, unique in the group.
        lanes: Number of lanes of the runner.
    """

    def __init__(self, init_fn: bytes, group: str, name: str, lanes: int) -> None:
        self._init_fn: bytes | None = init_fn
        """Function to call at the first start; None after the first start."""
        self._folder: str | None = None
        """Working directory in which each runner is built."""
        self._recording = group, name, lanes
        self._trouble: Exception | None = None
        """Error that prevented the installation of the flight recorder."""
        self._runner: Runner | None = None
        self._process_info: ProcessInfo | None = None

    def settle(self) -> ProcessInfo:
        """Start the flight recorder, before the user's code is loaded; return a description of this process."""
        import ray

        expect_no_ctrl_c()
        try:
            self._process_info = install(*self._recording, ray.get_runtime_context().get_node_id())
            end_after_main_thread()
        except Exception as error:
            self._trouble = error
            raise
        return self._process_info

    @errors_returned
    def start(self, index: int, weights: WeightsSnapshot | None, payload: bytes) -> None:
        """Unpickle the user's code and build the runner, in place of a former runner with other settings.

        Args:
            index: Position in the group.
            weights: The policy's initial weights; None if it has no weights.
            payload: Pickled ``(settings, policy)``.
        """
        if self._trouble is not None:
            raise self._trouble
        if self._init_fn is not None:
            _initialize(self._init_fn)
            self._init_fn, self._folder = None, current_folder()
        self._end_runner()

        from rl_eval.backends.pickling import unpickle_with_weights
        from rl_eval.runners import class_of

        settings, policy = unpickle_with_weights(payload, weights)
        self._runner = class_of(settings)(settings, index, policy)

    def _end_runner(self) -> None:
        """Stop the runner, if there is one, and reset the flight recorder and the working directory."""
        former, self._runner = self._runner, None
        if former is not None:
            former.stop()
        del former
        gc.collect()  # A policy in a reference cycle would stay in memory beside the next one.
        flight_recorder(self._recording[-1]).clear()
        change_to(self._folder)

    def set_weights(self, weights: Any) -> Any:
        """Answer a :class:`SetWeights`. Ray replaces the handle of the weights by the weights."""
        return self.answer(SetWeights(weights))

    @errors_returned
    def answer(self, request: RunnerRequest) -> Any:
        """Answer a request."""
        assert self._runner is not None
        try:
            return answer(self._runner, request)
        finally:
            # Without deadlines, there is no agent to do this.
            if isinstance(request, Stop) and self._process_info is not None:
                erase_recordings(self._process_info)


def _initialize(pickled: bytes) -> None:
    """Call the user's ``init_fn``, if there is one."""
    init_fn = cloudpickle.loads(pickled)
    if isinstance(init_fn, str):
        from rl_eval.config.references import import_attribute

        init_fn = import_attribute("runners.init_fn", init_fn)
    if init_fn is None:
        return
    try:
        init_fn()
    except survivable() as error:
        from rl_eval.errors import ConfigError, summary_of

        raise ConfigError(
            f"runners.init_fn raised {summary_of(error)}", key="runners.init_fn", value=init_fn
        ) from error
