"""A group of runners that stays warm between evaluations."""

from __future__ import annotations

import atexit
import contextlib
import copy
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, final

from rl_eval.adapters import integration_for
from rl_eval.backends import Backend
from rl_eval.backends.pickling import pickled
from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings, PolicySection, check_runner, with_values
from rl_eval.errors import ConfigError, EvalError
from rl_eval.errors.redaction import learn
from rl_eval.execution.aspects import default_aspects
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.jobs import Apply, Ask, Awaited, Do, FollowUp, WeightsSync
from rl_eval.execution.loop import ControlLoop
from rl_eval.execution.outcome import Aspect, EvalOutcome
from rl_eval.execution.runner_pool import GroupWeights, PublishedWeights, RunnerPool
from rl_eval.execution.session import Opening
from rl_eval.policies.live import check_policies, configured_weights, live_policies, with_live, without_live
from rl_eval.results.result import EvalResult
from rl_eval.results.source_code import code_of
from rl_eval.runners import EvalRunner
from rl_eval.supervision.caller import current_folder, working_in
from rl_eval.weights import HeldWeights, WeightsSnapshot, add_missing, snapshot_weights

if TYPE_CHECKING:
    from rl_eval.log import EvaluationLog
    from rl_eval.recording.sampling import Sampler, SampleRequest


Result = TypeVar("Result")
_SAMPLING: Final = "rl_eval.recording.sampling"
"""Module of a room above, which is looked up when episodes are sampled."""
_logger: Final = logging.getLogger(__name__)


class GroupCallbacks:
    """Callbacks of a group, to derive from.

    They are called in a thread of the group, or in the one that cancels an evaluation, and must return soon.
    The steps of an episode are for observers (``evaluation.observers``), which live in its runner.
    """

    def on_sample_end(self, result: EvalResult) -> None:
        """Take the result of an evaluation."""

    def on_runner_restart(self, runner_index: int) -> None:
        """Note that a runner is started in place of one that was lost."""


@final
class EvalRunnerGroup:
    """Runners that evaluate one policy in one environment, again and again.

    Runners start at once and in parallel; the first that is up begins to work. All methods may be called from any
    thread; evaluations and weight broadcasts happen one after the other, in the order of the calls.

    Args:
        config: What to evaluate and how; a copy is frozen.
        policy: A live policy, used instead of the configured one and its weights.
        threaded: Whether the group works in a thread of its own, so that ``submit`` returns at once. Without one every
            method does the work before it returns, in the thread that calls it, which must always be the same; only
            for ``num_runners=0``. Environments that need the main thread (signal handlers, event loops, windows) or
            change the working directory need this, or :func:`evaluate`.
        callbacks: Called when an evaluation has a result and when a runner is replaced.

    Raises:
        ConfigError: The configuration cannot work.
        RunnerStartError: The cluster cannot be reached.

    Example:
        >>> with EvalRunnerGroup(config) as group:  # doctest: +SKIP
        ...     group.sync_weights(module, version=10_000)
        ...     print(group.evaluate(num_episodes=100))
    """

    def __init__(
        self,
        config: EvalConfig | EvalSettings,
        policy: Any = None,
        *,
        threaded: bool = True,
        callbacks: GroupCallbacks | None = None,
    ) -> None:
        settings = settings_of(config)
        if settings.runners.num_runners and not threaded:
            raise ConfigError(
                f"threaded is False, but runners.num_runners is {settings.runners.num_runners}, and runners in other "
                "processes need a thread",
                key="threaded",
                value=False,
                fix="Pass threaded=True, or set runners.num_runners to 0.",
            )
        if policy is not None:
            settings = with_live(settings, policy)
        check_runner(settings)
        check_policies(settings.policy)
        live = settings.policy.policy if not settings.policy.policies else live_policies(settings.policy)
        if live is None:
            raise ConfigError(
                "policy.policy is missing",
                key="policy.policy",
                fix='Set it, or pass a policy object as the argument "policy".',
            )
        learn(settings.model_dump())  # They may have been made in another process.
        self.settings = settings
        """What results say of themselves; the runners have what the group was made with."""
        self._threaded = threaded
        self._lock = threading.Lock()
        self._post_lock = threading.Lock()
        """Held while jobs that belong together are posted, so that no others come between them."""
        if not isinstance(live, str):
            live = portable_policy(live)
        weights = _initial_weights(settings.policy, live)
        self._callbacks = callbacks
        self._folder = current_folder()
        """Working directory in which the group was made."""
        if isinstance(live, str):
            self._backend = _make_backend(settings, None, threaded=threaded)
        else:
            self._backend = _make_backend(without_live(settings), live, threaded=threaded)
        initial = None if weights is None else PublishedWeights(*self._backend.publish(weights))
        self._weights = GroupWeights(initial)
        self._pool = RunnerPool(self._backend, settings, self._weights)
        if callbacks is not None:
            self._pool.on_restart = callbacks.on_runner_restart
        self._loop = ControlLoop(self._backend, self._pool, threaded)
        if not settings.runners.num_runners:
            with contextlib.suppress(EvalError), working_in(None):  # An evaluation says it.
                # It may build an environment, which must not be while the loop's thread builds others.
                settings.runners.runner_class.columns(settings)
        self._loop.start()
        if settings.runners.num_runners:
            # Before Ray goes down with the process: its driver must not call it then.
            atexit.register(self.stop)
        count = max(1, settings.runners.num_runners)
        self._loop.post(Do(lambda pool, now: pool.grow(count, now)))

    # ------------------------------------------------------------------ evaluating

    def submit(
        self,
        num_episodes: int | None = None,
        seed: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        first_index: int | None = None,
        *,
        weights: Any = None,
        version: int | None = None,
        follow_up: FollowUp | None = None,
        accept_code_change: bool = False,
        held: HeldWeights | None = None,
        on_submitted: Callable[[EvalHandle], object] | None = None,
    ) -> EvalHandle:
        """Start an evaluation, and return at once; in a group without a thread, when it is done.

        Args:
            num_episodes: How many episodes; by default as configured.
            seed: Root seed of the plan; by default as configured.
            run_dir: Folder, or URI of an object store, of an evaluation log. A log that is there already is
                continued, and only what is missing runs; the handle fails with ``LogMismatch`` if it belongs to
                another plan, policy or environment, or was begun with other code. A relative path counts from the
                working directory; with environments in a thread of this process, from where the group was made.
            first_index: Where the plan begins; by default as configured. Episodes from ``num_episodes`` on are held
                out: no evaluation of those before has seen them.
            weights: What to evaluate, as for :meth:`sync_weights`; by default the weights that were sent last.
            version: Number that stamps the records; by default one more than the last.
            follow_up: What one runner does right afterwards, before any other weights or evaluation.
            accept_code_change: Continue a log although the source files or packages of environment or policy are
                others than those it was begun with; the log keeps both, and the result has a note.
            held: Gets the weights that are evaluated, when the evaluation starts.
            on_submitted: Called with the handle before any work is done; it must not call the group. Where there is no
                thread it is the way to watch or cancel what runs.

        Raises:
            ConfigError: A value is out of range, or the folder cannot be used.
            LogOwned: Another driver is writing this log.
            WeightsError: The weights are none. Those that do not fit the policy are an error of the handle.
        """
        given = {"num_episodes": num_episodes, "seed": seed, "first_index": first_index}
        changes = {key: value for key, value in given.items() if value is not None}
        settings = with_values(self.settings, evaluation=changes)
        plan = settings.plan()
        if weights is None and version is not None:
            raise ConfigError(
                f"version is {version}, but it is the number of new weights, and there are none",
                key="version",
                value=version,
                fix="Pass weights=..., or remove version.",
            )
        with contextlib.ExitStack() as opened:
            log = _open_log(None if run_dir is None else self._located(run_dir), accept_code_change)
            if log is not None:
                opened.callback(log.close)
            with self._post_lock:
                sync = None if weights is None else self._weights_job(weights, version)
                jobs = None if follow_up is None else follow_up.jobs
                outcome = EvalOutcome(settings, plan, log, jobs, self._aspects)
                handle = outcome.handle
                handle.weights_version = self._weights.posted_version
                if self._callbacks is not None:
                    handle.add_done_callback(partial(_tell_result, self._callbacks))
                if on_submitted is not None:
                    on_submitted(handle)
                if sync is not None:
                    sync.superseded = lambda: outcome.done
                    self._loop.post(sync)
                self._loop.post(Opening(outcome, sync, held))
            opened.pop_all()
        return handle

    def evaluate(
        self,
        num_episodes: int | None = None,
        seed: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        first_index: int | None = None,
        *,
        accept_code_change: bool = False,
    ) -> EvalResult:
        """Run an evaluation and return its result: ``submit(...).result()``."""
        return self.submit(num_episodes, seed, run_dir, first_index, accept_code_change=accept_code_change).result()

    # ------------------------------------------------------------------ sampling

    def sample(self, num_episodes: int | None = None, *, num_env_steps: int | None = None, **options: Any) -> Any:
        """Run the next episodes of the plan, and return all their steps.

        The next call goes on with the episodes that follow. Nothing is recorded in evaluations.

        Args:
            num_episodes: Whole episodes to return.
            num_env_steps: Steps to return, instead of a number of episodes.
            **options: Other fields of :class:`~rl_eval.recording.sampling.SampleRequest`: ``mode``, ``order``,
                ``split_trajs``, ``as_arrays``, ``storage``, ``compress_images``, ``skip_failed``.

        Returns:
            A ``TensorDict`` in the layout of :mod:`rl_eval.recording.trajectories`, or a dict of arrays.

        Raises:
            ConfigError: An option is out of range.
            EvalError: An episode failed on all attempts, or runners were lost; what came in waits for the next call.
        """
        return self.sampler.sample(self._request(num_episodes, num_env_steps, options))

    def iter_samples(
        self,
        num_episodes: int | None = None,
        *,
        num_env_steps: int | None = None,
        num_batches: int | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Return an iterator of batches as of :meth:`sample`; the next is prepared while one is looked at, no more.

        Args:
            num_episodes: Whole episodes of each batch.
            num_env_steps: Steps of each batch, instead.
            num_batches: How many batches; by default without end.
            **options: As for :meth:`sample`.
        """
        return self.sampler.iterate(self._request(num_episodes, num_env_steps, options), num_batches)

    def _request(self, episodes: int | None, env_steps: int | None, options: Mapping[str, Any]) -> SampleRequest:
        sampling: Any = importlib.import_module(_SAMPLING)
        request: SampleRequest = sampling.SampleRequest(num_episodes=episodes, num_env_steps=env_steps, **options)
        return request if request.storage is None else replace(request, storage=self._located(request.storage))

    @cached_property
    def sampler(self) -> Sampler:
        """Where :meth:`sample` is in the plan, and the way to send it elsewhere: ``restart``, ``load_state_dict``."""
        evaluation, sampling = self.settings.evaluation, cast("Any", importlib.import_module(_SAMPLING))
        sampler: Sampler = sampling.Sampler(
            self._record,
            lambda: self.weights_version,
            lambda: max(1, self._pool.expected()) * self.settings.runners.lanes,
            evaluation.seed,
            evaluation.first_index,
            works_ahead=self._threaded,
        )
        return sampler

    def _record(self, seed: int, first_index: int, num_episodes: int, recorder: Callable[..., Any]) -> EvalHandle:
        """Start to run episodes under a recorder, which is built with an environment and ``info_keys``."""
        from rl_eval.execution.recorded import Recorded

        changes = {"seed": seed, "first_index": first_index, "num_episodes": num_episodes, "determinism_check": 0.0}
        settings = with_values(self.settings, evaluation=changes)
        outcome = EvalOutcome(settings, settings.plan(), aspects=self._aspects)
        observer = partial(recorder, info_keys=settings.evaluation.info_keys)
        with self._post_lock:
            self._loop.post(Recorded(Opening(outcome), observer))
        return outcome.handle

    # ------------------------------------------------------------------ weights

    def sync_weights(self, weights: Any, version: int | None = None) -> int:
        """Send weights to all runners and wait until each that is up has acknowledged them.

        The weights are copied at once. While an evaluation runs, the broadcast waits for its end, so that no
        evaluation sees two versions.

        Args:
            weights: An ``nn.Module``, a state dict, a ``TensorDict``, or a mapping of names to any of these.
            version: Number that stamps the records; by default one more than that of the last that were given, refused
                ones included.

        Returns:
            The version.

        Raises:
            WeightsError: They do not fit the policy, which keeps those it has.
        """
        with self._post_lock:
            job = self._weights_job(weights, version)
            self._loop.post(job)
        job.future.result()
        return job.weights.snapshot.version

    def publish_weights(self, weights: Any, version: int | None = None) -> PublishedWeights:
        """Store weights where all runners can fetch them, without sending them; for a later ``submit(weights=...)``.

        Raises:
            WeightsError: The weights are none.
        """
        snapshot = weights if isinstance(weights, WeightsSnapshot) else snapshot_weights(weights, 0)
        snapshot = replace(snapshot, version=self._weights.number(version))
        if self.settings.policy.policies:
            # A runner that starts later gets these alone, so those of the other policies must be among them.
            former = self._weights.posted and self._weights.posted.snapshot
            snapshot = add_missing(snapshot, former, self.settings.policy.policies)
        return PublishedWeights(*self._backend.publish(snapshot))

    @property
    def published_weights(self) -> PublishedWeights | None:
        """The weights that the next evaluation uses; None if each runner has those that its policy was built with."""
        return self._weights.sent

    @property
    def weights_version(self) -> int:
        """Version of the weights that the next evaluation uses; 0 before any ``sync_weights``."""
        return 0 if self._weights.sent is None else self._weights.sent.snapshot.version

    # ------------------------------------------------------------------ runners

    def foreach_runner(self, function: Callable[[EvalRunner], Result]) -> list[Result]:
        """Call a function with every runner that is up, where it lives; return the results by position."""
        results: list[Result] = self._call(Apply(function), function)
        return results

    def apply_to_one(self, function: Callable[[EvalRunner], Result], timeout_s: float = 600.0) -> Result:
        """Call a function with one runner that is up, where it lives, between evaluations; return its result.

        Args:
            function: What to call; for runners in other processes it must be picklable.
            timeout_s: Longest time that it may take, in seconds; then its runner is given up. Nothing can interrupt
                it in this process.

        Raises:
            ClusterError: The runner was lost, or took too long.
        """
        result: Result = self._call(Ask(timeout_s, function), function)
        return result

    @property
    def healthy_runner_ids(self) -> list[int]:
        """Positions of the runners that are up."""
        return [member.index for member in self._pool.ready()]

    def add_runners(self, count: int = 1) -> None:
        """Start more runners; they take part in what runs as soon as they are up.

        Raises:
            ConfigError: ``count`` is below 1, or the group runs in this process.
        """
        self._check_resizable("add_runners", count)
        self._wait(Do(lambda pool, now: pool.grow(count, now)))

    def remove_runners(self, count: int = 1) -> None:
        """End the last runners; what they were running is run by others.

        Raises:
            ConfigError: ``count`` is below 1 or leaves no runner, or the group runs in this process.
        """
        self._check_resizable("remove_runners", count)

        def remove(pool: RunnerPool, now: float) -> None:
            if count >= pool.expected():
                raise ConfigError(
                    f"remove_runners({count}): the group has {pool.expected()}, and keeps at least one",
                    key="count",
                    value=count,
                )
            self._loop.forget(pool.shrink(count))

        self._wait(Do(remove))

    def get_metrics(self) -> dict[str, float]:
        """Return lifetime counters of the group, and the sums of its runners', lost ones included.

        A lost runner counts with what it had reported.
        """
        totals: dict[str, float] = {"num_healthy_runners": 0, "num_runner_restarts": self._pool.restarts}
        totals |= self._pool.reported
        for metrics in self.foreach_runner(lambda runner: runner.metrics()):
            totals["num_healthy_runners"] += 1
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def stop(self) -> None:
        """End everything that this group started, within about ten seconds; may be called again."""
        with self._lock:
            self._loop.stop()
            self._weights.drop()
        atexit.unregister(self.stop)

    def __enter__(self) -> EvalRunnerGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ plumbing

    @cached_property
    def _aspects(self) -> Sequence[Callable[[EvalOutcome], Aspect]]:
        """Aspects of every evaluation."""
        return default_aspects(lambda: self._code)

    @cached_property
    def _code(self) -> dict[str, Any]:
        """Digests of the code of environment and policy, as of the first evaluation; empty if that fails."""
        with contextlib.suppress(Exception):  # Live objects can be anything, and this describes them only.
            return {"code": code_of(self.settings)}
        return {}

    def _weights_job(self, weights: Any, version: int | None) -> WeightsSync:
        published = weights if isinstance(weights, PublishedWeights) else self.publish_weights(weights, version)
        self._weights.post(published)
        return WeightsSync(published)

    def _located(self, place: str | os.PathLike[str]) -> str:
        """Return the absolute path of a place that the caller names; a URI stays as it is.

        In a thread, an environment may have changed the working directory of the caller too: the path counts from where
        the group was made.
        """
        from rl_eval.log.storage import absolute_place

        in_thread = self._threaded and not self.settings.runners.num_runners
        return absolute_place(place, self._folder if in_thread else None)

    def _wait(self, job: Awaited[Result]) -> Result:
        self._loop.post(job)
        return job.future.result()

    def _call(self, job: Apply, function: Callable[[EvalRunner], Any]) -> Any:
        if self.settings.runners.num_runners:
            pickled(function, "the function")  # What cannot travel is an error here, and not in the driver's thread.
        return self._wait(job)

    def _check_resizable(self, what: str, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{what}({count})", key="count", value=count, fix="Pass at least 1.")
        if not self.settings.runners.num_runners:
            raise ConfigError(
                f"{what}: with runners.num_runners=0 the only runner is this process",
                key="runners.num_runners",
                value=0,
                fix="Set it to 1 or more.",
            )


def evaluate(
    config: EvalConfig | EvalSettings,
    policy: Any = None,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    accept_code_change: bool = False,
) -> EvalResult:
    """Evaluate once: start runners, run the plan, stop them.

    With ``num_runners=0`` everything happens in the thread that calls, so that environments may do what only the main
    thread may; one that never returns from a call keeps it. A result that is not complete is logged as a warning.

    Args:
        config: What to evaluate and how.
        policy: A live policy, used instead of the configured one and its weights.
        run_dir: Folder or URI of an evaluation log, to continue or to begin; see :meth:`EvalRunnerGroup.submit`.
        accept_code_change: Continue a log that was begun with other code; see there, too.

    Raises:
        ConfigError: The configuration cannot work.
        RunnerStartError: No runner came up.
        LogMismatch: The log belongs to another plan, policy or environment, or was begun with other code.
        LogOwned: Another driver is writing it.
    """
    settings = settings_of(config)
    with EvalRunnerGroup(settings, policy, threaded=settings.runners.num_runners > 0) as group:
        result = group.evaluate(run_dir=run_dir, accept_code_change=accept_code_change)
    if result.status != "complete":
        _logger.warning("the evaluation is %s: %s", result.status, result.reason)
    return result


def _initial_weights(section: PolicySection, live: Any) -> WeightsSnapshot | None:
    """Return the weights of the configured file, else those of the live policy, if it has any."""
    if not section.policies and section.weights is None and section.weights_key is not None:
        raise ConfigError(
            f"policy.weights_key is {section.weights_key!r}, but policy.weights is not set",
            key="policy.weights_key",
            value=section.weights_key,
            fix="Set policy.weights to the file, or remove the key.",
        )
    return configured_weights(section, live)


def _tell_result(callbacks: GroupCallbacks, handle: EvalHandle) -> None:
    """Call back with the result of an evaluation, if it has one."""
    if handle.exception() is None:
        callbacks.on_sample_end(handle.result())


def _open_log(run_dir: str | os.PathLike[str] | None, accept_code_change: bool) -> EvaluationLog | None:
    if run_dir is None:
        if accept_code_change:
            raise ConfigError(
                "accept_code_change=True needs a log to continue",
                key="accept_code_change",
                value=True,
                fix="Pass run_dir, or remove the argument.",
            )
        return None
    from rl_eval.log import EvaluationLog

    return EvaluationLog.open(run_dir, accept_code_change=accept_code_change)


def _make_backend(settings: EvalSettings, policy: Any, *, threaded: bool) -> Backend:
    if settings.runners.num_runners == 0:
        from rl_eval.backends.inline import InlineBackend

        return InlineBackend(settings, policy, threaded=threaded)
    from rl_eval.backends.ray_actors import RayBackend

    return RayBackend(settings, policy)


def portable_policy(policy: Any) -> Any:
    """Return a policy, or several by id, that a process without its device, and without its trainer, can unpickle."""
    if type(policy) is dict:
        return {name: portable_policy(one) for name, one in policy.items()}
    if (detach := integration_for(policy, "portable")) is not None:
        policy = detach(policy)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(policy, torch.nn.Module):
        return policy
    if all(tensor.device.type == "cpu" for tensor in [*policy.parameters(), *policy.buffers()]):
        return policy
    return copy.deepcopy(policy).cpu()
