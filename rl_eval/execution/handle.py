"""Handle of a running evaluation: a future with progress, cancellation, and the latest events of each episode."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from rl_eval.errors import UsageError
from rl_eval.errors.other_names import KnowsNames
from rl_eval.records.episode import EpisodeTable, Outcome
from rl_eval.scheduling import events

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult
    from rl_eval.results.story import Event, Kind


_CAPACITY: Final = 10_000


class _Granted(NamedTuple):
    """Grant without its leases, because thousands of lease objects slow down the garbage collector."""

    runner: int
    attempts: dict[int, int]
    """Number of the attempt, by the index of the episode."""


@final
class EventRing:
    """Latest events of the schedule, with the commands that each event caused. The oldest events are dropped.

    Args:
        capacity: Maximum size of the kept events. Each event has size 1, plus 1 for each episode that it grants or
            reports as finished.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.positions: dict[int, int] = {}
        """Position of each runner in the group, by the number of the runner."""
        self._capacity = capacity
        self._entries: deque[tuple[float, int, events.Event, list[events.Command | _Granted]]] = deque()
        self._size = 0
        self._began: float | None = None

    def append(self, now: float, event: events.Event, commands: Sequence[events.Command]) -> None:
        """Add an event and its commands."""
        self._began = now if self._began is None else self._began
        kept = [_kept(command) for command in commands]
        size = 1 + sum(len(command.attempts) for command in kept if isinstance(command, _Granted))
        size += len(event.finished) if isinstance(event, events.RunnerReported) else 0
        self._entries.append((now, size, event, kept))
        self._size += size
        while self._size > self._capacity and len(self._entries) > 1:
            self._size -= self._entries.popleft()[1]

    def moves(self, index: int) -> list[Event]:
        """Return the kept events of one episode, in order. Any thread may call this.

        For a failed attempt, the event has the time and the runner. The fault itself is in the table of records.
        """
        from rl_eval.results.story import Event

        moves: list[Event] = []
        held = (-1, 0)
        """Runner and attempt of the episode's last assignment."""
        for now, _, event, commands in list(self._entries):
            told = [*_ended(event, index, *held), *_decided(commands, index, *held)]
            for kind, text, runner, attempt in told:
                held = (runner, attempt) if kind in ("granted", "reclaimed") else (-1, 0)
                moves.append(Event(kind, text, attempt, self.positions.get(runner), at=now - (self._began or now)))
        return moves


def _kept(command: events.Command) -> events.Command | _Granted:
    if not isinstance(command, events.Grant):
        return command
    return _Granted(command.runner, {lease.spec.index: lease.attempt for lease in command.leases})


def _ended(event: events.Event, index: int, runner: int, attempt: int) -> Iterator[tuple[Kind, str, int, int]]:
    """Yield the end of an attempt on a runner, if the event reports it."""
    match event:
        case events.RunnerReported(reporter) if reporter == runner:
            if (index, attempt) in (*event.failed_attempts, *event.suspects):
                yield "fault", "failed", runner, attempt
            elif index in event.returned:
                yield "returned", "given back by the runner before it started", runner, attempt
            elif index in event.finished:
                yield "completed", "reported", runner, attempt
        case events.RunnerLost(lost) if lost == runner:
            yield "lost", "its runner was lost", runner, attempt
        case _:
            pass


def _decided(
    commands: Sequence[events.Command | _Granted], index: int, runner: int, attempt: int
) -> Iterator[tuple[Kind, str, int, int]]:
    """Yield the commands about an episode."""
    for command in commands:
        match command:
            case _Granted(receiver, attempts) if index in attempts:
                yield "granted", "assigned to the runner", receiver, attempts[index]
            case events.Reclaim(holder, indices) if holder == runner and index in indices:
                yield "reclaimed", "taken back, to run on another runner", runner, attempt
            case events.Exclude(excluded) if excluded == runner:
                yield "excluded", "its runner was excluded", runner, attempt
            case _:
                pass


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """Progress of an evaluation."""

    num_episodes: int
    num_finished: int
    num_failed: int
    num_faults: int
    num_prefix: int
    """Number of episodes in the finished prefix of the plan. Mean and interval are computed from them."""
    mean_return: float
    """Mean return of the completed episodes in the prefix; NaN if there are none."""
    half_width: float
    """Half width of the approximate 95 % interval of the mean return; NaN for fewer than two episodes."""
    env_steps: int
    """Number of environment steps of this session, without earlier sessions of a log."""
    seconds: float
    """Seconds since the first runner of this session took part."""
    num_runners: int
    """Number of ready runners."""
    num_earlier: int = 0
    """Number of finished episodes of earlier sessions of the log."""
    waiting: str = ""
    """Sentence about who waits for whom, the simulators or the server of the policy; empty if it is unknown."""
    phase: str = "running"
    """Present activity of the evaluation, in a few words."""
    unavailable: str = ""
    """Reason why the policy cannot act for now, such as the error of its server; empty if it can act."""

    @classmethod
    def of_table(cls, table: EpisodeTable, **rest: Any) -> EvalProgress:
        """Return the progress of a table; ``rest`` contains the other fields."""
        rows = table.rows
        prefix = rows[: table.prefix()]
        returns = prefix["episode_return"][prefix["outcome"] == Outcome.COMPLETED]
        count = len(returns)
        return cls(
            num_episodes=len(rows),
            num_finished=int(table.filled.sum()),
            num_failed=int((rows["outcome"] == Outcome.FAILED).sum()),
            num_faults=sum(map(len, list(table.faults.values()))),
            num_prefix=len(prefix),
            mean_return=float(np.mean(returns)) if count else math.nan,
            half_width=1.96 * float(np.std(returns, ddof=1)) / math.sqrt(count) if count > 1 else math.nan,
            **rest,
        )


@final
class EvalHandle(KnowsNames):
    """Handle of a running evaluation: a future that also reports progress.

    It can be awaited: ``result = await handle``.

    Args:
        progress: Function that :meth:`progress` calls.
        cancel: Function that :meth:`cancel` calls with its arguments.
        flush: Function that :meth:`flush` calls with its argument.
        weights_version: Version of the evaluated weights, if known.
        snapshot: Function that :meth:`snapshot` calls with its argument.
        moves: Function that :meth:`story` calls with its index, even after the evaluation has ended. It returns the
            events of this episode.
    """

    def __init__(
        self,
        progress: Callable[[], EvalProgress],
        cancel: Callable[[str, bool], None],
        flush: Callable[[float], None],
        weights_version: int = 0,
        snapshot: Callable[[str], EvalResult] | None = None,
        moves: Callable[[int], Sequence[Event]] | None = None,
    ) -> None:
        self._progress = progress
        self._cancel = cancel
        self._flush = flush
        self._snapshot = snapshot
        self._moves = moves
        self._future: Future[EvalResult] = Future()
        # Only the evaluation ends it: cancelling an awaiting task does not.
        self._future.set_running_or_notify_cancel()
        self.weights_version = weights_version
        """Version of the evaluated weights."""
        self.step: int | None = None
        """Training step of the weights, if the caller passed one."""
        self.delivered = True
        """Whether callbacks and loggers have received the result; False until then for a request of an evaluator."""

    def done(self) -> bool:
        """Whether the evaluation has ended, so that :meth:`result` does not wait."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> EvalResult:
        """Wait for the result.

        A cancelled evaluation has a result, too. Its status is ``partial``, and its numbers are those of the finished
        prefix of the plan.

        Args:
            timeout: Time limit in seconds; None for no limit.

        Raises:
            TimeoutError: The evaluation has not ended in time. It continues.
            EvalError: The evaluation could not run.
        """
        wait([self._future], timeout)
        if not self.done():
            raise TimeoutError(f"the evaluation has not ended after {timeout} s, and continues. See progress()")
        return self._future.result()

    def exception(self) -> BaseException | None:
        """Return the error of the evaluation; None if it has a result, or has not ended."""
        return self._future.exception() if self.done() else None

    def add_done_callback(self, function: Callable[[EvalHandle], object]) -> None:
        """Call a function with this handle when the evaluation ends, or immediately if the evaluation has ended.

        The thread that ends the evaluation calls the function. This may be a thread that cancels the evaluation. The
        function must return soon.
        """
        self._future.add_done_callback(lambda _: function(self))

    def __await__(self) -> Generator[Any, None, EvalResult]:
        import asyncio

        return asyncio.wrap_future(self._future).__await__()

    def cancel(self, reason: str = "cancelled", *, unless_started: bool = False) -> None:
        """Stop the evaluation and drop unfinished episodes. An evaluation that has not started ends immediately.

        Args:
            reason: Reason in the result.
            unless_started: Whether to do nothing if the evaluation has started.
        """
        if not self.done():
            self._cancel(reason or "cancelled", unless_started)

    def flush(self, timeout_s: float = 10.0) -> None:
        """Commit finished episodes to the evaluation log, if there is one, even while an environment hangs.

        Raises:
            LogError: The log cannot be written, or writing takes longer than ``timeout_s``.
        """
        self._flush(timeout_s)

    def snapshot(self, reason: str = "the evaluation was still running") -> EvalResult:
        """Return a result of the episodes that have finished so far. The evaluation continues.

        Args:
            reason: Reason for missing episodes in the result.

        Raises:
            UsageError: The evaluation runs in a service, which has no snapshots.
        """
        snapshot = self._snapshot  # First: it is removed when the result is set.
        if self.done():
            return self.result()
        if snapshot is None:
            fix = "Wait for result(), or call cancel() and use its partial result."
            raise UsageError("an evaluation in a service has no snapshots", key="snapshot", fix=fix)
        return snapshot(reason)

    def story(self, index: int) -> tuple[Event, ...]:
        """Return the events of one episode so far, in order.

        The result contains the events of :func:`~rl_eval.results.story.story`. It also contains the latest assignments
        and their ends, with times and runners; :class:`EventRing` limits their number.

        Args:
            index: Index of the episode.

        Raises:
            UsageError: The plan has no such episode, or the evaluation runs in a service and has not ended.
        """
        from rl_eval.results.story import story

        return story(self.snapshot(), index, [] if self._moves is None else self._moves(index))

    def progress(self) -> EvalProgress:
        """Return the progress."""
        return self._progress()

    def set_result(self, result: EvalResult) -> None:
        """Set the result. Only the evaluation calls this."""
        self._future.set_result(result)
        self._snapshot = None

    def set_error(self, error: BaseException) -> None:
        """Set an error. Only the evaluation calls this."""
        self._future.set_exception(error)
        self._snapshot = None

    def release(self, final: EvalProgress) -> None:
        """Drop the references to the evaluation and its weights, so that a handle does not keep these in memory.

        The function for snapshots is dropped only when the result is set, so that finished episodes are available at
        any time.
        """
        self._progress = lambda: final
        self._cancel = self._flush = _ignore


def _ignore(*args: object) -> None:
    """Do nothing. This replaces the functions of a handle after the evaluation has ended."""


def result_unless(handle: EvalHandle, stopping: Callable[[], bool], every_s: float) -> EvalResult:
    """Return the result of an evaluation. If the caller must stop earlier, cancel the evaluation.

    Args:
        handle: The evaluation.
        stopping: Function that returns whether the caller must stop.
        every_s: Seconds between two calls of ``stopping``.
    """
    while not handle.done():
        if stopping():
            handle.cancel()
        with suppress(TimeoutError):
            handle.result(every_s)
    return handle.result()
