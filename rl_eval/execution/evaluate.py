"""Evaluations in one call: ``evaluate``, and ``evaluate_policy`` with the signature of Stable-Baselines3."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import tree

from rl_eval.adapters import integration_for
from rl_eval.config.builder import EvalConfig, checked_settings, settings_of
from rl_eval.config.settings import SECTIONS, EvalSettings
from rl_eval.errors import ConfigError, EvalError, checked_keywords
from rl_eval.execution.environment_objects import environment_like, is_environment_object
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.results.result import EvalResult

_logger: Final = logging.getLogger(__name__)

_VECTOR_MODES: Final = ("async", "vector_entry_point")
"""Modes of ``make_vec`` that single environments in one process do not replace."""
_A_SETTING: Final = re.compile(rf"\b(?:{'|'.join(SECTIONS)})\.\w+")
"""Name of a setting, such as ``policy.device``."""


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


@checked_settings
def evaluate(
    config: Any,
    policy: Any = None,
    *,
    output: str | os.PathLike[str] | None = None,
    num_episodes: int | None = None,
    seed: int | None = None,
    max_episode_steps: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    return_bounds: tuple[float, float] | None = None,
    info_keys: Sequence[str] | None = None,
    success_key: str | None = None,
    deterministic: bool | None = None,
    num_runners: int | None = None,
    num_envs_per_runner: int | None = None,
    accept_code_change: bool = False,
) -> EvalResult:
    """Evaluate once: start runners, run the plan, stop the runners.

    With ``num_runners=0`` everything runs in the calling thread, so that environments can use the main thread. An
    environment that never returns from a call then blocks the caller. An incomplete result logs a warning.

    Args:
        config: An environment, or the complete configuration of the evaluation. An environment is a gymnasium id,
            ``"module:attr"``, a function or class that builds one, or an object of ``gymnasium.make`` or ``make_vec``.
            An object is not stepped or closed: similar environments are built, as for :func:`evaluate_policy`.
        policy: Policy object, used instead of the configured policy and its weights.
        output: Folder or URI of the run, to start or to continue; see :meth:`EvalRunnerGroup.submit`. By default, the
            result is only returned.
        num_episodes: Number of episodes; 100 unless configured.
        seed: Root seed of all episodes; 0 unless configured.
        max_episode_steps: Step limit of an episode, in addition to the environment's own limit; none unless configured.
        env_kwargs: Arguments of the environment, for an id, a function or a class.
        return_bounds: Lowest and highest possible return of an episode, for intervals near a bound.
        info_keys: Keys of the infos whose last values the records contain.
        success_key: Key of the infos that reports success; ``is_success`` or ``success`` unless configured.
        deterministic: Whether to take the most likely actions instead of sampling; True unless configured.
        num_runners: Number of Ray actors; 0 unless configured. With 0, everything runs in this process, without Ray.
        num_envs_per_runner: Number of environments per runner; 8 unless configured.
        accept_code_change: Whether to continue a log that other code wrote; see :meth:`EvalRunnerGroup.submit`.

    Raises:
        ConfigError: The configuration is invalid, a keyword is unknown, or an environment object cannot be built again.
        RunnerStartError: No runner started in time.
        LogMismatch: The log belongs to another plan, policy, environment or code.
        LogOwned: Another process is writing the log.
        PolicyError, EnvError: All attempts failed alike before their first step; see :meth:`EvalRunnerGroup.evaluate`.

    Example:
        >>> evaluate("CartPole-v1", lambda observations: [0] * len(observations), num_episodes=10).mean_return
        9.5
    """
    _check_order("evaluate(environment, policy)", config, policy)
    evaluation: dict[str, Any] = {"num_episodes": num_episodes, "seed": seed, "max_episode_steps": max_episode_steps}
    evaluation |= {"return_bounds": return_bounds, "info_keys": info_keys, "success_key": success_key}
    given: dict[str, dict[str, Any]] = {
        "environment": {"env_kwargs": env_kwargs},
        "policy": {"deterministic": deterministic},
        "runners": {"num_runners": num_runners, "num_envs_per_runner": num_envs_per_runner},
        "evaluation": evaluation,
    }
    given = {name: {key: value for key, value in keys.items() if value is not None} for name, keys in given.items()}
    how = {"output": output, "accept_code_change": accept_code_change}
    if is_environment_object(config):
        if env_kwargs is not None:
            fix = "Pass them to the function that builds env, or pass its id or class."
            raise ConfigError("env_kwargs does not change an environment object", key="env_kwargs", fix=fix)
        like, policy = _like(config, policy)
        result = _evaluated(settings_of(like, **given), policy, config, **how)
    else:
        result = _result(settings_of(config, **given), policy, **how)
    if result.status != "complete":
        _logger.warning("the evaluation is %s: %s", result.status, result.reason)
    return result


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
    environments, and slots can be reset one by one. A model that needs action masks gets those of the environment.

    Args:
        model: A model of Stable-Baselines3, or any policy that :func:`rl_eval.evaluate` takes. If ``env`` has a
            ``VecNormalize``, its statistics are used.
        env: A gymnasium id, ``"module:attr"``, a function or class that builds an environment, or an environment built
            by ``gymnasium.make`` or ``make_vec``. An environment that gymnasium cannot build again is an error, for
            example if an attribute was set on it.
        n_eval_episodes: Number of episodes.
        deterministic: Whether to take the most likely actions, instead of sampling.
        render: Must be False. Use ``rl-eval replay --render human`` or ``--video`` to see episodes of a run.
        callback: Function that is called after every step with two dicts, as in Stable-Baselines3. The first contains
            ``model``, ``env`` (the environment of the episode), ``observations``, ``actions``, ``new_observations``,
            ``rewards``, ``dones``, ``infos``, ``reward``, ``done`` and ``info``, as for one environment (``i`` is 0).
            The second is empty. An error of the function is raised after the last episode.
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
    if render:
        fix = "Show episodes with rl-eval replay."
        raise ConfigError("evaluate_policy does not render", key="render", value=render, fix=fix)
    _check_order("evaluate_policy(model, env)", env, model)
    observer = None if callback is None else _Callback(callback, model)
    config, policy = _like(env, model)
    config.policy(deterministic=deterministic)
    config.evaluation(num_episodes=n_eval_episodes, seed=seed, observers=() if observer is None else (observer,))
    try:
        result = _evaluated(config.build(), policy, env)
    except ConfigError as error:
        if not _A_SETTING.search(error.fix):
            raise
        fix = f"{error.fix} evaluate_policy has no such argument: use EvalConfig and evaluate(config, model)."
        raise ConfigError(error.problem, key=error.key, value=error.value, fix=fix) from error
    if observer is not None and observer.error is not None:
        raise observer.error
    if result.status != "complete":
        fix = "To get the result of the other episodes, call evaluate(config, model)."
        raise EvalError(result.reason, key="status", value=result.status, fix=fix)
    if reward_threshold is not None and not result.mean_return > reward_threshold:
        raise AssertionError(f"the mean return {result.mean_return:.2f} does not exceed {reward_threshold:.2f}")
    rows = result.counted_rows
    if return_episode_rewards:
        return PolicyEvaluation(rows["episode_return"].tolist(), rows["length"].tolist(), result)
    return PolicyEvaluation(result.mean_return, float(np.std(rows["episode_return"])), result)


def _check_order(call: str, env: Any, policy: Any) -> None:
    """Check that environment and policy are not swapped.

    Raises:
        ConfigError: The policy is an environment, and the environment is not.
    """
    if _is_environment(policy) and not _is_environment(env):
        name = policy if isinstance(policy, str) else type(policy).__name__
        problem = f"the policy is the environment {name!r}, so the arguments are swapped"
        raise ConfigError(problem, key="policy", value=name, fix=f"Call {call}.")


def _is_environment(given: Any) -> bool:
    if isinstance(given, str):
        return given.rpartition(":")[2] in gym.registry
    if isinstance(given, type):
        return issubclass(given, gym.Env)
    # Policies and algorithms may have some of these, too.
    spaces = hasattr(given, "action_space") or hasattr(given, "action_spec")
    return is_environment_object(given) and spaces and hasattr(given, "step")


def _like(env: Any, policy: Any) -> tuple[EvalConfig, Any]:
    """Return a config for environments like ``env``, and the policy for them."""
    adapt, needs = (integration_for(policy, name) for name in ("for_environment", "environment_settings"))
    config = EvalConfig().environment(
        **environment_like(env, of_the_model=adapt is not None), **(needs(policy) if needs else {})
    )
    return config, policy if adapt is None else adapt(policy, env)


def _evaluated(settings: EvalSettings, policy: Any, env: Any, **how: Any) -> EvalResult:
    """Evaluate in a vector environment if ``make_vec`` built ``env``, otherwise in single environments."""
    mode = env.spec.kwargs.get("vectorization_mode") if isinstance(env, gym.vector.VectorEnv) and env.spec else None
    section = settings.environment
    if mode in _VECTOR_MODES and not section.wrappers and not section.action_masks:
        environment = {"env_kwargs": {**section.env_kwargs, "vectorization_mode": mode}}
        runners = {"runner": "batched", "num_envs_per_runner": env.num_envs}
        try:
            return _result(settings_of(settings, environment=environment, runners=runners), policy, **how)
        except ConfigError as error:
            if error.key != "environment.env":  # Otherwise its slots cannot be reset one by one.
                raise
            result, note = _result(settings, policy, **how), f"the episodes ran in single environments, because {error}"
            result.provenance["notes"] = [*result.provenance.get("notes", []), note]
            return result
    return _result(settings, policy, **how)


def _result(settings: EvalSettings, policy: Any, **how: Any) -> EvalResult:
    with EvalRunnerGroup(settings, policy, threaded=settings.runners.num_runners > 0) as group:
        return group.evaluate(**how)


@final
class _Callback:
    """Factory of observers that call a callback of Stable-Baselines3's ``evaluate_policy``.

    Args:
        callback: The callback.
        model: The evaluated model.
    """

    def __init__(self, callback: Callable[[dict[str, Any], dict[str, Any]], object], model: Any) -> None:
        self._callback = callback
        self._model = model
        self.error: Exception | None = None
        """First error of the callback, which is not called again."""

    def __call__(self, env: Any) -> _StepCaller:
        return _StepCaller(self, env)

    def call(self, values: dict[str, Any]) -> None:
        """Call the callback after a step."""
        if self.error is None:
            try:
                self._callback({"model": self._model, "i": 0, "n_envs": 1, **values}, {})
            except Exception as error:
                self.error = error


@final
class _StepCaller:
    """Observer of one environment that calls a callback after each step."""

    def __init__(self, callback: _Callback, env: Any) -> None:
        self._callback = callback
        self._env = env
        self._last: Any = None

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Store the first observation."""
        self._last = _one_row(observation)

    def on_step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Any,
        policy_outputs: Any,
    ) -> None:
        """Call the callback."""
        before, self._last = self._last, _one_row(observation)
        done = bool(terminated or truncated)
        self._callback.call(
            {
                "env": self._env,
                "observations": before,
                "actions": np.asarray(action)[None],
                "new_observations": self._last,
                "rewards": np.array([reward]),
                "dones": np.array([done]),
                "infos": [info],
                "reward": reward,
                "done": done,
                "info": info,
            }
        )

    def on_episode_end(self, record: EpisodeRecord) -> None:
        """Return no artifact."""


def _one_row(observation: Any) -> Any:
    """Return a copy of an observation as a batch of one, because the environment may reuse its arrays."""
    return tree.map_structure(lambda leaf: np.array(leaf)[None], copy.copy(observation))
