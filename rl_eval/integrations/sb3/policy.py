"""Policy of Stable-Baselines3 for a batch of lanes. It takes the same actions as the policy's own ``predict``.

Actions have the environment's scale: squashed actions are mapped onto the bounds, other actions are clipped to them.
``deterministic=False`` samples the policy's distribution with each episode's own noise:

==========================  ========================================================================
policy                      sampled action
==========================  ========================================================================
PPO, A2C and similar        categorical, multi-categorical, Bernoulli or diagonal Gaussian
SAC and similar             tanh of a diagonal Gaussian
DQN and similar             greedy, or a random action with probability ``exploration_rate``
TD3 and similar             the deterministic action, as from their ``predict``
gSDE                        the mean plus noise from the episode's own matrix (:class:`Exploration`)
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

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3.files import MASKABLE
from rl_eval.integrations.sb3.models import own_predict, portable
from rl_eval.integrations.sb3.observations import ATTRIBUTE, NOTES, Preprocessor, refuse_empty
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]


def parameters(distribution: Distribution) -> list[Array]:
    """Return the parameters of a distribution as arrays of shape (batch, n).

    These are the logits of each part, or the mean and the standard deviation.
    """
    parts = getattr(distribution, "distributions", None)
    return [
        getattr(part, name).numpy(force=True)
        for part in ([distribution.distribution] if parts is None else parts)
        for name in (("loc", "scale") if isinstance(part, torch.distributions.Normal) else ("logits",))
    ]


@final
class Exploration:
    """Noise of a policy with gSDE: one matrix per episode.

    The matrix is drawn at the episode's first step. At every step, it is multiplied by the features.

    SB3 draws a new matrix when a rollout starts, or every ``sde_sample_freq`` steps. SB3's ``predict`` never draws a
    matrix, so all episodes of SB3's ``evaluate_policy`` share the last matrix of the training.

    Args:
        actor: Part of the policy that contains the action distribution.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zero matrices, shape (batch, features, actions), and the mask of drawn matrices, shape (batch,)."""
        std = self._std()
        blank = torch.zeros((batch_size, *std.shape), dtype=std.dtype, device=std.device)
        return blank, torch.zeros(batch_size, dtype=torch.bool, device=std.device)

    def draw(self, state: Any, noise: NoiseSource) -> Any:
        """Draw the matrices of new episodes, set all matrices in the distribution, and return the next state."""
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


# ---------------------------------------------------------------------- inputs in addition to the observation


_RECURRENT: Final = "sb3_contrib.common.recurrent.policies"
_PREDICTS: Final = ("stable_baselines3.common.policies", _RECURRENT, MASKABLE)
"""Modules whose ``predict`` this module can replace. ``RecurrentPPO`` has a state, and ``MaskablePPO`` takes action
masks."""


def _home_of(module: BasePolicy) -> str:
    """Return the name of the module that defines a policy's ``predict``.

    Raises:
        ConfigError: The policy has its own ``predict``.
    """
    home: str = type(module).predict.__module__
    if home not in _PREDICTS:
        raise own_predict(module)
    return home


def _without_mask(module: BasePolicy, space: gym.Space[Any]) -> gym.Space[Any]:
    """Return the observation space without the mask that ``environment.action_masks`` adds.

    Raises:
        ConfigError: The space has no mask.
    """
    if not isinstance(space, gym.spaces.Dict) or set(space.spaces) != {"observation", "action_mask"}:
        problem = f"{type(module).__name__} needs the environment's action masks (environment.action_masks)"
        fix = (
            "Set environment.action_masks to true, and define the method action_masks() in the environment, as for "
            "sb3-contrib."
        )
        raise ConfigError(problem, key="environment.action_masks", fix=fix)
    return space["observation"]


# ---------------------------------------------------------------------- policies


State = dict[str, Any]


def as_policy(
    value: BaseAlgorithm | BasePolicy,
    section: PolicySection,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
) -> SB3Policy:
    """Build the policy for an environment with these spaces.

    ``value`` is a model, or a result of :func:`portable` or :func:`load_policy`.

    Raises:
        ConfigError: The spaces do not fit, or the policy cannot act as configured.
    """
    if section.actions == "unsquash":
        problem = "policy.actions is 'unsquash', but Stable-Baselines3 returns actions in the environment's scale"
        raise ConfigError(problem, key="policy.actions", value="unsquash", fix="Leave policy.actions out.")
    return SB3Policy(portable(value), observation_space, action_space, section.deterministic)


@final
class SB3Policy:
    """Policy of Stable-Baselines3 with the interface of :class:`rl_eval.Policy`.

    Args:
        module: Policy that no other code uses, with its normalizers if it has any.
        observation_space: Observation space of the environment.
        action_space: Action space of the environment.
        deterministic: Whether the policy always uses the mode of its distribution.

    Raises:
        ConfigError: The spaces do not fit the policy, action masks are missing, or the policy has its own ``predict``.
    """

    def __init__(
        self,
        module: BasePolicy,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        deterministic: bool = True,
    ) -> None:
        home = _home_of(module)
        self._masked, self._recurrent = home == MASKABLE, home == _RECURRENT
        if action_space != module.action_space:
            problem = (
                f"the policy was trained with actions of {module.action_space}, but the environment has {action_space}"
            )
            raise ConfigError(problem, key="environment.env", value=action_space)
        self.module = module
        self.result_notes: tuple[str, ...] = getattr(module, NOTES, ())
        """Notes for readers of the result."""
        self._normalizers = getattr(module, ATTRIBUTE, torch.nn.ModuleList())
        self.normalizes = len(self._normalizers) > 0
        observed = _without_mask(module, observation_space) if self._masked else observation_space
        self._prepare = Preprocessor(observed, module.observation_space, self._normalizers)
        self._actor: Any = getattr(module, "actor", module)
        distribution = getattr(self._actor, "action_dist", None)
        called = (type(module)._predict, type(self._actor).forward, type(distribution))
        known = all(one.__module__.startswith(("stable_baselines3.", "sb3_contrib.")) for one in called)
        self._samples = known and distribution is not None
        """Whether the forward pass runs outside of ``EpisodeDraws``, which slows down each call of torch."""
        self._exploration: Exploration | None = None
        if not deterministic and isinstance(distribution, StateDependentNoiseDistribution):
            self._exploration = Exploration(self._actor)

    # ------------------------------------------------------------------ the Policy protocol

    def initial_state(self, batch_size: int) -> State | None:
        """Return frames, LSTM state and exploration noise of new episodes; None for a policy without a state."""
        state: State = {
            "frames": self._prepare.initial_state(batch_size, self.module.device),
            "exploration": self._exploration and self._exploration.initial_state(batch_size),
        }
        if self._recurrent:  # ``predict`` starts with zeros, too.
            layers, _, size = self.module.lstm_hidden_state_shape
            zeros = torch.zeros((batch_size, layers, size), device=self.module.device)
            state["lstm"] = zeros, zeros.clone()
        return {name: part for name, part in state.items() if part is not None} or None

    @torch.no_grad()
    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return Q values or the parameters of the distribution.

        With an LSTM, these are the parameters at the second step. Return an empty list for a policy that has neither Q
        values nor ``get_distribution``, such as SAC's.
        """
        rows = len(tree.flatten(observations)[0])
        state = self.initial_state(rows) or {}
        prepared, arguments, _ = self._read(observations, state)
        values = getattr(self.module, "q_net", None) or getattr(self.module, "quantile_net", None)
        if values is not None:
            return [values(prepared).numpy(force=True)]
        if not hasattr(self.module, "get_distribution"):
            return []
        distribution, following = self._distribution(prepared, arguments)
        if following is not None:
            # A state of zeros has matrix products of zero in every batch, which would hide differences in rounding.
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
        rate = getattr(self.module, "exploration_rate", None)  # It comes with the weights.
        if noise is not None and rate is not None:
            chosen = self._explored(chosen, noise, float(rate))
        return self._finished(chosen), {name: following.get(name, former[name]) for name in former} or None

    # ------------------------------------------------------------------ calls of the policy

    def _read(self, observations: Any, state: State) -> tuple[Any, dict[str, Any], Any]:
        """Return the observation for the policy, the other arguments by name, and the frames for the next step."""
        observation = observations["observation"] if self._masked else observations
        prepared, frames = self._prepare(observation, state.get("frames"), self.module.device)
        return prepared, self._arguments(observations, state.get("lstm")), frames

    def _arguments(self, observations: Any, lstm: Any) -> dict[str, Any]:
        """Return the arguments of ``_predict`` and ``get_distribution`` other than the observation."""
        if self._masked:
            return {"action_masks": torch.from_numpy(observations["action_mask"]).to(self.module.device)}
        if self._recurrent:  # Layers first. No row needs a reset, since new episodes have a state of zeros.
            states = tuple(part.transpose(0, 1).contiguous() for part in lstm)
            return {"lstm_states": states, "episode_starts": torch.zeros(len(lstm[0]), device=self.module.device)}
        return {}

    def _split(self, result: Any) -> tuple[Any, Any]:
        """Split a result of the policy into the output and the next LSTM state, which is None without an LSTM.

        The first dimension of the returned state is the batch.
        """
        if not self._recurrent:
            return result, None
        computed, states = result
        return computed, tuple(part.transpose(0, 1).contiguous() for part in states)

    def _distribution(self, prepared: Any, arguments: dict[str, Any]) -> tuple[Distribution, Any]:
        if hasattr(self._actor, "get_action_dist_params"):
            mean, log_std, more = self._actor.get_action_dist_params(prepared)
            return self._actor.action_dist.proba_distribution(mean, log_std, **more), None
        return self._split(self._actor.get_distribution(prepared, **arguments))

    def _explored(self, greedy: Array, noise: NoiseSource, rate: float) -> Array:
        draws = noise.uniform(2)
        anything = (draws[:, 1] * self.module.action_space.n).astype(greedy.dtype)
        return np.where(draws[:, 0] < rate, anything, greedy)

    # ------------------------------------------------------------------ scale

    def _finished(self, actions: Array) -> Array:
        """Convert actions to the shape, scale and dtype of the action space, as ``BasePolicy.predict`` does."""
        space = self.module.action_space
        actions = actions.reshape(len(actions), *space.shape)
        if not isinstance(space, gym.spaces.Box):
            return actions.astype(space.dtype)
        if self.module.squash_output:
            return np.asarray(self.module.unscale_action(actions))
        return np.clip(actions, space.low, space.high)
