"""Policies from the zip file of ``model.save`` and from the file of ``policy.save``, without the training.

Of the attributes of a model, only those of its policy are unpickled. Another version of Python or of a library often
cannot read the others, such as the schedule of the learning rate.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import cloudpickle
import gymnasium as gym
import torch
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import VecTransposeImage

from rl_eval.config.model_files import described
from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError
from rl_eval.integrations.policy_files import missing_module, reading
from rl_eval.integrations.sb3.files import attributes_of, is_policy

_KEY: Final = "policy.policy_kwargs.custom_objects"
_WHAT: Final = "a model of Stable-Baselines3"
_OF_THE_POLICY: Final = ("policy_class", "policy_kwargs", "observation_space", "action_space")

Saved = tuple[BasePolicy, float | None, tuple[str, ...]]
"""A policy, the exploration rate of its algorithm, and notes for readers of the result."""


def read_policy(file: Path, custom_objects: Mapping[str, Any], spaces: Mapping[str, gym.Space[Any] | None]) -> Saved:
    """Read the policy of a file.

    Args:
        file: File of ``model.save`` or ``policy.save``.
        custom_objects: Attributes that replace those in the file. A string ``"module:attr"`` stands for an object.
        spaces: Spaces of the environment, by the name of the attribute. They replace spaces that cannot be read.

    Raises:
        ConfigError: The file cannot be read, or what it lacks is neither in ``custom_objects`` nor in ``spaces``.
    """
    given = _resolved(custom_objects)
    if is_policy(described(file)):
        with reading("path", file, "a policy of Stable-Baselines3"), torch.random.fork_rng(devices=[]):
            return _of_policy_file(file, given)
    with reading("path", file, _WHAT):
        stored = {**attributes_of(file), **given}
        weights = load_from_zip_file(file, load_data=False, device="cpu")[1]["policy"]
    notes: list[str] = []
    for name in (one for one in _OF_THE_POLICY if one not in given):
        stored[name], more = _attribute(name, stored, file, spaces.get(name))
        notes += more
    advice = f"If the model saw other spaces than those of the environment, set {_KEY}." if notes else ""
    with reading("path", file, _WHAT, advice):
        policy = _build(stored)
        policy.load_state_dict(weights)
    return policy, stored.get("exploration_rate"), tuple(notes)


def _attribute(name: str, stored: Mapping[str, Any], file: Path, space: gym.Space[Any] | None) -> tuple[Any, list[str]]:
    """Return an attribute of a model, or the space that replaces it and a note."""
    try:
        value = stored[name]
        pickled = isinstance(value, Mapping) and ":serialized:" in value
        return cloudpickle.loads(base64.b64decode(value[":serialized:"])) if pickled else value, []
    except Exception as error:
        unread = f"the {name} in {file.name} cannot be read: {type(error).__name__}: {error}"
        if space is None:
            fix = f"{missing_module(error)} To replace it, set {_KEY}.{name}.".strip()
            raise ConfigError(unread, key=f"{_KEY}.{name}", fix=fix) from error
        return _transposed(space), [f"the policy has the {name} of the environment, because {unread}"]


def _resolved(value: Any) -> Any:
    """Return a value of a config with the objects that its strings ``"module:attr"`` name."""
    if isinstance(value, Mapping):
        return {name: _resolved(part) for name, part in value.items()}
    return import_attribute(_KEY, value) if isinstance(value, str) and ":" in value else value


def _transposed(space: gym.Space[Any]) -> gym.Space[Any]:
    """Return a space with the channels of an image first, as SB3 makes it for its models."""
    if is_image_space(space) and not is_image_space_channels_first(space):
        space = VecTransposeImage.transpose_space(space)
    return space


def _classes() -> Iterator[type[BasePolicy]]:
    """Find the classes that may have written the file of ``policy.save``, which does not name its class.

    Of each algorithm, the first is enough. Those for images and Dict observations differ only in arguments that the
    file contains.
    """
    for package in ("stable_baselines3", "sb3_contrib"):
        with suppress(ImportError):
            algorithms = vars(import_module(package)).values()
            yield from (next(iter(one.policy_aliases.values())) for one in algorithms if hasattr(one, "policy_aliases"))


def _of_policy_file(file: Path, given: Mapping[str, Any]) -> Saved:
    saved = torch.load(file, map_location="cpu", weights_only=False)
    arguments, weights = {**saved["data"], **given}, saved["state_dict"]
    if (own := arguments.pop("policy_class", None)) is not None:
        policy = own(**arguments)
        policy.load_state_dict(weights)
        return policy, None, ()
    for kind in _classes():
        with suppress(TypeError):
            policy = kind(**arguments)
            rewritten = policy._get_constructor_parameters()  # noqa: SLF001 - ``save`` writes them.
            if rewritten.keys() == arguments.keys() and policy.state_dict().keys() == weights.keys():
                policy.load_state_dict(weights)
                note = f"the policy was read as {kind.__name__}, because {file.name} does not name its class"
                return policy, None, (note,)
    problem = f"{file.name} does not name the class of its policy, which is none of Stable-Baselines3"
    fix = f"Set {_KEY}.policy_class to the MODULE:CLASS of the policy."
    raise ConfigError(problem, key=f"{_KEY}.policy_class", fix=fix)


def _build(data: dict[str, Any]) -> BasePolicy:
    """Build the policy of a saved model from the model's attributes, with the same arguments as in training."""
    policy_class = data["policy_class"]
    kwargs = dict(data["policy_kwargs"])
    kwargs.pop("device", None)
    parameters = inspect.signature(policy_class).parameters
    if "use_sde" in parameters:
        kwargs.setdefault("use_sde", data.get("use_sde", False))
    schedule = [lambda _: 0.0] if _has_learning_rate(list(parameters.values())) else []
    with torch.random.fork_rng(devices=[]):  # Initial weights are drawn and then replaced.
        return policy_class(data["observation_space"], data["action_space"], *schedule, **kwargs)


def _has_learning_rate(parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether the third argument of a policy's class is the schedule of the learning rate.

    Policies that are trained without gradients, such as ``ARSPolicy``, have no such argument.
    """
    if any(one.kind is one.VAR_POSITIONAL for one in parameters[:3]):
        return True
    return any(
        one.name == "lr_schedule" or (one.default is one.empty and one.kind is not one.VAR_KEYWORD)
        for one in parameters[2:3]
    )
