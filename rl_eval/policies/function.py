"""Policy of a plain function, which maps a batch of numpy observations to a batch of actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt

from rl_eval.protocols import NoiseSource

__all__ = ["CallablePolicy"]


@final
class CallablePolicy:
    r"""A stateless policy around a function of observations.

    Args:
        function: Maps a batch in the structure of the observation space (leaves of shape
            (batch, \\*leaf_shape)) to a batch of actions.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return self.function(observations), None
