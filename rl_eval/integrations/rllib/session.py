"""Evaluations of one Algorithm: an :class:`rl_eval.Evaluator` that lives as long as it, and what it has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final
from weakref import WeakKeyDictionary, finalize, ref

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME

from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings
from rl_eval.execution.handle import EvalHandle
from rl_eval.integrations.rllib.algorithm import VersionedWeights, as_policies, portable, versioned_weights
from rl_eval.loggers import Logger
from rl_eval.results.point import EvalPoint
from rl_eval.training.evaluator import Evaluator

if TYPE_CHECKING:
    from rl_eval.video import VideoSettings

__all__ = ["EvaluationSession", "Receivers", "open_session", "session_of"]

_KEPT: Final = 100

_SESSIONS: WeakKeyDictionary[Algorithm, EvaluationSession] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Receivers:
    """Receivers of results, as :class:`rl_eval.Evaluator` takes them."""

    on_result: tuple[Callable[[EvalPoint], object], ...] = ()
    on_error: Callable[[BaseException], object] | None = None
    loggers: tuple[Logger, ...] = ()
    videos: VideoSettings | None = None

    def __deepcopy__(self, memo: object) -> Receivers:
        """Stay the caller's loggers and callbacks where RLlib copies its config."""
        return self


@final
class EvaluationSession:
    """The evaluations of one Algorithm.

    It ends with ``Algorithm.stop()``, or when the Algorithm is garbage; what it started ends with it.

    Args:
        algorithm: Evaluated on each call; only weakly referenced.
        config: What to evaluate and how; its policy is the Algorithm's.
        receivers: Where results go. With ``on_error`` an evaluation that could not run raises nowhere else.
    """

    def __init__(self, algorithm: Algorithm, config: EvalConfig | EvalSettings, receivers: Receivers) -> None:
        self._algorithm = ref(algorithm)
        self._raises = receivers.on_error is None
        self._handle: EvalHandle | None = None
        self.points: list[EvalPoint] = []
        """The last 100 finished evaluations, in order; ``on_result`` has them all."""
        self.num_episodes = 0
        """Finished episodes of all evaluations."""
        self.reported: EvalPoint | None = None
        """The one that was reported to RLlib last."""
        self.num_skipped = 0
        """Evaluations that were due while another was running."""
        self.env_steps = 0
        """Environment steps of all of them."""
        self.stopped = False
        settings = settings_of(config)
        self._policies = tuple(settings.policy.policies)
        self._evaluator = Evaluator(
            settings,
            as_policies(algorithm, self._policies) if self._policies else portable(algorithm),
            on_result=[self._take_in, *receivers.on_result],
            on_error=receivers.on_error,
            loggers=receivers.loggers,
            videos=receivers.videos,
        )
        finalize(algorithm, self._evaluator.shutdown)

    @property
    def last(self) -> EvalPoint | None:
        """The evaluation that finished last."""
        return self.points[-1] if self.points else None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running."""
        return self._handle is not None

    def submit(self) -> None:
        """Start an evaluation of the present weights; one that is running is waited for."""
        algorithm = self._algorithm()
        if algorithm is not None:
            self._submit(algorithm, versioned_weights(algorithm, self._policies))

    def _submit(self, algorithm: Algorithm, weights: VersionedWeights) -> None:
        self.wait()
        step = algorithm.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)
        self._handle = self._evaluator.submit(weights.tensors, int(step), version=weights.weights_seq_no)

    def poll(self) -> EvalPoint | None:
        """Return the running evaluation if it is finished; None if it is not, or there is none."""
        return None if self._evaluator.pending else self.wait()

    def wait(self, timeout_s: float | None = None) -> EvalPoint | None:
        """Wait for the running evaluation and return it; None if there is none.

        Raises:
            TimeoutError: It takes longer than ``timeout_s`` seconds; it goes on.
            EvalError: It could not run, and there is no ``on_error``.
        """
        if self._handle is None:
            return None
        if not self._evaluator.drain(timeout_s):
            raise TimeoutError(f"the evaluation is not done after {timeout_s} s, and goes on")
        error, self._handle = self._handle.exception(), None
        if error is not None and self._raises:
            raise error
        return None if error is not None else self.last

    def evaluate_final(self, timeout_s: float | None = None) -> EvalPoint | None:
        """Finish what runs, and evaluate the present weights unless they were the last that were.

        Args:
            timeout_s: Longest wait for each of the two, in seconds.

        Raises:
            TimeoutError: One takes longer.
        """
        algorithm = self._algorithm()
        self.wait(timeout_s)
        if algorithm is not None and not self.stopped:
            weights = versioned_weights(algorithm, self._policies)
            if self.last is None or self.last.weights_version != weights.weights_seq_no:
                self._submit(algorithm, weights)
                self.wait(timeout_s)
        return self.last

    def stop(self) -> None:
        """End the runners; points stay."""
        self.stopped = True
        self._evaluator.shutdown()

    def _take_in(self, point: EvalPoint) -> None:
        self.env_steps += point.result.timing.env_steps
        self.num_episodes += len(point.result.episodes)
        self.points.append(point)
        del self.points[:-_KEPT]


def open_session(algorithm: Algorithm, config: EvalConfig | EvalSettings, receivers: Receivers) -> EvaluationSession:
    """Start the runners of an Algorithm's evaluations."""
    session = _SESSIONS[algorithm] = EvaluationSession(algorithm, config, receivers)
    return session


def session_of(algorithm: Algorithm) -> EvaluationSession | None:
    """Return what an Algorithm's evaluation function has found so far; None before its first evaluation."""
    return _SESSIONS.get(algorithm)
