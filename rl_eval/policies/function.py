"""Policy of a plain function, which maps a batch of numpy observations to a batch of actions."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import tree

from rl_eval.errors import PolicyError, summary_of
from rl_eval.protocols import NoiseSource

_TAKES_ONE: Final = (
    "the policy takes one observation, and raises {} for a batch of them: give a function of a batch, such as "
    "lambda batch: np.array([policy(observation) for observation in batch])"
)


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
        """Choose actions; see :class:`rl_eval.Policy`.

        Raises:
            PolicyError: The function takes one observation, and not a batch.
        """
        try:
            return self.function(observations), None
        except (IndexError, TypeError, ValueError) as error:
            if self._takes_one(observations):
                raise PolicyError(_TAKES_ONE.format(summary_of(error))) from error
            raise

    def _takes_one(self, observations: Any) -> bool:
        """Return whether the function takes an observation, and not a batch that holds it alone."""
        return self._takes(tree.map_structure(itemgetter(0), observations)) and not self._takes(
            tree.map_structure(itemgetter(slice(1)), observations)
        )

    def _takes(self, observations: Any) -> bool:
        try:
            self.function(observations)
        except Exception:
            return False
        return True
