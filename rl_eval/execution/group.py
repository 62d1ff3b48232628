"""Group of runners that stays warm between evaluations."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from rl_eval.backends import Backend
from rl_eval.backends.pickling import pickled
from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError, EvalError, UsageError, checked_keywords
from rl_eval.errors.other_names import no_attribute
from rl_eval.errors.redaction import learn
from rl_eval.execution.aspects import default_aspects
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.jobs import ApplyToAll, ApplyToReady, Ask, Awaited, Do, FollowUp, Reconfigure, WeightsSync
from rl_eval.execution.loop import ControlLoop
from rl_eval.execution.mistakes import mistake_in
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import Aspect, EvalOutcome
from rl_eval.execution.runner_pool import GroupWeights, PublishedWeights, RunnerPool
from rl_eval.policies.subject import Subject, configured_weights, subject_of
from rl_eval.results.result import EvalResult
from rl_eval.results.source_code import code_of
from rl_eval.runners import EvalRunner, Layout, layout_of
from rl_eval.supervision.caller import current_folder, working_in
from rl_eval.weights import HeldWeights, WeightsSnapshot, add_missing, keep_unsent, snapshot_weights

if TYPE_CHECKING:
    from rl_eval.execution.sampling import Sampler, SampleRequest
    from rl_eval.log import EvaluationLog


Result = TypeVar("Result")
_SPACES_TIMEOUT_S: Final = 10.0
_logger: Final = logging.getLogger(__name__)


class GroupCallbacks:
    """Base class for callbacks of a group.

    The group calls them in its thread, or in the thread that cancels an evaluation. They must return soon. To see the
    steps of an episode, use observers (``evaluation.observers``), which run in the runner.
    """

    def on_sample_end(self, result: EvalResult) -> None:
        """Handle the result of an evaluation."""

    def on_runner_restart(self, runner_index: int) -> None:
        """Handle the start of a runner that replaces a lost one."""


@final
class EvalRunnerGroup:
    """Runners that evaluate one policy in one environment, many times.

    All runners start in parallel when the group is created. Each runner starts to work as soon as it is ready. All
    methods may be called from any thread. Evaluations and weight broadcasts run one after the other, in the order of
    the calls.

    Args:
        config: Configuration (the group keeps a frozen copy), or an environment as for :func:`evaluate`.
        policy: Policy object, used instead of the configured policy and its weights.
        threaded: Whether the group works in a separate thread, so that ``submit`` returns immediately. False needs
            ``num_runners=0``. Then every method does its work in the calling thread before it returns, and all calls
            must come from the same thread. Use False, or :func:`evaluate`, for environments that need the main thread
            (signal handlers, event loops, windows) or change the working directory.
        callbacks: Object whose methods are called when an evaluation has a result, and when a runner is replaced.

    Raises:
        ConfigError: The configuration is invalid.
        RunnerStartError: The cluster cannot be reached.

    Example:
        >>> with EvalRunnerGroup(config) as group:  # doctest: +SKIP
        ...     group.sync_weights(module, version=10_000)
        ...     print(group.evaluate(num_episodes=100))
    """

    @checked_keywords
    def __init__(
        self,
        config: EvalConfig | EvalSettings | str | Callable[..., Any],
        policy: Any = None,
        *,
        threaded: bool = True,
        callbacks: GroupCallbacks | None = None,
    ) -> None:
        settings = settings_of(config)
        if settings.runners.num_runners and not threaded:
            problem = (
                f"threaded is False, but runners.num_runners is {settings.runners.num_runners}, and runners in other "
                "processes need a thread"
            )
            fix = "Pass threaded=True, or set runners.num_runners to 0."
            raise ConfigError(problem, key="threaded", value=False, fix=fix)
        settings, self._subject, self._layout = _checked(settings, policy)
        self.settings = settings
        """Settings reported in results; runners keep those of construction or of :meth:`reconfigure`."""
        self._threaded = threaded
        self._lock = threading.Lock()
        self._post_lock = threading.Lock()
        """Lock that is held while several jobs are posted together, so that no other job comes between them."""
        packed = self._subject.packed(settings)
        weights = configured_weights(settings.policy, packed[1])
        self._callbacks = callbacks
        self._folder = current_folder()
        """Working directory at construction."""
        self._backend = _make_backend(*packed, self._layout.lanes, threaded=threaded)
        self._weights = self._first_weights(weights)
        self._pool = RunnerPool(self._backend, settings, self._weights)
        if callbacks is not None:
            self._pool.on_restart = callbacks.on_runner_restart
        self._loop = ControlLoop(self._backend, self._pool, threaded)
        _read_columns(settings, self._layout)
        self._loop.start()
        if threaded:
            # Stop at exit: Ray must not be called after its shutdown, and a thread in native code aborts the process.
            atexit.register(self.stop)
        count = max(1, settings.runners.num_runners)
        self._loop.post(Do(lambda pool, now: pool.grow(count, now)))

    @checked_keywords
    def reconfigure(self, config: EvalConfig | EvalSettings | str | Callable[..., Any], policy: Any = None) -> None:
        """Evaluate another configuration from now on, in the processes of the present runners.

        The call waits for the end of running evaluations. Then the runners close their environments, drop their policy,
        and build the new environments and the new policy. This saves the start of processes and the imports. Results
        are those of a new group, unless code of an environment or a policy leaves state in its module or in a library.
        Weights that were sent before are dropped, and versions start at 0 again. The call also repairs a group whose
        runners could not be built.

        Args:
            config: Configuration or environment, as for the constructor.
            policy: Policy object, as for the constructor.

        Raises:
            ConfigError: The configuration is invalid, or needs other processes; see
                :func:`~rl_eval.runners.runner_processes.shares_processes`.
        """
        from rl_eval.runners.runner_processes import check_processes

        settings, subject, layout = _checked(settings_of(config), policy)
        check_processes(self.settings, settings)
        packed = subject.packed(settings)
        weights = configured_weights(settings.policy, packed[1])
        with self._post_lock:
            payload = self._backend.pack(*packed)
            group_weights = self._first_weights(weights)

            def change(pool: RunnerPool, now: float) -> None:
                _read_columns(settings, layout)
                pool.reconfigure(settings, payload, group_weights, now)

            job = Reconfigure(change)
            self._loop.post(job)
            self.settings, self._subject, self._layout, self._weights = settings, subject, layout, group_weights
            for cached in ("_code", "sampler"):
                vars(self).pop(cached, None)
        job.future.result()

    # ------------------------------------------------------------------ evaluating

    @checked_keywords
    def submit(
        self,
        num_episodes: int | None = None,
        seed: int | None = None,
        output: str | os.PathLike[str] | None = None,
        first_index: int | None = None,
        *,
        weights: Any = None,
        version: int | None = None,
        follow_up: FollowUp | None = None,
        accept_code_change: bool = False,
        held: HeldWeights | None = None,
        on_submitted: Callable[[EvalHandle], object] | None = None,
        subject: Subject | None = None,
    ) -> EvalHandle:
        """Start an evaluation and return its handle.

        In a group without a thread, the evaluation runs before the method returns.

        Args:
            num_episodes: Number of episodes; by default as configured.
            seed: Root seed of the plan; by default as configured.
            output: Folder of the run, or URI of an object store, with its log. An existing log is continued: only
                missing episodes run. The handle fails with ``LogMismatch`` if the log belongs to another plan, policy,
                environment or code. A relative path starts at the working directory. If environments run in a thread of
                this process, it starts at the directory that was the working directory when the group was created.
            first_index: Index of the plan's first episode; by default as configured. Episodes from index
                ``num_episodes`` on are held out: an evaluation from index 0 does not use them.
            weights: Weights to evaluate, as for :meth:`sync_weights`; by default the weights that were sent last.
            version: Version of the weights in the records; by default one more than the last version.
            follow_up: Work for one runner directly after the evaluation, before other weights or evaluations.
            accept_code_change: Whether to continue a log although source files or packages of environment or policy
                have changed. The log keeps both versions, and the result has a note.
            held: Object that receives the evaluated weights when the evaluation starts.
            on_submitted: Function that is called with the handle before any work starts. It must not call the group. In
                a group without a thread, use it to watch or cancel the evaluation.
            subject: Policies that the result names, such as the file with ``weights``; by default those of the group.

        Raises:
            ConfigError: A value is out of range, or the folder cannot be used.
            LogOwned: Another process is writing this log.
            WeightsError: ``weights`` is of another type. Weights that do not fit the policy are an error of the handle.
        """
        changes = _without_none({"num_episodes": num_episodes, "seed": seed, "first_index": first_index})
        if weights is None and version is not None:
            problem = f"version is {version}, but there are no new weights"
            raise ConfigError(problem, key="version", value=version, fix="Pass weights=..., or remove version.")
        with self._post_lock, contextlib.ExitStack() as opened:
            subject = subject or self._subject
            settings = with_values(subject.described(self.settings), evaluation=changes)
            plan = settings.plan()
            log = _open_log(None if output is None else self._located(output), accept_code_change)
            if log is not None:
                opened.callback(log.close)
            sync = None if weights is None else self._weights_job(weights, version)
            jobs = None if follow_up is None else follow_up.jobs
            outcome = EvalOutcome(settings, self._layout, plan, log, jobs, self._aspects, subject)
            handle = outcome.handle
            handle.weights_version = self._weights.posted_version
            if self._callbacks is not None:
                handle.add_done_callback(partial(_tell_result, self._callbacks))
            if on_submitted is not None:
                on_submitted(handle)
            if sync is not None:
                sync.superseded = lambda: outcome.state == "done"
                self._loop.post(sync)
            self._loop.post(Opening(outcome, sync, held))
            opened.pop_all()
        return handle

    @checked_keywords
    def evaluate(
        self,
        num_episodes: int | None = None,
        seed: int | None = None,
        output: str | os.PathLike[str] | None = None,
        first_index: int | None = None,
        *,
        accept_code_change: bool = False,
    ) -> EvalResult:
        """Run an evaluation and return its result: ``submit(...).result()``.

        The result is also saved beside the log in ``output``, unless this is a URI.

        Raises:
            PolicyError, EnvError: All attempts failed alike before their first step, because of the policy, its
                actions, or an invalid return value of the environment. The attribute ``result`` is the result.
        """
        from rl_eval.log.storage import is_uri

        place = None if output is None else self._located(output)
        result = self.submit(num_episodes, seed, place, first_index, accept_code_change=accept_code_change).result()
        if place is not None and not is_uri(place):
            try:
                result.save(place)
            except (OSError, UsageError) as error:
                _logger.warning("the log of %s has all episodes, but no result could be saved: %s", place, error)
        if (mistake := mistake_in(result, self.spaces)) is not None:
            raise mistake
        return result

    def spaces(self) -> tuple[Any, Any]:
        """Return the observation space and the action space of a runner, or texts if no runner answers."""
        with contextlib.suppress(EvalError):
            spaces: tuple[Any, Any] = self.apply_to_one(attrgetter("spaces"), _SPACES_TIMEOUT_S)
            return spaces
        return "unknown spaces", "unknown spaces"

    # ------------------------------------------------------------------ sampling

    def sample(self, num_episodes: int | None = None, *, num_env_steps: int | None = None, **options: Any) -> Any:
        """Run the next episodes of the plan, and return all their steps.

        The next call continues with the following episodes. Evaluations do not contain these episodes.

        Args:
            num_episodes: Number of complete episodes to return.
            num_env_steps: Number of steps to return, instead of a number of episodes.
            **options: Other fields of :class:`~rl_eval.execution.sampling.SampleRequest`: ``mode``, ``order``,
                ``split_trajs``, ``as_arrays``, ``storage``, ``compress_images``, ``skip_failed``.

        Returns:
            A ``TensorDict`` in the layout of :mod:`rl_eval.runners.trajectories`, or a dict of arrays.

        Raises:
            ConfigError: An option is out of range.
            EvalError: An episode failed on all attempts, or runners were lost. Finished episodes are kept for the next
                call.
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
        """Return an iterator of batches like those of :meth:`sample`. The next batch is prepared in advance.

        Args:
            num_episodes: Number of complete episodes in each batch.
            num_env_steps: Number of steps in each batch, instead of a number of episodes.
            num_batches: Number of batches; by default unlimited.
            **options: The options of :meth:`sample`.
        """
        return self.sampler.iterate(self._request(num_episodes, num_env_steps, options), num_batches)

    def _request(self, episodes: int | None, env_steps: int | None, options: Mapping[str, Any]) -> SampleRequest:
        from rl_eval.execution.sampling import SampleRequest

        request = SampleRequest(num_episodes=episodes, num_env_steps=env_steps, **options)
        return request if request.storage is None else replace(request, storage=self._located(request.storage))

    @cached_property
    def sampler(self) -> Sampler:
        """Position of :meth:`sample` in the plan; change it with ``restart`` or ``load_state_dict``.

        Raises:
            ConfigError: Episodes run in blocks.
        """
        if (block := self.settings.runners.block) is not None:
            problem = (
                f"runners.block is {block}, so this group cannot sample: each episode depends on the other episodes of "
                "its block, so each batch of steps would depend on earlier batches"
            )
            fix = "Record the steps of an evaluation with evaluation.observers."
            raise ConfigError(problem, key="runners.block", value=block, fix=fix)
        from rl_eval.execution.sampling import Sampler

        evaluation = self.settings.evaluation
        return Sampler(
            self._record,
            lambda: self.weights_version,
            lambda: max(1, self._pool.expected()) * self._layout.lanes,
            evaluation.seed,
            evaluation.first_index,
            works_ahead=self._threaded,
        )

    def _record(self, seed: int, first_index: int, num_episodes: int, recorder: Callable[..., Any]) -> EvalHandle:
        """Start to run episodes with a recorder; return the handle.

        Args:
            seed: Root seed of the plan.
            first_index: Index of the first episode.
            num_episodes: Number of episodes. With matchups, more episodes can run before and after these, because a
                plan contains whole turns, and at least one round.
            recorder: Function that builds a recorder from an environment and ``info_keys``.
        """
        from rl_eval.execution.recorded import Recorded

        if (matchups := self.settings.plan().matchups) is not None:
            end = matchups.next_turn(first_index + max(num_episodes, len(matchups.round)))
            first_index = matchups.turn_start(first_index)
            num_episodes = end - first_index
        changes = {"seed": seed, "first_index": first_index, "num_episodes": num_episodes}
        with self._post_lock:
            settings = with_values(self.settings, evaluation=changes | {"determinism_check": 0.0, "rules": ()})
            outcome = EvalOutcome(settings, self._layout, settings.plan(), aspects=self._aspects)
            observer = partial(recorder, info_keys=settings.evaluation.info_keys)
            self._loop.post(Recorded(Opening(outcome), observer))
        return outcome.handle

    # ------------------------------------------------------------------ weights

    def sync_weights(self, weights: Any, version: int | None = None) -> int:
        """Send weights to all runners and wait until every ready runner has acknowledged them.

        The weights are copied immediately. The broadcast waits for the end of a running evaluation, so that no
        evaluation uses two versions.

        Args:
            weights: An ``nn.Module``, a state dict, a ``TensorDict``, or a mapping of names to any of these.
            version: Version of the weights in the records; by default one more than the last version, even if those
                weights were rejected.

        Returns:
            The version.

        Raises:
            WeightsError: The weights do not fit the policy. The policy keeps its present weights.
        """
        with self._post_lock:
            job = self._weights_job(weights, version)
            self._loop.post(job)
        job.future.result()
        return job.weights.snapshot.version

    def publish_weights(self, weights: Any, version: int | None = None) -> PublishedWeights:
        """Store weights for all runners without sending them, for a later ``submit(weights=...)``.

        Raises:
            WeightsError: ``weights`` is of another type.
        """
        snapshot = weights if isinstance(weights, WeightsSnapshot) else snapshot_weights(weights, 0)
        snapshot = replace(snapshot, version=self._weights.number(version))
        # A runner that starts later gets only these, so they must include everything that stays in use.
        former = self._weights.posted and self._weights.posted.snapshot
        if self.settings.policy.policies and not snapshot.versions:
            snapshot = add_missing(snapshot, former, self.settings.policy.policies)
        elif former is not None and snapshot.extra_digest:
            snapshot = keep_unsent(snapshot, former)
        return PublishedWeights(*self._backend.publish(snapshot))

    @property
    def published_weights(self) -> PublishedWeights | None:
        """Weights of the next evaluation; None if each runner keeps the initial weights of its policy."""
        return self._weights.sent

    @property
    def weights_version(self) -> int:
        """Version of the weights of the next evaluation; 0 before the first ``sync_weights``."""
        return 0 if self._weights.sent is None else self._weights.sent.snapshot.version

    # ------------------------------------------------------------------ runners

    def foreach_runner(self, function: Callable[[EvalRunner], Result], timeout_s: float | None = None) -> list[Result]:
        """Call a function with every runner, in the runner's process; return the results by position.

        Args:
            function: Function of a runner. For runners in other processes, it must be picklable.
            timeout_s: Time limit in seconds within which all runners must answer. The call waits for runners that are
                starting or being replaced. By default, it calls only the runners that are ready now.

        Raises:
            ClusterError: A runner did not answer within ``timeout_s``, or no runner answered.
        """
        job = ApplyToReady(function) if timeout_s is None else ApplyToAll(function, timeout_s)
        results: list[Result] = self._call(job, function)
        return results

    def apply_to_one(self, function: Callable[[EvalRunner], Result], timeout_s: float = 600.0) -> Result:
        """Call a function with one ready runner between evaluations, and return the function's result.

        The function runs in the runner's process.

        Args:
            function: Function of the runner. For runners in other processes, it must be picklable.
            timeout_s: Time limit in seconds, after which the runner is terminated. A call in this process cannot be
                interrupted.

        Raises:
            ClusterError: The runner was lost, or took too long.
        """
        result: Result = self._call(Ask(timeout_s, function), function)
        return result

    @property
    def healthy_runner_ids(self) -> list[int]:
        """Positions of the ready runners."""
        return [member.position for member in self._pool.ready()]

    def add_runners(self, count: int = 1) -> None:
        """Start more runners; they join a running evaluation when they are ready.

        Raises:
            ConfigError: ``count`` is below 1, or the group runs in this process.
        """
        self._check_resizable("add_runners", count)
        self._wait(Do(lambda pool, now: pool.grow(count, now)))

    def remove_runners(self, count: int = 1) -> None:
        """End the runners at the last positions. Other runners take over their episodes.

        Raises:
            ConfigError: ``count`` is below 1 or leaves no runner, or the group runs in this process.
        """
        self._check_resizable("remove_runners", count)

        def remove(pool: RunnerPool, now: float) -> None:
            if count >= pool.expected():
                problem = f"remove_runners({count}): one runner must remain, and the group has {pool.expected()}"
                raise ConfigError(problem, key="count", value=count)
            self._loop.forget(pool.shrink(count))

        self._wait(Do(remove))

    def get_metrics(self) -> dict[str, float]:
        """Return the counters of the group since its start, and sums over its ready runners.

        ``episodes``, ``faults`` and ``env_steps`` include lost runners. They do not include the determinism check.
        """
        totals: dict[str, float] = {"num_healthy_runners": 0, "num_runner_restarts": self._pool.restarts}
        for metrics in self.foreach_runner(lambda runner: runner.metrics()):
            totals["num_healthy_runners"] += 1
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0) + value
        return totals | self._pool.counters()

    def stop(self) -> None:
        """Stop the group, its runners and its other processes within about ten seconds.

        Further calls have no effect.
        """
        with self._lock:
            self._loop.stop()
            self._weights.drop()
        atexit.unregister(self.stop)

    if not TYPE_CHECKING:  # Type checkers reject unknown names themselves.

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

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
        """Digests of the code of environment and policy at the first evaluation; empty if they cannot be computed."""
        with contextlib.suppress(Exception):  # Users' objects may raise, and this only describes them.
            return {"code": code_of(self.settings, self._subject)}
        return {}

    def _first_weights(self, weights: WeightsSnapshot | None) -> GroupWeights:
        return GroupWeights(None if weights is None else PublishedWeights(*self._backend.publish(weights)))

    def _weights_job(self, weights: Any, version: int | None) -> WeightsSync:
        published = weights if isinstance(weights, PublishedWeights) else self.publish_weights(weights, version)
        self._weights.post(published)
        return WeightsSync(published)

    def _located(self, place: str | os.PathLike[str]) -> str:
        """Return the absolute path of a caller's path; return a URI unchanged.

        With environments in a thread of this process, the path is relative to the working directory at the group's
        construction, because an environment may have changed the working directory.
        """
        from rl_eval.log.storage import absolute_place

        in_thread = self._threaded and not self.settings.runners.num_runners
        return absolute_place(place, self._folder if in_thread else None)

    def _wait(self, job: Awaited[Result]) -> Result:
        self._loop.post(job)
        return job.future.result()

    def _call(self, job: ApplyToReady, function: Callable[[EvalRunner], Any]) -> Any:
        if self.settings.runners.num_runners:
            pickled(function, "the function")  # Raise here, not in the control loop's thread.
        return self._wait(job)

    def _check_resizable(self, what: str, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{what}({count})", key="count", value=count, fix="Pass at least 1.")
        if not self.settings.runners.num_runners:
            problem = f"{what}: with runners.num_runners=0 the only runner is this process"
            raise ConfigError(problem, key="runners.num_runners", value=0, fix="Set runners.num_runners to 1 or more.")


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _checked(settings: EvalSettings, policy: Any) -> tuple[EvalSettings, Subject, Layout]:
    """Return checked settings without policy objects, the policies, and the layout of the runners.

    Raises:
        ConfigError: The settings are invalid.
    """
    settings, subject = subject_of(settings, policy)
    layout = layout_of(settings)
    learn(settings.model_dump())  # They may come from another process.
    return settings, subject, layout


def _read_columns(settings: EvalSettings, layout: Layout) -> None:
    """Read the columns of the records, if episodes run in this process.

    This may build an environment, so the call must end before the loop's thread builds other environments.
    """
    if not settings.runners.num_runners:
        with contextlib.suppress(EvalError), working_in(None):  # An evaluation raises the same error.
            layout.runner.columns(settings)


def _tell_result(callbacks: GroupCallbacks, handle: EvalHandle) -> None:
    """Call ``on_sample_end`` with the result of an evaluation, if it has one."""
    if handle.exception() is None:
        callbacks.on_sample_end(handle.result())


def _open_log(output: str | os.PathLike[str] | None, accept_code_change: bool) -> EvaluationLog | None:
    if output is None:
        if accept_code_change:
            problem, fix = "accept_code_change=True needs a log to continue", "Pass output, or remove the argument."
            raise ConfigError(problem, key="accept_code_change", value=True, fix=fix)
        return None
    from rl_eval.log import EvaluationLog

    return EvaluationLog.open(output, accept_code_change=accept_code_change)


def _make_backend(settings: EvalSettings, policy: Any, lanes: int, *, threaded: bool) -> Backend:
    if settings.runners.num_runners == 0:
        from rl_eval.backends.inline import InlineBackend

        return InlineBackend(settings, policy, threaded=threaded)
    from rl_eval.backends.ray_actors import RayBackend

    return RayBackend(settings, policy, lanes)
