"""A group of runners that stays warm between evaluations."""

from __future__ import annotations

import copy
import operator
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, final

from rl_eval.backends import Backend, pickled
from rl_eval.config import EvalConfig
from rl_eval.driver import Driver
from rl_eval.errors import ConfigError, EvalError
from rl_eval.evaluation import Evaluation
from rl_eval.fleet import Fleet, PublishedWeights
from rl_eval.handle import EvalHandle
from rl_eval.jobs import Apply, Do, Job, WeightsSync
from rl_eval.plan import EpisodePlan
from rl_eval.result import EvalResult
from rl_eval.runners import EvalRunner, runner_class
from rl_eval.settings import EvalSettings
from rl_eval.weights import load_weights_file, snapshot_weights, weights_of

if TYPE_CHECKING:
    from rl_eval.log import EvaluationLog

__all__ = ["EvalRunnerGroup", "evaluate"]

Result = TypeVar("Result")


@final
class EvalRunnerGroup:
    """Runners that evaluate one policy in one environment, again and again.

    Runners start at once and in parallel; the first that is up begins to work. All methods may be called from any
    thread; evaluations and weight broadcasts happen one after the other, in the order of the calls.

    Args:
        config: What to evaluate and how; a copy is frozen.
        policy: A live policy, used instead of the configured one and its weights.

    Raises:
        ConfigError: The configuration cannot work.
        RunnerStartError: The cluster cannot be reached.

    Example:
        >>> with EvalRunnerGroup(config) as group:  # doctest: +SKIP
        ...     group.sync_weights(module, version=10_000)
        ...     print(group.evaluate(num_episodes=100))
    """

    def __init__(self, config: EvalConfig | EvalSettings, policy: Any = None) -> None:
        settings = config.build() if isinstance(config, EvalConfig) else config
        runner_class(settings.runners.runner)
        live = policy if policy is not None else settings.policy.policy
        if live is None:
            raise ConfigError('policy.policy is missing: configure one, or pass a live policy as the argument "policy"')
        if policy is not None:
            settings = _with_policy(settings, policy)
        self.settings = settings
        self._lock = threading.Lock()
        self._sync_lock = threading.Lock()
        path = settings.policy.weights
        weights = weights_of(live) if path is None else snapshot_weights(load_weights_file(path), 0)
        if isinstance(live, str):
            self._backend = _make_backend(settings, None)
        else:
            self._backend = _make_backend(_with_policy(settings, None), _portable(live))
        self._fleet = Fleet(self._backend, settings)
        self._driver = Driver(self._backend, self._fleet)
        if weights is not None:
            self._fleet.weights = PublishedWeights(*self._backend.publish(weights))
        self._driver.start()
        count = max(1, settings.runners.num_runners)
        self._driver.post(Do(self._driver.next_tag(), lambda fleet, now: fleet.grow(count, now)))

    # ------------------------------------------------------------------ evaluating

    def submit(
        self,
        num_episodes: int | None = None,
        seed: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> EvalHandle:
        """Start an evaluation with the current weights, and return at once.

        Args:
            num_episodes: How many episodes; by default as configured.
            seed: Root seed of the plan; by default as configured.
            run_dir: Folder, or URI that ``pyarrow.fs`` opens, of an evaluation log. A log that is there already is
                continued, and only what is missing runs; the handle fails with ``LogMismatch`` if it belongs to
                another plan, policy or environment.

        Raises:
            ConfigError: A value is out of range, or the folder cannot be used.
            LogOwned: Another driver is writing this log.
        """
        changes: dict[str, Any] = {}
        if num_episodes is not None:
            changes["num_episodes"] = num_episodes
        if seed is not None:
            changes["seed"] = seed
        evaluation = self.settings.evaluation.model_copy(update=changes)
        settings = self.settings.model_copy(update={"evaluation": evaluation})
        plan = EpisodePlan(evaluation.num_episodes, evaluation.seed)
        log = None if run_dir is None else _open_log(run_dir)
        job = Evaluation(self._driver.next_tag(), settings, plan, log)
        try:
            self._driver.post(job)
        except EvalError:
            if log is not None:
                log.close()
            raise
        return job.handle

    def evaluate(
        self,
        num_episodes: int | None = None,
        seed: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> EvalResult:
        """Run an evaluation and return its result: ``submit(...).result()``."""
        return self.submit(num_episodes, seed, run_dir).result()

    # ------------------------------------------------------------------ weights

    def sync_weights(self, weights: Any, version: int | None = None) -> int:
        """Send weights to all runners and wait until each that is up has acknowledged them.

        The weights are copied at once. While an evaluation runs, the broadcast waits for its end, so that no
        evaluation sees two versions.

        Args:
            weights: An ``nn.Module``, a state dict, a ``TensorDict``, or a mapping of names to any of these.
            version: Number that stamps the records; by default one more than the last.

        Returns:
            The version.

        Raises:
            WeightsError: They do not fit the policy, which keeps those it has.
        """
        with self._sync_lock:
            version = self.weights_version + 1 if version is None else operator.index(version)
            published = PublishedWeights(*self._backend.publish(snapshot_weights(weights, version)))
            job = WeightsSync(self._driver.next_tag(), published)
            self._wait(job, job.future)
        return version

    @property
    def weights_version(self) -> int:
        """Version of the weights that the next evaluation uses; 0 before any ``sync_weights``."""
        return 0 if self._fleet.weights is None else self._fleet.weights.snapshot.version

    # ------------------------------------------------------------------ runners

    def foreach_runner(self, function: Callable[[EvalRunner], Result]) -> list[Result]:
        """Call a function with every runner that is up, where it lives; return the results by position."""
        if self.settings.runners.num_runners:
            pickled(function, "the function")  # What cannot travel is an error here, and not in the driver's thread.
        job = Apply(self._driver.next_tag(), "apply", function)
        return self._wait(job, job.future)

    @property
    def healthy_runner_ids(self) -> list[int]:
        """Positions of the runners that are up."""
        return [member.index for member in self._fleet.ready()]

    def add_runners(self, count: int = 1) -> None:
        """Start more runners; they take part in what runs as soon as they are up.

        Raises:
            ConfigError: ``count`` is below 1, or the group runs in this process.
        """
        self._check_resizable("add_runners", count)
        self._do(lambda fleet, now: fleet.grow(count, now))

    def remove_runners(self, count: int = 1) -> None:
        """End the last runners; what they were running is run by others.

        Raises:
            ConfigError: ``count`` is below 1 or leaves no runner, or the group runs in this process.
        """
        self._check_resizable("remove_runners", count)
        if count >= self._fleet.expected():
            raise ConfigError(
                f"remove_runners({count}): the group has {self._fleet.expected()}, and keeps at least one"
            )
        self._do(lambda fleet, _: self._driver.forget(fleet.shrink(count)))

    def get_metrics(self) -> dict[str, float]:
        """Return lifetime counters of the group and the sums of its runners'."""
        totals: dict[str, float] = {"num_healthy_runners": 0, "num_runner_restarts": self._fleet.restarts}
        for metrics in self.foreach_runner(lambda runner: runner.get_metrics()):
            totals["num_healthy_runners"] += 1
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def stop(self) -> None:
        """End everything that this group started, within about ten seconds; may be called again."""
        with self._lock:
            self._driver.stop()

    def __enter__(self) -> EvalRunnerGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # ------------------------------------------------------------------ plumbing

    def _wait(self, job: Job, future: Future[Result]) -> Result:
        self._driver.post(job)
        return future.result()

    def _do(self, function: Callable[[Fleet, float], None]) -> None:
        job = Do(self._driver.next_tag(), function)
        self._wait(job, job.future)

    def _check_resizable(self, what: str, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{what}({count}): give at least 1")
        if not self.settings.runners.num_runners:
            raise ConfigError(f"{what}: with runners.num_runners=0 the one runner is this process; configure 1 or more")


def evaluate(
    config: EvalConfig | EvalSettings, policy: Any = None, run_dir: str | os.PathLike[str] | None = None
) -> EvalResult:
    """Evaluate once: start runners, run the plan, stop them.

    Args:
        config: What to evaluate and how.
        policy: A live policy, used instead of the configured one and its weights.
        run_dir: Folder or URI of an evaluation log, to continue or to begin; see :meth:`EvalRunnerGroup.submit`.

    Raises:
        ConfigError: The configuration cannot work.
        RunnerStartError: No runner came up.
        LogMismatch: The log belongs to another plan, policy or environment.
        LogOwned: Another driver is writing it.
    """
    with EvalRunnerGroup(config, policy) as group:
        return group.evaluate(run_dir=run_dir)


def _open_log(run_dir: str | os.PathLike[str]) -> EvaluationLog:
    from rl_eval.log import EvaluationLog

    return EvaluationLog.open(run_dir)


def _make_backend(settings: EvalSettings, policy: Any) -> Backend:
    if settings.runners.num_runners == 0:
        from rl_eval.backends.inline import InlineBackend

        return InlineBackend(settings, policy)
    from rl_eval.backends.ray_actors import RayBackend

    return RayBackend(settings, policy)


def _with_policy(settings: EvalSettings, policy: Any) -> EvalSettings:
    section = settings.policy.model_copy(update={"policy": policy, "policy_kwargs": {}, "weights": None})
    return settings.model_copy(update={"policy": section})


def _portable(policy: Any) -> Any:
    """Return a policy that a process without its device can unpickle."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(policy, torch.nn.Module):
        return policy
    if all(tensor.device.type == "cpu" for tensor in [*policy.parameters(), *policy.buffers()]):
        return policy
    return copy.deepcopy(policy).cpu()
