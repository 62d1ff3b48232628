"""What a caller holds while an evaluation runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from rl_eval.result import EvalResult

__all__ = ["EvalHandle", "EvalProgress"]


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """How far an evaluation is."""

    num_episodes: int
    num_finished: int
    num_failed: int
    num_faults: int
    num_prefix: int
    """Length of the finished index prefix, over which mean and interval are taken."""
    mean_return: float
    """Mean return of the completed episodes in the prefix; NaN while there is none."""
    half_width: float
    """Half width of its approximate 95 % interval; NaN below two episodes."""
    env_steps: int
    seconds: float
    num_runners: int
    """Runners that are up."""


@final
class EvalHandle:
    """A running evaluation: a future that also tells its progress.

    Args:
        progress: Called for :meth:`progress`.
        cancel: Called for :meth:`cancel`.
        flush: Called for :meth:`flush`.
    """

    def __init__(
        self, progress: Callable[[], EvalProgress], cancel: Callable[[], None], flush: Callable[[float], None]
    ) -> None:
        self._progress = progress
        self._cancel = cancel
        self._flush = flush
        self._finished = threading.Event()
        self._result: EvalResult | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether :meth:`result` returns at once."""
        return self._finished.is_set()

    def result(self, timeout_s: float | None = None) -> EvalResult:
        """Wait for the result.

        A cancelled evaluation has a result too: ``partial``, over the index prefix that had finished.

        Args:
            timeout_s: Longest wait, in seconds; None waits until it is done.

        Raises:
            TimeoutError: It is not done in time; it goes on.
            EvalError: It could not run at all.
        """
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"the evaluation is not done after {timeout_s} s: {self.progress()}")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Stop; episodes that have not finished are dropped."""
        if not self.done():
            self._cancel()

    def flush(self, timeout_s: float = 10.0) -> None:
        """Commit what has finished to the evaluation log, if there is one, even while an environment hangs.

        Raises:
            LogError: It cannot be written, or not in time.
        """
        self._flush(timeout_s)

    def progress(self) -> EvalProgress:
        """Return how far it is."""
        return self._progress()

    def _set_result(self, result: EvalResult) -> None:
        self._result = result
        self._finished.set()

    def _set_error(self, error: BaseException) -> None:
        self._error = error
        self._finished.set()
