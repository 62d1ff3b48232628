"""How often a 95 % interval of a mean holds it: by method, distribution and number of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.runner import Row
from rl_eval.results.stats import interval as intervals

__all__ = ["measure"]

_SIZES: Final = (2, 5, 10, 20, 50, 200)
_CONFIDENCE: Final = 0.95
_WORLDS: Final[Mapping[str, tuple[float, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]]]] = {
    "normal": (0.0, lambda rng, size: rng.normal(size=size)),
    "exponential": (1.0, lambda rng, size: rng.exponential(size=size)),
    "0 or 1, mean 0.9": (0.9, lambda rng, size: (rng.random(size) < 0.9).astype(np.float64)),
}
"""True means, and what draws a sample."""


def measure(samples: int, progress: Callable[[str], None]) -> list[Row]:
    """One row per distribution and number of values: the share of samples whose interval holds the true mean.

    Args:
        samples: Of each kind; the same ones for both methods.
        progress: Told what runs.
    """
    rows: list[Row] = []
    for name, (mean, draw) in _WORLDS.items():
        for size in _SIZES:
            progress(f"{name}, {size} values")
            rng = np.random.default_rng(size)
            held = np.array([_held(draw(rng, size), mean) for _ in range(samples)])
            bca, student_t = held.mean(axis=0).tolist()
            rows.append({"distribution": name, "values": size, "samples": samples, "bca": bca, "student_t": student_t})
    return rows


def _held(sample: npt.NDArray[np.float64], mean: float) -> tuple[bool, bool]:
    """Whether the intervals of BCa and of Student t hold a mean; of equal values both are that value."""
    if (sample == sample[0]).all():
        return (bool(sample[0] == mean),) * 2
    made: Any = (intervals._bca(sample, _CONFIDENCE), intervals._student_t(sample, _CONFIDENCE, ""))
    return tuple(mean in interval for interval in made)
