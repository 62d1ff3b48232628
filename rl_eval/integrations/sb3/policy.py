"""Policy of Stable-Baselines3, which acts as its own ``predict`` does, for a batch of lanes.

Actions come out in the environment's own scale: squashed ones are mapped onto the bounds, others clipped into them.
``deterministic=False`` draws from each episode's own stream, by the parameters of the policy's distribution:

==========================  ========================================================================
policy                      sampled action
==========================  ========================================================================
PPO, A2C and their like     categorical, multi-categorical, Bernoulli or diagonal Gaussian
SAC and its like            tanh of a diagonal Gaussian
DQN and its like            greedy, or with probability ``exploration_rate`` any action
TD3 and its like            the deterministic one, which is what they predict either way
gSDE                        the mean and the episode's own noise matrix, drawn at its first step
==========================  ========================================================================
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import Distribution, StateDependentNoiseDistribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.dqn.policies import DQNPolicy

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3.models import portable
from rl_eval.integrations.sb3.observations import ATTRIBUTE, NOTES, Preprocessor, refuse_empty
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]


def parameters(distribution: Distribution) -> list[Array]:
    """Return logits of each part, or mean and standard deviation, each of shape (batch, n)."""
    parts = getattr(distribution, "distributions", None)
    return [
        getattr(part, name).numpy(force=True)
        for part in ([distribution.distribution] if parts is None else parts)
        for name in (("loc", "scale") if isinstance(part, torch.distributions.Normal) else ("logits",))
    ]


@final
class Exploration:
    """Noise of a policy with gSDE: one matrix per episode, drawn at its first step, and multiplied by the features.

    SB3 draws a new matrix when a rollout begins, or every ``sde_sample_freq`` steps. Its ``predict`` never does, so all
    episodes of an ``evaluate_policy`` share the one that the training had last.

    Args:
        actor: The part of the policy that has the distribution.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return matrices of shape (batch, features, actions), and whether they are drawn, shape (batch,)."""
        std = self._std()
        blank = torch.zeros((batch_size, *std.shape), dtype=std.dtype, device=std.device)
        return blank, torch.zeros(batch_size, dtype=torch.bool, device=std.device)

    def draw(self, state: Any, noise: NoiseSource) -> Any:
        """Draw the matrices of fresh episodes, give them all to the distribution, and return the next state."""
        matrices, drawn = state
        if not drawn.all():
            std = self._std()
            numbers = torch.from_numpy(noise.normal(std.numel())).to(std).reshape(matrices.shape)
            matrices = torch.where(drawn[:, None, None], matrices, numbers * std)
        distribution = self._actor.action_dist
        distribution.exploration_mat, distribution.exploration_matrices = matrices[0], matrices
        return matrices, torch.ones_like(drawn)

    def _std(self) -> torch.Tensor:
        std: torch.Tensor = self._actor.action_dist.get_std(self._actor.log_std).detach()
        return std


# ---------------------------------------------------------------------- inputs beside the observation


_RECURRENT: Final = "sb3_contrib.common.recurrent.policies"
_MASKABLE: Final = "sb3_contrib.common.maskable.policies"
_PREDICTS: Final = ("stable_baselines3.common.policies", _RECURRENT, _MASKABLE)
"""Modules of the ``predict`` that policies have; ``RecurrentPPO`` has a state, and ``MaskablePPO`` masks."""


def _home_of(module: BasePolicy) -> str:
    """Return the module of a policy's ``predict``.

    Raises:
        ConfigError: It has a ``predict`` of its own.
    """
    home: str = type(module).predict.__module__
    if home not in _PREDICTS:
        raise ConfigError(
            f"{type(module).__name__} has a predict() of its own, which rl_eval cannot batch: implement rl_eval.Policy "
            "around it"
        )
    return home


def _without_mask(module: BasePolicy, space: gym.Space[Any]) -> gym.Space[Any]:
    """Return the space of the observation beside the mask, which ``environment.action_masks`` puts there.

    Raises:
        ConfigError: There is no mask.
    """
    if not isinstance(space, gym.spaces.Dict) or set(space.spaces) != {"observation", "action_mask"}:
        raise ConfigError(
            f"{type(module).__name__} needs the environment's action masks: set environment.action_masks to true, and "
            "give the environment a method action_masks(), as sb3-contrib does"
        )
    return space["observation"]


# ---------------------------------------------------------------------- policies


State = dict[str, Any]


def as_policy(
    value: BaseAlgorithm | BasePolicy,
    section: PolicySection,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
) -> SB3Policy:
    """Make a model, or what :func:`portable` or :func:`load_policy` made of it, fit for an environment.

    Raises:
        ConfigError: The spaces do not fit, or it cannot act as configured.
    """
    if section.actions == "unsquash":
        raise ConfigError(
            'policy.actions is "unsquash", but a policy of Stable-Baselines3 returns actions in the environment\'s '
            "scale: leave policy.actions out"
        )
    return SB3Policy(portable(value), observation_space, action_space, section.deterministic)


@final
class SB3Policy:
    """A policy of Stable-Baselines3 behind the interface of :class:`rl_eval.Policy`.

    Args:
        module: A detached policy, with its normalizers if it has any.
        observation_space: Observation space of the environment.
        action_space: Action space of the environment.
        deterministic: Whether it is only asked for the mode of its distribution.

    Raises:
        ConfigError: The spaces do not fit the policy's, or it has a ``predict`` of its own, or cannot be sampled from.
    """

    def __init__(
        self,
        module: BasePolicy,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        deterministic: bool = True,
    ) -> None:
        home = _home_of(module)
        self._masked, self._recurrent = home == _MASKABLE, home == _RECURRENT
        if action_space != module.action_space:
            raise ConfigError(
                f"the policy was trained with actions of {module.action_space}, but the environment's are of "
                f"{action_space}"
            )
        self.module = module
        self.result_notes: tuple[str, ...] = getattr(module, NOTES, ())
        """Sentences for the reader of a result."""
        self._normalizers = getattr(module, ATTRIBUTE, torch.nn.ModuleList())
        observed = _without_mask(module, observation_space) if self._masked else observation_space
        self._prepare = Preprocessor(observed, module.observation_space, self._normalizers)
        self._actor: Any = getattr(module, "actor", module)
        known = type(module)._predict.__module__.startswith(("stable_baselines3.", "sb3_contrib."))
        self._samples = known and hasattr(self._actor, "action_dist")
        """Whether a sample is one of the distribution; the context of draws costs time for each call of torch in it."""
        self._exploration: Exploration | None = None
        if not deterministic and isinstance(getattr(self._actor, "action_dist", None), StateDependentNoiseDistribution):
            self._exploration = Exploration(self._actor)

    # ------------------------------------------------------------------ the Policy protocol

    def initial_state(self, batch_size: int) -> State | None:
        """Return frames, LSTM state and exploration noise of fresh episodes; None if the policy has none of them."""
        state: State = {
            "frames": self._prepare.initial_state(batch_size, self.module.device),
            "exploration": self._exploration and self._exploration.initial_state(batch_size),
        }
        if self._recurrent:  # Zeros, as ``predict`` begins with.
            layers, _, size = self.module.lstm_hidden_state_shape
            zeros = torch.zeros((batch_size, layers, size), device=self.module.device)
            state["lstm"] = zeros, zeros.clone()
        return {name: part for name, part in state.items() if part is not None} or None

    @torch.no_grad()
    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return the numbers that actions are chosen by, in the second step if the policy has a state."""
        rows = len(tree.flatten(observations)[0])
        state = self.initial_state(rows) or {}
        prepared, arguments, _ = self._read(observations, state)
        if isinstance(self.module, DQNPolicy):
            return [self.module.q_net(prepared).numpy(force=True)]
        if not hasattr(self.module, "get_distribution"):
            return []
        distribution, following = self._distribution(prepared, arguments)
        if following is not None:
            # A state of zeros would hide whether rows share its matrix products without a trace.
            distribution, _ = self._distribution(prepared, self._arguments(observations, following))
        return parameters(distribution)

    @torch.no_grad()
    def act(
        self, observations: Any, state: State | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Array, State | None]:
        """Choose actions; see :class:`rl_eval.Policy`.

        Raises:
            ConfigError: Statistics are uninitialized.
        """
        refuse_empty(self._normalizers, ConfigError)
        former = state or {}
        prepared, arguments, frames = self._read(observations, former)
        following: State = {"frames": frames}
        if self._exploration is not None and noise is not None:
            following["exploration"] = self._exploration.draw(former["exploration"], noise)
        if noise is not None and self._samples:
            distribution, following["lstm"] = self._distribution(prepared, arguments)
            with EpisodeDraws(live, noise):
                actions = distribution.sample()
        else:
            with nullcontext() if noise is None else EpisodeDraws(live, noise):
                result = self.module._predict(prepared, deterministic=noise is None, **arguments)
            actions, following["lstm"] = self._split(result)
        chosen = actions.numpy(force=True)
        if noise is not None and isinstance(self.module, DQNPolicy):
            chosen = self._explored(chosen, noise)
        return self._finished(chosen), {name: following.get(name, former[name]) for name in former} or None

    # ------------------------------------------------------------------ calls of the policy

    def _read(self, observations: Any, state: State) -> tuple[Any, dict[str, Any], Any]:
        """Return what the policy takes: an observation, and more by name; and the frames to remember."""
        observation = observations["observation"] if self._masked else observations
        prepared, frames = self._prepare(observation, state.get("frames"), self.module.device)
        return prepared, self._arguments(observations, state.get("lstm")), frames

    def _arguments(self, observations: Any, lstm: Any) -> dict[str, Any]:
        """Return what ``_predict`` and ``get_distribution`` take beside the observation."""
        if self._masked:
            return {"action_masks": torch.from_numpy(observations["action_mask"]).to(self.module.device)}
        if self._recurrent:  # Layers first; no episode starts, for the state of a fresh one is zero already.
            states = tuple(part.transpose(0, 1).contiguous() for part in lstm)
            return {"lstm_states": states, "episode_starts": torch.zeros(len(lstm[0]), device=self.module.device)}
        return {}

    def _split(self, result: Any) -> tuple[Any, Any]:
        """Return what such a call computed, and the next state of an LSTM, rows first."""
        if not self._recurrent:
            return result, None
        computed, states = result
        return computed, tuple(part.transpose(0, 1).contiguous() for part in states)

    def _distribution(self, prepared: Any, arguments: dict[str, Any]) -> tuple[Distribution, Any]:
        if hasattr(self._actor, "get_action_dist_params"):
            mean, log_std, more = self._actor.get_action_dist_params(prepared)
            return self._actor.action_dist.proba_distribution(mean, log_std, **more), None
        return self._split(self._actor.get_distribution(prepared, **arguments))

    def _explored(self, greedy: Array, noise: NoiseSource) -> Array:
        rate = float(getattr(self.module, "exploration_rate", 0.0))
        draws = noise.uniform(2)
        anything = (draws[:, 1] * self.module.action_space.n).astype(greedy.dtype)
        return np.where(draws[:, 0] < rate, anything, greedy)

    # ------------------------------------------------------------------ scale

    def _finished(self, actions: Array) -> Array:
        """Bring actions into the shape, scale and kind of the action space, as ``BasePolicy.predict`` does."""
        space = self.module.action_space
        actions = actions.reshape(len(actions), *space.shape)
        if not isinstance(space, gym.spaces.Box):
            return actions.astype(space.dtype)
        if self.module.squash_output:
            return np.asarray(self.module.unscale_action(actions))
        return np.clip(actions, space.low, space.high)
