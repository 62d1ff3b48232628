"""Schedule of evaluations in a training loop.

The training steps are divided into intervals of ``every_steps``. The first step in a new interval is due for an
evaluation, and stays due while the evaluator is busy. A loop that skips several intervals gets one evaluation, of its
current policy. A training checkpoint records an evaluation as done only after callbacks and loggers have received its
result. Other evaluations are due again after a restore, so the learning curve has no gap.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from rl_eval.errors import EvaluatorBusy, UsageError

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult


_RETRY_S: Final = 0.05
"""Seconds between two attempts to submit the final policy to a busy evaluator."""


class _Handle(Protocol):
    @property
    def delivered(self) -> bool: ...
    def done(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self, timeout: float | None = None) -> EvalResult: ...


class _Submits(Protocol):
    def submit(self, weights: Any = None, step: int | None = None) -> _Handle: ...


@final
class EvalSchedule:
    """Schedule of evaluations during training. Call ``update`` after every iteration and ``finish`` after training.

    Args:
        every_steps: Length of an interval, in training steps, at least 1. Step 0 is not due.
        final: Whether :meth:`finish` evaluates the final policy.

    Raises:
        UsageError: ``every_steps`` is below 1.

    Example:
        >>> schedule = EvalSchedule(every_steps=10_000)  # doctest: +SKIP
        >>> while step < 1_000_000:
        ...     step = train(module)
        ...     schedule.update(evaluator, module, step)
        >>> result = schedule.finish(evaluator, module, step)
    """

    def __init__(self, every_steps: int = 10_000, final: bool = True) -> None:
        try:
            whole = int(every_steps)  # Users may write 1e4.
        except (TypeError, ValueError, OverflowError):
            whole = 0
        if whole < 1 or whole != every_steps:
            fix = "Pass a whole number, 1 or more."
            raise UsageError(f"every_steps is {every_steps!r}", key="every_steps", value=every_steps, fix=fix)
        self.every_steps = whole
        self.final = final
        self.unfinished: tuple[int, ...] = ()
        """After :meth:`finish`: steps whose results were not delivered in time."""
        self._last: int | None = None
        """Step of the last evaluation that was accepted."""
        self._final: int | None = None
        """Step of the evaluation that :meth:`finish` submitted."""
        self._settled: int | None = None
        """Step of the last evaluation that succeeded, before the first evaluation that has not finished."""
        self._handle: _Handle | None = None
        """Handle of the last evaluation."""
        self._open: deque[tuple[int, _Handle]] = deque()

    # ------------------------------------------------------------------ the decision

    def due(self, step: int) -> bool:
        """Return whether the policy of a step should be evaluated.

        A step in the interval of the last accepted evaluation, or in an earlier interval, is not due. So a loop that
        returns to an earlier step must also restore the schedule (:meth:`load_state_dict`). Otherwise, no step is due
        until the loop has passed this interval.

        Args:
            step: Training steps done so far, at least 0.
        """
        return self._interval(operator.index(step)) > self._interval(self._last or 0)

    def _interval(self, step: int) -> int:
        return step // self.every_steps

    # ------------------------------------------------------------------ driving an evaluator

    def update(self, evaluator: _Submits, weights: Any, step: int) -> bool:
        """Submit the policy if the step is due; if the evaluator is busy, the evaluation stays due.

        Args:
            evaluator: An :class:`~rl_eval.Evaluator`.
            weights: Weights for ``evaluator.submit``, which copies them if it accepts the request.
            step: Training steps done so far.

        Returns:
            Whether an evaluation was accepted.
        """
        return self.due(step) and self._submit(evaluator, weights, step)

    def finish(self, evaluator: _Submits, weights: Any, step: int, timeout_s: float = 60.0) -> EvalResult | None:
        """Evaluate the final policy, and wait for all evaluations of this schedule.

        It evaluates the last step again even if it was evaluated already, since the weights may have changed.
        Afterwards, :attr:`unfinished` contains the steps whose results were not delivered in time. It includes the
        final step if the evaluator was busy all the time.

        Args:
            evaluator: As in :meth:`update`.
            weights: Final weights.
            step: Final training step.
            timeout_s: Longest wait, in seconds.

        Returns:
            The result of the last evaluation; None if there was no evaluation, or if it did not finish in time.

        Raises:
            EvalError: The last evaluation could not run.
        """
        step, give_up = operator.index(step), time.monotonic() + timeout_s
        refused = self.final and step != self._final and not self._insist(evaluator, weights, step, give_up)
        self._final = self._final if refused else step
        for _, handle in list(self._open):
            _wait(handle, give_up)
        self._settle()
        self.unfinished = tuple(step for step, handle in self._open if not _is_over(handle))
        if refused:
            self.unfinished += (step,)
        if refused or self._handle is None or not self._handle.done():
            return None
        return self._handle.result(0.0)

    def _insist(self, evaluator: _Submits, weights: Any, step: int, give_up: float) -> bool:
        while not self._submit(evaluator, weights, step):
            left = give_up - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_RETRY_S, left))
        return True

    def _submit(self, evaluator: _Submits, weights: Any, step: int) -> bool:
        self._settle()
        try:
            handle = evaluator.submit(weights, step)
        except EvaluatorBusy:
            return False
        self._last, self._handle = operator.index(step), handle
        self._open.append((self._last, handle))
        return True

    def _settle(self) -> None:
        while self._open and _is_over(self._open[0][1]):
            step, handle = self._open.popleft()
            if handle.exception() is None:
                self._settled = step

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a training checkpoint; after a restore, unfinished evaluations are due again."""
        self._settle()
        return {"last_step": self._settled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a training checkpoint; forget all evaluations that this schedule has submitted.

        Raises:
            UsageError: The state does not come from :meth:`state_dict`.
        """
        last = state.get("last_step", "missing")
        if last is not None and not isinstance(last, int):
            fix = "Pass the return value of EvalSchedule.state_dict()."
            raise UsageError(f"last_step is {last!r}", key="last_step", value=last, fix=fix)
        self._last = self._settled = last
        self._handle = self._final = None
        self._open.clear()
        self.unfinished = ()

    def __repr__(self) -> str:
        return f"EvalSchedule(every_steps={self.every_steps}, final={self.final}, last_step={self._last})"


def _is_over(handle: _Handle) -> bool:
    """Whether an evaluation has ended, and callbacks and loggers have received its result."""
    return handle.done() and handle.delivered


def _wait(handle: _Handle, give_up: float) -> None:
    """Wait until an evaluation is over, or until the deadline."""
    while not _is_over(handle) and (left := give_up - time.monotonic()) > 0:
        time.sleep(min(_RETRY_S, left))
