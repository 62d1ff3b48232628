"""RLlib's custom evaluation function: rl_eval inside ``Algorithm.train()``.

A session contains the :class:`rl_eval.Evaluator` of one Algorithm, and the results of the evaluations so far. The
session ends with the Algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakKeyDictionary, finalize, ref

import numpy as np
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, EVALUATION_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from typing_extensions import override

from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.errors import ConfigError
from rl_eval.execution.handle import EvalHandle
from rl_eval.integrations.rllib.algorithm import as_policies, portable, versioned_weights
from rl_eval.integrations.rllib.config import eval_config_of
from rl_eval.results.result import EvalPoint, EvalResult
from rl_eval.training.evaluator import Evaluator
from rl_eval.training.loggers import Logger

if TYPE_CHECKING:
    from rl_eval.recording.video_selection import VideoSettings


_KEPT: Final = 100

_SESSIONS: WeakKeyDictionary[Algorithm, EvaluationSession] = WeakKeyDictionary()


@final
class EvaluationSession:
    """The evaluations of one Algorithm.

    The session and its runners end with ``Algorithm.stop()``, or when the Algorithm is garbage collected.

    Args:
        algorithm: Algorithm to evaluate on each call. The session has only a weak reference to it.
        function: Settings of the evaluation, and functions that receive results. If ``on_error`` is set, the
            session does not raise the error of an evaluation.
    """

    def __init__(self, algorithm: Algorithm, function: EvaluationFunction) -> None:
        self._algorithm = ref(algorithm)
        self._raises = function.on_error is None
        self._handle: EvalHandle | None = None
        self.points: list[EvalPoint] = []
        """The last 100 finished evaluations, in order. ``on_result`` gets every finished evaluation."""
        self.num_episodes = 0
        """Number of finished episodes of all evaluations."""
        self.reported: EvalPoint | None = None
        """Last evaluation that was reported to RLlib."""
        self.num_skipped = 0
        """Number of evaluations that were skipped because another evaluation was running."""
        self.env_steps = 0
        """Number of environment steps of all evaluations."""
        self.stopped = False
        settings = settings_of(eval_config_of(algorithm.config) if function.config is None else function.config)
        self._policies = tuple(settings.policy.policies)
        self._evaluator = Evaluator(
            settings,
            as_policies(algorithm, self._policies) if self._policies else portable(algorithm),
            on_result=[self._take_in, *function.on_result],
            on_error=function.on_error,
            loggers=function.loggers,
            videos=function.videos,
        )
        finalize(algorithm, self._evaluator.shutdown)

    @property
    def last(self) -> EvalPoint | None:
        """The last evaluation that finished; None if there is none."""
        return self.points[-1] if self.points else None

    @property
    def pending(self) -> bool:
        """Whether an evaluation is running."""
        return self._evaluator.pending

    def submit(self, timeout_s: float | None = None, *, only_new: bool = False) -> None:
        """Wait for the running evaluation, if any. Then start an evaluation of the current weights.

        Args:
            timeout_s: Maximum waiting time, in seconds; None for no limit.
            only_new: Whether to do nothing if the last finished evaluation used the current weights.

        Raises:
            TimeoutError: The running evaluation takes longer than ``timeout_s``.
        """
        self.wait(timeout_s)
        algorithm = self._algorithm()
        if algorithm is None or self.stopped:
            return
        weights = versioned_weights(algorithm, self._policies)
        if only_new and self.last is not None and self.last.weights_version == weights.weights_seq_no:
            return
        step = algorithm.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        self._handle = self._evaluator.submit(weights.tensors, int(step), version=weights.weights_seq_no)

    def wait(self, timeout_s: float | None = None) -> EvalPoint | None:
        """Wait for the running evaluation, and return its result.

        Return None if no evaluation is running, or if the evaluation could not run and ``on_error`` is set.

        Raises:
            TimeoutError: The evaluation takes longer than ``timeout_s`` seconds. It continues.
            EvalError: The evaluation could not run, and there is no ``on_error``.
        """
        if self._handle is None:
            return None
        if not self._evaluator.drain(timeout_s):
            raise TimeoutError(f"the evaluation has not ended after {timeout_s} s, and continues")
        error, self._handle = self._handle.exception(), None
        if error is not None and self._raises:
            raise error
        return None if error is not None else self.last

    def stop(self) -> None:
        """Terminate the runners. This object keeps the results."""
        self.stopped = True
        self._evaluator.shutdown()

    def _take_in(self, point: EvalPoint) -> None:
        self.env_steps += point.result.timing.env_steps
        self.num_episodes += len(point.result.episodes)
        self.points.append(point)
        del self.points[:-_KEPT]


def session_of(algorithm: Algorithm) -> EvaluationSession | None:
    """Return the session of an Algorithm; None before its first evaluation."""
    return _SESSIONS.get(algorithm)


# ---------------------------------------------------------------------- the evaluation function


OnResult = Callable[[EvalPoint], object]


def evaluation_function(
    config: EvalConfig | None = None,
    *,
    parallel: bool = False,
    on_result: OnResult | Iterable[OnResult] = (),
    on_error: Callable[[BaseException], object] | None = None,
    loggers: Iterable[Logger] = (),
    videos: VideoSettings | None = None,
    final_timeout_s: float = 600.0,
) -> EvaluationFunction:
    """Return a function for ``AlgorithmConfig.evaluation(custom_evaluation_function=...)``.

    The function evaluates the Algorithm's policy, with the weights and filter statistics at the time of the call.

    Args:
        config: Config of the evaluation; by default, :func:`eval_config_of` translates the Algorithm's config.
        parallel: Whether training continues during an evaluation. Then each call starts an evaluation of the current
            weights, unless an evaluation is running. The call reports the last evaluation that finished.
            ``result_is_new`` is 0 if an earlier call reported the same evaluation. ``weights_seq_no`` and
            ``evaluated_at_env_steps`` identify the weights of the reported evaluation. ``Algorithm.stop()`` first
            evaluates the final weights.
        on_result: One function or several. Each is called with every :class:`rl_eval.results.result.EvalPoint`,
            including that of the final weights.
        on_error: Function that is called with each exception of an evaluation, a callback or a logger; then
            training continues. Without this function, an evaluation that could not run ends the training, and
            exceptions of callbacks and loggers are logged.
        loggers: Additional loggers of results. ``Algorithm.stop()`` closes them. If RLlib pickles its config, it
            also pickles the loggers and callbacks.
        videos: Episodes to record after each evaluation, and their folder.
        final_timeout_s: Maximum time, in seconds, that ``Algorithm.stop()`` waits for the running evaluation. The final
            evaluation has the same limit. Used only if ``parallel`` is true.

    Raises:
        ConfigError: ``policy.actions`` is "unsquash", although the connectors already unsquash actions. Or the config
            sets a policy or weights, although these come from the Algorithm.
    """
    policy = {} if config is None else config.to_dict().get("policy", {})
    if policy.get("actions") == "unsquash":
        problem = 'policy.actions is "unsquash", but the Algorithm\'s connectors already unsquash (normalize_actions)'
        raise ConfigError(problem, key="policy.actions", value="unsquash", fix='Use "none".')
    each = {f"policy.policies.{name}": given for name, given in (policy.get("policies") or {}).items()}
    for place, given in {"policy": policy, **each}.items():
        section = given if isinstance(given, Mapping) else {"policy": given}
        for key in ("policy", "policy_kwargs", "weights"):
            if section.get(key):
                problem = f"{place}.{key} is {section[key]!r}, but the Algorithm's own policy is evaluated"
                raise ConfigError(problem, key=f"{place}.{key}", value=section[key], fix="Remove this key.")
    called = (on_result,) if callable(on_result) else tuple(on_result)
    return EvaluationFunction(config, parallel, called, on_error, tuple(loggers), videos, final_timeout_s)


@final
@dataclass(frozen=True, eq=False)
class EvaluationFunction:
    """An evaluation function without state. A config that contains it can be copied and pickled."""

    config: EvalConfig | None
    parallel: bool
    on_result: tuple[OnResult, ...]
    on_error: Callable[[BaseException], object] | None
    loggers: tuple[Logger, ...]
    videos: VideoSettings | None
    final_timeout_s: float

    def __deepcopy__(self, memo: object) -> EvaluationFunction:
        """Return this object, so that RLlib's copies of its config use the caller's loggers and callbacks."""
        return self

    def __call__(self, algorithm: Algorithm, eval_env_runner_group: Any = None) -> tuple[dict[str, Any], int, int]:
        """Evaluate an Algorithm. RLlib calls this method.

        Returns:
            The metrics, the number of environment steps, and the number of agent steps. Both numbers of steps are
            equal. RLlib reads the metrics from the Algorithm's MetricsLogger.
        """
        session = session_of(algorithm) or self._open(algorithm)
        if session.pending:
            session.num_skipped += 1
        else:
            session.submit()
        if not self.parallel:
            session.wait()
        is_new = session.last is not session.reported
        session.reported = session.last
        numbers = report(session, is_new)
        _log(algorithm, numbers)
        steps = session.last.result.timing.env_steps if session.last is not None and is_new else 0
        return numbers, steps, steps

    def _open(self, algorithm: Algorithm) -> EvaluationSession:
        session = _SESSIONS[algorithm] = EvaluationSession(algorithm, self)
        algorithm.callbacks.append(_Forget())
        _stop_together(algorithm, session, self.final_timeout_s if self.parallel else None)
        return session


def report(session: EvaluationSession, is_new: bool) -> dict[str, Any]:
    """Return the values that RLlib reports under ``evaluation/env_runners``.

    The keys are those of RLlib, additional keys of rl_eval, and keys that show how old the values are.
    """
    point = session.last
    numbers: dict[str, Any] = {
        "result_is_new": int(is_new),
        "num_evaluations_skipped": session.num_skipped,
        "num_env_steps_sampled_lifetime": session.env_steps,
        "num_episodes_lifetime": session.num_episodes,
    }
    return numbers | (_NOTHING if point is None else _numbers(point))


_NOTHING: Final[dict[str, Any]] = {
    "status": "no_data",
    "num_episodes": 0,
    "num_env_steps_sampled": 0,
    "weights_seq_no": math.nan,
    "evaluated_at_env_steps": math.nan,
    **dict.fromkeys(
        (
            "episode_return_mean",
            "episode_return_min",
            "episode_return_max",
            "episode_return_ci_low",
            "episode_return_ci_high",
            "episode_return_iqm",
            "episode_len_mean",
            "episode_len_min",
            "episode_len_max",
            "episode_duration_sec_mean",
        ),
        math.nan,
    ),
}
"""Values until the first evaluation has finished. Stopping rules and schedulers may use these keys."""


def _numbers(point: EvalPoint) -> dict[str, Any]:
    metrics, timing = point.result.metrics, point.result.timing
    mean = metrics["episode_return_mean"]
    return {
        **metrics,
        "status": point.result.status,
        "fingerprint": point.result.fingerprint,
        "weights_seq_no": point.weights_version,
        "evaluated_at_env_steps": point.step,
        **_returns_by_part(metrics, mean),
        **_steps_by_part(point.result),
        "num_env_step_failures": metrics["num_faults"],
        "sample": timing.wall_seconds,
    }


def _steps_by_part(result: EvalResult) -> dict[str, dict[str, float]]:
    """Return the number of actions of each agent and of each module, under RLlib's keys."""
    if not len(result.agents):
        steps = result.metrics["num_env_steps_sampled"]
        return {
            "num_agent_steps_sampled": {DEFAULT_AGENT_ID: steps},
            "num_module_steps_sampled": {DEFAULT_MODULE_ID: steps},
        }
    lengths = result.agents["length"]
    return {
        f"num_{part}_steps_sampled": {
            str(name): int(lengths[result.agents[column] == name].sum()) for name in np.unique(result.agents[column])
        }
        for part, column in (("agent", "agent"), ("module", "policy"))
    }


def _returns_by_part(metrics: Mapping[str, float], mean: float) -> dict[str, dict[str, float]]:
    """Return the mean return of each agent and of each module, under all keys that RLlib uses for these values."""
    agents = _parts(metrics, "agent_episode_returns_mean") or {DEFAULT_AGENT_ID: mean}
    modules = _parts(metrics, "module_episode_returns_mean") or {DEFAULT_MODULE_ID: mean}
    return {
        "agent_episode_return_mean": agents,
        "agent_episode_returns_mean": agents,
        "module_episode_return_mean": modules,
        "module_episode_returns_mean": modules,
        "policy_reward_mean": modules,
    }


def _parts(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    return {key.removeprefix(f"{name}/"): value for key, value in metrics.items() if key.startswith(f"{name}/")}


def _log(algorithm: Algorithm, numbers: dict[str, Any]) -> None:
    """Write the numbers to RLlib's metrics, one value per key, so that RLlib does not average them."""
    logger = MetricsLogger(root=False)
    for key, value in numbers.items():
        parts = {(key, name): item for name, item in value.items()} if isinstance(value, dict) else {(key,): value}
        for path, item in parts.items():
            logger.log_value(path, item, reduce="item")
    algorithm.metrics.delete(EVALUATION_RESULTS, key_error=False)
    algorithm.metrics.aggregate([logger.reduce()], key=(EVALUATION_RESULTS, ENV_RUNNER_RESULTS))


class _Forget(RLlibCallback):  # type: ignore[misc]
    """Callback that removes the numbers of an evaluation from the MetricsLogger.

    Otherwise, the MetricsLogger would repeat these numbers in later training results.
    """

    @override
    def on_evaluate_end(self, *, algorithm: Algorithm, **kwargs: Any) -> None:
        algorithm.metrics.delete(EVALUATION_RESULTS, key_error=False)


def _stop_together(algorithm: Algorithm, session: EvaluationSession, final_timeout_s: float | None) -> None:
    """Change ``Algorithm.stop()`` so that it first ends the session. RLlib has no callback for this.

    Args:
        algorithm: The Algorithm.
        session: Its session.
        final_timeout_s: Time limit of an evaluation of the final weights, in seconds; None for no such evaluation.
    """
    alive = ref(algorithm)

    def cleanup() -> None:
        stopping = alive()
        try:
            if final_timeout_s is not None:
                session.submit(final_timeout_s, only_new=True)
                session.wait(final_timeout_s)
        finally:
            session.stop()
            if stopping is not None:
                type(stopping).cleanup(stopping)

    algorithm.cleanup = cleanup
