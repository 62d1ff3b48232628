"""Evaluation whose episodes leave trajectories: an evaluation, and an observer in every runner that takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

from rl_eval.backends import requests
from rl_eval.errors import ConfigError
from rl_eval.execution.evaluation import Evaluation
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.jobs import Apply, Job
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.records.episode import RunReport
from rl_eval.runners import EvalRunner
from rl_eval.supervision.flight_recorder import CrashReport

__all__ = ["TRAJECTORY", "RecordedEvaluation"]

TRAJECTORY: Final = "trajectory"
"""Name of the artifact."""


@final
class RecordedEvaluation(Job):
    """Runs an evaluation, and has runners record while it runs and only then.

    A runner's calls run in order, so it records from the first episode on, also one that comes up later.

    Args:
        evaluation: What to run.
        recorder: Builds the observer of an environment; picklable.
        next_tag: Returns a mark for a new job.
    """

    exclusive = True

    def __init__(self, evaluation: Evaluation, recorder: Callable[[Any], Any], next_tag: Callable[[], int]) -> None:
        super().__init__(evaluation.tag)
        self._evaluation = evaluation
        self._begin = requests.Apply(partial(_observe, factories={TRAJECTORY: recorder}))
        self._next_tag = next_tag
        self._pool: RunnerPool | None = None

    @property
    def handle(self) -> EvalHandle:
        """Handle of the evaluation."""
        return self._evaluation.handle

    def start(self, pool: RunnerPool, now: float) -> None:
        """See :class:`Job`."""
        self._pool = pool
        for member in pool.ready():
            pool.call(member, self._begin, tag=self.tag, now=now)
        self._evaluation.start(pool, now)

    def joined(self, member: Member, now: float) -> None:
        """See :class:`Job`."""
        if self._pool is not None:
            self._pool.call(member, self._begin, tag=self.tag, now=now)
        self._evaluation.joined(member, now)

    def lost(self, member: Member, crash_report: CrashReport | None) -> bool:
        """See :class:`Job`."""
        return self._evaluation.lost(member, crash_report)

    def replied(self, member: Member, value: Any, now: float) -> None:
        """See :class:`Job`."""
        if isinstance(value, RunReport):
            self._evaluation.replied(member, value, now)

    def tick(self, now: float) -> None:
        """See :class:`Job`."""
        self._evaluation.tick(now)

    def fail(self, error: BaseException) -> None:
        """See :class:`Job`."""
        self._evaluation.fail(error)

    @property
    def done(self) -> bool:
        """See :class:`Job`."""
        return self._evaluation.done

    @property
    def waits_for_disk(self) -> bool:
        """See :class:`Job`."""
        return self._evaluation.waits_for_disk

    def successors(self) -> list[Job]:
        """Have the runners record no more, behind the calls that end the evaluation."""
        if self._pool is None or not self._pool.ready():
            return []
        return [Apply(self._next_tag(), partial(_observe, factories={}))]


def _observe(runner: Any, factories: Mapping[str, Callable[[Any], Any]]) -> None:
    """Have a runner's environments seen by observers, beside those that are configured.

    Raises:
        ConfigError: It is a runner that has none.
    """
    if not isinstance(runner, EvalRunner):
        raise ConfigError(
            f"episodes of {type(runner).__name__} leave no trajectories, as it is no rl_eval.EvalRunner: derive it "
            "from that class"
        )
    runner.observe(factories)
