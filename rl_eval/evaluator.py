"""Evaluation beside a training loop: which request runs, and which is refused or replaced.

:meth:`Evaluator.submit` is the one primitive. Requests run one after the other, in order, and at a service in turns
with those of its other clients; their results are delivered by :mod:`rl_eval.delivery`.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, final, get_args

from rl_eval.config import EvalConfig
from rl_eval.delivery import Delivery, Listener, Request
from rl_eval.errors import ConfigError, EvaluatorBusy, UsageError, nearest
from rl_eval.group import EvalRunnerGroup
from rl_eval.handle import EvalHandle
from rl_eval.jobs import FollowUp
from rl_eval.loggers import Logger
from rl_eval.point import EvalPoint
from rl_eval.settings import EvalSettings, make_settings
from rl_eval.weights import HeldWeights

if TYPE_CHECKING:
    from rl_eval.result import EpisodeSequence, EvalResult
    from rl_eval.service.client import ServiceEngine
    from rl_eval.service.messages import FinishedEvaluation
    from rl_eval.video import VideoSettings

__all__ = ["Backend", "BusyPolicy", "Engine", "Evaluator"]

Backend = Literal["inline", "thread", "ray"]
BusyPolicy = Literal["error", "skip", "queue", "latest"]

_logger = logging.getLogger(__name__)

_ROOM_S: Final = 0.5
"""How often :meth:`Evaluator.evaluate` asks a service again that has no room."""
_NAMESPACE: Final = "rl_eval"
_IDLE_S: Final = 600.0


class Engine(Protocol):
    """Where the evaluations of an evaluator run, in the order in which they were submitted."""

    def submit(
        self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None, held: HeldWeights
    ) -> EvalHandle:
        """Start an evaluation, or queue it.

        Args:
            weights: What to evaluate; None for what was evaluated last.
            version: Least version that the weights may get.
            step: Training step.
            follow_up: What follows.
            held: Gets the weights.
        """

    def acknowledge(self, handle: EvalHandle) -> None:
        """A result has reached whoever wants it."""

    def stop(self) -> None:
        """End it; bounded."""


@final
class _OwnGroup:
    """Runners of this evaluator alone."""

    def __init__(self, group: EvalRunnerGroup) -> None:
        self._group = group

    def submit(
        self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None, held: HeldWeights
    ) -> EvalHandle:
        """See :class:`Engine`."""
        handle = self._group.submit(weights=weights, version=version, follow_up=follow_up, held=held)
        handle.step = step
        return handle

    def acknowledge(self, handle: EvalHandle) -> None:
        """See :class:`Engine`."""

    def stop(self) -> None:
        """See :class:`Engine`."""
        self._group.stop()


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
            ``wait`` raise the error of an evaluation, and that of a callback or logger is logged: it ends no training.
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
        self._prepare(busy_policy, max_queue, Delivery(on_result, on_error, metrics_fn, log_prefix, loggers))
        if name is None:
            self.settings = settings
            group = EvalRunnerGroup(settings, policy, threaded=backend != "inline")
            if backend == "thread":
                # A factory may draw from the global generators, which are set back behind it: not while training draws.
                with suppress(Exception):  # Who asks for an evaluation is told.
                    group.apply_to_one(lambda _: None)
            self._begin(_OwnGroup(group), videos, threaded=backend != "inline")
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
        delivery = Delivery(on_result, on_error, metrics_fn, log_prefix, loggers)
        evaluator._prepare(busy_policy, 1 if max_queue is None else max_queue, delivery)
        evaluator._join(ServiceEngine.reach(name, namespace, address, client), max_queue)
        return evaluator

    def _prepare(self, busy_policy: BusyPolicy, max_queue: int, delivery: Delivery) -> None:
        """Keep what concerns this process."""
        if busy_policy not in get_args(BusyPolicy):
            raise ConfigError(f"busy_policy is {busy_policy!r}: {nearest(str(busy_policy), get_args(BusyPolicy))}")
        if max_queue < 1:
            raise ConfigError(f"max_queue is {max_queue}: give at least 1")
        self._busy_policy = busy_policy
        self._max_queue = max_queue
        self._delivery = delivery
        self._service = None
        self._submitting = threading.RLock()
        """Held while a request is decided on and submitted, so that steps and weights keep their order."""
        self._next_step = self._version = 0
        self._stopped = False

    def _begin(self, engine: Engine, videos: VideoSettings | None, *, threaded: bool) -> None:
        self._engine = engine
        self._delivery.begin(engine.acknowledge, videos, threaded=threaded)

    def _join(self, engine: ServiceEngine, max_queue: int | None) -> None:
        """Go on as the client of a service."""
        welcome = engine.welcome
        self._max_queue = welcome.max_queue if max_queue is None else max_queue
        if self._max_queue > welcome.max_queue:
            engine.stop()
            raise ConfigError(f"max_queue is {self._max_queue}, but the service was started with {welcome.max_queue}")
        self.settings = welcome.settings
        self._next_step, self._version = welcome.next_step, welcome.weights_version
        self._begin(engine, None, threaded=True)
        self._service = engine
        resumed = [Request(handle.step or 0, polled=True, replaceable=False) for handle in engine.resumed]
        for request, handle in zip(resumed, engine.resumed, strict=True):
            request.handle = handle
        self._delivery.expect(*resumed)

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
            self._delivery.await_delivery(request)
            raise
        self._delivery.await_delivery(request)
        return result

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
            Exception: What an evaluation raised, if there is no ``on_error``.
        """
        return self._delivery.read(timeout_s)

    def wait(self, timeout_s: float | None = None) -> EvalPoint | None:
        """Wait for the next result of ``trigger_eval``; return None if none is pending, or not in time.

        Raises:
            Exception: As :meth:`poll`.
            UsageError: It is called in a callback, which results are waiting for.
        """
        return self._delivery.read_next(timeout_s)

    @property
    def pending(self) -> bool:
        """Whether a request was accepted and its result not yet delivered; once False, ``poll`` has what there is."""
        return self._delivery.outstanding()[0] > 0

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
            ended = self._delivery.abandon()
            if ended and self._service is None:
                _logger.warning(
                    "shut down before the evaluations of steps %s were done: they have no result; wait() for them "
                    "first, or end with evaluate() or EvalSchedule.finish()",
                    ", ".join(map(str, ended)),
                )
        if self._service is not None:
            self._delivery.flush(timeout_s)  # What was read is told to the service, so before the goodbye.
        self._engine.stop()
        self._delivery.end(timeout_s)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ accepting

    def _submit(self, weights: Any, step: int | None, *, polled: bool, patient: bool = False) -> Request:
        with self._submitting:
            if self._stopped:
                raise UsageError("the evaluator is shut down: create a new one")
            request = Request(self._next_step if step is None else operator.index(step), polled, not patient)
            self._delivery.announce(request.step)
            replaced = self._admit(request)
            version = None if weights is None else self._version + 1
            handle = request.handle = self._engine.submit(
                weights=weights,
                version=version,
                step=request.step,
                follow_up=self._delivery.filming(request),
                held=request.held,
            )
            self._next_step = request.step + 1
            self._version = self._version if version is None else handle.weights_version
            self._delivery.expect(request)
            if replaced is not None:
                replaced.replaced = True
                replaced.handle.cancel(f"replaced by the request of step {request.step}", unless_started=True)
        return request

    def _submit_patiently(self, weights: Any, step: int | None) -> Request:
        while True:
            try:
                return self._submit(weights, step, polled=False, patient=True)
            except EvaluatorBusy:  # noqa: PERF203  # A service has no room for more requests of one client.
                self._delivery.await_change(_ROOM_S)

    def _admit(self, asking: Request) -> Request | None:
        """Decide on a request; return the one that it replaces, if any.

        Raises:
            EvaluatorBusy: It is refused.
        """
        unfinished = self._delivery.unfinished()
        if asking.replaceable and (reason := self._delivery.congestion()):
            raise EvaluatorBusy(f"the evaluation of step {asking.step} was refused: {reason}")
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
        pending, unread = self._delivery.outstanding()
        if pending or unread:
            raise UsageError(
                f"the state cannot be {what} while {pending} evaluations are pending and {unread} results unread: "
                "wait() for them first"
            )


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
