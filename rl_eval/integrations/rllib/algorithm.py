"""Policies and weights of a running RLlib Algorithm, and of its checkpoint folders."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline
from ray.rllib.core import COMPONENT_ENV_TO_MODULE_CONNECTOR, DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, WeightsError, nearest
from rl_eval.integrations.policy_files import reading
from rl_eval.integrations.rllib.config import module_ids
from rl_eval.integrations.rllib.observations import FILTERS, filter_tensors
from rl_eval.integrations.rllib.policy import Pipelines, RLModulePolicy, check_separate, check_spaces
from rl_eval.policies import random_state_kept

_FETCH_TIMEOUT_S: Final = 60.0
_PREFIX: Final = f"{FILTERS}."


class VersionedWeights(NamedTuple):
    """Weights of one moment, and RLlib's number for it."""

    tensors: dict[str, Any]
    """Copies by their names in :attr:`RLModulePolicy.module`; with several agents such dicts by policy."""
    weights_seq_no: int


def portable(value: Any) -> RLModulePolicy:
    """Return an Algorithm's policy with its present weights, which shares nothing with the Algorithm.

    Args:
        value: An Algorithm of the new API stack with one agent, or what :func:`policy_of_module` returned.

    Raises:
        ConfigError: It is neither, such as a bare RLModule, or has connectors that rl_eval cannot apply.
        WeightsError: A MeanStdFilter has seen nothing yet.
    """
    if isinstance(value, Algorithm):
        return _policy_of(value)
    several = " of each policy, in a mapping of ids" if isinstance(value, MultiRLModule) else ""
    raise ConfigError(
        f"a {type(value).__name__} alone does not show its connectors, such as a MeanStdFilter: give the Algorithm or "
        f"rllib:CHECKPOINT, or rl_eval.integrations.rllib.policy_of_module(rl_module){several} if they are RLlib's own"
    )


def as_policy(
    value: Any, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> RLModulePolicy:
    """Return the policy of an Algorithm or RLModule, for an environment with these spaces.

    Raises:
        ConfigError: The spaces are not those that it was trained with.
    """
    if isinstance(value, Algorithm):
        check_spaces("the Algorithm", value.spaces[INPUT_ENV_SINGLE_SPACES], (observation_space, action_space))
    return portable(value)


def as_policies(value: Any, names: Collection[str]) -> dict[str, RLModulePolicy]:
    """Return policies of an Algorithm of several agents by id; see :func:`portable`.

    Args:
        value: An Algorithm of the new API stack.
        names: Ids of the policies.

    Raises:
        ConfigError: It is no such Algorithm, has no such policy, or one cannot be evaluated.
        WeightsError: A MeanStdFilter has seen nothing yet.
    """
    if not isinstance(value, Algorithm) or not value.config.is_multi_agent:
        raise ConfigError(
            f"a {type(value).__name__} of RLlib is not several policies: give an Algorithm of several agents, or a "
            "mapping from the ids of policies to what policy_of_module returns"
        )
    _check_stack(value)
    known = module_ids(value.config)
    for name in names:
        if name not in known:
            raise ConfigError(f"the Algorithm has no policy {name!r}: {nearest(name, known)}")
    return _policies_of(value, names)


def as_weights(value: Any) -> dict[str, Any]:
    """Return an Algorithm's weights with the statistics of its filters, as copies; with several agents by policy.

    Raises:
        WeightsError: The object is no Algorithm, or a MeanStdFilter has seen nothing yet.
    """
    return versioned_weights(value).tensors


def versioned_weights(algorithm: Any, names: Collection[str] = ()) -> VersionedWeights:
    """Return an Algorithm's weights and their number, read from its learners together.

    Filters count what every environment runner has seen, also since RLlib last merged them: RLlib merges after it
    evaluates, so its own evaluation lags behind by one iteration.

    Args:
        algorithm: The Algorithm.
        names: Ids of policies, of an Algorithm of several agents; by default all.

    Raises:
        ConfigError: A policy cannot be evaluated.
        WeightsError: The object is no Algorithm, or a MeanStdFilter has seen nothing yet.
    """
    if not isinstance(algorithm, Algorithm):
        raise WeightsError(f"a {type(algorithm).__name__} of RLlib has no weights to send: give the Algorithm")
    state = algorithm.learner_group.get_state(components="learner/rl_module", inference_only=True)["learner"]
    pipelines = _pipelines(algorithm)
    pieces = pipelines.env_to_module.connectors
    others = _states_elsewhere(algorithm) if any(type(piece) is MeanStdFilter for piece in pieces) else []

    def tensors_of(module_id: str) -> dict[str, torch.Tensor]:
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in state["rl_module"][module_id].items()}
        filters = filter_tensors(pieces, others, pipelines.agent(module_id))
        return tensors | {_PREFIX + name: value for name, value in filters.items()}

    if not algorithm.config.is_multi_agent:
        return VersionedWeights(tensors_of(DEFAULT_MODULE_ID), int(state["weights_seq_no"]))
    chosen = names or module_ids(algorithm.config)
    return VersionedWeights({name: tensors_of(name) for name in chosen}, int(state["weights_seq_no"]))


def _policy_of(algorithm: Algorithm) -> RLModulePolicy:
    _check_stack(algorithm)
    if algorithm.config.is_multi_agent:
        raise ConfigError(
            f"the Algorithm has the policies {', '.join(module_ids(algorithm.config))}: name them in policy.policies, "
            "as eval_config_of(algorithm.config) does"
        )
    weights = versioned_weights(algorithm).tensors
    with random_state_kept():
        module = algorithm.config.get_rl_module_spec(spaces=algorithm.spaces, inference_only=True).build()
    return _with_weights(_pipelines(algorithm), DEFAULT_MODULE_ID, module, weights)


def _policies_of(algorithm: Algorithm, names: Collection[str]) -> dict[str, RLModulePolicy]:
    spec = algorithm.config.get_multi_rl_module_spec(spaces=algorithm.spaces, inference_only=True)
    check_separate(spec.multi_rl_module_class)
    weights, pipelines = versioned_weights(algorithm, names).tensors, _pipelines(algorithm)
    with random_state_kept():
        modules = {name: replace(spec.rl_module_specs[name], inference_only=True).build() for name in names}
    return {name: _with_weights(pipelines, name, modules[name], weights[name]) for name in names}


def _with_weights(pipelines: Pipelines, module_id: str, module: Any, weights: dict[str, Any]) -> RLModulePolicy:
    statistics = {name.removeprefix(_PREFIX): value for name, value in weights.items() if name.startswith(_PREFIX)}
    policy = pipelines.policy(module_id, module, statistics)
    policy.module.load_state_dict(weights)
    return policy


def _check_stack(algorithm: Algorithm) -> None:
    if not algorithm.config.enable_env_runner_and_connector_v2:
        raise ConfigError("the Algorithm uses RLlib's old API stack; rl_eval evaluates RLModules, of the new one")


def policy_of_module(module: Any) -> RLModulePolicy:
    """Return the policy of an RLModule that was trained with RLlib's default connectors; it shares nothing with it.

    These neither filter nor stack observations, and map actions from [-1, 1] onto their bounds.

    Raises:
        ConfigError: It is no module of torch.
    """
    from ray.rllib.connectors.module_to_env import NormalizeAndClipActions

    with random_state_kept():
        twin = type(module)(
            observation_space=module.observation_space,
            action_space=module.action_space,
            inference_only=module.inference_only,
            model_config=module.model_config,
            catalog_class=type(module.catalog) if getattr(module, "catalog", None) is not None else None,
        )
    twin.load_state_dict(module.state_dict())
    unsquash = NormalizeAndClipActions(normalize_actions=True, clip_actions=False)
    return RLModulePolicy(twin, [], [unsquash], (module.observation_space, module.action_space))


def _pipelines(algorithm: Algorithm) -> Pipelines:
    runner = algorithm.env_runner
    if runner is None:
        return Pipelines(algorithm.env_to_module_connector, algorithm.module_to_env_connector)
    return Pipelines(runner._env_to_module, runner._module_to_env)


def _states_elsewhere(algorithm: Algorithm) -> list[Any]:
    """Connector states of remote environment runners, where RLlib would merge them."""
    group = algorithm.env_runner_group
    if not algorithm.config.merge_env_runner_states or not group or not group.num_healthy_remote_workers():
        return []
    states = group.foreach_env_runner(
        "get_state",
        kwargs={"components": [COMPONENT_ENV_TO_MODULE_CONNECTOR]},
        local_env_runner=False,
        timeout_seconds=_FETCH_TIMEOUT_S,
    )
    return [state[COMPONENT_ENV_TO_MODULE_CONNECTOR] for state in states]


# ---------------------------------------------------------------------- checkpoints


_MODULES = Path("learner_group", "learner", "rl_module")
_CONSTRUCTOR = "class_and_ctor_args.pkl"


def load_policy(
    path: str | Path,
    module_id: str = DEFAULT_MODULE_ID,
    observation_space: gym.Space[Any] | None = None,
    action_space: gym.Space[Any] | None = None,
) -> RLModulePolicy:
    """Read RLModule, connectors and filter statistics from a checkpoint of an Algorithm.

    RLlib's checkpoints are pickles: reading one runs the code in it, so read only those that you trust.

    Args:
        path: The folder that ``Algorithm.save_to_path`` wrote, or a Tune trial's ``checkpoint_000000``.
        module_id: Which of its RLModules; with several agents the id of the policy.
        observation_space: The environment's; checked against the one that the policy was trained with.
        action_space: The environment's, likewise.

    Raises:
        ConfigError: The folder is none of these, is damaged, comes from the old API stack, the spaces differ, or the
            module plays agents that it cannot be evaluated for.
    """
    folder = Path(path).expanduser().resolve()
    _check_folder(folder)
    module = _module(folder / _MODULES, module_id)
    pipelines = Pipelines(
        _pipeline(folder, "env_to_module_connector", EnvToModulePipeline),
        _pipeline(folder, "module_to_env_connector", ModuleToEnvPipeline),
    )
    trained = pipelines.spaces(pipelines.agent(module_id))
    check_spaces(f"the policy in {folder}", trained, (observation_space, action_space))
    return pipelines.policy(module_id, module)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"policy_kwargs.path: there is no folder {str(folder)!r}")
    if (folder / _MODULES).is_dir():
        return
    inside = sorted(candidate.parent for candidate in folder.rglob("rllib_checkpoint.json"))
    hint = f"choose one of the {len(inside)} in it, such as {str(inside[-1])!r}" if inside else "give that folder"
    if inside and inside[-1] == folder:
        hint = "RLlib's old API stack has none, so train with the new one"
    raise ConfigError(
        f"policy_kwargs.path: {str(folder)!r} lacks {_MODULES.as_posix()}, which an Algorithm's checkpoint has: {hint}"
    )


def _module(folder: Path, module_id: str) -> Any:
    known = [part.name for part in folder.iterdir() if part.is_dir()]
    if module_id not in known:
        raise ConfigError(
            f"policy_kwargs.module_id is {module_id!r}, which {folder} lacks: {nearest(module_id, known)}"
        )
    check_separate(_constructor(folder)[2])
    args, kwargs, cls = _constructor(folder / module_id)
    module = cls(*args, **{**kwargs, "inference_only": True})
    module.restore_from_path(str(folder / module_id))
    return module


def _pipeline(folder: Path, name: str, cls: Any) -> Any:
    # Without a local environment runner the Algorithm keeps its connectors itself.
    for place in (folder / "env_runner" / name, folder / name):
        if place.is_dir():
            _constructor(place)  # RLlib would go on without the pieces that it cannot import.
            return cls.from_checkpoint(str(place))
    raise ConfigError(f"policy_kwargs.path: the checkpoint {str(folder)!r} has no {name}, so it cannot act")


def _constructor(folder: Path) -> tuple[Any, dict[str, Any], Any]:
    """Class and arguments that RLlib wrote down to build this part again."""
    file = folder / _CONSTRUCTOR
    with reading("path", file, "a part of RLlib", ": it is damaged, or the code that it needs is not importable here"):
        written = pickle.loads(file.read_bytes())
        args, kwargs = written["ctor_args_and_kwargs"]
        return args, kwargs, written["class"]
