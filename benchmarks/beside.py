"""What evaluation beside training costs the training: PPO of each framework, with and without it, in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.runner import Cell, Interpreters, Row, run_cell

__all__ = ["measure"]

_CONTENDERS: Final = {
    "RLlib PPO, CartPole": "beside_rllib",
    "TorchRL PPO, CartPole": "beside_torchrl",
    "Stable-Baselines3 PPO, Hopper": "beside_sb3",
}


def measure(interpreters: Interpreters, stretch_s: float, stretches: int, progress: Callable[[str], None]) -> list[Row]:
    """One row per framework.

    Args:
        interpreters: The peers' has the frameworks.
        stretch_s: Length of a stretch with or without evaluation, in seconds.
        stretches: How many, of both kinds together.
        progress: Told what runs.
    """
    rows = []
    for label, contender in _CONTENDERS.items():
        progress(label)
        params = {"scenario": "beside", "stretch_s": stretch_s, "stretches": stretches}
        cell = Cell(label, contender, params, peers=True, timeout_s=300.0 + 3 * stretch_s * stretches)
        rows.append({"label": label, **run_cell(cell, interpreters)})
    return rows
