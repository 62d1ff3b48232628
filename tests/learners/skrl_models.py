"""Models as users of skrl write them."""

from __future__ import annotations

from typing import Any

import torch
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from torch import nn


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


class Actor(GaussianMixin, Model):
    def __init__(self, observation_space: Any, state_space: Any, action_space: Any, device: Any) -> None:
        spaces = {"observation_space": observation_space, "state_space": state_space, "action_space": action_space}
        Model.__init__(self, **spaces, device=device)
        GaussianMixin.__init__(self, clip_actions=True)
        self.net = network(self.num_observations, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: Any, role: str) -> Any:
        return 2 * torch.tanh(self.net(inputs["observations"])), {"log_std": self.log_std}


class Values(DeterministicMixin, Model):
    """Values of the state, or of each discrete action."""

    def __init__(self, observation_space: Any, action_space: Any, device: Any = "cpu") -> None:
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device=device)
        DeterministicMixin.__init__(self)
        self.net = network(self.num_observations, getattr(action_space, "n", 1))

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


class Chooser(CategoricalMixin, Model):
    def __init__(self, observation_space: Any, action_space: Any, device: Any = "cpu") -> None:
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device=device)
        CategoricalMixin.__init__(self)
        self.net = network(self.num_observations, self.num_actions)

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


class Remembering(GaussianMixin, Model):
    """Actor with an LSTM, for one step at a time."""

    def __init__(self, observation_space: Any, action_space: Any, device: Any = "cpu") -> None:
        Model.__init__(self, observation_space=observation_space, action_space=action_space, device=device)
        GaussianMixin.__init__(self)
        self.lstm = nn.LSTM(self.num_observations, 6, num_layers=2)
        self.net = network(6, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def get_specification(self) -> dict[str, Any]:
        return {"rnn": {"sequence_length": 8, "sizes": [(2, 1, 6), (2, 1, 6)]}}

    def compute(self, inputs: Any, role: str) -> Any:
        output, states = self.lstm(inputs["observations"][None], tuple(inputs["rnn"]))
        return self.net(output[0]), {"log_std": self.log_std, "rnn": list(states)}
