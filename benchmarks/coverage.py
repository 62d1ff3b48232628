"""How often a 95 % interval of a mean holds it: by method, distribution, bounds and number of values."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.runner import Row
from rl_eval.results.stats import interval as intervals

__all__ = ["levels", "measure"]

_SIZES: Final = (2, 5, 10, 20, 50, 200)
_CONFIDENCE: Final = 0.95
_Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
_WORLDS: Final[Mapping[str, tuple[float, _Draw]]] = {
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


@dataclass(frozen=True, slots=True)
class _World:
    """Distribution of returns."""

    mean: float
    draw: _Draw
    bounds: intervals.Bounds | None = None


def _rare(share: float, usual: float, low: float, high: float) -> _World:
    """Nearly always one value, and a uniform one in a share of episodes, within the bounds of a solved task."""

    def draw(rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        return np.where(rng.random(size) < share, rng.uniform(low, high, size), usual)

    return _World(usual + share * ((low + high) / 2 - usual), draw, (0.0, max(usual, high)))


def _rate(share: float) -> _World:
    return _World(share, lambda rng, size: (rng.random(size) < share).astype(np.float64), (0.0, 1.0))


_LEVELS: Final[Mapping[str, _World]] = {
    "0 or 1, mean 0.5": _rate(0.5),
    "0 or 1, mean 0.9": _rate(0.9),
    "0 or 1, mean 0.98": _rate(0.98),
    "500, 2 % fall": _rare(0.02, 500.0, 10.0, 200.0),
    "500, 5 % fall": _rare(0.05, 500.0, 10.0, 200.0),
    "500, 10 % fall": _rare(0.1, 500.0, 10.0, 200.0),
    "0, 5 % spikes": _rare(0.05, 0.0, 0.0, 200.0),
    "normal": _World(0.0, lambda rng, size: rng.normal(size=size)),
    "exponential": _World(1.0, lambda rng, size: rng.exponential(size=size)),
    "lognormal": _World(float(np.exp(1.125)), lambda rng, size: rng.lognormal(0.0, 1.5, size)),
    "normal, 5 % spikes": _World(5.0, lambda rng, size: rng.normal(size=size) + 100 * (rng.random(size) < 0.05)),
}
_LEVEL_SIZES: Final = (6, 10, 20, 50, 100)


def levels(runs: int, progress: Callable[[str], None]) -> list[Row]:
    """One row per distribution, bounds and number of values: how often each end of the interval is wrong.

    Args:
        runs: Simulated evaluations of each kind. A missing interval is not wrong.
        progress: Told what ran.
    """
    kinds = [
        (name, bounded) for name, world in _LEVELS.items() for bounded in (True, False) if world.bounds or not bounded
    ]
    cells = [(*kind, size, runs) for kind in kinds for size in _LEVEL_SIZES]
    rows: list[Row] = []
    with ProcessPoolExecutor() as pool:
        for row in pool.map(_level, *zip(*cells, strict=True)):
            progress(f"{row['distribution']}, {row['values']} values")
            rows.append(row)
    return rows


def _level(name: str, bounded: bool, size: int, runs: int) -> Row:
    world, rng = _LEVELS[name], np.random.default_rng([size, zlib.crc32(name.encode())])
    bounds = world.bounds if bounded else None
    found = [intervals.mean_interval(world.draw(rng, size), _CONFIDENCE, bounds=bounds) for _ in range(runs)]
    return {
        "distribution": name,
        "bounds": bounds,
        "values": size,
        "runs": runs,
        "above": sum(one.low > world.mean for one in found),
        "below": sum(one.high < world.mean for one in found),
        "none": sum(not one.exists for one in found),
    }
