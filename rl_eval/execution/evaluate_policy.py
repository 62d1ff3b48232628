"""``evaluate_policy`` with the signature of Stable-Baselines3's, and the whole result behind the two numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import numpy as np

from rl_eval.adapters import integration_for
from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ConfigError, EvalError
from rl_eval.execution.group import evaluate
from rl_eval.results.result import EvalResult

__all__ = ["PolicyEvaluation", "evaluate_policy"]

_MONITORS: Final = ("stable_baselines3.common.monitor:",)
"""Wrappers that change nothing that an episode is made of."""

_NOT_OF_THE_EPISODES: Final = ("render_mode", "num_envs", "vectorization_mode", "vector_kwargs")
"""Arguments of ``gymnasium.make`` and ``make_vec`` that are about watching and layout."""


@final
class PolicyEvaluation(tuple[Any, Any]):  # noqa: SLOT001 - a tuple with slots can hold nothing else.
    """Pair of numbers, or of lists, with the result that they are from.

    Args:
        first: Mean return, or the return of each episode.
        second: Standard deviation, or the length of each episode.
        result: All numbers, records and provenance.
    """

    result: EvalResult

    def __new__(cls, first: Any, second: Any, result: EvalResult) -> PolicyEvaluation:
        """Make the pair."""
        pair = super().__new__(cls, (first, second))
        pair.result = result
        return pair


def evaluate_policy(
    model: Any,
    env: Any,
    n_eval_episodes: int = 10,
    deterministic: bool = True,
    *,
    return_episode_rewards: bool = False,
    seed: int = 0,
) -> PolicyEvaluation:
    """Evaluate a policy in this process, as ``stable_baselines3.common.evaluation.evaluate_policy`` does.

    The episodes are those of the plan with this seed, so equal calls give equal numbers, however many environments
    ``env`` has. ``env`` itself is neither stepped nor closed: environments like it are built.

    Args:
        model: A model of Stable-Baselines3, or any policy that :func:`rl_eval.evaluate` takes. If ``env`` has a
            ``VecNormalize``, its statistics are used.
        env: A gymnasium id, ``"module:attr"``, a function or class that builds an environment; or an environment, or a
            vectorized one, that was made by ``gymnasium.make``.
        n_eval_episodes: Episodes to run.
        deterministic: Take the most likely actions, instead of sampling.
        return_episode_rewards: Return the lists of returns and lengths, instead of mean and standard deviation.
        seed: Root seed of the plan.

    Returns:
        ``(mean, std)``, the standard deviation dividing by n as Stable-Baselines3's does, or ``(returns, lengths)``;
        the :class:`~rl_eval.EvalResult` is its ``result``.

    Raises:
        ConfigError: The environment cannot be built again, or the policy cannot act.
        EvalError: An episode failed on all attempts.

    Example:
        >>> mean, std = evaluate_policy(lambda observations: [0] * len(observations), "CartPole-v1")
        >>> 8 < mean < 11
        True
    """
    config = (
        EvalConfig()
        .environment(**_environment(env))
        .policy(deterministic=deterministic)
        .evaluation(num_episodes=n_eval_episodes, seed=seed)
    )
    adapt = integration_for(model, "for_environment")
    result = evaluate(config, model if adapt is None else adapt(model, env))
    if result.status != "complete":
        raise EvalError(f"{result.reason}. evaluate(config, model) returns a result in such a case, too")
    rows = result.counted_rows
    if return_episode_rewards:
        return PolicyEvaluation(rows["episode_return"].tolist(), rows["length"].tolist(), result)
    return PolicyEvaluation(result.mean_return, float(np.std(rows["episode_return"])), result)


def _environment(env: Any) -> dict[str, Any]:
    """Return the config of an environment."""
    if isinstance(env, str) or not hasattr(env, "reset") or isinstance(env, type):
        return {"env": env}
    if (spec := _spec_of(env)) is None:
        raise ConfigError(
            f"env is a live {type(env).__name__} that gymnasium.make has not made: give a function that builds one, "
            "such as lambda: MyEnv()"
        )
    kwargs = {name: value for name, value in spec.kwargs.items() if name not in _NOT_OF_THE_EPISODES}
    if spec.max_episode_steps is not None:
        kwargs["max_episode_steps"] = spec.max_episode_steps
    return {"env": spec.id, "env_kwargs": kwargs, "wrappers": tuple(_wrappers(spec))}


def _spec_of(env: Any) -> Any:
    """Return the spec of an environment, or of the first one of several."""
    of_each: Callable[[str], Any] | None = getattr(env, "get_attr", None)
    if of_each is None:
        return getattr(env, "spec", None)
    found = list(of_each("spec"))
    return found[0] if found else None


def _wrappers(spec: Any) -> list[Mapping[str, Any]]:
    wrappers = [one for one in spec.additional_wrappers if not one.entry_point.startswith(_MONITORS)]
    for one in wrappers:
        if one.kwargs is None:
            raise ConfigError(
                f"env has a wrapper {one.name}, which does not tell its arguments: give a function that builds the "
                "environment with it"
            )
    return [{"wrapper": one.entry_point, **one.kwargs} for one in wrappers]
