"""Evaluation beside a training loop: which request runs, and how its result comes back.

:meth:`Evaluator.submit` is the one primitive. What it accepts is *open* until its result has been *delivered*: written
to the loggers, given to the callbacks, and ready for :meth:`Evaluator.poll`. Requests run one after the other, in
order, and at a service in turns with those of its other clients.
"""

from __future__ import annotations

import logging
import operator
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, final, get_args

from rl_eval.config import EvalConfig
from rl_eval.errors import ConfigError, EvaluatorBusy, UsageError, nearest
from rl_eval.group import EvalRunnerGroup
from rl_eval.handle import EvalHandle
from rl_eval.jobs import FollowUp
from rl_eval.loggers import Logger
from rl_eval.point import EvalPoint
from rl_eval.settings import EvalSettings, make_settings

if TYPE_CHECKING:
    from rl_eval.result import EpisodeSequence, EvalResult
    from rl_eval.service.client import ServiceEngine
    from rl_eval.service.messages import FinishedEvaluation
    from rl_eval.video import Video, VideoSettings

__all__ = ["Backend", "BusyPolicy", "Engine", "Evaluator"]

Backend = Literal["inline", "thread", "ray"]
BusyPolicy = Literal["error", "skip", "queue", "latest"]
Listener = Callable[[EvalPoint], object]

_logger = logging.getLogger(__name__)

_PROGRESS_S: Final = 2.0
"""How often loggers hear of an evaluation that runs."""
_ROOM_S: Final = 0.5
"""How often :meth:`Evaluator.evaluate` asks a service again that has no room."""
_NAMESPACE: Final = "rl_eval"
_IDLE_S: Final = 600.0
_UNREAD: Final = 1000
"""Results that :meth:`Evaluator.poll` keeps when callbacks or loggers have had them anyway."""


class Engine(Protocol):
    """Where the evaluations of an evaluator run, in the order in which they were submitted."""

    def submit(self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None) -> EvalHandle:
        """Start an evaluation, or queue it; ``version`` is the least that the weights may get."""

    def acknowledge(self, handle: EvalHandle) -> None:
        """A result has reached whoever wants it."""

    def stop(self) -> None:
        """End it; bounded."""


@final
class _OwnGroup:
    """Runners of this evaluator alone."""

    def __init__(self, group: EvalRunnerGroup) -> None:
        self._group = group

    def submit(self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None) -> EvalHandle:
        """See :class:`Engine`."""
        handle = self._group.submit(weights=weights, version=version, follow_up=follow_up)
        handle.step = step
        return handle

    def acknowledge(self, handle: EvalHandle) -> None:
        """See :class:`Engine`."""

    def stop(self) -> None:
        """See :class:`Engine`."""
        self._group.stop()


@dataclass(eq=False)
class _Request:
    """A request, from its acceptance until its result is delivered."""

    step: int
    polled: bool
    """Whether its result is for :meth:`Evaluator.poll`, and not only for who has the handle."""
    replaceable: bool
    handle: EvalHandle = field(init=False)
    replaced: bool = False
    abandoned: bool = False
    """Whether a shutdown ended it: its error says nothing else."""
    concluded: bool = False
    """Whether its result is delivered."""
    point: EvalPoint | None = None
    films: list[Future[Video]] | None = None
    """None as long as they are being made."""


@final
class Evaluator:
    """Evaluates the weights that a training loop sends, while it goes on.

    Weights are copied when they are submitted. All methods may be called from any thread.

    Args:
        config: What to evaluate and how.
        policy: A live policy, used instead of the configured one; it is copied.
        backend: ``thread``: this process, in a thread of its own. ``inline``: this process, before ``submit`` returns.
            ``ray``: processes of their own. By default ``thread``, or ``ray`` if ``runners.num_runners`` is not 0.
        busy_policy: What becomes of a request while another one is running. ``skip``: refused. ``error``: refused, and
            ``trigger_eval`` raises too. ``queue``: it waits, behind at most ``max_queue`` others. ``latest``: it waits,
            and replaces the one that waits already.
        max_queue: Longest queue of ``busy_policy="queue"``; each request in it holds a copy of the weights.
        on_result: One or more functions that are called with every :class:`EvalPoint`, one at a time, in a thread of
            the evaluator (``inline``: in the caller's).
        on_error: Called, likewise, with what an evaluation, a callback or a logger raised. Without it, ``poll`` and
            ``wait`` raise it, and what nobody can be given is logged.
        metrics_fn: Called with the finished episodes, a sequence of ``EpisodeRecord``; returns more metrics by name.
        log_prefix: Put before the names of all metrics, with a slash.
        loggers: One or more places where points are logged; closed by ``shutdown``.
        videos: Which episodes to record after each evaluation, and where.
        name: Start a *service* of this name, which :meth:`from_name` reaches from any process of the Ray cluster.
            Videos are saved on its machine.
        namespace: Ray namespace of the name.
        detached: Whether the service outlives this process; ``shutdown`` leaves it alone then.
        idle_timeout_s: A service ends when it had neither a client nor anything to do for so long, in seconds.
        client: Name under which this evaluator asks its service; who connects under it later is given the results that
            were not read. By default one that nobody else has.

    Raises:
        ConfigError: The configuration cannot work.
        RunnerStartError: The cluster cannot be reached.

    Example:
        >>> with Evaluator(config, busy_policy="latest", on_result=print) as ev:  # doctest: +SKIP
        ...     for step in range(0, 1_000_000, 10_000):
        ...         train(module)
        ...         ev.trigger_eval(module, step)
        ...     ev.evaluate(module, step)
    """

    _videos: VideoSettings | None
    _service: ServiceEngine | None

    def __init__(
        self,
        config: EvalConfig | EvalSettings,
        policy: Any = None,
        *,
        backend: Backend | None = None,
        busy_policy: BusyPolicy = "skip",
        max_queue: int = 8,
        on_result: Listener | Sequence[Listener] = (),
        on_error: Callable[[BaseException], object] | None = None,
        metrics_fn: Callable[[EpisodeSequence], Mapping[str, float]] | None = None,
        log_prefix: str = "eval",
        loggers: Logger | Iterable[Logger] = (),
        videos: VideoSettings | None = None,
        name: str | None = None,
        namespace: str = _NAMESPACE,
        detached: bool = False,
        idle_timeout_s: float = _IDLE_S,
        client: str | None = None,
    ) -> None:
        _check_service(name, backend, namespace, detached, idle_timeout_s, client)
        if videos is not None and not hasattr(videos, "max_videos"):
            raise ConfigError(f"videos is {videos!r}: give VideoSettings({videos!r}, FOLDER)")
        settings, backend = _with_backend(config, "ray" if name is not None else backend)
        self._prepare(busy_policy, max_queue, on_result, on_error, metrics_fn, log_prefix, loggers)
        if name is None:
            self.settings = settings
            self._videos = videos
            group = EvalRunnerGroup(settings, policy, threaded=backend != "inline")
            if backend == "thread":
                # A factory may draw from the global generators, which are set back behind it: not while training draws.
                with suppress(Exception):  # Who asks for an evaluation is told.
                    group.apply_to_one(lambda _: None)
            self._begin(_OwnGroup(group), backend)
            return
        from rl_eval.service.client import ServiceEngine

        engine = ServiceEngine.start(
            settings,
            policy,
            videos,
            name=name,
            namespace=namespace,
            client=client,
            detached=detached,
            idle_timeout_s=idle_timeout_s,
            max_queue=max_queue,
        )
        self._join(engine, max_queue)

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        namespace: str = _NAMESPACE,
        address: str | None = None,
        client: str | None = None,
        busy_policy: BusyPolicy = "skip",
        max_queue: int | None = None,
        on_result: Listener | Sequence[Listener] = (),
        on_error: Callable[[BaseException], object] | None = None,
        metrics_fn: Callable[[EpisodeSequence], Mapping[str, float]] | None = None,
        log_prefix: str = "eval",
        loggers: Logger | Iterable[Logger] = (),
    ) -> Evaluator:
        """Reach a service that ``Evaluator(..., name=name)`` has started, from any process of its cluster.

        ``shutdown`` leaves the service alone, and what was submitted to it.

        Args:
            name: Of the service.
            namespace: Of the name.
            address: Of the cluster, for a process that is not connected; by default ``RAY_ADDRESS``, else the one that
                runs on this machine.
            client: Name under which to ask. What was submitted under it earlier, and not read, comes out of
                :meth:`poll` and :meth:`wait`; an evaluator that still uses it is told that it is not the client any
                more. By default a name that nobody else has.
            busy_policy: As for the constructor, like what follows.
            max_queue: By default, and at most, what the service was started with.
            on_result: See above.
            on_error: See above.
            metrics_fn: See above.
            log_prefix: See above.
            loggers: See above.

        Raises:
            UsageError: There is no service of this name; the message lists those that there are.
            ConfigError: ``max_queue`` is longer than the service's.
            ClusterError: The cluster or the service does not answer.
        """
        from rl_eval.service.client import ServiceEngine

        evaluator = object.__new__(cls)
        evaluator._prepare(
            busy_policy,
            1 if max_queue is None else max_queue,
            on_result,
            on_error,
            metrics_fn,
            log_prefix,
            loggers,
        )
        evaluator._join(ServiceEngine.reach(name, namespace, address, client), max_queue)
        return evaluator

    def _prepare(
        self,
        busy_policy: BusyPolicy,
        max_queue: int,
        on_result: Listener | Sequence[Listener],
        on_error: Callable[[BaseException], object] | None,
        metrics_fn: Callable[[EpisodeSequence], Mapping[str, float]] | None,
        log_prefix: str,
        loggers: Logger | Iterable[Logger],
    ) -> None:
        """Keep what concerns this process."""
        if busy_policy not in get_args(BusyPolicy):
            raise ConfigError(f"busy_policy is {busy_policy!r}: {nearest(str(busy_policy), get_args(BusyPolicy))}")
        if max_queue < 1:
            raise ConfigError(f"max_queue is {max_queue}: give at least 1")
        self._busy_policy = busy_policy
        self._max_queue = max_queue
        self._listeners = _several("on_result", on_result, callable)
        self._on_error = on_error
        self._metrics_fn = metrics_fn
        self._prefix = log_prefix
        self._loggers = _several("loggers", loggers, lambda one: hasattr(one, "log"))
        self._videos = None
        self._service = None
        self._submitting = threading.RLock()
        """Held while a request is decided on and submitted, so that steps and weights keep their order."""
        self._next_step = self._version = 0
        self._changed = threading.Condition()
        """Guards the next three, and is notified when a result is delivered."""
        self._open: list[_Request] = []
        self._unread: deque[tuple[EvalPoint | BaseException, EvalHandle | None]] = deque()
        """The handle is there if reading the result is what acknowledges it."""
        self._stopped = False
        self._deliveries: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliverer: threading.Thread | None = None
        self._delivering: threading.Thread | None = None
        """The thread that calls back, while it does."""

    def _begin(self, engine: Engine, backend: Backend) -> None:
        self._engine = engine
        if backend != "inline":
            self._deliverer = threading.Thread(target=self._deliver_all, name="rl_eval evaluator", daemon=True)
            self._deliverer.start()

    def _join(self, engine: ServiceEngine, max_queue: int | None) -> None:
        """Go on as the client of a service."""
        welcome = engine.welcome
        self._max_queue = welcome.max_queue if max_queue is None else max_queue
        if self._max_queue > welcome.max_queue:
            engine.stop()
            raise ConfigError(f"max_queue is {self._max_queue}, but the service was started with {welcome.max_queue}")
        self.settings = welcome.settings
        self._next_step, self._version = welcome.next_step, welcome.weights_version
        self._begin(engine, "ray")
        self._service = engine
        for handle in engine.resumed:
            request = _Request(handle.step or 0, polled=True, replaceable=False)
            request.handle = handle
            self._open.append(request)
        for request in list(self._open):
            self._await(request)

    # ------------------------------------------------------------------ asking

    def submit(self, weights: Any = None, step: int | None = None) -> EvalHandle:
        """Start an evaluation and return at once.

        Args:
            weights: An ``nn.Module``, a state dict, a ``TensorDict``, a trainer of a supported framework, or a mapping
                of names to any of these; copied at once. By default those that were submitted last.
            step: Training step that they are of; by default one more than the last.

        Returns:
            A future of the result, with ``step`` and ``weights_version``.

        Raises:
            EvaluatorBusy: The request is refused; no weights were copied, and no step was counted.
            WeightsError: The weights are none.
        """
        return self._submit(weights, step, polled=False).handle

    def evaluate(self, weights: Any = None, step: int | None = None) -> EvalResult:
        """Evaluate and wait for the result: ``submit(...).result()``, but never refused; it waits for its turn.

        Callbacks and loggers have had the result when it returns, and ``on_error`` the error when it raises.
        """
        request = self._submit_patiently(weights, step)
        try:
            result = request.handle.result()
        except Exception:
            self._await_delivery(request)
            raise
        self._await_delivery(request)
        return result

    def _await_delivery(self, request: _Request) -> None:
        if threading.current_thread() is not self._delivering:
            with self._changed:
                self._changed.wait_for(lambda: request not in self._open)

    def trigger_eval(self, weights: Any = None, step: int | None = None) -> bool:
        """Start an evaluation whose result :meth:`poll` and :meth:`wait` return; tell whether it was accepted.

        Raises:
            EvaluatorBusy: It was refused, and ``busy_policy`` is ``error``.
        """
        try:
            self._submit(weights, step, polled=True)
        except EvaluatorBusy:
            if self._busy_policy == "error":
                raise
            return False
        return True

    def poll(self, timeout_s: float = 0.0) -> EvalPoint | None:
        """Return the oldest result of ``trigger_eval`` that was not read yet; None if there is none in time.

        Raises:
            Exception: What an evaluation, a callback or a logger raised, if there is no ``on_error``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._unread, timeout_s)
            return self._read()

    def wait(self, timeout_s: float | None = None) -> EvalPoint | None:
        """Wait for the next result of ``trigger_eval``; return None if none is pending, or not in time.

        Raises:
            Exception: As :meth:`poll`.
            UsageError: It is called in a callback, which results are waiting for.
        """
        if threading.current_thread() is self._delivering:
            raise UsageError("wait() in a callback would wait for that callback: use poll(), or on_result")
        with self._changed:
            self._changed.wait_for(lambda: self._unread or not any(one.polled for one in self._open), timeout_s)
            return self._read()

    @property
    def pending(self) -> bool:
        """Whether a request was accepted and its result not yet delivered; once False, ``poll`` has what there is."""
        with self._changed:
            return bool(self._open)

    @property
    def weights_version(self) -> int:
        """Version of the weights that were submitted last; 0 before any."""
        return self._version

    def history(self) -> list[FinishedEvaluation]:
        """Return the last evaluations of all clients of the service, the oldest first: 200, or 256 MiB of them.

        Raises:
            UsageError: This evaluator has no service.
            ClusterError: The service is gone.
        """
        if self._service is None:
            raise UsageError("only a service keeps a history: create the evaluator with a name, or use loggers")
        return self._service.history()

    # ------------------------------------------------------------------ state, and the end

    def state_dict(self) -> dict[str, int]:
        """Return what a continued training run needs to go on counting steps and versions.

        Raises:
            UsageError: A result is pending or unread, and would be lost.
        """
        with self._submitting:
            self._check_idle("saved")
            return {"step": self._next_step, "weights_version": self._version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            UsageError: It is something else, or a result is pending or unread.
        """
        with self._submitting:
            self._check_idle("replaced")
            try:
                self._next_step, self._version = operator.index(state["step"]), operator.index(state["weights_version"])
            except (KeyError, TypeError) as error:
                cause = f"{type(error).__name__}: {error}"
                raise UsageError(f"{state!r} is not the state of an Evaluator ({cause})") from None

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """End what runs, deliver what is finished, and close the loggers; may be called again.

        Args:
            timeout_s: Longest wait, in seconds, for callbacks that still run when everything else has ended.
        """
        with self._submitting:
            self._stopped = True
            with self._changed:
                for request in self._open:
                    request.abandoned = not request.handle.done()
                ended = [request.step for request in self._open if request.abandoned]
            if ended and self._service is None:
                _logger.warning(
                    "shut down before the evaluations of steps %s were done: they have no result; wait() for them "
                    "first, or end with evaluate() or EvalSchedule.finish()",
                    ", ".join(map(str, ended)),
                )
        if self._service is not None and self._deliverer is not threading.current_thread():
            delivered = threading.Event()  # What was read is told to the service, so before the goodbye.
            self._post(delivered.set)
            delivered.wait(timeout_s)
        self._engine.stop()
        self._post(self._close_loggers)
        if self._deliverer is not None:
            self._deliveries.put(None)
            if self._deliverer is threading.current_thread():
                return
            self._deliverer.join(timeout_s)
        with self._changed:
            self._open.clear()  # What a callback that hangs has kept open must keep nobody waiting.
            self._changed.notify_all()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ accepting

    def _submit(self, weights: Any, step: int | None, *, polled: bool, patient: bool = False) -> _Request:
        with self._submitting:
            if self._stopped:
                raise UsageError("the evaluator is shut down: create a new one")
            request = _Request(self._next_step if step is None else operator.index(step), polled, not patient)
            self._tell_loggers(request.step)
            replaced = self._admit(request)
            version = None if weights is None else self._version + 1
            handle = request.handle = self._engine.submit(
                weights=weights, version=version, step=request.step, follow_up=self._filming(request)
            )
            with self._changed:
                self._open.append(request)
            self._next_step = request.step + 1
            self._version = self._version if version is None else handle.weights_version
            self._await(request)
            if replaced is not None:
                replaced.replaced = True
                replaced.handle.cancel(f"replaced by the request of step {request.step}", unless_started=True)
        return request

    def _await(self, request: _Request) -> None:
        request.handle.add_done_callback(lambda _: self._post(partial(self._conclude, request)))

    def _submit_patiently(self, weights: Any, step: int | None) -> _Request:
        while True:
            try:
                return self._submit(weights, step, polled=False, patient=True)
            except EvaluatorBusy:  # noqa: PERF203  # A service has no room for more requests of one client.
                with self._changed:
                    self._changed.wait(_ROOM_S)

    def _admit(self, asking: _Request) -> _Request | None:
        """Decide on a request; return the one that it replaces, if any.

        Raises:
            EvaluatorBusy: It is refused.
        """
        with self._changed:
            unfinished = [request for request in self._open if not request.handle.done()]
        if not unfinished or not asking.replaceable:
            return None
        waiting = unfinished[1:]
        if self._busy_policy == "latest":
            return next((request for request in reversed(waiting) if request.replaceable), None)
        if self._busy_policy == "queue" and len(waiting) < self._max_queue:
            return None
        raise EvaluatorBusy(
            f"the evaluation of step {unfinished[0].step} is still running"
            + (f" and {len(waiting)} are waiting" if waiting else "")
            + f", so that of step {asking.step} was refused: wait() first, ask less often, or use another busy_policy "
            f"than {self._busy_policy!r}"
        )

    def _check_idle(self, what: str) -> None:
        with self._changed:
            unread = 0 if self._listeners or self._loggers else len(self._unread)
            if self._open or unread:
                raise UsageError(
                    f"the state cannot be {what} while {len(self._open)} evaluations are pending and {unread} results "
                    "unread: wait() for them first"
                )

    def _read(self) -> EvalPoint | None:
        if not self._unread:
            return None
        item, unacknowledged = self._unread.popleft()
        if unacknowledged is not None:
            self._engine.acknowledge(unacknowledged)
        if isinstance(item, BaseException):
            raise item
        return item

    # ------------------------------------------------------------------ delivering

    def _post(self, delivery: Callable[[], None]) -> None:
        """Have something delivered, in order."""
        if self._deliverer is None:
            delivery()
        else:
            self._deliveries.put(delivery)

    def _deliver_all(self) -> None:
        while True:
            try:
                delivery = self._deliveries.get(timeout=_PROGRESS_S if self._loggers else None)
            except queue.Empty:
                delivery = self._log_progress
            if delivery is None:
                return
            self._attempt(delivery, polled=False)

    def _conclude(self, request: _Request) -> None:
        """Deliver the result of a request that is done."""
        former, self._delivering = self._delivering, threading.current_thread()
        try:
            self._deliver(request)
        finally:
            self._delivering = former
            if self._videos is None or request.handle.exception() is not None:
                request.films = []
            request.concluded = True
            self._close(request)

    def _deliver(self, request: _Request) -> None:
        request.point = point = self._point(request)
        told = point is None or not request.polled or bool(self._listeners or self._loggers)
        try:
            if point is not None:
                for receive in [*(logger.log for logger in self._loggers), *self._listeners]:
                    self._attempt(partial(receive, point), request.polled)
        finally:
            if point is not None and request.polled:
                self._keep(point, None if told else request.handle)
            if told:
                self._engine.acknowledge(request.handle)

    def _keep(self, item: EvalPoint | BaseException, unacknowledged: EvalHandle | None = None) -> None:
        """Keep something for :meth:`poll`; forget the oldest of what others have had, but no error in silence."""
        dropped = None
        with self._changed:
            self._unread.append((item, unacknowledged))
            if len(self._unread) > _UNREAD and (self._listeners or self._loggers):
                dropped, _ = self._unread.popleft()
            self._changed.notify_all()
        if isinstance(dropped, BaseException):
            _log_error(dropped)

    def _close(self, request: _Request) -> None:
        """Deliver the films of a request, as soon as there are its result and they; it is over then."""
        if request.films is None or not request.concluded:
            return
        if request.films and request.point is not None:
            self._log_films(request.films, request.point)
        with self._changed:
            if request in self._open:
                self._open.remove(request)
            self._changed.notify_all()

    def _point(self, request: _Request) -> EvalPoint | None:
        """Return what to deliver: nothing for a request that failed, or was replaced before it began."""
        handle = request.handle
        if (error := handle.exception()) is not None:
            raised = not (request.polled or request.replaceable) and self._on_error is None
            if not (request.abandoned or raised):  # What evaluate() raises needs no other way out.
                self._complain(error, request.polled)
            return None
        result = handle.result()
        if request.replaced and not len(result.records):
            return None
        metrics = dict(result.metrics)
        if self._metrics_fn is not None:
            measure = self._metrics_fn
            self._attempt(lambda: metrics.update(measure(result.records)), request.polled)
        prefixed = {f"{self._prefix}/{name}" if self._prefix else name: value for name, value in metrics.items()}
        return EvalPoint(request.step, handle.weights_version, result, prefixed)

    def _attempt(self, function: Callable[[], object], polled: bool) -> None:
        """Call what the user gave; its error is reported, and nothing else."""
        try:
            function()
        except BaseException as error:
            self._pass_interruptions(error)
            self._complain(error, polled)

    def _complain(self, error: BaseException, polled: bool) -> None:
        if self._on_error is not None:
            try:
                self._on_error(error)
            except BaseException as another:
                _logger.exception("on_error of the evaluator raised, for %r", error)
                self._pass_interruptions(another)
        elif polled:
            self._keep(error)
        else:
            _log_error(error)

    def _pass_interruptions(self, error: BaseException) -> None:
        """Raise what is meant for the caller's thread; in ours ``SystemExit`` would end only the deliveries."""
        if not isinstance(error, Exception) and threading.current_thread() is not self._deliverer:
            raise error

    # ------------------------------------------------------------------ loggers and films

    def _tell_loggers(self, step: int) -> None:
        if self._loggers:
            self._post(partial(self._reach, step))

    def _filming(self, request: _Request) -> FollowUp | None:
        if self._videos is None:
            return None
        from rl_eval.video.recording import filming

        def done(films: list[Future[Video]]) -> None:
            self._post(partial(self._filmed, request, films))

        return filming(self._videos, done)

    def _filmed(self, request: _Request, films: list[Future[Video]]) -> None:
        request.films = films
        self._close(request)

    def _log_films(self, films: list[Future[Video]], point: EvalPoint) -> None:
        """Save films and give them to the loggers; what is wrong with all of them is reported once."""
        assert self._videos is not None
        folder = Path(self._videos.folder, f"step_{point.step}")
        for film in films:
            try:
                video = film.result().save(folder)
            except Exception as error:
                self._complain(error, polled=False)
                if isinstance(error, ConfigError):
                    return  # The others failed in the same way.
                continue
            for logger in self._loggers:
                self._attempt(partial(logger.log_video, video, point), polled=False)

    def _reach(self, step: int) -> None:
        for logger in self._loggers:
            self._attempt(partial(logger.reached, step), polled=False)

    def _close_loggers(self) -> None:
        loggers, self._loggers = self._loggers, []
        for logger in reversed(loggers):
            self._attempt(logger.close, polled=False)

    def _log_progress(self) -> None:
        with self._changed:
            running = next((request for request in self._open if not request.handle.done()), None)
        if running is not None:
            progress = running.handle.progress()
            for logger in self._loggers:
                self._attempt(partial(logger.progress, progress), polled=False)


def _check_service(
    name: str | None, backend: Backend | None, namespace: str, detached: bool, idle_timeout_s: float, client: str | None
) -> None:
    """Have nothing ignored."""
    if name is not None:
        if backend not in (None, "ray"):
            raise ConfigError(f"backend is {backend!r}, but a service has processes of its own: leave it out")
        return
    given = {
        "namespace": namespace != _NAMESPACE,
        "detached": detached,
        "idle_timeout_s": idle_timeout_s != _IDLE_S,
        "client": client is not None,
    }
    for key, meant in given.items():
        if meant:
            raise ConfigError(f"{key} is given, but there is no service without a name: give name=...")


def _several(key: str, given: Any, fits: Callable[[Any], bool]) -> list[Any]:
    """Return one or more objects as a list."""
    try:
        found = [given] if fits(given) else list(given)
    except TypeError:
        found = [None]
    if not all(map(fits, found)):
        raise ConfigError(f"{key} is {given!r}: give one, or a list of them")
    return found


def _log_error(error: BaseException) -> None:
    _logger.error("%s: %s", type(error).__name__, error, exc_info=error)


def _with_backend(config: EvalConfig | EvalSettings, backend: Backend | None) -> tuple[EvalSettings, Backend]:
    """Bring the backend and the number of runners together."""
    if backend is not None and backend not in get_args(Backend):
        raise ConfigError(f"backend is {backend!r}: {nearest(str(backend), get_args(Backend))}")
    values = config.to_dict() if isinstance(config, EvalConfig) else {name: dict(section) for name, section in config}
    runners = values.setdefault("runners", {})
    if backend == "ray" and runners.get("num_runners", 0) == 0:
        runners["num_runners"] = 1
    settings = make_settings(values)
    count = settings.runners.num_runners
    if count and backend in ("inline", "thread"):
        raise ConfigError(
            f"backend is {backend!r}, but runners.num_runners is {count}: use backend='ray', or runners.num_runners=0"
        )
    return settings, backend or ("ray" if count else "thread")
