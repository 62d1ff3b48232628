"""Fitted Q evaluation: action values of the target policy, learned from logged episodes (Le, Voloshin & Yue 2019).

A value is the discounted return of the rest of the episode. An episode ends at the time limit at the latest. So the
number of the step is an input, and the value after the last step is 0. If the values of an episode were fitted to
its rewards, they would bias the doubly robust estimate. So the values of each half of the episodes come from a network
that was fitted to the other half.
"""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rl_eval.ope.data import LoggedEpisodes
from rl_eval.ope.estimators import ActionValues
from rl_eval.policies.inference.spaces import no_grad
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Policy

Array = npt.NDArray[Any]

_DRAWS: Final = 8
"""Number of drawn actions that represent the distribution of the target policy at a step."""
_FOLDS: Final = 2
_BATCH: Final = 256
_HIDDEN: Final = 64
_AVERAGING: Final = 0.1
"""Weight of the network in each update of its slow copy. The slow copy computes the targets."""
_LEAST_UPDATES: Final = 2_000
_UPDATES_PER_STEP: Final = 20
"""Number of updates per step of the longest episode. The value of a step influences the step before it within ten
updates."""
_MANY: Final = 1_000
"""Minimum number of different integers that count as numbers, and not as classes."""


def fitted_action_values(
    episodes: LoggedEpisodes, policy: Policy, gamma: float, *, updates: int | None = None, seed: int = 0
) -> ActionValues:
    """Fit action values, and return them at the logged steps.

    Args:
        episodes: Logged episodes, at least two.
        policy: The target policy. At each step, some of its actions are drawn.
        gamma: Discount factor.
        updates: Number of gradient steps for each half of the episodes; by default 20 per step of the longest episode,
            and at least 2,000.
        seed: Seed of the networks and the batches. Global generators do not change.
    """
    if updates is None:
        updates = max(_LEAST_UPDATES, _UPDATES_PER_STEP * int(episodes.lengths.max()))
    drawn = _draw_actions(policy, episodes)
    inputs = _Inputs(episodes, drawn)
    fold_of = np.arange(len(episodes)) % _FOLDS
    q, v = np.zeros(len(episodes.rewards)), np.zeros(len(episodes.rewards))
    for fold in range(_FOLDS):
        others = torch.from_numpy(np.flatnonzero(episodes.rows_of(fold_of != fold)))
        scale = inputs.scale_of(others)
        network = _fit(inputs, others, scale, gamma, updates, seed + fold)
        rows = torch.from_numpy(np.flatnonzero(episodes.rows_of(fold_of == fold)))
        with torch.no_grad():
            q[rows] = scale * network(inputs.taken(rows)).squeeze(-1).double().numpy()
            v[rows] = scale * network(inputs.drawn(rows)).squeeze(-1).mean(1).double().numpy()
    return ActionValues(q, v)


def _draw_actions(policy: Policy, episodes: LoggedEpisodes) -> Array:
    """Return actions of the policy at every step, shape (steps, draws, ...)."""
    count = len(episodes.rewards)
    seeds, live = np.arange(count), np.ones(count, bool)
    with no_grad():
        draws = [
            policy.act(episodes.observations.copy(), None, live, EpisodeNoise(seeds, np.full(count, draw)))[0]
            for draw in range(_DRAWS)
        ]
    return np.stack([np.asarray(actions) for actions in draws], axis=1)


class _Inputs:
    """Rows that the network reads: observation, number of the step, action."""

    def __init__(self, episodes: LoggedEpisodes, drawn: Array) -> None:
        steps = episodes.step_numbers()
        last = np.append(steps[1:] == 0, True)
        both = np.concatenate([episodes.actions[:, None], drawn], axis=1)
        actions = _features(both.reshape(-1, *both.shape[2:])).reshape(*both.shape[:2], -1)
        self.states = torch.cat([_features(episodes.observations), _features(steps.astype(np.float64))], dim=1)
        self.actions = actions
        self.rewards = torch.from_numpy(episodes.rewards.copy())
        self.goes_on = torch.from_numpy(~last)

    def scale_of(self, rows: torch.Tensor) -> float:
        """Return the approximate size of the values.

        The network is fitted to values divided by this size, so that its outputs are about 1.
        """
        return float(self.rewards[rows].abs().mean() * len(rows) / (~self.goes_on[rows]).sum()) or 1.0

    def taken(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the inputs for the stored actions, shape (rows, features)."""
        return torch.cat([self.states[rows], self.actions[rows, 0]], dim=1)

    def drawn(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the inputs for the actions that were drawn, shape (rows, draws, features)."""
        actions = self.actions[rows, 1:]
        return torch.cat([self.states[rows, None].expand(-1, actions.shape[1], -1), actions], dim=2)


def _features(values: Array) -> torch.Tensor:
    """Return features: one-hot classes for single integers.

    Other values are scaled to mean 0 and standard deviation 1.
    """
    flat = values.reshape(len(values), -1)
    if values.dtype.kind in "iub" and flat.shape[1] == 1 and np.ptp(flat.astype(np.int64)) < _MANY:
        _, codes = np.unique(flat[:, 0], return_inverse=True)
        return torch.from_numpy(np.eye(codes.max() + 1, dtype=np.float32)[codes])
    wide = flat.astype(np.float64)
    spread = wide.std(0)
    return torch.from_numpy((wide - wide.mean(0)) / np.where(spread > 0, spread, 1.0)).float()


def _fit(inputs: _Inputs, rows: torch.Tensor, scale: float, gamma: float, updates: int, seed: int) -> nn.Module:
    """Return a network that is fitted to rows. Its outputs are values divided by ``scale``."""
    rewards = (inputs.rewards / scale).float()
    width = inputs.states.shape[1] + inputs.actions.shape[2]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # Layers draw their first weights from the global generator.
        torch.default_generator.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1)
        )
    slow = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(updates):
        batch = rows[torch.randint(len(rows), (_BATCH,), generator=generator)]
        targets = rewards[batch]
        following = batch[inputs.goes_on[batch]] + 1
        with torch.no_grad():
            targets[inputs.goes_on[batch]] += gamma * slow(inputs.drawn(following)).squeeze(-1).mean(1)
        loss = nn.functional.mse_loss(network(inputs.taken(batch)).squeeze(-1), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(slow.parameters(), network.parameters(), strict=True):
                kept.lerp_(new, _AVERAGING)
    return slow
