"""What lives as long as one Algorithm that evaluates with rl_eval: warm runners, what they run, what they found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, final
from weakref import WeakKeyDictionary, finalize, ref

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME

from rl_eval.config import EvalConfig
from rl_eval.group import EvalRunnerGroup
from rl_eval.handle import EvalHandle
from rl_eval.integrations.rllib.algorithm import VersionedWeights, portable, versioned_weights
from rl_eval.point import EvalPoint
from rl_eval.settings import EvalSettings

__all__ = ["EvaluationSession", "open_session", "session_of"]

_KEPT: Final = 100

_logger = logging.getLogger(__name__)

_SESSIONS: WeakKeyDictionary[Algorithm, EvaluationSession] = WeakKeyDictionary()


@final
class EvaluationSession:
    """The evaluations of one Algorithm.

    It ends with ``Algorithm.stop()``, or when the Algorithm is garbage; what it started ends with it.

    Args:
        algorithm: Evaluated on each call; only weakly referenced.
        config: What to evaluate and how; its policy is the Algorithm's.
        on_result: Called with each :class:`EvalPoint`; what one raises is logged, and training goes on.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        config: EvalConfig | EvalSettings,
        on_result: Sequence[Callable[[EvalPoint], object]],
    ) -> None:
        self._algorithm = ref(algorithm)
        self._group = EvalRunnerGroup(config, portable(algorithm))
        self._on_result = tuple(on_result)
        self._running: tuple[int, EvalHandle] | None = None
        self.points: list[EvalPoint] = []
        """The last 100 finished evaluations, in order; ``on_result`` has them all."""
        self.num_episodes = 0
        """Finished episodes of all evaluations."""
        self.reported: EvalPoint | None = None
        """The one that RLlib was told about last."""
        self.num_skipped = 0
        """Evaluations that were due while another was running."""
        self.env_steps = 0
        """Environment steps of all of them."""
        self.stopped = False
        finalize(algorithm, self._group.stop)

    @property
    def last(self) -> EvalPoint | None:
        """The evaluation that finished last."""
        return self.points[-1] if self.points else None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running."""
        return self._running is not None

    def submit(self, weights: VersionedWeights) -> None:
        """Start an evaluation; one that is running is waited for."""
        self.wait()
        algorithm = self._algorithm()
        step = algorithm.metrics.peek((ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0)  # type: ignore[union-attr]
        self._running = int(step), self._group.submit(weights=weights.tensors, version=weights.weights_seq_no)

    def poll(self) -> EvalPoint | None:
        """Return the running evaluation if it is finished; None if it is not, or there is none."""
        return self.wait() if self._running is not None and self._running[1].done() else None

    def wait(self, timeout_s: float | None = None) -> EvalPoint | None:
        """Wait for the running evaluation and return it; None if there is none.

        Raises:
            TimeoutError: It takes longer than ``timeout_s`` seconds; it goes on.
            EvalError: It could not run.
        """
        if self._running is None:
            return None
        step, handle = self._running
        try:
            result = handle.result(timeout_s)
        except TimeoutError:
            raise
        except BaseException:
            self._running = None
            raise
        self._running = None
        self.env_steps += result.timing.env_steps
        self.num_episodes += len(result.episodes)
        metrics = {f"eval/{key}": value for key, value in result.metrics.items()}
        point = EvalPoint(step, handle.weights_version, result, metrics)
        self.points.append(point)
        del self.points[:-_KEPT]
        for notify in self._on_result:
            _tell(notify, point)
        return point

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
            weights = versioned_weights(algorithm)
            if self.last is None or self.last.weights_version != weights.weights_seq_no:
                self.submit(weights)
                self.wait(timeout_s)
        return self.last

    def stop(self) -> None:
        """End the runners; points stay."""
        self.stopped = True
        self._group.stop()


def _tell(notify: Callable[[EvalPoint], object], point: EvalPoint) -> None:
    try:
        notify(point)
    except Exception:
        _logger.exception("on_result raised for the evaluation of step %s; training goes on", point.step)


def open_session(
    algorithm: Algorithm, config: EvalConfig | EvalSettings, on_result: Sequence[Callable[[EvalPoint], object]]
) -> EvaluationSession:
    """Start the runners of an Algorithm's evaluations."""
    session = _SESSIONS[algorithm] = EvaluationSession(algorithm, config, on_result)
    return session


def session_of(algorithm: Algorithm) -> EvaluationSession | None:
    """Return what an Algorithm's evaluation function has found so far; None before its first evaluation."""
    return _SESSIONS.get(algorithm)
