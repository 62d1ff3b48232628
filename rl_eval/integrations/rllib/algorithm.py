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
    """Weights at one moment, with RLlib's sequence number of these weights."""

    tensors: dict[str, Any]
    """Copies of the tensors, by their names in :attr:`RLModulePolicy.module`. With several agents, one such dict per
    policy."""
    weights_seq_no: int


def portable(value: Any) -> RLModulePolicy:
    """Return an Algorithm's policy with its current weights, as a copy that shares nothing with the Algorithm.

    Args:
        value: An Algorithm of the new API stack with one agent.

    Raises:
        ConfigError: The value is not an Algorithm (for example, it is an RLModule), or rl_eval cannot apply its
            connectors.
        WeightsError: A MeanStdFilter has seen fewer than two observations.
    """
    if isinstance(value, Algorithm):
        return _policy_of(value)
    several = " for each policy, in a dict by policy id" if isinstance(value, MultiRLModule) else ""
    problem = f"a {type(value).__name__} alone cannot act: it does not contain its connectors, such as a MeanStdFilter"
    fix = (
        "Pass the Algorithm or rllib:CHECKPOINT; with RLlib's default connectors, pass "
        f"rl_eval.integrations.rllib.policy_of_module(rl_module){several}."
    )
    raise ConfigError(problem, key="policy", value=type(value).__name__, fix=fix)


def as_policy(
    value: Any, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> RLModulePolicy:
    """Return the policy of an Algorithm or RLModule, for an environment with these spaces.

    Raises:
        ConfigError: The policy was trained with other spaces.
    """
    if isinstance(value, Algorithm):
        check_spaces("the Algorithm", value.spaces[INPUT_ENV_SINGLE_SPACES], (observation_space, action_space))
    return portable(value)


def as_policies(value: Any, names: Collection[str]) -> dict[str, RLModulePolicy]:
    """Return copies of some policies of an Algorithm with several agents, by policy id.

    Args:
        value: An Algorithm of the new API stack, with several agents.
        names: Ids of the policies to return.

    Raises:
        ConfigError: The value is not such an Algorithm, or a policy does not exist or cannot be evaluated.
        WeightsError: A MeanStdFilter has seen fewer than two observations.
    """
    if not isinstance(value, Algorithm) or not value.config.is_multi_agent:
        problem = f"a {type(value).__name__} of RLlib does not have several policies"
        fix = "Pass an Algorithm of several agents, or a dict that maps policy ids to policies from policy_of_module."
        raise ConfigError(problem, key="policy", value=type(value).__name__, fix=fix)
    _check_stack(value)
    known = module_ids(value.config)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the Algorithm has no policy {name!r}; {nearest(name, known)}", key="policy.policies", value=name
            )
    return _policies_of(value, names)


def as_weights(value: Any) -> dict[str, Any]:
    """Return copies of an Algorithm's weights and filter statistics.

    With several agents, return one dict of weights and statistics per policy, by policy id.

    Raises:
        WeightsError: The object is not an Algorithm, or a MeanStdFilter has seen fewer than two observations.
    """
    return versioned_weights(value).tensors


def versioned_weights(algorithm: Any, names: Collection[str] = ()) -> VersionedWeights:
    """Return an Algorithm's weights and their sequence number, read from its learners in one call.

    If a module is stateful, a second call reads its weights.

    If RLlib merges the states of its environment runners, the filters include the observations of all these runners,
    even observations since the last merge. RLlib merges filters after its own evaluation, so RLlib's evaluation uses
    filters that are one iteration old.

    Args:
        algorithm: The Algorithm.
        names: Ids of policies, for an Algorithm of several agents; by default, all policies.

    Raises:
        ConfigError: A policy cannot be evaluated.
        WeightsError: The object is not an Algorithm, or a MeanStdFilter has seen fewer than two observations.
    """
    if not isinstance(algorithm, Algorithm):
        problem = f"a {type(algorithm).__name__} of RLlib has no weights to send"
        raise WeightsError(problem, key="weights", value=type(algorithm).__name__, fix="Pass the Algorithm.")
    chosen = (names or module_ids(algorithm.config)) if algorithm.config.is_multi_agent else [DEFAULT_MODULE_ID]
    state = _learner_state(algorithm, inference_only=True)
    # RLlib's stateful modules ignore inference_only, so they need all weights.
    stateful = {module_id for module_id in chosen if algorithm.get_module(module_id).is_stateful()}
    whole = _learner_state(algorithm, inference_only=False) if stateful else state
    pipelines = _pipelines(algorithm)
    pieces = pipelines.env_to_module.connectors
    others = _states_elsewhere(algorithm) if any(type(piece) is MeanStdFilter for piece in pieces) else []

    def tensors_of(module_id: str) -> dict[str, torch.Tensor]:
        found = (whole if module_id in stateful else state)["rl_module"][module_id]
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in found.items()}
        filters = filter_tensors(pieces, others, pipelines.agent(module_id))
        return tensors | {_PREFIX + name: value for name, value in filters.items()}

    if not algorithm.config.is_multi_agent:
        return VersionedWeights(tensors_of(DEFAULT_MODULE_ID), int(state["weights_seq_no"]))
    return VersionedWeights({name: tensors_of(name) for name in chosen}, int(state["weights_seq_no"]))


def _learner_state(algorithm: Algorithm, *, inference_only: bool) -> Any:
    return algorithm.learner_group.get_state(components="learner/rl_module", inference_only=inference_only)["learner"]


def _policy_of(algorithm: Algorithm) -> RLModulePolicy:
    _check_stack(algorithm)
    if algorithm.config.is_multi_agent:
        problem = f"the config does not name the Algorithm's policies {', '.join(module_ids(algorithm.config))}"
        fix = "Name its policies in policy.policies, as eval_config_of(algorithm.config) does."
        raise ConfigError(problem, key="policy.policies", fix=fix)
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
        problem = "the Algorithm uses RLlib's old API stack, but rl_eval supports only the new API stack"
        raise ConfigError(problem, key="enable_env_runner_and_connector_v2", value=False)


def policy_of_module(module: Any) -> RLModulePolicy:
    """Return the policy of an RLModule that was trained with RLlib's default connectors, as a copy.

    The default connectors map actions from [-1, 1] to their bounds. They neither filter nor stack observations.

    Raises:
        ConfigError: The module is not a torch module.
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
    """Return the connector states of remote environment runners; an empty list if RLlib does not merge states."""
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
    """Load a policy from a checkpoint of an Algorithm: RLModule, connectors and filter statistics.

    RLlib's checkpoints are pickle files, and loading one runs its code. Load only checkpoints that you trust.

    Args:
        path: Folder written by ``Algorithm.save_to_path``, or a Tune trial's ``checkpoint_000000``.
        module_id: Id of the RLModule; with several agents, the id of the policy.
        observation_space: Observation space of the environment, to compare with that of the training. None skips this
            check.
        action_space: Action space of the environment, to compare with that of the training. None skips this check.

    Raises:
        ConfigError: The folder is not a checkpoint, is damaged or comes from the old API stack, the spaces differ, or
            rl_eval cannot evaluate the module for its agents.
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
        problem = f"policy_kwargs.path: folder {str(folder)!r} does not exist"
        raise ConfigError(problem, key="policy.policy_kwargs.path", value=str(folder))
    if (folder / _MODULES).is_dir():
        return
    inside = sorted(candidate.parent for candidate in folder.rglob("rllib_checkpoint.json"))
    hint = "Pass the checkpoint folder of an Algorithm."
    if inside:
        hint = f"Pass one of the {len(inside)} checkpoints in this folder, such as {str(inside[-1])!r}."
    if inside and inside[-1] == folder:
        hint = "The checkpoint comes from RLlib's old API stack. Train with the new API stack."
    problem = f"policy_kwargs.path: {str(folder)!r} is not an Algorithm's checkpoint: {_MODULES.as_posix()} is missing"
    raise ConfigError(problem, key="policy.policy_kwargs.path", value=str(folder), fix=hint)


def _module(folder: Path, module_id: str) -> Any:
    known = [part.name for part in folder.iterdir() if part.is_dir()]
    if module_id not in known:
        problem = f"policy_kwargs.module_id is {module_id!r}, which is not in {folder}; {nearest(module_id, known)}"
        raise ConfigError(problem, key="policy.policy_kwargs.module_id", value=module_id)
    check_separate(_constructor(folder)[2])
    args, kwargs, cls = _constructor(folder / module_id)
    module = cls(*args, **{**kwargs, "inference_only": True})
    module.restore_from_path(str(folder / module_id))
    return module


def _pipeline(folder: Path, name: str, cls: Any) -> Any:
    # Without a local environment runner the Algorithm keeps its connectors itself.
    for place in (folder / "env_runner" / name, folder / name):
        if place.is_dir():
            _constructor(place)  # RLlib would continue without the pieces that it cannot import.
            return cls.from_checkpoint(str(place))
    problem = f"policy_kwargs.path: the checkpoint {str(folder)!r} has no {name}, so it cannot act"
    raise ConfigError(problem, key="policy.policy_kwargs.path", value=str(folder))


def _constructor(folder: Path) -> tuple[Any, dict[str, Any], Any]:
    """Return the args, kwargs and class from which RLlib rebuilds the component that is saved in a folder."""
    file = folder / _CONSTRUCTOR
    with reading(
        "path", file, "a component of RLlib", "Check that the file is intact, and that its code can be imported here."
    ):
        written = pickle.loads(file.read_bytes())
        args, kwargs = written["ctor_args_and_kwargs"]
        return args, kwargs, written["class"]
