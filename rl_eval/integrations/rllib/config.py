"""Translation of an RLlib AlgorithmConfig to an EvalConfig. A setting without a translation is an error."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.env.env_context import EnvContext as RLlibEnvContext
from ray.rllib.utils import force_list
from ray.tune.registry import ENV_CREATOR, _global_registry

from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ConfigError
from rl_eval.integrations.rllib.observations import NoEpisode
from rl_eval.integrations.rllib.policy import check_separate
from rl_eval.protocols import EnvContext
from rl_eval.records.episode import EpisodeSpec

_logger: Final = logging.getLogger(__name__)
_DEFAULTS: Final = AlgorithmConfig()

_OVERRIDES: Final = frozenset(
    {
        "custom_resources_per_env_runner",
        "env",
        "env_config",
        "explore",
        "gamma",
        "ignore_env_runner_failures",
        "max_num_env_runner_restarts",
        "metrics_num_episodes_for_smoothing",
        "num_cpus_per_env_runner",
        "num_envs_per_env_runner",
        "num_gpus_per_env_runner",
        "policy_mapping_fn",
        "restart_failed_env_runners",
        "restart_failed_sub_environments",
        "seed",
    }
)
"""Keys of ``evaluation_config`` that are translated, or that cannot change the result."""

_SET_BY_RLLIB: Final = frozenset(
    {"batch_mode", "evaluation_config", "in_evaluation", "num_env_runners", "rollout_fragment_length"}
)
"""Keys that RLlib itself changes in the config of its evaluation runners."""

_SPACES: Final = ("action_space", "observation_space")

_NOT_HONOURED: Final = (
    *("evaluation_unhealthy_workers_timeout_s", "off_policy_estimation_methods"),
    *("offline_evaluation_interval", "env_runner_cls", "render_env"),
)
_SECTIONS: Final = ("environment", "env_runners", "evaluation", "fault_tolerance")
"""Methods of AlgorithmConfig whose arguments describe environments and their runners."""
_TRANSLATED: Final = frozenset(
    {
        *("env", "env_config", "explore", "num_envs_per_env_runner", "num_cpus_per_env_runner"),
        *("num_gpus_per_env_runner", "custom_resources_per_env_runner", "evaluation_num_env_runners"),
        *("evaluation_duration", "evaluation_sample_timeout_s", "restart_failed_env_runners"),
        "max_num_env_runner_restarts",
    }
)
_OF_THE_POLICY: Final = frozenset(
    {
        *("normalize_actions", "clip_actions", "env_to_module_connector", "module_to_env_connector"),
        "add_default_connectors_to_env_to_module_pipeline",
        "add_default_connectors_to_module_to_env_pipeline",
        *("episode_lookback_horizon", "action_mask_key", *_SPACES),
    }
)
_OF_THE_TRAINING: Final = frozenset(
    {
        *("create_local_env_runner", "create_env_on_local_worker", "sample_timeout_s", "evaluation_interval"),
        *("custom_evaluation_function", *_SET_BY_RLLIB),
    }
)
"""Keys that RLlib's evaluation does not read, or that work as before."""
_CHECKED: Final = frozenset(
    {
        *("evaluation_duration_unit", "evaluation_parallel_to_training"),
        *("evaluation_error_after_n_consecutive_skips", *_NOT_HONOURED),
    }
)
"""Keys that :func:`_refusals` rejects if they have an unsupported value."""

_RUNNER_CALLBACKS: Final = (
    "on_environment_created",
    "on_episode_created",
    "on_episode_end",
    "on_episode_start",
    "on_episode_step",
    "on_sample_end",
)
"""Callbacks that RLlib calls inside its evaluation runners."""


def eval_config_of(config: AlgorithmConfig, ignore: Collection[str] = ()) -> EvalConfig:
    """Translate the evaluation settings of an AlgorithmConfig.

    The result has no policy. :func:`evaluation_function` takes the policy from the Algorithm. Otherwise, set the policy
    with ``.policy(...)``, or pass the Algorithm to :func:`rl_eval.evaluate`. With several agents, the result names one
    policy per RLModule and contains RLlib's ``policy_mapping_fn``. If the ``policy_mapping_fn`` reads its episode
    argument, an error is raised. You can change every setting of the result.

    A warning names the other arguments of ``environment()``, ``env_runners()``, ``evaluation()`` and
    ``fault_tolerance()`` that are set and have no counterpart.

    Args:
        config: Config with ``environment()``, ``env_runners()`` and ``evaluation()`` as for RLlib's own evaluation.
        ignore: Unsupported keys that are left out without an error or a warning.

    Raises:
        ConfigError: A setting is not supported; the message names its key.
    """
    for key, why in _refusals(config):
        if key not in ignore:
            raise ConfigError(
                f"{key} {why}", key=key, fix=f"To leave this key out, call eval_config_of(config, ignore=[{key!r}])."
            )
    evaluated = config if config.in_evaluation else config.get_evaluation_config_object()
    if dropped := [key for key in _dropped(evaluated) if key not in ignore]:
        _logger.warning("eval_config_of leaves out settings without a counterpart in rl_eval: %s", ", ".join(dropped))
    ours = EvalConfig()
    ours.environment(_environment(evaluated), env_kwargs=dict(evaluated.env_config))
    ours.policy(deterministic=not evaluated.explore, actions="none")
    if evaluated.is_multi_agent:
        ours.policy(
            policies={name: {} for name in module_ids(evaluated)},
            policy_mapping_fn=_Mapping(evaluated.policy_mapping_fn),
        )
    ours.evaluation(num_episodes=config.evaluation_duration, seed=evaluated.seed or 0, gamma=evaluated.gamma)
    ours.runners(num_runners=config.evaluation_num_env_runners, num_envs_per_runner=evaluated.num_envs_per_env_runner)
    if config.evaluation_num_env_runners:
        ours.runners(
            num_cpus_per_runner=evaluated.num_cpus_per_env_runner,
            num_gpus_per_runner=evaluated.num_gpus_per_env_runner,
            custom_resources_per_runner=evaluated.custom_resources_per_env_runner or {},
        )
        if evaluated.num_gpus_per_env_runner:
            ours.policy(device="cuda")
    if config.evaluation_sample_timeout_s != _DEFAULTS.evaluation_sample_timeout_s:
        # RLlib documents it as the time for a complete episode.
        ours.fault_tolerance(episode_timeout_s=config.evaluation_sample_timeout_s)
    if not evaluated.restart_failed_env_runners:
        ours.fault_tolerance(max_runner_restarts=0)
    elif evaluated.max_num_env_runner_restarts != _DEFAULTS.max_num_env_runner_restarts:
        ours.fault_tolerance(max_runner_restarts=evaluated.max_num_env_runner_restarts)
    return ours


def _refusals(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield a pair for each unsupported setting: its key, and the text after the key in the error message."""
    if not config.enable_env_runner_and_connector_v2:
        yield "enable_env_runner_and_connector_v2", "is False: rl_eval evaluates RLModules of the new API stack"
    if config.is_multi_agent and isinstance(config.rl_module_spec, MultiRLModuleSpec):
        try:
            check_separate(config.rl_module_spec.multi_rl_module_class)
        except ConfigError as error:
            yield "rl_module_spec", f"is not supported: {error}"
    if config.evaluation_duration == "auto":
        yield "evaluation_duration", "is 'auto', which depends on wall-clock time: set a number of episodes"
    elif config.evaluation_duration_unit != "episodes":
        yield "evaluation_duration_unit", f"is {config.evaluation_duration_unit!r}, which cuts episodes: use 'episodes'"
    if config.evaluation_parallel_to_training:
        yield "evaluation_parallel_to_training", "is True: use evaluation_function(..., parallel=True) instead"
    # Some versions of RLlib do not have these keys.
    if getattr(config, "evaluation_error_after_n_consecutive_skips", None) not in (None, 1):
        yield "evaluation_error_after_n_consecutive_skips", "is above 1, but rl_eval raises at the first failure"
    for key in _NOT_HONOURED:
        if (value := getattr(config, key, None)) != getattr(_DEFAULTS, key, None):
            yield key, f"is {value!r}, which rl_eval does not support"
    for key in sorted(_overrides(config) - _OVERRIDES):
        yield f"evaluation_config.{key}", "is set and changes RLlib's evaluation, but rl_eval does not support it"
    yield from _refused_callbacks(config)


def _dropped(evaluated: AlgorithmConfig) -> list[str]:
    """Return the keys that are set, and that the translation does not use."""
    arguments = {name for section in _SECTIONS for name in inspect.signature(getattr(evaluated, section)).parameters}
    used = _TRANSLATED | _OF_THE_POLICY | _OF_THE_TRAINING | _CHECKED
    mine, default = vars(evaluated), vars(_DEFAULTS)
    return [key for key in sorted(arguments & mine.keys() - used) if mine[key] != default.get(key)]


def _refused_callbacks(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    classes = force_list(config.callbacks_class)
    for name in _RUNNER_CALLBACKS:
        overridden = any(getattr(cls, name, None) is not getattr(RLlibCallback, name) for cls in classes)
        if overridden or getattr(config, f"callbacks_{name}", None):
            yield f"callbacks.{name}", "is set, but rl_eval's runners do not call RLlib's callbacks"


def module_ids(config: AlgorithmConfig) -> tuple[str, ...]:
    """Return the ids of the RLModules that choose actions, sorted. The config must have several agents."""
    spec = config.rl_module_spec
    specs = spec.rl_module_specs if isinstance(spec, MultiRLModuleSpec) else {}
    known = {*config.policies, *specs}
    return tuple(sorted(name for name in known if name not in specs or not specs[name].learner_only))


def _overrides(config: AlgorithmConfig) -> set[str]:
    """Return the keys of ``evaluation_config`` whose values differ from those of the training.

    ``evaluation_config`` is a dict, or a whole AlgorithmConfig.
    """
    overrides = config.evaluation_config or {}
    theirs = overrides.to_dict() if isinstance(overrides, AlgorithmConfig) else overrides
    mine = config.to_dict()
    changed = {key for key, value in theirs.items() if key not in mine or mine[key] != value} - _SET_BY_RLLIB
    # If a space is None, RLlib uses the environment's space, as rl_eval does.
    return {key for key in changed if key not in _SPACES or theirs[key] is not None}


def _environment(evaluated: AlgorithmConfig) -> Any:
    env = evaluated.env
    if env is None:
        problem = "the AlgorithmConfig has no environment"
        raise ConfigError(problem, key="env", fix="Set the environment with config.environment(env=...).")
    if isinstance(env, str) and _global_registry.contains(ENV_CREATOR, env):
        return _Creator(_global_registry.get(ENV_CREATOR, env), env)
    return _Creator(env, getattr(env, "__qualname__", type(env).__qualname__)) if callable(env) else env


class _Creator:
    """Factory of environments that calls the user's callable with RLlib's context, as RLlib's runners do.

    The callable is pickled by value, so runners do not need RLlib's registry. Results show the name of the callable.
    """

    def __init__(self, creator: Callable[[Any], Any], name: str) -> None:
        self._creator = creator
        self.__module__ = getattr(creator, "__module__", type(creator).__module__)
        self.__qualname__ = name

    def __call__(self, context: EnvContext) -> Any:
        return self._creator(
            RLlibEnvContext(
                dict(context),
                worker_index=context.runner_index + 1,
                vector_index=context.lane_index,
                num_workers=context.num_runners,
            )
        )


class _Mapping:
    """Wrapper of RLlib's ``policy_mapping_fn``. In place of RLlib's episode, it passes a :class:`NoEpisode`."""

    def __init__(self, function: Callable[[Any, Any], str]) -> None:
        self._function = function
        self.__module__ = getattr(function, "__module__", type(function).__module__)
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, agent_id: Any, spec: EpisodeSpec) -> str:
        return self._function(agent_id, _NO_EPISODE)


_NO_EPISODE: Final = NoEpisode(
    "RLlib's policy_mapping_fn",
    "Call .policy(policy_mapping_fn=function) on rl_eval's config. The function gets agent_id and spec, which has "
    "the episode's index.",
)
