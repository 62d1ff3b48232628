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
gSDE                        cannot be: its noise outlives a step
==========================  ========================================================================
"""

from __future__ import annotations

from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    SquashedDiagGaussianDistribution,
)
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.dqn.policies import DQNPolicy
from stable_baselines3.td3.policies import TD3Policy

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3.live import portable
from rl_eval.integrations.sb3.normalizer import ATTRIBUTE, refuse_empty
from rl_eval.integrations.sb3.observations import Preprocessor, State
from rl_eval.policies.sampling import bernoulli, categorical, gaussian
from rl_eval.protocols import NoiseSource

__all__ = ["SB3Policy", "as_policy"]

Array = npt.NDArray[Any]

_KNOWN: Final = (
    CategoricalDistribution,
    MultiCategoricalDistribution,
    BernoulliDistribution,
    DiagGaussianDistribution,
)


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
    policy = SB3Policy(portable(value), observation_space, action_space)
    if not section.deterministic:
        policy.check_sampling()
    return policy


@final
class SB3Policy:
    """A policy of Stable-Baselines3 behind the interface of :class:`rl_eval.Policy`.

    Args:
        module: A detached policy, with its normalizers if it has any.
        observation_space: Observation space of the environment.
        action_space: Action space of the environment.

    Raises:
        ConfigError: The spaces do not fit the policy's, or the policy has a ``predict`` of its own.
    """

    def __init__(self, module: BasePolicy, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        if type(module).predict is not BasePolicy.predict:
            raise ConfigError(
                f"{type(module).__name__} has a predict() of its own, as recurrent and masked policies do, which "
                "rl_eval cannot batch: implement rl_eval.Policy around it"
            )
        if action_space != module.action_space:
            raise ConfigError(
                f"the policy was trained with actions of {module.action_space}, but the environment's are of "
                f"{action_space}"
            )
        self.module = module
        self._normalizers = getattr(module, ATTRIBUTE, torch.nn.ModuleList())
        self._prepare = Preprocessor(observation_space, module.observation_space, self._normalizers)
        self._actor: Any = getattr(module, "actor", module)

    # ------------------------------------------------------------------ the Policy protocol

    def initial_state(self, batch_size: int) -> State | None:
        """Return the frames of fresh episodes; None if the policy sees one at a time."""
        return self._prepare.initial_state(batch_size, self.module.device)

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return the numbers that discrete actions are chosen by."""
        batch = len(next(iter(observations.values())) if isinstance(observations, dict) else observations)
        prepared, _ = self._prepare(observations, self.initial_state(batch), self.module.device)
        if isinstance(self.module, DQNPolicy):
            return [_array(self.module.q_net(prepared))]
        return self._parameters(prepared) if hasattr(self.module, "get_distribution") else []

    @torch.no_grad()
    def act(
        self, observations: Any, state: State | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Array, State | None]:
        """Choose actions; see :class:`rl_eval.Policy`.

        Raises:
            ConfigError: Statistics are uninitialized, or the policy cannot be sampled from.
        """
        refuse_empty(self._normalizers, ConfigError)
        prepared, state = self._prepare(observations, state, self.module.device)
        if noise is None or isinstance(self.module, TD3Policy):
            chosen = _array(self.module._predict(prepared, deterministic=True))
        elif isinstance(self.module, DQNPolicy):
            chosen = self._explored(_array(self.module._predict(prepared)), noise)
        else:
            chosen = self._sampled(prepared, live, noise)
        return self._finished(chosen), state

    # ------------------------------------------------------------------ sampling

    def check_sampling(self) -> None:
        """Make sure that the policy can be sampled from an episode's own stream.

        Raises:
            ConfigError: It has gSDE, a distribution that rl_eval does not know, or its own way to predict.
        """
        if isinstance(self.module, (DQNPolicy, TD3Policy)):
            return
        distribution = getattr(self._actor, "action_dist", None)
        foreign = type(self.module)._predict.__module__.partition(".")[0] not in {"stable_baselines3", "sb3_contrib"}
        if foreign or not isinstance(distribution, _KNOWN):
            what = (
                f"{type(self.module).__name__} has a _predict() of its own"
                if foreign
                else f"{type(self.module).__name__} acts by a {type(distribution).__name__}"
            )
            raise ConfigError(
                f"policy.deterministic is False, but {what}, which rl_eval cannot sample from an episode's own stream "
                "(gSDE draws noise that outlives a step): set policy.deterministic to True"
            )

    def _sampled(self, prepared: Any, live: npt.NDArray[np.bool_], noise: NoiseSource) -> Array:
        self.check_sampling()
        distribution: Distribution = self._actor.action_dist
        parameters = self._parameters(prepared)
        if isinstance(distribution, DiagGaussianDistribution):
            mean, std = parameters
            drawn: Array = gaussian(mean, std, noise)
            return np.tanh(drawn) if isinstance(distribution, SquashedDiagGaussianDistribution) else drawn
        if isinstance(distribution, BernoulliDistribution):
            return bernoulli(parameters[0], noise)
        chosen = [categorical(logits, live, noise) for logits in parameters]
        return np.stack(chosen, axis=1) if isinstance(distribution, MultiCategoricalDistribution) else chosen[0]

    def _parameters(self, prepared: Any) -> list[Array]:
        """Return logits of each part, or mean and standard deviation, each of shape (batch, n)."""
        if hasattr(self._actor, "get_action_dist_params"):
            mean, log_std, _ = self._actor.get_action_dist_params(prepared)
            return [_array(mean), _array(log_std.exp())]
        found = self._actor.get_distribution(prepared).distribution
        if isinstance(found, torch.distributions.Normal):
            return [_array(found.loc), _array(found.scale)]
        return [_array(part.logits) for part in (found if isinstance(found, list) else [found])]

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


def _array(tensor: torch.Tensor) -> Array:
    return tensor.cpu().numpy()
