"""``evaluate_policy`` with the signature of Stable-Baselines3, which also returns the complete result."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import gymnasium as gym
import numpy as np

from rl_eval.adapters import integration_for, integrations, learning_wrappers
from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ConfigError, EvalError, checked_keywords
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.records.plain import plain
from rl_eval.results.result import EvalResult

_ADDRESS: Final = re.compile(" at 0x[0-9a-f]+")
_NOT_OF_THE_EPISODES: Final = ("render_mode", "num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments of ``gymnasium.make`` and ``make_vec`` that do not change episodes."""
_VECTOR_MODES: Final = ("async", "vector_entry_point")
"""Modes of ``make_vec`` that single environments in one process do not replace."""


@final
class PolicyEvaluation(tuple[Any, Any]):  # noqa: SLOT001 - a tuple with slots cannot have attributes.
    """Pair of numbers or lists, with the complete result.

    Args:
        first: Mean return, or the return of each episode.
        second: Standard deviation, or the length of each episode.
        result: All numbers, records and provenance.
    """

    result: EvalResult

    def __new__(cls, first: Any, second: Any, result: EvalResult) -> PolicyEvaluation:
        """Create the pair."""
        pair = super().__new__(cls, (first, second))
        pair.result = result
        return pair


@checked_keywords
def evaluate_policy(
    model: Any,
    env: Any,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    render: bool = False,
    callback: Any = None,
    reward_threshold: float | None = None,
    return_episode_rewards: bool = False,
    warn: bool = True,
    *,
    seed: int = 0,
) -> PolicyEvaluation:
    """Evaluate a policy in this process, as ``stable_baselines3.common.evaluation.evaluate_policy`` does.

    The episodes are those of the plan with this seed, so equal calls return equal numbers for any number of
    environments in ``env``. ``env`` itself is not stepped or closed, because similar environments are built. A vector
    environment is built if ``make_vec`` built ``env`` in another mode than ``sync``, without wrappers of single
    environments, and slots can be reset one by one.

    Args:
        model: A model of Stable-Baselines3, or any policy that :func:`rl_eval.evaluate` takes. If ``env`` has a
            ``VecNormalize``, its statistics are used.
        env: A gymnasium id, ``"module:attr"``, a function or class that builds an environment, or an environment built
            by ``gymnasium.make`` or ``make_vec``. Attributes that were set on a built environment are ignored.
        n_eval_episodes: Number of episodes.
        deterministic: Whether to take the most likely actions, instead of sampling.
        render: Must be False. Use ``rl-eval replay --render human`` or ``--video`` to see episodes of a run.
        callback: Must be None. An observer in ``evaluation.observers`` sees every step.
        reward_threshold: Mean return that must be exceeded; None for no check.
        return_episode_rewards: Whether to return the lists of returns and lengths, instead of mean and standard
            deviation.
        warn: Not used, because episodes do not depend on a ``Monitor``.
        seed: Root seed of the plan.

    Returns:
        ``(mean, std)`` or ``(returns, lengths)``. As in Stable-Baselines3, the standard deviation has the divisor n.
        The attribute ``result`` of this pair is the :class:`~rl_eval.EvalResult`.

    Raises:
        ConfigError: The environment cannot be built again, or the policy cannot act.
        EvalError: An episode failed on all attempts.
        AssertionError: The mean return does not exceed ``reward_threshold``.

    Example:
        >>> mean, std = evaluate_policy(lambda observations: [0] * len(observations), "CartPole-v1")
        >>> 8 < mean < 11
        True
    """
    if render or callback is not None:
        problem = "evaluate_policy does not render or call a callback"
        fix = "Show episodes with rl-eval replay, and observe steps with evaluation.observers."
        raise ConfigError(problem, key="render" if render else "callback", value=render or callback, fix=fix)
    adapt = integration_for(model, "for_environment")
    config = (
        EvalConfig()
        .environment(**environment_like(env, of_the_model=adapt is not None))
        .policy(deterministic=deterministic)
        .evaluation(num_episodes=n_eval_episodes, seed=seed)
    )
    result = _evaluated(config, model if adapt is None else adapt(model, env), env)
    if result.status != "complete":
        fix = "To get the result of the other episodes, call evaluate(config, model)."
        raise EvalError(result.reason, key="status", value=result.status, fix=fix)
    if reward_threshold is not None and not result.mean_return > reward_threshold:
        raise AssertionError(f"the mean return {result.mean_return:.2f} does not exceed {reward_threshold:.2f}")
    rows = result.counted_rows
    if return_episode_rewards:
        return PolicyEvaluation(rows["episode_return"].tolist(), rows["length"].tolist(), result)
    return PolicyEvaluation(result.mean_return, float(np.std(rows["episode_return"])), result)


def _evaluated(config: EvalConfig, policy: Any, env: Any) -> EvalResult:
    """Evaluate in a vector environment if ``make_vec`` built ``env``, otherwise in single environments."""
    mode = env.spec.kwargs.get("vectorization_mode") if isinstance(env, gym.vector.VectorEnv) and env.spec else None
    section = config.build().environment
    if mode in _VECTOR_MODES and not section.wrappers:
        kwargs = {**section.env_kwargs, "vectorization_mode": mode}
        batched = config.copy().environment(env_kwargs=kwargs)
        try:
            return _result(batched.runners(runner="batched", num_envs_per_runner=env.num_envs), policy)
        except ConfigError as error:
            if error.key != "environment.env":  # Otherwise its slots cannot be reset one by one.
                raise
            result, note = _result(config, policy), f"the episodes ran in single environments, because {error}"
            result.provenance["notes"] = [*result.provenance.get("notes", []), note]
            return result
    return _result(config, policy)


def _result(config: EvalConfig, policy: Any) -> EvalResult:
    with EvalRunnerGroup(config, policy, threaded=False) as group:
        return group.evaluate()


def environment_like(env: Any, *, of_the_model: bool) -> dict[str, Any]:
    """Return the arguments of ``EvalConfig.environment`` for environments like ``env``.

    Args:
        env: The environment, as for :func:`evaluate_policy`.
        of_the_model: Whether to leave out wrappers that the integration of the model replaces.

    Raises:
        ConfigError: The environment cannot be built again.
    """
    harmless: tuple[str, ...] = ()
    for one in integrations():
        harmless += one.watching_wrappers + (one.modelled_wrappers if of_the_model else ())
    if isinstance(env, str) or not hasattr(env, "reset") or isinstance(env, type):
        return {"env": env}
    inner = _without_wrappers(env, harmless)
    described = [_described(env, spec, harmless) for spec in _specs_of(inner)]
    texts = [_ADDRESS.sub("", str(plain(one))) for one in described]  # Each environment may have its own functions.
    for number, text in enumerate(texts):
        if text != texts[0]:
            problem = f"env has different environments: number 0 is {texts[0]}, and number {number} is {text}"
            raise ConfigError(problem, key="env", value=text, fix="Evaluate the environments one after the other.")
    return described[0]


def _without_wrappers(env: Any, harmless: tuple[str, ...]) -> Any:
    """Return the vectorized environment inside its wrappers."""
    while (inner := getattr(env, "venv", env.env if isinstance(env, gym.vector.VectorWrapper) else None)) is not None:
        wrapper = type(env)
        if not f"{wrapper.__module__}:{wrapper.__qualname__}".startswith(harmless):
            problem = (
                f"env has a {wrapper.__name__} around several environments, but an episode here has a single "
                "environment"
            )
            fix = "Pass a function that builds a single environment, with a wrapper for single environments."
            raise ConfigError(problem, key="env", value=wrapper.__name__, fix=fix)
        env = inner
    return env


def _described(env: Any, spec: Any, harmless: tuple[str, ...]) -> dict[str, Any]:
    if spec is None:
        problem = f"env is a {type(env).__name__} object that gymnasium.make did not build"
        fix = "Pass a function that builds the environment, such as lambda: MyEnv()."
        raise ConfigError(problem, key="env", value=type(env).__name__, fix=fix)
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in _NOT_OF_THE_EPISODES}
    if spec.max_episode_steps is not None:
        kwargs["max_episode_steps"] = spec.max_episode_steps
    return {"env": spec.id, "env_kwargs": kwargs, "wrappers": tuple(_wrappers(spec, harmless))}


def _specs_of(env: Any) -> list[Any]:
    """Return the ``spec`` of an environment in a list; for a vectorized environment, the ``spec`` of each slot."""
    of_each: Callable[[str], Any] | None = getattr(env, "get_attr", None)
    return [getattr(env, "spec", None)] if of_each is None else list(of_each("spec"))


def _wrappers(spec: Any, harmless: tuple[str, ...]) -> list[Mapping[str, Any]]:
    wrappers = [one for one in spec.additional_wrappers if not one.entry_point.startswith(harmless)]
    for one in wrappers:
        if one.entry_point in learning_wrappers():
            problem = f"env has a wrapper {one.name}, whose statistics a new environment does not have"
            fix = "Pass a function that builds the environment with these statistics, or make them part of the policy."
            raise ConfigError(problem, key="env", value=one.name, fix=fix)
        if one.kwargs is None:
            problem = f"env has a wrapper {one.name}, which does not record its arguments"
            fix = "Pass a function that builds the environment with this wrapper."
            raise ConfigError(problem, key="env", value=one.name, fix=fix)
    return [{"wrapper": one.entry_point, **one.kwargs} for one in wrappers]
