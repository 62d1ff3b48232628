"""Evaluator for training loops: it runs, queues, replaces or rejects requests.

:meth:`Evaluator.submit` is the basic method: it returns a handle or raises ``EvaluatorBusy``. Requests run one at a
time, in order. A service alternates between its clients. :mod:`rl_eval.training.delivery` passes the results to
callbacks and loggers.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, final, get_args

from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings, make_settings
from rl_eval.errors import ConfigError, EvaluatorBusy, UsageError, check_known, checked_keywords
from rl_eval.errors.other_names import KnowsNames
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.handle import EvalHandle
from rl_eval.policies.subject import subject_of
from rl_eval.training.delivery import Delivery, Listener, Submission
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
class Evaluator(KnowsNames):
    """Evaluates weights while training continues.

    Weights are copied when they are submitted. All methods may be called from any thread.

    Args:
        config: Configuration of the evaluation.
        policy: Policy object, used instead of the configured one; it is copied.
        backend: Place where evaluations run. ``thread``: in a separate thread of this process. ``inline``: in this
            process, before ``submit`` returns. ``ray``: in Ray actors. Default: ``ray`` if ``runners.num_runners`` is
            not 0, otherwise ``thread``.
        busy_policy: Handling of a new request while another request is running. ``skip``: reject it. ``queue``: queue
            it, if fewer than ``max_queue`` requests are waiting. ``latest``: queue it, in place of the request that is
            waiting.
        max_queue: Maximum number of waiting requests with ``busy_policy="queue"``. Each waiting request holds a copy of
            its weights.
        on_result: One or more functions that are called with every :class:`EvalPoint`, one at a time, in a thread of
            the evaluator (``inline``: in the caller's thread).
        on_error: Called in the same way with each error of an evaluation, a callback or a logger. Without it, errors
            are logged. Training continues in both cases. The handle of a failed evaluation raises its error.
        metrics_fn: Called with the finished episodes, a sequence of ``EpisodeRecord``; returns more metrics by name.
        log_prefix: Prefix of the names of all metrics; a slash follows it.
        loggers: One or more loggers of points; closed by ``shutdown``.
        videos: Selection of episodes to record after each evaluation, and the folder for videos.
        after: Called as ``after(runner, step=step)`` after each evaluation, in the process of one of its runners. The
            result is delivered after this call. If the runners are in other processes, the function must be picklable.
            A service does not support it.
        name: Name of a *service* to start. :meth:`from_name` reaches it from any process of the Ray cluster. Videos
            are saved on the machine of the service.
        namespace: Ray namespace of the name.
        detached: Whether the service continues after this process; if true, ``shutdown`` does not stop it.
        idle_timeout_s: Time without clients and requests after which a service ends, in seconds.
        client: Name of this client of the service. A later client with the same name receives the results that were
            not delivered. Default: a unique name.
        output: Folder of the service on the head node of the cluster. It contains the accepted requests and an
            evaluation log for each of them. If a service is started again with the same folder, it continues these
            requests. Default: a new folder of the Ray session, which exists as long as the cluster.

    Raises:
        ConfigError: The configuration or an argument is invalid.
        RunnerStartError: The cluster cannot be reached.

    Example:
        >>> with Evaluator(config, busy_policy="latest", on_result=print) as ev:  # doctest: +SKIP
        ...     for step in range(0, 1_000_000, 10_000):
        ...         train(module)
        ...         ev.submit(module, step)
        ...     ev.evaluate(module, step)
    """

    _group: EvalRunnerGroup
    """Runners of this evaluator; not set for a service, which has its own runners."""
    _service: ServiceClient | None

    @checked_keywords
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
        output: str | os.PathLike[str] | None = None,
    ) -> None:
        of_a_service = {
            "namespace": namespace != _NAMESPACE,
            "detached": detached,
            "idle_timeout_s": idle_timeout_s != _IDLE_S,
            "client": client is not None,
            "output": output is not None,
        }
        for key, given in of_a_service.items():
            if given and name is None:
                raise ConfigError(f"{key} needs a service name", key=key, fix="Pass name=...")
        if name is not None and (backend not in (None, "ray") or after is not None):
            key, value = ("backend", backend) if after is None else ("after", after)
            fix = "Remove the arguments backend and after, because a service has its own runners."
            raise ConfigError(f"name is {name!r}, and {key} is set", key=key, value=value, fix=fix)
        if videos is not None and not hasattr(videos, "max_videos"):
            fix = f"Pass VideoSettings({videos!r}, FOLDER)."
            raise ConfigError(f"videos is {videos!r}", key="videos", value=videos, fix=fix)
        settings, backend = _with_backend(config, backend if name is None else "ray")
        settings, subject = subject_of(settings, policy)
        self._prepare(busy_policy, max_queue, Delivery(on_result, on_error, metrics_fn, log_prefix, loggers, after))
        if name is None:
            self.settings = settings
            self._group = EvalRunnerGroup(settings, subject, threaded=backend != "inline")
            if backend == "thread":
                # A factory may draw from the global random generators, which are restored after it. Until then,
                # training must wait.
                with suppress(Exception):  # The first evaluation raises the error.
                    self._group.apply_to_one(lambda _: None)
            self._delivery.begin(lambda _: None, videos, threaded=backend != "inline")
            atexit.register(self._end_with_process)  # After the group's function, so that this one is called first.
            return
        from rl_eval.training.service.client import ServiceClient, start_service
        from rl_eval.training.service.requests import ServiceOptions

        folder = "" if output is None else os.fspath(output)
        options = ServiceOptions(name, namespace, folder, detached, idle_timeout_s, videos)
        actor, connection = start_service(settings, subject, options)
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
        """Connect to a service that ``Evaluator(..., name=name)`` started, from any process of its cluster.

        ``shutdown`` stops neither the service nor the submitted requests.

        Args:
            name: Name of the service.
            namespace: Ray namespace of the name.
            address: Address of the cluster, for a process that is not connected. Default: ``RAY_ADDRESS``, or the
                cluster on this machine.
            client: Name of this client. If results of earlier requests under this name were not delivered, callbacks
                and loggers receive them now. The handles of these requests are in :attr:`resumed`. Default: a unique
                name.
            busy_policy: As for the constructor, like all arguments below.
            max_queue: As for the constructor.
            on_result: As for the constructor.
            on_error: As for the constructor.
            metrics_fn: As for the constructor.
            log_prefix: As for the constructor.
            loggers: As for the constructor.

        Raises:
            UsageError: No service has this name; the message lists the existing services.
            ClusterError: The cluster or the service does not answer.
        """
        from rl_eval.training.service.client import ServiceClient, reach

        evaluator = object.__new__(cls)
        evaluator._prepare(busy_policy, max_queue, Delivery(on_result, on_error, metrics_fn, log_prefix, loggers))
        evaluator._join(ServiceClient(reach(address), name, namespace, client))
        return evaluator

    def _prepare(self, busy_policy: BusyPolicy, max_queue: int, delivery: Delivery) -> None:
        """Set the attributes of an evaluator with or without a service."""
        check_known("busy_policy", busy_policy, get_args(BusyPolicy))
        if max_queue < 1:
            raise ConfigError(f"max_queue is {max_queue}", key="max_queue", value=max_queue, fix="Pass 1 or more.")
        self._busy_policy = busy_policy
        self._max_queue = max_queue
        self._delivery = delivery
        self._service = None
        self.resumed: tuple[EvalHandle, ...] = ()
        """Handles of earlier requests whose results were not delivered, in order. The requests were sent to the service
        under the name of this client."""
        self._submitting = threading.RLock()
        """Held while a request is accepted and submitted, so that steps and weights keep their order."""
        self._next_step = self._version = 0
        self._stopped = False
        self._process = os.getpid()

    def _join(self, service: ServiceClient) -> None:
        """Continue as the client of a service."""
        welcome, self._service = service.welcome, service
        self.settings = welcome.settings
        self._next_step, self._version = welcome.next_step, welcome.weights_version
        self._delivery.begin(service.acknowledge, None, threaded=True)
        self.resumed = tuple(service.resumed)
        self._delivery.expect(*(Submission.of(handle) for handle in self.resumed))
        atexit.register(self._end_with_process)

    # ------------------------------------------------------------------ asking

    def submit(self, weights: Any = None, step: int | None = None, *, version: int | None = None) -> EvalHandle:
        """Start an evaluation and return immediately.

        Args:
            weights: An ``nn.Module``, a state dict, a ``TensorDict``, a trainer of a supported framework, or a mapping
                of names to any of these; copied before this call returns. Default: the last submitted weights.
            step: Training step of the weights. Default: one more than the last step.
            version: Version of the weights, stored in the records. Default: one more than the last version.

        Returns:
            A future of the result. It has the attributes ``step`` and ``weights_version``.

        Raises:
            EvaluatorBusy: The request was rejected; no weights were copied, and no step was counted.
            WeightsError: The object does not contain weights.
            UsageError: This process is a fork of the process that created this evaluator, so its threads are missing.
        """
        return self._submit(weights, step, version).handle

    def evaluate(self, weights: Any = None, step: int | None = None) -> EvalResult:
        """Evaluate and return the result; if the evaluator is busy, wait in the queue.

        It returns after callbacks and loggers received the result, or raises after ``on_error`` received the error.
        """
        request = self._submit(weights, step, None, patient=True)
        try:
            result = request.handle.result()
        except Exception:  # Not an interrupt, which must not wait for the end of the evaluation.
            self._delivery.await_delivery(request)
            raise
        self._delivery.await_delivery(request)
        return result

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no result is :attr:`pending`; return False if that takes longer than ``timeout_s``.

        Raises:
            UsageError: The call was made in a callback, or in a fork of the process that created this evaluator.
        """
        return self._delivery.drain(timeout_s)

    @property
    def pending(self) -> bool:
        """Whether the result of an accepted request is not yet delivered to callbacks and loggers."""
        return bool(self._delivery.open)

    @property
    def weights_version(self) -> int:
        """Version of the last submitted weights; 0 if no weights were submitted."""
        return self._version

    def history(self) -> list[FinishedEvaluation]:
        """Return the last 200 evaluations of all clients of the service, the oldest first.

        Raises:
            UsageError: This evaluator has no service.
            ClusterError: The service has ended.
        """
        if self._service is None:
            fix = "Create the evaluator with a name, or use loggers."
            raise UsageError("this evaluator has no history, because it uses no service", key="name", fix=fix)
        return self._service.history()

    # ------------------------------------------------------------------ state, and the end

    def state_dict(self) -> dict[str, int]:
        """Return the counters of steps and versions, for a training checkpoint.

        Raises:
            UsageError: A result is pending and would be lost.
        """
        with self._submitting:
            self._check_idle("saved")
            return {"step": self._next_step, "weights_version": self._version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counters that :meth:`state_dict` returned.

        Raises:
            UsageError: The state does not come from :meth:`state_dict`, or a result is pending.
        """
        with self._submitting:
            self._check_idle("replaced")
            try:
                self._next_step, self._version = operator.index(state["step"]), operator.index(state["weights_version"])
            except (KeyError, TypeError) as error:
                cause = f"{type(error).__name__}: {error}"
                raise UsageError(
                    f"{state!r} is not the state of an Evaluator ({cause})", key="state", value=state
                ) from None

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Stop running evaluations, deliver finished results, and close the loggers; may be called again.

        Args:
            timeout_s: Longest wait for callbacks that are still running, in seconds.
        """
        atexit.unregister(self._end_with_process)
        with self._submitting:
            self._stopped = True
            ended = self._delivery.abandon()
            if ended and self._service is None:
                _logger.warning(
                    "the evaluator was shut down before the evaluations of steps %s were done: they have no result. "
                    "Call drain() before shutdown(), or end with evaluate() or EvalSchedule.finish()",
                    ", ".join(map(str, ended)),
                )
        if self._service is None:
            self._group.stop()
            self._delivery.end(timeout_s)
        elif self._delivery.in_callback:  # Leave the service after the results that are already here.
            self._delivery.end(timeout_s, self._service.stop)
        else:
            self._delivery.flush(timeout_s)  # Report the deliveries to the service before this client leaves.
            self._service.stop()
            self._delivery.end(timeout_s)

    def _end_with_process(self) -> None:
        if os.getpid() == self._process:  # Not in a fork.
            self.shutdown()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ accepting

    def _submit(self, weights: Any, step: int | None, version: int | None, *, patient: bool = False) -> Submission:
        with self._submitting:
            if self._stopped:
                raise UsageError("the evaluator is shut down", key="shutdown", fix="Create a new evaluator.")
            if weights is None and version is not None:
                problem, fix = f"version is {version}, but weights is None", "Pass the new weights, or remove version."
                raise UsageError(problem, key="version", value=version, fix=fix)
            request = Submission(self._next_step if step is None else operator.index(step), not patient)
            self._delivery.announce(request.step)
            replaced = self._admit(request)
            if weights is not None and version is None:
                version = self._version + 1
            if self._service is None:
                follow_up = self._delivery.follow_up(request)
                handle = self._group.submit(
                    weights=weights,
                    version=version,
                    follow_up=follow_up,
                    held=request.held,
                    on_submitted=request.submitted,
                )
            else:
                handle = self._service.submit(weights, version, request.step, request.held)
                request.submitted(handle)
            self._next_step = request.step + 1
            self._version = self._version if version is None else handle.weights_version
            self._delivery.expect(request)
            if replaced is not None:
                replaced.replaced = True
        if replaced is not None:
            replaced.handle.cancel(f"replaced by the request of step {request.step}", unless_started=True)
        return request

    def _admit(self, asking: Submission) -> Submission | None:
        """Accept or reject a request; return the waiting request that it replaces, or None."""
        unfinished = self._delivery.unfinished()
        if asking.replaceable and (reason := self._delivery.congestion()):
            raise EvaluatorBusy(
                f"the evaluation of step {asking.step} was rejected: {reason}", key="step", value=asking.step
            )
        if not unfinished or not asking.replaceable:
            return None
        waiting = unfinished[1:]
        if self._busy_policy == "latest":
            return next((request for request in reversed(waiting) if request.replaceable), None)
        if self._busy_policy == "queue" and len(waiting) < self._max_queue:
            return None
        problem = (
            f"the evaluation of step {unfinished[0].step} is still running"
            + (f" and {len(waiting)} are waiting" if waiting else "")
            + f", so the evaluation of step {asking.step} was rejected"
        )
        fix = "Wait for it, submit less often, or " + (
            "raise max_queue." if self._busy_policy == "queue" else "use busy_policy='queue'."
        )
        raise EvaluatorBusy(problem, key="step", value=asking.step, fix=fix)

    def _check_idle(self, verb: str) -> None:
        if pending := len(self._delivery.open):
            problem = f"the state cannot be {verb} while {pending} evaluations are pending"
            raise UsageError(problem, key="state", value=pending, fix="Call drain() first.")


def _with_backend(config: EvalConfig | EvalSettings, backend: Backend | None) -> tuple[EvalSettings, Backend]:
    """Return settings and backend; check that the number of runners fits the backend."""
    if backend is not None:
        check_known("backend", backend, get_args(Backend))
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
        problem, fix = (
            f"backend is {backend!r}, but runners.num_runners is {count}",
            "Use backend='ray' or num_runners=0.",
        )
        raise ConfigError(problem, key="backend", value=backend, fix=fix)
    return settings, backend or ("ray" if count else "thread")
