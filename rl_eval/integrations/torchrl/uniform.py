"""Random actions in place of a policy of TorchRL."""

from __future__ import annotations

from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.policies.uniform import UniformPolicy
from rl_eval.protocols import NoiseSource

__all__ = ["UNIFORM", "UniformActions"]

UNIFORM: Final = "uniform"
"""Mode of a policy whose actions are random."""


@final
class UniformActions:
    """:class:`~rl_eval.policies.uniform.UniformPolicy` with the members of a policy of TorchRL.

    Args:
        action_space: Space of one action.
    """

    outputs: Final = None

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self._policy = UniformPolicy(action_space)

    def initial_state(self, batch_size: int) -> None:
        """Return no state."""

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return nothing: no action depends on an observation."""
        return []

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        actions, _ = self._policy.act(observations, state, live, noise)
        return actions, state
