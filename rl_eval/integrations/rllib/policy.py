"""Policy of an RLModule with its connectors. The rows of a batch are independent.

An action is the mode of the module's distribution, or a sample drawn with each episode's noise.

RLlib's own distribution classes interpret the module's output. They draw in a context in which each episode's noise
replaces torch's global generator. Then RLlib's own functions unsquash or clip the Box actions of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree
from ray.rllib.connectors.common.agent_to_module_mapping import AgentToModuleMapping
from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.spaces.space_utils import clip_action, get_base_struct_from_space, unsquash_action

from rl_eval.errors import ConfigError, PolicyError
from rl_eval.integrations.rllib.observations import FILTERS, NoEpisode, Observations, filter_tensors
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.policies import random_state_kept
from rl_eval.policies.sampling import refuse_nan
from rl_eval.protocols import NoiseSource

_PLUMBING: Final = frozenset(
    {
        "GetActions",
        "ListifyDataForVectorEnv",
        "ModuleToAgentUnmapping",
        "RemoveSingleTsTimeRankFromBatch",
        "TensorToNumpy",
        "UnBatchToIndividualItems",
    }
)

Array = npt.NDArray[Any]
Live = npt.NDArray[np.bool_]


def actions_for_env(pieces: Sequence[Any], action_space: gym.Space[Any]) -> Callable[[Any], Any]:
    """Return a function that maps a batch of actions as a module-to-env pipeline does.

    The function unsquashes the actions, clips them, or returns them unchanged.

    Args:
        pieces: Connector pieces in order.
        action_space: Space of the environment.

    Raises:
        ConfigError: A piece cannot be applied to a batch; the message names it.
    """
    unsquash = clip = False
    for piece in pieces:
        name = type(piece).__name__
        if not type(piece).__module__.startswith("ray.rllib."):
            problem = (
                f"the connector piece {name} of the module-to-env pipeline is not RLlib's own, and cannot be "
                "applied to a batch of actions"
            )
            raise ConfigError(problem, key="module_to_env", value=name, fix="Use an action wrapper of the environment.")
        if name == "NormalizeAndClipActions":
            unsquash, clip = piece.normalize_actions, piece.clip_actions
        elif name not in _PLUMBING:
            problem = (
                f"the connector piece {name} of the module-to-env pipeline cannot be applied to a batch of actions"
            )
            raise ConfigError(problem, key="module_to_env", value=name)
    structure, mapped = get_base_struct_from_space(action_space), unsquash_action if unsquash else clip_action
    return lambda actions: mapped(actions, structure) if unsquash or clip else actions


def read_actions(module: Any, outputs: Mapping[str, Any], live: Live, noise: NoiseSource | None) -> Any:
    """Choose a batch of actions from the module's output.

    Args:
        module: The RLModule. It defines the class of the action distribution.
        outputs: Output of the module's forward pass, without a time dimension.
        live: Mask of the rows that run an episode, shape (batch,).
        noise: Randomness of each row; None for the mode.

    Raises:
        ConfigError: The module samples actions itself, or its distribution cannot use the episode's noise.
        PolicyError: The output contains NaN, or it contains neither actions nor inputs of the distribution.
    """
    if Columns.ACTIONS in outputs:
        if noise is not None:
            problem = (
                f"policy.deterministic is False, but {type(module).__name__} samples its actions itself, without the "
                "episode's own noise"
            )
            fix = "Set policy.deterministic to True (in RLlib, explore=False)."
            raise ConfigError(problem, key="policy.deterministic", value=False, fix=fix)
        return tree.map_structure(_numpy, outputs[Columns.ACTIONS])
    if Columns.ACTION_DIST_INPUTS not in outputs:
        problem = f"{type(module).__name__} returned neither actions nor action_dist_inputs, only {list(outputs)}"
        raise PolicyError(problem, key=Columns.ACTION_DIST_INPUTS, value=list(outputs))
    logits = outputs[Columns.ACTION_DIST_INPUTS]
    refuse_nan(_numpy(logits), live, "a number of the RLModule's action_dist_inputs")
    if noise is None:
        distribution = module.get_inference_action_dist_cls().from_logits(logits).to_deterministic()
    else:
        distribution = module.get_exploration_action_dist_cls().from_logits(logits)
    with EpisodeDraws(live, noise):
        return tree.map_structure(_numpy, distribution.sample())


def _numpy(value: Any) -> Array:
    return np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)


# ---------------------------------------------------------------------- policies


@final
class RLModulePolicy:
    """A policy around an RLModule and the connector pieces before and after it.

    Without noise, it acts as RLlib with ``explore=False`` (``forward_inference`` and the distribution's mode). With
    noise, it acts as RLlib with ``explore=True`` (``forward_exploration``), but samples come from the episode's own
    stream.

    Args:
        module: A torch RLModule that no other code uses. The filters become its submodule ``env_to_module``, so weights
            and statistics are sent together.
        env_to_module: Pieces of the env-to-module pipeline.
        module_to_env: Pieces of the module-to-env pipeline.
        spaces: Observation space and action space of the training environment.
        statistics: Statistics of the filters, from :func:`filter_tensors`; by default, those of the pieces.
        agent: Agent whose settings and statistics are used, in pieces that treat each agent separately; None in an
            environment with one agent.

    Raises:
        ConfigError: A piece cannot be applied to a batch, or the module is not a torch module.
        WeightsError: A filter is uninitialized.
    """

    def __init__(
        self,
        module: Any,
        env_to_module: Sequence[Any],
        module_to_env: Sequence[Any],
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        statistics: Mapping[str, torch.Tensor] | None = None,
        agent: Any = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            problem = f"the RLModule {type(module).__name__} is not a torch module, and rl_eval requires torch"
            raise ConfigError(problem, key="policy", value=type(module).__name__)
        self.module = module.eval()
        known = filter_tensors(env_to_module, agent=agent) if statistics is None else statistics
        self._observations, self.normalizes = Observations(env_to_module, known, agent), bool(known)
        self.module.add_module(FILTERS, self._observations)
        self._for_env = actions_for_env(module_to_env, spaces[1])
        self._trained_on = get_base_struct_from_space(spaces[0])
        self._familiar = False
        # torch.nn.Module does not declare the methods of RLModule.
        self._rl_module = cast("Any", module)
        with random_state_kept():
            self._stateful = bool(self._rl_module.is_stateful())

    def initial_state(self, batch_size: int) -> Any:
        """Return the recurrent state and the stacked frames of new episodes; None if the policy uses neither."""
        state: dict[str, Any] = {}
        if self._stateful:
            state[Columns.STATE_IN] = tree.map_structure(
                lambda leaf: _tensor(leaf).expand(batch_size, *leaf.shape).clone(), self._rl_module.get_initial_state()
            )
        if (frames := self._observations.initial_frames(batch_size)) is not None:
            state["frames"] = frames
        return state or None

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return the outputs of the module for new episodes, such as logits."""
        rows = len(tree.flatten(observations)[0])
        outputs, _ = self._forward(observations, self.initial_state(rows), np.ones(rows, bool), explore=False)
        return [np.asarray(leaf.cpu()) for leaf in tree.flatten(outputs) if isinstance(leaf, torch.Tensor)]

    def act(self, observations: Any, state: Any, live: Live, noise: NoiseSource | None) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        outputs, state = self._forward(observations, state, live, explore=noise is not None)
        return self._for_env(read_actions(self.module, outputs, live, noise)), state

    def _forward(self, observations: Any, state: Any, live: Live, *, explore: bool) -> tuple[Mapping[str, Any], Any]:
        """Run the connectors and the module.

        Return the module's outputs without the time dimension, and the next state.
        """
        if not self._familiar:
            self._check_familiar(observations)
        state = state or {}
        inputs, frames = self._observations(observations, state.get("frames"), live)
        batch: dict[str, Any] = {Columns.OBS: tree.map_structure(self._to_device, inputs)}
        if self._stateful:
            batch[Columns.OBS] = tree.map_structure(lambda leaf: leaf[:, None], batch[Columns.OBS])
            batch[Columns.STATE_IN] = tree.map_structure(self._to_device, state[Columns.STATE_IN])
        forward = self._rl_module.forward_exploration if explore else self._rl_module.forward_inference
        # Only epsilon-greedy modules read the time step. They sample themselves, so read_actions() raises.
        outputs = dict(forward(batch, t=0) if explore else forward(batch))
        following: dict[str, Any] = {} if frames is None else {"frames": frames}
        if self._stateful:
            following[Columns.STATE_IN] = outputs.pop(Columns.STATE_OUT)
            outputs = tree.map_structure(lambda leaf: leaf[:, 0], outputs)
        return outputs, following or None

    def _check_familiar(self, observations: Any) -> None:
        """Check once that observations have the same shapes as in the training."""
        ours, theirs = tree.flatten(self._trained_on), tree.flatten(observations)
        if [space.shape for space in ours] != [leaf.shape[1:] for leaf in theirs]:
            problem = (
                f"the policy was trained with the observation space {self._trained_on}, but the environment's "
                f"observations have the shapes {[leaf.shape[1:] for leaf in theirs]}"
            )
            raise ConfigError(problem, key="environment.env", value=[leaf.shape[1:] for leaf in theirs])
        self._familiar = True

    def _to_device(self, value: Any) -> torch.Tensor:
        weight = next(self.module.parameters(), None)
        return _tensor(value) if weight is None else _tensor(value).to(weight.device)


def check_spaces(
    what: str,
    trained: tuple[gym.Space[Any] | None, gym.Space[Any] | None],
    offered: tuple[gym.Space[Any] | None, gym.Space[Any] | None],
) -> None:
    """Check that a policy and an environment have the same spaces. A space that is None is not checked.

    Bounds of observations may differ, because they do not change the episodes.

    Args:
        what: Description of the policy, for the message.
        trained: Observation space and action space of the training.
        offered: Observation space and action space of the environment.

    Raises:
        ConfigError: The spaces differ; the message shows both.
    """
    for kind, ours, theirs in zip(("observation", "action"), trained, offered, strict=True):
        if ours is None or theirs is None or ours == theirs:
            continue
        boxes = isinstance(ours, gym.spaces.Box) and isinstance(theirs, gym.spaces.Box)
        if kind == "observation" and boxes and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            continue
        problem = f"{what} was trained with the {kind} space {ours}, but the environment has {theirs}"
        raise ConfigError(problem, key="environment.env", value=theirs)


def _tensor(value: Any) -> torch.Tensor:
    """Convert a value as RLlib's NumpyToTensor does: floats become float32, except float16."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float16 else tensor


# ---------------------------------------------------------------------- pipelines


class Pipelines(NamedTuple):
    """RLlib's connector pipelines before and after the modules."""

    env_to_module: Any
    module_to_env: Any

    def policy(
        self, module_id: str, module: Any, statistics: Mapping[str, torch.Tensor] | None = None
    ) -> RLModulePolicy:
        """Return the policy of one module.

        Raises:
            ConfigError: The module acts for agents with different spaces, or for several agents with separate filters.
        """
        agent = self.agent(module_id)
        return RLModulePolicy(
            module,
            self.env_to_module.connectors,
            self.module_to_env.connectors,
            self.spaces(agent),
            statistics,
            agent,
        )

    def spaces(self, agent: Any) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the observation space and the action space of an agent; for None, those of the environment."""
        spaces = self.env_to_module.input_observation_space, self.env_to_module.input_action_space
        return spaces if agent is None else (spaces[0][agent], spaces[1][agent])

    def agent(self, module_id: str) -> Any:
        """Return one of the agents for which a module acts; None in an environment with one agent.

        If a connector piece has separate settings or statistics for each agent, it uses those of this agent.

        Raises:
            ConfigError: The module acts for agents with different spaces, or for several agents with separate filters.
        """
        mapping = next((p for p in self.env_to_module.connectors if type(p) is AgentToModuleMapping), None)
        if mapping is None:
            return None
        first, *others = agents = self._agents(module_id, mapping._agent_to_module_mapping_fn)
        for other in others:
            if self.spaces(other) != self.spaces(first):
                problem = (
                    f"the module {module_id!r} may act for the agents {first!r} and {other!r}, whose spaces differ: "
                    f"{self.spaces(first)} and {self.spaces(other)}"
                )
                raise ConfigError(problem, key="policy_mapping_fn", value=module_id)
        if others and any(type(piece) is MeanStdFilter for piece in self.env_to_module.connectors):
            problem = (
                f"the module {module_id!r} may act for the agents {agents}, but MeanStdFilter has separate statistics "
                "for each agent"
            )
            raise ConfigError(problem, key="policy_mapping_fn", value=module_id, fix="Use one module per agent.")
        return first

    def _agents(self, module_id: str, mapping_fn: Any) -> list[Any]:
        """Return the agents for which a module acts.

        Return all agents if the mapping assigns no agent to the module, or if the mapping reads RLlib's episode object.
        """
        agents = list(self.env_to_module.input_observation_space.spaces)
        unknown = NoEpisode("policy_mapping_fn", "Use only the agent.")
        try:
            return [agent for agent in agents if mapping_fn(agent, unknown) == module_id] or agents
        except ConfigError:
            return agents


def check_separate(kind: type) -> None:
    """Check that the modules in a MultiRLModule of this class are independent.

    Raises:
        ConfigError: ``kind`` is a subclass of MultiRLModule. Its modules may share parts, such as an encoder.
    """
    if kind is not MultiRLModule:
        problem = f"{kind.__name__} is a subclass of MultiRLModule, and rl_eval runs each RLModule separately"
        raise ConfigError(problem, key="rl_module_spec", value=kind.__name__, fix="Use RLlib's MultiRLModule.")
