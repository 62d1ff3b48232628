"""Evaluation beside a training loop: which request runs, and which is refused or replaced.

:meth:`Evaluator.submit` is the one primitive: it returns a handle or raises ``EvaluatorBusy``. Requests run one after
the other, in order, and at a service in turns with those of its other clients; :mod:`rl_eval.training.delivery`
gives their results to callbacks and loggers.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, final, get_args

from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings, make_settings
from rl_eval.errors import ConfigError, EvaluatorBusy, UsageError, nearest
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.handle import EvalHandle
from rl_eval.training.delivery import Delivery, Listener, Request
from rl_eval.training.loggers import Logger

if TYPE_CHECKING:
    from rl_eval.recording.video_selection import VideoSettings
    from rl_eval.results.result import EpisodeSequence, EvalResult
    from rl_eval.training.service.client import ServiceClient
    from rl_eval.training.service.requests import FinishedEvaluation


Backend = Literal["inline", "thread", "ray"]
BusyPolicy = Literal["skip", "queue", "latest"]

_logger = logging.getLogger(__name__)

_NAMESPACE: Final = "rl_eval"
_IDLE_S: Final = 600.0


@final
class Evaluator:
    """Evaluates the weights that a training loop sends, while it goes on.

    Weights are copied when they are submitted. All methods may be called from any thread.

    Args:
        config: What to evaluate and how.
        policy: A live policy, used instead of the configured one; it is copied.
        backend: ``thread``: this process, in a thread of its own. ``inline``: this process, before ``submit`` returns.
            ``ray``: processes of their own. By default ``thread``, or ``ray`` if ``runners.num_runners`` is not 0.
        busy_policy: What becomes of a request while another one is running. ``skip``: refused. ``queue``: it waits,
            behind at most ``max_queue`` others. ``latest``: it waits, and replaces the one that waits already.
        max_queue: Longest queue of ``busy_policy="queue"``; each request in it holds a copy of the weights.
        on_result: One or more functions that are called with every :class:`EvalPoint`, one at a time, in a thread of
            the evaluator (``inline``: in the caller's).
        on_error: Called, likewise, with what an evaluation, a callback or a logger raised. Without it the error is
            logged. It ends no training either way; the handle of an evaluation that could not run raises its error.
        metrics_fn: Called with the finished episodes, a sequence of ``EpisodeRecord``; returns more metrics by name.
        log_prefix: Put before the names of all metrics, with a slash.
        loggers: One or more places where points are logged; closed by ``shutdown``.
        videos: Which episodes to record after each evaluation, and where.
        after: Called as ``after(runner, step=step)`` after each evaluation, with one of its runners, where that lives;
            the result is delivered then. For runners in other processes it must be picklable. Not for a service.
        name: Start a *service* of this name, which :meth:`from_name` reaches from any process of the Ray cluster.
            Videos are saved on its machine.
        namespace: Ray namespace of the name.
        detached: Whether the service outlives this process; ``shutdown`` leaves it alone then.
        idle_timeout_s: A service ends when it had neither a client nor anything to do for so long, in seconds.
        client: Name under which this evaluator asks its service; who connects under it later is given the results that
            were not delivered. By default one that nobody else has.
        run_dir: Folder of the service, on the machine of the cluster's head: its journal, and an evaluation log per
            request. A service that is started on it again goes on with what was accepted. By default a new folder
            of the Ray session, which lasts as long as the cluster.

    Raises:
        ConfigError: The configuration cannot work.
        RunnerStartError: The cluster cannot be reached.

    Example:
        >>> with Evaluator(config, busy_policy="latest", on_result=print) as ev:  # doctest: +SKIP
        ...     for step in range(0, 1_000_000, 10_000):
        ...         train(module)
        ...         ev.submit(module, step)
        ...     ev.evaluate(module, step)
    """

    _group: EvalRunnerGroup
    """Runners of this evaluator alone; there are none if a service has them."""
    _service: ServiceClient | None

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
        after: Callable[..., object] | None = None,
        name: str | None = None,
        namespace: str = _NAMESPACE,
        detached: bool = False,
        idle_timeout_s: float = _IDLE_S,
        client: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        of_a_service = {
            "namespace": namespace != _NAMESPACE,
            "detached": detached,
            "idle_timeout_s": idle_timeout_s != _IDLE_S,
            "client": client is not None,
            "run_dir": run_dir is not None,
        }
        for key, given in of_a_service.items():
            if given and name is None:
                raise ConfigError(f"{key} is given, but there is no service without a name: give name=...")
        if name is not None and (backend not in (None, "ray") or after is not None):
            raise ConfigError(f"name is {name!r}: leave out backend and after, as a service has runners of its own")
        if videos is not None and not hasattr(videos, "max_videos"):
            raise ConfigError(f"videos is {videos!r}: give VideoSettings({videos!r}, FOLDER)")
        settings, backend = _with_backend(config, backend if name is None else "ray")
        self._prepare(busy_policy, max_queue, Delivery(on_result, on_error, metrics_fn, log_prefix, loggers, after))
        if name is None:
            self.settings = settings
            self._group = EvalRunnerGroup(settings, policy, threaded=backend != "inline")
            if backend == "thread":
                # A factory may draw from the global generators, which are set back behind it: not while training draws.
                with suppress(Exception):  # The first evaluation raises it.
                    self._group.apply_to_one(lambda _: None)
            self._delivery.begin(lambda _: None, videos, threaded=backend != "inline")
            return
        from rl_eval.training.service.client import ServiceClient, start_service
        from rl_eval.training.service.requests import ServiceOptions

        folder = "" if run_dir is None else os.fspath(run_dir)
        options = ServiceOptions(name, namespace, folder, detached, idle_timeout_s, videos)
        actor, connection = start_service(settings, policy, options)
        self._join(ServiceClient(connection, name, namespace, client, actor, owner=not detached))

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        namespace: str = _NAMESPACE,
        address: str | None = None,
        client: str | None = None,
        busy_policy: BusyPolicy = "skip",
        max_queue: int = 8,
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
            client: Name under which to ask. What was submitted under it earlier, and not delivered, is delivered to
                callbacks and loggers, and is in :attr:`resumed`. By default a name that nobody else has.
            busy_policy: As for the constructor, like what follows.
            max_queue: See above.
            on_result: See above.
            on_error: See above.
            metrics_fn: See above.
            log_prefix: See above.
            loggers: See above.

        Raises:
            UsageError: There is no service of this name; the message lists those that there are.
            ClusterError: The cluster or the service does not answer.
        """
        from rl_eval.training.service.client import ServiceClient, reach

        evaluator = object.__new__(cls)
        evaluator._prepare(busy_policy, max_queue, Delivery(on_result, on_error, metrics_fn, log_prefix, loggers))
        evaluator._join(ServiceClient(reach(address), name, namespace, client))
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
        self.resumed: tuple[EvalHandle, ...] = ()
        """Handles of what this client of a service submitted earlier, and was not delivered then; in order."""
        self._submitting = threading.RLock()
        """Held while a request is decided on and submitted, so that steps and weights keep their order."""
        self._next_step = self._version = 0
        self._stopped = False

    def _join(self, service: ServiceClient) -> None:
        """Go on as the client of a service."""
        welcome, self._service = service.welcome, service
        self.settings = welcome.settings
        self._next_step, self._version = welcome.next_step, welcome.weights_version
        self._delivery.begin(service.acknowledge, None, threaded=True)
        self.resumed = tuple(service.resumed)
        self._delivery.expect(*(Request.of(handle) for handle in self.resumed))

    # ------------------------------------------------------------------ asking

    def submit(self, weights: Any = None, step: int | None = None, *, version: int | None = None) -> EvalHandle:
        """Start an evaluation and return at once.

        Args:
            weights: An ``nn.Module``, a state dict, a ``TensorDict``, a trainer of a supported framework, or a mapping
                of names to any of these; copied at once. By default those that were submitted last.
            step: Training step that they are of; by default one more than the last.
            version: Number of these weights, which stamps the records; by default one more than the last.

        Returns:
            A future of the result, with ``step`` and ``weights_version``.

        Raises:
            EvaluatorBusy: The request is refused; no weights were copied, and no step was counted.
            WeightsError: The weights are none.
            UsageError: This process is a fork of the one that made this evaluator, whose threads it does not have.
        """
        return self._submit(weights, step, version).handle

    def evaluate(self, weights: Any = None, step: int | None = None) -> EvalResult:
        """Evaluate and wait for the result: ``submit(...).result()``, but never refused; it waits for its turn.

        Callbacks and loggers have had the result when it returns, and ``on_error`` the error when it raises.
        """
        request = self._submit(weights, step, None, patient=True)
        try:
            return request.handle.result()
        finally:
            self._delivery.await_delivery(request)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is :attr:`pending`; return False if that takes longer.

        Raises:
            UsageError: It is called in a callback, which results are waiting for, or in a fork of the process that
                made this evaluator.
        """
        return self._delivery.drain(timeout_s)

    @property
    def pending(self) -> bool:
        """Whether a request was accepted and its result not yet delivered to callbacks and loggers."""
        return bool(self._delivery.open)

    @property
    def weights_version(self) -> int:
        """Version of the weights that were submitted last; 0 before any."""
        return self._version

    def history(self) -> list[FinishedEvaluation]:
        """Return the last 200 evaluations of all clients of the service, the oldest first.

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
            UsageError: A result is pending, and would be lost.
        """
        with self._submitting:
            self._check_idle("saved")
            return {"step": self._next_step, "weights_version": self._version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            UsageError: It is something else, or a result is pending.
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
                    "shut down before the evaluations of steps %s were done: they have no result; drain() "
                    "first, or end with evaluate() or EvalSchedule.finish()",
                    ", ".join(map(str, ended)),
                )
        if self._service is None:
            self._group.stop()
        else:
            self._delivery.flush(timeout_s)  # The service learns what was delivered before it is left.
            self._service.stop()
        self._delivery.end(timeout_s)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ accepting

    def _submit(self, weights: Any, step: int | None, version: int | None, *, patient: bool = False) -> Request:
        with self._submitting:
            if self._stopped:
                raise UsageError("the evaluator is shut down: create a new one")
            if weights is None and version is not None:
                raise UsageError(f"version is {version}, but no weights are given: it is the number of new weights")
            request = Request(self._next_step if step is None else operator.index(step), not patient)
            self._delivery.announce(request.step)
            replaced = self._admit(request)
            if weights is not None and version is None:
                version = self._version + 1
            if self._service is None:
                follow_up = self._delivery.follow_up(request)
                handle = self._group.submit(weights=weights, version=version, follow_up=follow_up, held=request.held)
            else:
                handle = self._service.submit(weights, version, request.step, request.held)
            request.handle, handle.step = handle, request.step
            self._next_step = request.step + 1
            self._version = self._version if version is None else handle.weights_version
            self._delivery.expect(request)
            if replaced is not None:
                replaced.replaced = True
        if replaced is not None:
            replaced.handle.cancel(f"replaced by the request of step {request.step}", unless_started=True)
        return request

    def _admit(self, asking: Request) -> Request | None:
        """Decide on a request; return the one that it replaces, if any."""
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
            + f", so that of step {asking.step} was refused. Wait for it, submit less often, or "
            + ("raise max_queue" if self._busy_policy == "queue" else "use busy_policy='queue'")
        )

    def _check_idle(self, what: str) -> None:
        if pending := len(self._delivery.open):
            raise UsageError(f"the state cannot be {what} while {pending} evaluations are pending: drain() first")


def _with_backend(config: EvalConfig | EvalSettings, backend: Backend | None) -> tuple[EvalSettings, Backend]:
    """Bring the backend and the number of runners together."""
    if backend is not None and backend not in get_args(Backend):
        raise ConfigError(f"backend is {backend!r}: {nearest(str(backend), get_args(Backend))}")
    if isinstance(config, EvalConfig):
        values = config.to_dict()
    else:
        values = {name: dict(section) for name, section in settings_of(config)}
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
