"""``RayMetrics``: a plain HTTP client reads at Ray's Prometheus endpoint what an evaluation came to."""

import math
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
from waiting import eventually
from workloads import cartpole

from rl_eval import EvalProgress, evaluate
from rl_eval.results.result import EvalPoint
from rl_eval.training.loggers import RayMetrics

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.skipif(
        tuple(map(int, ray.__version__.split(".")[:2])) < (2, 60), reason="older ones do not show every update"
    ),
]

SAMPLE = re.compile(r"^ray_rl_eval_(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def point() -> EvalPoint:
    """One evaluation with retries and failed episodes."""
    result = evaluate(cartpole(attempt_rates=[0.5, 0.5]).fault_tolerance(max_attempts_per_episode=2))
    assert result.num_failed
    assert result.num_retried > result.num_failed
    return EvalPoint(1000, 0, result, {f"eval/{name}": value for name, value in result.metrics.items()})


class Process:
    """Holds the metrics of evaluators; a process that was connected before, as this one, would report twice."""

    def __init__(self) -> None:
        self._of: dict[str, RayMetrics] = {}

    def call(self, evaluator: str, method: str, args: Any, values: Any) -> None:
        metrics = self._of.setdefault(evaluator, RayMetrics(evaluator))
        getattr(metrics, method)(*args, **values)


@pytest.fixture(scope="module")
def call(ray_cluster: None) -> Iterator[Callable[..., None]]:
    """Call a method of an evaluator's metrics in another process."""
    process = ray.remote(num_cpus=0)(Process).remote()
    yield lambda evaluator, method, *args, **values: ray.get(process.call.remote(evaluator, method, args, values))
    ray.kill(process)


def scraped(evaluator: str) -> dict[str, float]:
    """Return the series of one evaluator, summed over the processes of all nodes."""
    found: dict[str, float] = {}
    for node in ray.nodes():
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(address, timeout=10) as reply:
            text = reply.read().decode()
        for name, labels, value in SAMPLE.findall(text):
            if f'evaluator="{evaluator}"' in labels:
                found[name] = found.get(name, 0.0) + float(value)
    return found


def reads(evaluator: str, expected: dict[str, float]) -> bool:
    """Whether the endpoint comes to show these values, and no others."""
    return eventually(lambda: scraped(evaluator) == pytest.approx(expected))


@pytest.mark.slow
def test_every_number_is_at_the_endpoint(point, call):
    """Counters add up over evaluations; gauges are those of the last one."""
    result = point.result
    call("first", "log", point)
    once = {
        "episodes_done_total": result.aggregates.count,
        "episodes_failed_total": result.num_failed,
        "episodes_retried_total": result.num_retried,
        "env_steps_total": result.timing.env_steps,
        "faults_total": len(result.faults),
        "evaluations_total": 1,
    }
    gauges = {"mean_return": result.mean_return, "evaluated_step": 1000, "weights_version": 0, "weights_lag": 0}
    assert reads("first", once | gauges), scraped("first")

    call("first", "reached", 1750)
    call("first", "log", replace(point, step=1500, weights_version=4))
    twice = {name: 2 * value for name, value in once.items()}
    assert reads("first", twice | gauges | {"evaluated_step": 1500, "weights_version": 4, "weights_lag": 250})
    call("first", "reached", 2000)
    assert reads("first", twice | gauges | {"evaluated_step": 1500, "weights_version": 4, "weights_lag": 500})


@pytest.mark.slow
def test_lost_runners_and_progress_are_shown(point, call):
    """Evaluators of one cluster are told apart by their label."""
    point.result.provenance["runners_lost"] = 3
    call("second", "log", point)
    call("second", "progress", EvalProgress(60, 17, 0, 0, 17, 1.0, 0.5, 400, 2.0, 2))
    point.result.provenance["runners_lost"] = 0
    wanted = {"runner_restarts_total": 3, "running_episodes_finished": 17, "runners": 2}
    assert eventually(lambda: wanted.items() <= scraped("second").items()), scraped("second")
    assert "runners" not in scraped("first")


def test_a_number_that_is_not_finite_leaves_the_last_one(call):
    """NaN and infinity have no place in a gauge."""
    for value in (5.0, math.nan, math.inf):
        call("third", "_set", mean_return=value)
    call("third", "_set", weights_version=1)
    assert reads("third", {"mean_return": 5, "weights_version": 1})
