"""Evaluation that records trajectories: jobs that add an observer to every runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, final

from typing_extensions import override

from rl_eval.backends import requests
from rl_eval.errors import ConfigError
from rl_eval.execution.jobs import ApplyToReady, Job
from rl_eval.execution.opening import Opening
from rl_eval.execution.runner_pool import Member
from rl_eval.runners.core import RunnerCore
from rl_eval.supervision.flight_recorder import CrashReport

TRAJECTORY: Final = "trajectory"
"""Name of the artifact with the recorded steps."""


@final
class Recorded(Job):
    """Job of an evaluation. The runners record only while this job or one of its successors runs.

    The calls of a runner run in order. So a runner records from its first episode on, even if it joins late.

    Args:
        job: The original job.
        recorder: Function that builds the observer of an environment. It must be picklable.
    """

    exclusive = True

    def __init__(self, job: Job, recorder: Callable[[Any], Any]) -> None:
        self._job = job
        self._recorder = recorder
        self._begin = requests.Apply(partial(_observe, factories={TRAJECTORY: recorder}))

    @override
    def start(self, now: float) -> None:
        self._job.pool, self._job.tag, self._job.started = self.pool, self.tag, True
        if not isinstance(self._job, Opening):
            for member in self.pool.ready():
                self.pool.call(member, self._begin, tag=self.tag, now=now)
        self._job.start(now)

    @override
    def joined(self, member: Member, now: float) -> None:
        self.pool.call(member, self._begin, tag=self.tag, now=now)
        self._job.joined(member, now)

    @override
    def lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        return self._job.lost(member, crash_report, now)

    @override
    def replied(self, member: Member, value: Any, now: float) -> None:
        if value is not None:  # The answer to its own call.
            self._job.replied(member, value, now)

    @override
    def tick(self, now: float) -> None:
        self._job.tick(now)

    @override
    def fail(self, error: BaseException) -> None:
        self._job.fail(error)

    @property
    @override
    def done(self) -> bool:
        return self._job.done

    def successors(self) -> list[Job]:
        """Return the successors as recorded jobs. After the last job, stop the recording."""
        if following := self._job.successors():
            return [Recorded(job, self._recorder) for job in following]
        if not self.started or not self.pool.ready():
            return []
        return [ApplyToReady(partial(_observe, factories={}))]


def _observe(runner: Any, factories: Mapping[str, Callable[[Any], Any]]) -> None:
    """Add observers to a runner's environments, in addition to the configured ones."""
    if not isinstance(runner, RunnerCore):
        problem = f"{type(runner).__name__} cannot record trajectories, because it is not an rl_eval.EvalRunner"
        fix = "Set runners.runner: vector, or derive your class from rl_eval.EvalRunner."
        raise ConfigError(problem, key="runners.runner", value=type(runner).__name__, fix=fix)
    runner.observe(factories)
