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
import numpy.typing as npt
import torch
import tree
from d3rlpy.algos import QLearningAlgoBase
from d3rlpy.base import LearnableConfigWithShape
from d3rlpy.constants import ActionSpace
from gymnasium.vector.utils import create_empty_array

from rl_eval.bounded_read import LARGE, BoundedFile
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.policy_files import reading
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource
from rl_eval.weights import read_tensors

_ADVICE: Final = (
    "If the config has an encoder of your own, name a function as the policy that calls d3rlpy's "
    "register_encoder_factory, and returns rl_eval.integrations.d3rlpy.load_policy(path)."
)


@final
class Learned(torch.nn.ModuleDict):
    """Networks of an algorithm, on the CPU and without optimizers.

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
        networks = _networks_of(algo)
        for name, network in networks.items():
            network.load_state_dict(states[name], assign=True)
        super().__init__(networks)
        self.algo = algo


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
    if isinstance(value, Learned):
        return copy.deepcopy(value)
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


def as_weights(value: Any) -> dict[str, torch.Tensor]:
    """Return the current tensors of an algorithm. The keys are the names that the copy from :func:`portable` uses."""
    networks = value if isinstance(value, Learned) else torch.nn.ModuleDict(_networks_of(value))
    return dict(networks.state_dict())


def as_policy(
    value: Any, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> D3rlpyPolicy:
    """Build the policy for an environment with these spaces.

    Raises:
        ConfigError: The spaces do not fit, or the algorithm cannot act as configured.
    """
    learned = portable(value)
    algo, impl = learned.algo, learned.algo.impl
    discrete = algo.get_action_type() == ActionSpace.DISCRETE
    size = getattr(action_space, "n", int(np.prod(action_space.shape or ())))
    parts = observation_space.spaces if isinstance(observation_space, gym.spaces.Tuple) else [observation_space]
    kind = gym.spaces.Discrete if discrete else gym.spaces.Box
    if (
        not isinstance(action_space, kind)
        or size != impl.action_size
        or tree.flatten([part.shape for part in parts]) != tree.flatten(impl.observation_shape)
    ):
        ours = (
            f"observations of shape {impl.observation_shape} and a {kind.__name__} space of {impl.action_size} actions"
        )
        problem = f"the policy was trained with {ours}, but the environment has {observation_space} and {action_space}"
        raise ConfigError(problem, key="environment.env", value=str(observation_space))
    learned.to(section.device)
    for part in (algo, impl):
        vars(part)["_device"] = section.device  # Observations are moved to it.
    if section.deterministic and _draws(algo, observation_space):
        problem = f"predict() of {type(algo).__name__} draws actions at random, but policy.deterministic is True"
        fix = "Set policy.deterministic to False. Actions are then those of sample_action(), with each episode's noise."
        raise ConfigError(problem, key="policy.deterministic", value=True, fix=fix)
    return D3rlpyPolicy(learned, action_space)


@final
class D3rlpyPolicy:
    """An algorithm of d3rlpy behind the interface of :class:`rl_eval.Policy`.

    It acts with ``algo.predict``, or with ``algo.sample_action`` and each episode's own noise.

    Args:
        module: The algorithm's copy, which no other code uses.
        action_space: Action space of the environment.
    """

    def __init__(self, module: Learned, action_space: gym.Space[Any]) -> None:
        self.module = module
        self._space = action_space

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return the outputs of all layers that have one row per observation."""
        rows = len(tree.flatten(observations)[0])
        found: list[npt.NDArray[Any]] = []

        def keep(layer: Any, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.shape[:1] == (rows,):
                found.append(output.numpy(force=True))

        hooks = [layer.register_forward_hook(keep) for layer in self.module.modules()]
        self.act(observations, None, np.ones(rows, np.bool_), None)
        for hook in hooks:
            hook.remove()
        return found

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[npt.NDArray[Any], None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        algo = self.module.algo
        with EpisodeDraws(live, noise):
            actions = algo.predict(observations) if noise is None else algo.sample_action(observations)
        return actions.reshape(-1, *(self._space.shape or ())).astype(self._space.dtype), None


def _draws(algo: Any, observation_space: gym.Space[Any]) -> bool:
    """Return whether an algorithm draws numbers from torch's generator to choose a greedy action."""
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        algo.predict(create_empty_array(observation_space))
        return not torch.equal(before, torch.random.get_rng_state())


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
