"""Delivery of results to loggers and callbacks, one at a time, in order.

A request is *open* from its acceptance until its result is *delivered*, which means that all loggers and callbacks were
called with it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from rl_eval.errors import ConfigError, UsageError, summary_of, traceback_of
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.jobs import FollowUp
from rl_eval.execution.loop import forked
from rl_eval.results.result import EvalPoint
from rl_eval.training.loggers import Logger
from rl_eval.weights import HeldWeights

if TYPE_CHECKING:
    from rl_eval.recording.video import Video
    from rl_eval.recording.video_selection import VideoSettings
    from rl_eval.results.result import EpisodeSequence, EvalResult


Listener = Callable[[EvalPoint], object]

_logger = logging.getLogger(__name__)

_PROGRESS_S: Final = 2.0
"""Seconds between two reports of progress to the loggers."""
_AFTER_S: Final = 600.0
"""Time limit of ``after``, in seconds."""
_BACKLOG: Final = 1000
"""Maximum number of results that wait for callbacks and loggers. When it is reached, new requests are rejected."""


@dataclass(eq=False)
class Submission:
    """A request, from its acceptance until its result is delivered."""

    step: int
    replaceable: bool
    """Whether a later request may replace this request; False for requests of ``evaluate``."""
    held: HeldWeights = field(init=False, default_factory=HeldWeights)
    handle: EvalHandle = field(init=False)
    replaced: bool = False
    abandoned: bool = False
    """Whether a shutdown stopped the evaluation of this request. If so, its error is not reported."""
    expected: bool = False
    """Whether :meth:`Delivery.expect` was called with this request. ``after`` may end before."""
    concluded: bool = False
    """Whether loggers and callbacks have received the result of this request."""
    point: EvalPoint | None = None
    videos: list[Future[Video]] | None = None
    """Futures of the videos; None until all videos are recorded or have failed."""

    @classmethod
    def of(cls, handle: EvalHandle) -> Submission:
        """Return a request with the handle of an evaluation that an earlier process submitted."""
        request = cls(handle.step or 0, replaceable=True)
        request.submitted(handle)
        return request

    def submitted(self, handle: EvalHandle) -> None:
        """Store the handle of the evaluation, and set its step."""
        self.handle, handle.step = handle, self.step


@final
class Delivery:
    """Open requests of an evaluator, and the receivers of their results.

    Args:
        on_result: One or more callbacks for points.
        on_error: Callback for errors; without it, errors are logged.
        metrics_fn: Computes more metrics from the finished episodes.
        log_prefix: Prefix of the names of metrics.
        loggers: One or more loggers.
        after: Called with a runner and the step after each evaluation, in the runner's process. The result is delivered
            afterwards.

    Raises:
        ConfigError: ``on_result`` is not callable, or ``loggers`` are not loggers.
    """

    def __init__(
        self,
        on_result: Listener | Sequence[Listener],
        on_error: Callable[[BaseException], object] | None,
        metrics_fn: Callable[[EpisodeSequence], Mapping[str, float]] | None,
        log_prefix: str,
        loggers: Logger | Iterable[Logger],
        after: Callable[..., object] | None = None,
    ) -> None:
        self._listeners: list[Listener] = _several("on_result", on_result, "a function", callable)
        self._on_error = on_error
        self._metrics_fn = metrics_fn
        self._prefix = log_prefix
        self._after = after
        self._loggers: list[Logger] = _several("loggers", loggers, "a Logger", lambda one: hasattr(one, "log"))
        self._acknowledge: Callable[[EvalHandle], object]
        self._videos: VideoSettings | None = None
        self._changed = threading.Condition()
        """Protects ``open`` and ``_reached``; notified when a result is delivered."""
        self.open: list[Submission] = []
        self._reached: int | None = None
        """Step to report to the loggers next; None if there is none."""
        self._deliveries: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._delivers = False
        """Whether the queue is run now, without a thread."""
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._delivering: threading.Thread | None = None
        """Thread that is calling callbacks now."""
        self._ended = False

    def begin(
        self, acknowledge: Callable[[EvalHandle], object], videos: VideoSettings | None, *, threaded: bool
    ) -> None:
        """Start the delivery.

        Args:
            acknowledge: Called with the handle of each delivered request.
            videos: Selection of episodes to record, and the folder for videos.
            threaded: Whether to deliver in a separate thread; otherwise in the thread that finishes a request.
        """
        self._acknowledge, self._videos = acknowledge, videos
        if threaded:
            self._thread = threading.Thread(target=self._deliver_all, name="rl_eval evaluator", daemon=True)
            self._thread.start()

    def expect(self, *requests: Submission) -> None:
        """Add accepted requests, in order; each result is delivered when it is ready."""
        for request in requests:
            request.handle.delivered = False
        with self._changed:
            self.open += requests
            followed_up = [request for request in requests if request.videos is not None]
            for request in requests:
                request.expected = True
        for request in requests:
            request.handle.add_done_callback(partial(self._done, request))
        if self._after is not None:
            for request in followed_up:
                self._post(partial(self._conclude, request))

    def announce(self, step: int) -> None:
        """Report the current training step to the loggers, before the result of this step.

        Raises:
            UsageError: This process is a fork of the process with the delivery thread.
        """
        self._check_thread()
        if self._loggers:
            with self._changed:
                posted, self._reached = self._reached is not None, step
            if not posted:
                self._post(self._reach)

    def follow_up(self, request: Submission) -> FollowUp | None:
        """Return the job that calls ``after`` and records the videos of a request; None if there is nothing to do."""
        if self._videos is None and self._after is None:
            return None
        after = [] if self._after is None else [partial(self._after, step=request.step)]

        def done(futures: list[Future[Any]]) -> None:
            self._post(partial(self._followed_up, request, futures, len(after)))

        def choose(result: EvalResult) -> list[Callable[[Any], Any]]:
            # If an evaluation was cancelled before its first episode finished, ``after`` is not called.
            return [*(after if len(result.episodes) else []), *(videos.choose(result) if videos is not None else [])]

        videos = None
        if self._videos is not None:
            from rl_eval.recording.video import follow_up_videos

            videos = follow_up_videos(self._videos, done)
        return FollowUp(choose, done, _AFTER_S if videos is None else videos.timeout_s)

    # ------------------------------------------------------------------ asking

    def unfinished(self) -> list[Submission]:
        """Return the requests that are running or waiting."""
        with self._changed:
            return [request for request in self.open if not request.handle.done()]

    def congestion(self) -> str:
        """Return the reason to reject requests, if callbacks and loggers are too slow; otherwise an empty string."""
        with self._changed:
            # A replaced request has nothing to deliver, and is removed soon.
            waiting = sum(request.handle.done() and not request.replaced for request in self.open)
        if waiting < _BACKLOG:
            return ""
        return f"{waiting} results are waiting for callbacks and loggers, which take longer than the evaluations"

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until no request is open; return False if that takes longer than ``timeout_s``.

        Raises:
            UsageError: The call was made in a callback, or in a fork of the process with the delivery thread.
        """
        self._check_thread()
        if threading.current_thread() is self._delivering:
            raise UsageError("drain() in a callback would wait for the callback itself", fix="Use on_result instead.")
        with self._changed:
            return self._changed.wait_for(lambda: not self.open, timeout_s)

    def await_delivery(self, request: Submission) -> None:
        """Wait until a request is no longer open. Return immediately in a callback, which would wait for itself."""
        if threading.current_thread() is not self._delivering:
            with self._changed:
                self._changed.wait_for(lambda: request not in self.open)

    def _check_thread(self) -> None:
        if self._thread is not None and os.getpid() != self._process:
            raise forked("the evaluator")

    # ------------------------------------------------------------------ the end

    def abandon(self) -> list[int]:
        """Mark the unfinished requests as abandoned; return their steps."""
        unfinished = self.unfinished()
        for request in unfinished:
            request.abandoned = True
        return [request.step for request in unfinished]

    def flush(self, timeout_s: float) -> None:
        """Wait until finished results are delivered. Do not call this in a callback, which would wait for itself."""
        if self._ended:
            self.join(timeout_s)
        else:
            delivered = threading.Event()
            self._post(delivered.set)
            delivered.wait(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait until the delivery has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def in_callback(self) -> bool:
        """Whether the caller is the thread that delivers results now."""
        return threading.current_thread() in (self._thread, self._delivering)

    def end(self, timeout_s: float, leave: Callable[[], object] = lambda: None) -> None:
        """Deliver finished results, close the loggers, and release all threads that still wait for a result.

        Args:
            timeout_s: Longest wait, in seconds. A call in a callback does not wait.
            leave: Called after the finished results are delivered.
        """
        self._ended = True
        self._post(partial(self._finish, leave))
        if self.in_callback:
            return
        self.join(timeout_s)
        with self._changed:
            missing = [one.step for one in self.open if not (one.concluded or one.abandoned or one.replaced)]
            self.open.clear()  # A callback that hangs keeps its request open, but threads must not wait for it.
            self._changed.notify_all()
        if missing:
            _logger.warning(
                "callbacks and loggers did not finish with the results of steps %s within %g s of shutdown(). Call "
                "drain() before shutdown(), or pass a longer timeout_s",
                ", ".join(map(str, missing)),
                timeout_s,
            )

    def _finish(self, leave: Callable[[], object]) -> None:
        leave()
        self._post(self._close_loggers)
        if self._thread is not None:
            self._deliveries.put(None)

    # ------------------------------------------------------------------ delivering

    def _done(self, request: Submission, handle: EvalHandle) -> None:
        if self._after is None or handle.exception() is not None:
            self._post(partial(self._conclude, request))

    def _post(self, delivery: Callable[[], None]) -> None:
        """Queue a delivery. Without a thread, also run the queue, unless a callback called this method."""
        self._deliveries.put(delivery)
        if self._thread is None and not self._delivers:
            self._run_queue()

    def _run_queue(self) -> None:
        self._delivers = True
        try:
            while not self._deliveries.empty():
                if (delivery := self._deliveries.get()) is not None:
                    delivery()
        finally:
            self._delivers = False
            if not self._deliveries.empty():  # An interruption must not lose the other deliveries.
                self._run_queue()

    def _deliver_all(self) -> None:
        while True:
            try:
                delivery = self._deliveries.get(timeout=_PROGRESS_S if self._loggers else None)
            except queue.Empty:
                delivery = self._log_progress
            if delivery is None:
                return
            self._attempt(delivery)

    def _conclude(self, request: Submission) -> None:
        """Deliver the result of a request that is done."""
        former, self._delivering = self._delivering, threading.current_thread()
        try:
            self._deliver(request)
        finally:
            self._delivering = former
            request.held.release()
            if self._videos is None or request.handle.exception() is not None:
                request.videos = []
            request.concluded = request.handle.delivered = True
            self._close(request)

    def _deliver(self, request: Submission) -> None:
        request.point = point = self._point(request)
        try:
            if point is not None:
                for receive in [*(logger.log for logger in self._loggers), *self._listeners]:
                    self._attempt(partial(receive, point))
        finally:
            self._acknowledge(request.handle)

    def _close(self, request: Submission) -> None:
        """Deliver the videos of a request and close the request, if its result was delivered and its videos are ready.

        Otherwise do nothing. This method is called again at the delivery of the result, and when the videos are ready.
        """
        if request.videos is None or not request.concluded:
            return
        if request.videos and request.point is not None:
            self._log_videos(request.videos, request.point)
        with self._changed:
            if request in self.open:
                self.open.remove(request)
            self._changed.notify_all()

    def _point(self, request: Submission) -> EvalPoint | None:
        """Return the point to deliver; None if the request failed, or was cancelled or replaced before it started."""
        handle = request.handle
        if (error := handle.exception()) is not None:
            raised = not request.replaceable and self._on_error is None
            if not (request.abandoned or raised):  # evaluate() raises it, so a report is not needed.
                self._report(error)
            return None
        result = handle.result()
        if not (len(result.episodes) or result.timing.num_runners):
            return None
        metrics = dict(result.metrics)
        if self._metrics_fn is not None:
            measure = self._metrics_fn
            self._attempt(lambda: metrics.update(measure(result.episodes)))
        prefixed = {f"{self._prefix}/{name}" if self._prefix else name: value for name, value in metrics.items()}
        return EvalPoint(request.step, handle.weights_version, result, prefixed, request.held)

    def _attempt(self, function: Callable[[], object]) -> None:
        """Call a function of the user; report its error to ``on_error`` or log it, and continue."""
        try:
            function()
        except BaseException as error:
            self._pass_interruptions(error)
            self._report(error)

    def _report(self, error: BaseException) -> None:
        if self._on_error is not None:
            try:
                self._on_error(error)
            except BaseException as another:
                _logger.exception("on_error of the evaluator raised an error while it handled %r", error)
                self._pass_interruptions(another)
        else:
            _logger.error("%s\n%s", summary_of(error), traceback_of(error).rstrip())

    def _pass_interruptions(self, error: BaseException) -> None:
        """Raise an interruption, such as ``SystemExit``, in the caller's thread.

        In the delivery thread it is not raised, because it would only stop the deliveries.
        """
        if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
            raise error

    # ------------------------------------------------------------------ loggers and videos

    def _followed_up(self, request: Submission, futures: list[Future[Any]], others: int) -> None:
        """Deliver the result if it waited for ``after``, and deliver the videos.

        Args:
            request: The request.
            futures: Futures of the calls of ``after``, followed by the futures of the videos.
            others: Number of calls of ``after``.
        """
        for future in futures[:others]:
            self._attempt(future.result)
        with self._changed:
            request.videos, expected = futures[others:], request.expected
        if self._after is None:
            self._close(request)
        elif expected:
            self._conclude(request)

    def _log_videos(self, videos: list[Future[Video]], point: EvalPoint) -> None:
        """Save videos and send them to the loggers."""
        assert self._videos is not None
        from rl_eval.recording.video import saved

        folder = Path(self._videos.folder, f"step_{point.step}")
        for video in saved((recorded.result for recorded in videos), folder, self._report):
            for logger in self._loggers:
                self._attempt(partial(logger.log_video, video, point))

    def _reach(self) -> None:
        with self._changed:
            step, self._reached = self._reached, None
        assert step is not None
        for logger in self._loggers:
            self._attempt(partial(logger.reached, step))

    def _close_loggers(self) -> None:
        loggers, self._loggers = self._loggers, []
        for logger in reversed(loggers):
            self._attempt(logger.close)

    def _log_progress(self) -> None:
        if unfinished := self.unfinished():
            progress = unfinished[0].handle.progress()
            for logger in self._loggers:
                self._attempt(partial(logger.progress, progress))


def _several(key: str, given: Any, one: str, fits: Callable[[Any], bool]) -> list[Any]:
    """Return an argument, which is one object or several objects, as a list."""
    try:
        found = [given] if fits(given) else list(given)
    except TypeError:
        found = [None]
    if not all(map(fits, found)):
        raise ConfigError(f"{key} is {given!r}", key=key, value=given, fix=f"Pass {one}, or a list of them.")
    return found
