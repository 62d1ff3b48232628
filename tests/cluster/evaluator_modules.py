"""Modules whose returns in ``evaluator_world`` say which weights they have."""

from typing import Any

import torch
from torch import nn


class Scale(nn.Module):
    """Multiplies by its one weight: the return of an episode is the weight."""

    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[weight]]))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return observations @ self.weight

    def become(self, weight: float) -> "Scale":
        """Change in place, as a training step does."""
        with torch.no_grad():
            self.weight.fill_(weight)
        return self


class Normalized(nn.Module):
    """Normalizes with running statistics, and adds a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.offset = 0.0

    def get_extra_state(self) -> Any:
        return {"offset": self.offset}

    def set_extra_state(self, state: Any) -> None:
        self.offset = state["offset"]

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.norm(observations) + self.offset
