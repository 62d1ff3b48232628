"""Draws from the distributions of policies, from each episode's own stream in place of torch's global generator."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.distributions import (
    Distribution,
    SquashedDiagGaussianDistribution,
    StateDependentNoiseDistribution,
)

from rl_eval.policies.sampling import bernoulli, categorical, gaussian
from rl_eval.protocols import NoiseSource

__all__ = ["Exploration", "draw", "explores", "parameters"]

Array = npt.NDArray[Any]


def parameters(distribution: Distribution) -> list[Array]:
    """Return logits of each part, or mean and standard deviation, each of shape (batch, n)."""
    found = _of_torch(distribution)
    if isinstance(found, torch.distributions.Normal):
        return [found.loc.numpy(force=True), found.scale.numpy(force=True)]
    return [part.logits.numpy(force=True) for part in (found if isinstance(found, list) else [found])]


def draw(distribution: Distribution, live: npt.NDArray[np.bool_], noise: NoiseSource) -> Array:
    """Draw an action per row, before it is mapped onto the action space; not of gSDE."""
    found, numbers = _of_torch(distribution), parameters(distribution)
    if isinstance(found, torch.distributions.Normal):
        drawn: Array = gaussian(numbers[0], numbers[1], noise)
        return np.tanh(drawn) if isinstance(distribution, SquashedDiagGaussianDistribution) else drawn
    if isinstance(found, torch.distributions.Bernoulli):
        return bernoulli(numbers[0], noise)
    chosen = [categorical(logits, live, noise) for logits in numbers]
    return np.stack(chosen, axis=1) if isinstance(found, list) else chosen[0]


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

    def draw(self, distribution: Any, state: Any, noise: NoiseSource) -> tuple[Array, Any]:
        """Draw an action per row; return them with the next state."""
        matrices = self._drawn(state[0], state[1], noise)
        features = distribution._latent_sde  # noqa: SLF001  # SB3 has no other name for it.
        actions = distribution.distribution.mean + torch.bmm(features[:, None], matrices)[:, 0]
        if distribution.bijector is not None:
            actions = distribution.bijector.forward(actions)
        return actions.numpy(force=True), (matrices, torch.ones_like(state[1]))

    def _drawn(self, matrices: torch.Tensor, drawn: torch.Tensor, noise: NoiseSource) -> torch.Tensor:
        """Return the matrices, with those of fresh episodes drawn."""
        if drawn.all():
            return matrices
        std = self._std()
        numbers = torch.from_numpy(noise.normal(std.numel())).to(std).reshape(matrices.shape)
        return torch.where(drawn[:, None, None], matrices, numbers * std)

    def _std(self) -> torch.Tensor:
        std: torch.Tensor = self._actor.action_dist.get_std(self._actor.log_std).detach()
        return std


def _of_torch(distribution: Any) -> Any:
    """Return torch's distribution, or a list of them, one for each part of an action."""
    parts = getattr(distribution, "distributions", None)
    return distribution.distribution if parts is None else parts


def explores(distribution: Distribution | None) -> bool:
    """Return whether a distribution is that of gSDE, whose noise outlives a step."""
    return isinstance(distribution, StateDependentNoiseDistribution)
