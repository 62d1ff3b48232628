"""Policies with what breaks evaluators: recurrent state that samples, and nested observations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt


def make_gru(observation_space: gym.Space[Any], action_space: gym.Space[Any], hidden: int = 16, seed: int = 12) -> Any:
    """Build a recurrent policy with fixed weights: a GRU cell over flat observations, sampling actions by its logits.

    It implements :class:`rl_eval.Policy`, with a state of shape (batch, hidden).
    """
    import torch
    from torch import nn

    class GRUPolicy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(seed)
            self.cell = nn.GRUCell(int(np.prod(observation_space.shape or ())), hidden)
            self.head = nn.Linear(hidden, int(action_space.n))  # type: ignore[attr-defined]
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.5, generator=generator)

        def initial_state(self, batch_size: int) -> torch.Tensor:
            return torch.zeros(batch_size, hidden)

        def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
            state = self.cell(torch.from_numpy(observations).float().flatten(1), state)
            logits = self.head(state).double().numpy()
            if noise is None:
                return logits.argmax(1), state
            gumbel = -np.log(-np.log(noise.uniform(logits.shape[1])))
            return (logits + gumbel).argmax(1), state

    return GRUPolicy()


def make_dict_policy(observation_space: gym.Space[Any]) -> Any:
    """Build a numpy policy for :class:`DictObservation`: it pushes towards where the pole leans, as a batch."""

    def act(observations: dict[str, Any]) -> npt.NDArray[np.int64]:
        cart, rest = observations["body"]
        lean = rest[:, 1] + 0.01 * cart[:, 0]
        picture = observations["camera"].reshape(len(lean), -1).mean(1) * 1e-5
        return np.asarray(lean + picture * (2 * observations["side"] - 1) > 0, np.int64)

    return act
