"""SplitMix64 (Steele, Lea & Flood 2014): the mixing function behind episode seeds and the draws of policies."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["GAMMA", "mix"]

GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
"""Step of the generator's counter, the golden ratio."""


def mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the generator's outputs for values of its counter, shape as given: a bijection of 64 bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)
