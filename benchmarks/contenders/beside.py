"""Training with and without evaluation beside it, in turns within one process, each on a core of its own.

The main thread, with all that it starts, keeps to the first core; Ray, the runners and the evaluator's own threads to
the second. In the stretches in which evaluation is on, it is asked for every :data:`EVERY` training steps, and
refused while one runs; before a stretch without it, the last one is waited for. What remains is what evaluation costs
the training loop: the copy of the weights, and a share of the interpreter's lock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from benchmarks.contenders import base

__all__ = ["EVERY", "Beside", "beside", "second_core"]

EVERY: Final = 10_000
"""Training steps between two evaluations."""
_SKIPPED: Final = 2
"""Stretches at the start, with and without, that warm up."""


@contextmanager
def second_core() -> Iterator[int]:
    """Have Ray start on the second core, with room for one runner; the block's thread is then moved to the first.

    Yields:
        The core that is left to training.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("training and evaluation need a core each")
    _pin(cores[1])
    with base.ray_cluster(num_cpus=2):
        yield cores[0]


@contextmanager
def beside(params: base.Params, core: int, config: Any, policy: Any) -> Iterator[Beside]:
    """Start an evaluator, and then keep to the core of training.

    Args:
        params: ``stretch_s`` and ``stretches`` of the scenario.
        core: Of training.
        config: An ``EvalConfig``; one runner evaluates.
        policy: What it evaluates.
    """
    from rl_eval import Evaluator

    with Evaluator(config, policy, backend="ray", busy_policy="skip") as evaluator:
        evaluator.evaluate(None, 0)
        _pin(core)
        yield Beside(evaluator, params["stretch_s"], params["stretches"])


@final
class Beside:
    """Asks for evaluations in every other stretch of a training run, and measures both kinds.

    Args:
        evaluator: Idle.
        stretch_s: Length of a stretch, in seconds.
        stretches: How many.
    """

    def __init__(self, evaluator: Any, stretch_s: float, stretches: int) -> None:
        self._evaluator = evaluator
        self._stretch_s = stretch_s
        self._left = stretches
        self._handles: list[Any] = []
        self._refused = 0
        self._asked = -EVERY
        self._asking_s = 0.0
        self._speeds: dict[bool, list[float]] = {True: [], False: []}
        self._on = False
        self._began: tuple[float, int] | None = None

    @property
    def over(self) -> bool:
        """Whether all stretches are measured."""
        return self._left <= 0

    def iterated(self, weights: Any, steps: int) -> None:
        """Take note that a training iteration has ended.

        Args:
            weights: What ``Evaluator.submit`` takes.
            steps: Environment steps of training so far.
        """
        if self.over:
            return
        now = time.perf_counter()
        if self._began is not None and now - self._began[0] >= self._stretch_s:
            self._speeds[self._on].append((steps - self._began[1]) / (now - self._began[0]))
            self._turn_over()
            self._began = None
        if self._began is None:
            self._began = time.perf_counter(), steps
        if self._on and steps - self._asked >= EVERY:
            self._ask(weights, steps)

    def finish(self, weights: Any, steps: int) -> dict[str, Any]:
        """Evaluate the final policy, and return the row."""
        final = self._evaluator.evaluate(weights, steps)
        results = [handle.result(600) for handle in self._handles]
        with_, without = (speeds[_SKIPPED // 2 :] for speeds in (self._speeds[True], self._speeds[False]))
        ratios = [ours / theirs for ours, theirs in zip(with_, without, strict=False)]
        return {
            "steps_per_second": statistics.median(without),
            "ratio": sum(with_) / len(with_) * len(without) / sum(without),
            "ratios": ratios,
            "asking_seconds": self._asking_s / max(1, len(self._handles)),
            "evaluations": len(results),
            "refused": self._refused,
            "complete": sum(result.status == "complete" for result in results),
            "right_version": sum(
                result.metrics["weights_version"] == handle.weights_version
                for result, handle in zip(results, self._handles, strict=True)
            ),
            "first_mean": results[0].mean_return,
            "final_mean": final.mean_return,
            "final_complete": final.status == "complete",
        }

    def _turn_over(self) -> None:
        self._left -= 1
        self._on = not self._on
        if not self._on and self._handles:
            self._handles[-1].result(600)

    def _ask(self, weights: Any, steps: int) -> None:
        from rl_eval import EvaluatorBusy

        began, self._asked = time.perf_counter(), steps
        try:
            self._handles.append(self._evaluator.submit(weights, steps))
        except EvaluatorBusy:
            self._refused += 1
        else:
            self._asking_s += time.perf_counter() - began


def _pin(core: int) -> None:
    """Keep the main thread, and what it starts from now on, on one core."""
    os.sched_setaffinity(0, {core})
