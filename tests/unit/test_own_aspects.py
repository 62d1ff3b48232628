"""Aspects of an evaluation from outside of the package: a half in each runner, and a half beside the control loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.backends.inline import InlineBackend
from rl_eval.config.settings import EvalSettings
from rl_eval.execution.jobs import ApplyToReady, Do
from rl_eval.execution.loop import ControlLoop
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import Aspect, EvalOutcome
from rl_eval.execution.runner_pool import GroupWeights, Member, RunnerPool
from rl_eval.records.episode import RunReport
from rl_eval.runners import layout_of
from rl_eval.runners.core import RunnerCore


class Numbers(Aspect):
    """Half beside the control loop: the numbers of all reports."""

    def __init__(self, outcome: EvalOutcome) -> None:
        super().__init__(outcome)
        self.numbers: list[int] = []

    def reported(self, member: Member, report: RunReport) -> None:
        """Keep the number of a report."""
        self.numbers.append(report.extra["numbers"])

    def describe(self, fields: dict[str, Any]) -> None:
        """Add the numbers to the provenance."""
        fields["provenance"] |= {"numbers": self.numbers}


def install(runner: RunnerCore) -> None:
    """Add the half to a runner: it numbers the reports."""
    runner.extra["numbers"] = itertools.count().__next__


@contextmanager
def loop_of(settings: EvalSettings) -> Iterator[ControlLoop]:
    """Run a control loop in this thread, with one runner."""
    backend = InlineBackend(settings, None, threaded=False)
    loop = ControlLoop(backend, RunnerPool(backend, settings, GroupWeights()), False)
    loop.start()
    loop.post(Do(lambda pool, now: pool.grow(1, now)))
    loop.post(ApplyToReady(install))
    try:
        yield loop
    finally:
        loop.stop()


@pytest.mark.parametrize("kind", ["vector", "batched"])
def test_an_aspect_adds_a_number_to_every_report(kind: str) -> None:
    kwargs = {"vectorization_mode": "sync"} if kind == "batched" else {}
    config = EvalConfig().environment("CartPole-v1", env_kwargs=kwargs).policy("random")
    config.runners(runner=kind, num_envs_per_runner=4)
    config.evaluation(num_episodes=200, determinism_check=0)
    settings = config.build()
    with loop_of(settings) as loop:
        outcome = EvalOutcome(settings, layout_of(settings), settings.plan(), aspects=[Numbers])
        loop.post(Opening(outcome))
        result: EvalResult = outcome.handle.result()
    numbers = result.provenance["numbers"]
    assert numbers == [*range(len(numbers))]
    assert len(numbers) > 1
    assert result.fingerprint == evaluate(config).fingerprint
