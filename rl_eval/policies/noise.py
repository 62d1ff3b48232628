"""Random numbers for sampling policies: a function of the episode seed, the step and the number of the draw.

The numbers are computed from counters, so there is no generator state that can be lost. An episode draws the same
numbers if it is retried, moved to another lane or resumed. No global generator is used. Each number is the result of
three rounds of SplitMix64, one each for the seed, the step and the draw.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.scheduling.plan import GAMMA, mix

_STREAM: Final = np.uint64(0x5851F42D4C957F2D)
_ELEMENT: Final = np.uint64(0xD1342543DE82EF95)


class EpisodeNoise:
    """Noise of a batch of lanes.

    Args:
        seeds: Episode seed of each lane, shape (batch,).
        steps: Number of steps of each lane's episode so far, shape (batch,).
    """

    def __init__(self, seeds: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> None:
        self.seeds, self.steps = seeds, steps
        keys = mix(seeds.astype(np.uint64) + _STREAM)
        self._counters = mix(keys + steps.astype(np.uint64) * GAMMA)
        self._used = 0

    def take(self, rows: Any) -> EpisodeNoise:
        """Return the noise of some lanes, before any draw."""
        return EpisodeNoise(self.seeds[rows], self.steps[rows])

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Return the next ``count`` uniform numbers in (0, 1) for each lane's current step, shape (batch, count)."""
        elements = np.arange(self._used + 1, self._used + count + 1, dtype=np.uint64)
        self._used += count
        bits = mix(self._counters[:, None] + elements * _ELEMENT)
        # 52 bits plus a half step: with 53 bits, the highest number would round to 1.
        return np.asarray(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52, np.float64)

    def normal(self, count: int) -> npt.NDArray[np.float64]:
        """Return the next ``count`` standard normal numbers for each lane's current step, shape (batch, count).

        Each number is the normal quantile of one uniform number. It is computed element by element, so it does not
        depend on its place in the batch.
        """
        from scipy.special import ndtri

        return np.asarray(ndtri(self.uniform(count)), np.float64)
