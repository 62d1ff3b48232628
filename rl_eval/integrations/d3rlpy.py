"""d3rlpy: its Q-learning algorithms as policies, from an object or from the file of ``algo.save``."""

from __future__ import annotations

import copy
import os
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import torch
import tree
from d3rlpy.algos import QLearningAlgoBase
from d3rlpy.base import LearnableConfigWithShape
from d3rlpy.constants import ActionSpace
from gymnasium.vector.utils import create_empty_array
from typing_extensions import override

from rl_eval.bounded_read import LARGE, BoundedFile
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.actors import Actor, State
from rl_eval.integrations.policy_files import reading
from rl_eval.weights import read_tensors

_ADVICE: Final = (
    "If the config has an encoder of your own, name a function as the policy that calls d3rlpy's "
    "register_encoder_factory, and returns rl_eval.integrations.d3rlpy.load_policy(path)."
)


@final
class Learned(Actor):
    """Networks of an algorithm, on the CPU and without optimizers.

    It acts with ``algo.predict``, or with ``algo.sample_action``.

    Args:
        config: Config of the algorithm, with the shapes of observations and actions.
        states: State dict of each network.

    Raises:
        ConfigError: The algorithm needs more than observations.
    """

    def __init__(self, config: LearnableConfigWithShape, states: Mapping[str, Mapping[str, Any]]) -> None:
        with torch.device("meta"):  # The config may ask for networks that are much larger than the weights.
            algo: Any = config.create("meta")
        _check_kind(algo)
        super().__init__()
        for name, network in _networks_of(algo).items():
            network.load_state_dict(states[name], assign=True)
            self.add_module(name, network)
        self.algo, self.normalizes = algo, algo.config.observation_scaler is not None

    @override
    def check(self, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        algo, impl = self.algo, self.algo.impl
        kind = gym.spaces.Discrete if algo.get_action_type() == ActionSpace.DISCRETE else gym.spaces.Box
        size = getattr(action_space, "n", int(np.prod(action_space.shape or ())))
        parts = observation_space.spaces if isinstance(observation_space, gym.spaces.Tuple) else [observation_space]
        shapes = tree.flatten([part.shape for part in parts])
        fits = isinstance(action_space, kind) and size == impl.action_size
        if not fits or shapes != tree.flatten(impl.observation_shape):
            ours = f"shape {impl.observation_shape} and a {kind.__name__} space of {impl.action_size} actions"
            problem = (
                f"the policy was trained with observations of {ours}, but the environment has {observation_space} and "
                f"{action_space}"
            )
            raise ConfigError(problem, key="environment.env", value=str(observation_space))
        if section.deterministic and self._draws(observation_space):
            problem = f"predict() of {type(algo).__name__} draws actions at random, but policy.deterministic is True"
            fix = (
                "Set policy.deterministic to False. Actions are then those of sample_action(), with each episode's "
                "noise."
            )
            raise ConfigError(problem, key="policy.deterministic", value=True, fix=fix)

    @override
    def step(self, observations: Any, state: State, sample: bool) -> tuple[torch.Tensor, State]:
        arrays = tree.map_structure(lambda part: part.numpy(force=True), observations)
        for part in (self.algo, self.algo.impl):
            vars(part)["_device"] = next(self.parameters()).device  # Observations are moved to it.
        actions = self.algo.sample_action(arrays) if sample else self.algo.predict(arrays)
        return torch.from_numpy(actions), ()

    def _draws(self, observation_space: gym.Space[Any]) -> bool:
        """Return whether the algorithm draws numbers from torch's generator to choose a greedy action."""
        with torch.random.fork_rng(devices=[]):
            before = torch.random.get_rng_state()
            self.step(tree.map_structure(torch.as_tensor, create_empty_array(observation_space)), (), False)
            return not torch.equal(before, torch.random.get_rng_state())


def load_policy(path: str | os.PathLike[str]) -> Learned:
    """Load an algorithm from the file of ``algo.save(path)``, without running code of the file.

    Raises:
        ConfigError: The file is missing, damaged or of another type, or its algorithm needs more than observations.
    """
    file = Path(path).expanduser()
    with reading("path", path, "an algorithm of d3rlpy", _ADVICE):
        content = _content(file)
        config = LearnableConfigWithShape.deserialize(content["config"])
        return Learned(config, read_tensors(file, content["torch"]))


def _content(file: Path) -> dict[Any, Any]:
    """Return the strings and bytes of the dict in a pickle, without unpickling it."""
    with BoundedFile(file, LARGE) as stream:
        parts = [argument for _, argument, _ in pickletools.genops(stream) if isinstance(argument, (str, bytes))]
    return dict(zip(parts[::2], parts[1::2], strict=False))


def portable(value: Any) -> Learned:
    """Return a copy of an algorithm that can be pickled and shares nothing with the training.

    Raises:
        ConfigError: The algorithm has no networks yet, has its own class, or needs more than observations.
    """
    _check_kind(value)
    name, impl = type(value).__name__, value.impl
    if impl is None:
        fix = "Train the algorithm, or call its build_with_env(env)."
        raise ConfigError(f"the {name} of d3rlpy has no networks", key="policy", value=name, fix=fix)
    try:
        config = LearnableConfigWithShape(impl.observation_shape, impl.action_size, value.config)
        config = LearnableConfigWithShape.deserialize(config.serialize())
    except (KeyError, NotImplementedError) as error:
        fix = "If it has an encoder of your own, call d3rlpy's register_encoder_factory."
        raise ConfigError(f"the config of the {name} cannot be copied: {error!r}", key="policy", fix=fix) from error
    states = {key: copy.deepcopy(network.state_dict()) for key, network in _networks_of(value).items()}
    learned = Learned(config, states).cpu()
    if type(learned.algo) is not type(value):
        problem = f"{name} is not an algorithm of d3rlpy, but a subclass of one"
        raise ConfigError(problem, key="policy", value=name, fix="Wrap it in an rl_eval.Policy.")
    return learned


def _networks_of(algo: Any) -> dict[str, torch.nn.Module]:
    return {name: one for name, one in vars(algo.impl.modules).items() if isinstance(one, torch.nn.Module)}


def _check_kind(value: Any) -> None:
    """Raise an error for an algorithm that chooses actions from more than observations."""
    if not isinstance(value, QLearningAlgoBase):
        name = type(value).__name__
        problem = f"a {name} of d3rlpy does not choose actions from observations alone"
        fix = (
            "For a decision transformer, write an rl_eval.Policy that keeps the former steps in its state, and add the "
            "last reward to the observation (rl_eval.wrappers.LastReward)."
        )
        raise ConfigError(problem, key="policy", value=name, fix=fix)
