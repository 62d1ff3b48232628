"""Times of the passes of a policy in the process, which decide when the next pass begins and how many rows it has.

Rows do not depend on each other, so these decisions change no action.
"""

from __future__ import annotations

from typing import Final, final

from rl_eval.policies.inference.probe import BLOCK

SLOW_S: Final = 0.002
"""Seconds from which a pass is slow, so that it is worth waiting for more rows."""
_ENOUGH: Final = 0.8
"""Least time of a pass over all lanes, in passes of a block each, from which passes have one block."""
_DRIFT: Final = 0.99
"""Factor per pass by which the known time of the other kind of pass falls, so that it is measured again."""


@final
class PassTimes:
    """Times of the last passes.

    Args:
        lanes: Number of lanes.
        patient: Whether a pass may wait for rows.
    """

    def __init__(self, lanes: int, *, patient: bool) -> None:
        self._lanes, self._patient = lanes, patient
        self.last_s = self._block_s = self._whole_s = 0.0
        """Seconds of the last pass, of the last one of a block, and of the last one over all lanes; 0 if unknown."""

    def note(self, rows: int, seconds: float) -> None:
        """Note the time of a pass with some rows."""
        self.last_s = seconds
        if rows == BLOCK:
            self._block_s, self._whole_s = seconds, self._whole_s * _DRIFT
        elif rows > max(BLOCK, self._lanes - BLOCK):
            self._whole_s, self._block_s = seconds, self._block_s * _DRIFT

    @property
    def slow(self) -> bool:
        """Whether it is worth waiting for more rows, because a pass takes about as long for fewer rows."""
        return self._patient and self.last_s >= SLOW_S

    def full(self, rows_per_pass: int | None) -> int:
        """Return the number of rows with which a pass is full.

        If a pass over all lanes takes as long as one pass per block, a slow pass has a block, and other slots step.

        Args:
            rows_per_pass: Most rows that may share a pass; None for all.
        """
        if not self.slow:
            return self._lanes
        blocks = -(-self._lanes // BLOCK)
        by_blocks = self._whole_s >= _ENOUGH * blocks * self._block_s
        return rows_per_pass or (min(BLOCK, self._lanes) if by_blocks else self._lanes)
