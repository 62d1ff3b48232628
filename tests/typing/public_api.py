"""Types of the public API, as a user's type checker sees them. mypy reads this file; nothing runs it."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

from rl_eval import (
    Comparison,
    Determinism,
    EpisodePlan,
    EpisodeRecord,
    EvalConfig,
    EvalHandle,
    EvalPoint,
    EvalProgress,
    EvalResult,
    EvalRunner,
    EvalRunnerGroup,
    EvalSettings,
    Evaluator,
    Fault,
    NewBest,
    NoiseSource,
    Policy,
    StopOnThreshold,
    VectorEvalRunner,
    compare,
    evaluate,
    evaluate_policy,
    load,
)
from rl_eval.execution.evaluate import PolicyEvaluation
from rl_eval.results.result import EpisodeSequence
from rl_eval.results.stats.interval import Interval
from rl_eval.results.stats.paired import McNemar, PairedDifference
from rl_eval.training.loggers import Logger


class MyPolicy:
    """A class with ``act`` is a policy; it needs no base class."""

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        return observations, state


class MyRunner(VectorEvalRunner):
    def make_env(self, lane_index: int) -> Any:
        return super().make_env(lane_index)


class MyLogger(Logger):
    def log(self, point: EvalPoint) -> None:
        assert_type(point.step, int)
        assert_type(point.result, EvalResult)
        assert_type(point.metrics, dict[str, float])


def configuration(settings: EvalSettings) -> None:
    config = EvalConfig().environment("CartPole-v1").policy("random").runners(num_runners=2, runner=MyRunner)
    assert_type(config, EvalConfig)
    assert_type(config.evaluation(num_episodes=20, seed=0).fault_tolerance(step_timeout_s=1.0), EvalConfig)
    assert_type(config.set("evaluation.seed", 1).copy(), EvalConfig)
    assert_type(EvalConfig.from_yaml("eval.yaml"), EvalConfig)
    assert_type(EvalConfig.from_dict({"evaluation": {"seed": 1}}), EvalConfig)
    assert_type(config.to_dict(), dict[str, dict[str, Any]])
    assert_type(config.to_yaml(), str)
    assert_type(config.build(), EvalSettings)
    assert_type(settings.evaluation.num_episodes, int)
    assert_type(settings.fault_tolerance.step_timeout_s, float | None)
    config.evaluation(num_episodes="20")  # type: ignore[arg-type]
    config.evaluation(episodes=20)  # type: ignore[call-arg]


def evaluation(config: EvalConfig, settings: EvalSettings) -> None:
    policy: Policy = MyPolicy()
    assert_type(evaluate(config, policy), EvalResult)
    assert_type(evaluate(settings, output="runs/a"), EvalResult)
    assert_type(load("runs/a"), EvalResult)
    assert_type(evaluate("CartPole-v1", policy, num_episodes=10, num_runners=2), EvalResult)
    evaluate("CartPole-v1", episodes=10)  # type: ignore[call-arg]


def result_fields(result: EvalResult) -> None:
    assert_type(result.status, Literal["complete", "partial", "failed"])
    assert_type(result.reason, str)
    assert_type(result.mean_return, float)
    assert_type(result.interval, Interval)
    assert_type(result.interval.low, float)
    assert_type(result.success_rate, float | None)
    assert_type(result.metrics, dict[str, float])
    assert_type(result.fingerprint, str)
    assert_type(result.determinism, Determinism)
    assert_type(result.plan, EpisodePlan)
    assert_type(result.num_failed, int)
    assert_type(result.notes, list[str])
    assert_type(result.faults, list[Fault])
    assert_type(result.provenance, dict[str, Any])
    assert_type(result.episodes, EpisodeSequence)
    assert_type(result.episodes[17], EpisodeRecord)
    assert_type(result.episodes[:3], EpisodeSequence)
    assert_type([episode.episode_return for episode in result.episodes], list[float])
    assert_type(result.episodes[17].seed, int)
    assert_type(result.to_json(), str)


def comparison(a: EvalResult, b: EvalResult) -> None:
    compared = compare(a, b, 0.99)
    assert_type(compared, Comparison)
    assert_type(compared.difference, PairedDifference)
    assert_type(compared.difference.p_value, float)
    assert_type(compared.difference.interval, Interval)
    assert_type(compared.success, McNemar | None)
    assert_type(compared.num_pairs, int)
    assert_type(compared.verdict, str)
    assert_type(compared.regressed, bool)


def as_in_stable_baselines3(model: Any) -> None:
    evaluated = evaluate_policy(model, "CartPole-v1", n_eval_episodes=20)
    assert_type(evaluated, PolicyEvaluation)
    assert_type(evaluated.result, EvalResult)
    mean, std = evaluated
    assert_type((mean, std), tuple[Any, Any])


def training(config: EvalConfig, module: Any, listener: Callable[[EvalPoint], None]) -> None:
    with Evaluator(
        config,
        module,
        busy_policy="latest",
        on_result=[StopOnThreshold(475.0), NewBest(save="best.safetensors"), listener],
        loggers=[MyLogger()],
    ) as evaluator:
        assert_type(evaluator, Evaluator)
        handle = evaluator.submit(module, step=1)
        assert_type(handle, EvalHandle)
        assert_type(handle.done(), bool)
        assert_type(handle.progress(), EvalProgress)
        assert_type(handle.result(timeout=60.0), EvalResult)
        assert_type(evaluator.evaluate(module, step=2), EvalResult)
        assert_type(evaluator.drain(), bool)
        assert_type(evaluator.state_dict(), dict[str, int])
    Evaluator(config, busy_policy="newest")  # type: ignore[arg-type]


async def awaited(handle: EvalHandle) -> None:
    assert_type(await handle, EvalResult)


def index_of(runner: EvalRunner) -> int:
    return runner.runner_index


def group(config: EvalConfig, module: Any) -> None:
    with EvalRunnerGroup(config, module) as runners:
        assert_type(runners, EvalRunnerGroup)
        assert_type(runners.sync_weights(module, version=3), int)
        assert_type(runners.evaluate(num_episodes=100), EvalResult)
        assert_type(runners.submit(weights=module), EvalHandle)
        assert_type(runners.foreach_runner(index_of), list[int])
        assert_type(runners.apply_to_one(index_of), int)
        assert_type(runners.get_metrics(), dict[str, float])
        assert_type(runners.healthy_runner_ids, list[int])
