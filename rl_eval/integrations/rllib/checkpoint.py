"""Policies from RLlib checkpoint folders, without Algorithm, learners or environment runners."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline
from ray.rllib.core import DEFAULT_MODULE_ID

from rl_eval.errors import ConfigError, nearest
from rl_eval.integrations.rllib.connected import Pipelines, check_separate
from rl_eval.integrations.rllib.policy import RLModulePolicy, check_spaces

__all__ = ["load_policy"]

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
    if inside := sorted(candidate.parent for candidate in folder.rglob("rllib_checkpoint.json")):
        raise ConfigError(
            f"policy_kwargs.path: {str(folder)!r} holds {len(inside)} RLlib checkpoints but is none itself: choose "
            f"one, such as {str(inside[-1])!r}"
            if inside[-1] != folder
            else f"policy_kwargs.path: {str(folder)!r} is a checkpoint of RLlib's old API stack, which has no RLModule"
            ": retrain with the new one"
        )
    if (folder / "class_and_ctor_args.pkl").is_file() and (folder / "metadata.json").is_file():
        raise ConfigError(
            f"policy_kwargs.path: {str(folder)!r} is a part of an RLlib checkpoint, without the connectors: give the "
            "folder of the whole Algorithm"
        )
    raise ConfigError(
        f"policy_kwargs.path: {str(folder)!r} is no checkpoint of an RLlib Algorithm: it lacks {_MODULES.as_posix()}"
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
    try:
        written = pickle.loads((folder / _CONSTRUCTOR).read_bytes())
        args, kwargs = written["ctor_args_and_kwargs"]
        return args, kwargs, written["class"]
    except Exception as error:
        raise ConfigError(
            f"policy_kwargs.path: {folder / _CONSTRUCTOR} cannot be read ({type(error).__name__}: {error}): it is "
            "damaged, or the code that it needs is not importable here"
        ) from error
