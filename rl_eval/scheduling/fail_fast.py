"""Early end of an evaluation whose first attempts all fail alike: what is wrong then is no single episode."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

from rl_eval.records.episode import Fault

__all__ = ["FailFast"]

_FEWEST: Final = 20
_PER_LANE: Final = 4
"""A runner holds up to two leases per lane, and their first attempts may all fail before a retry completes."""
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_PACKAGE: Final = Path(__file__).parents[1]


@final
class FailFast:
    """Counter of the first attempts of an evaluation, as long as all of them fail with one error at one place.

    Args:
        lanes: Lanes of all runners: each may fail four times before the evaluation ends.
    """

    def __init__(self, lanes: int) -> None:
        self._limit = max(_FEWEST, _PER_LANE * lanes)
        self._first: Fault | None = None
        self._count = 0
        self._over = False

    def completed(self) -> None:
        """An episode completed: from now on nothing ends the evaluation early."""
        self._over = True

    def failed(self, faults: Iterable[Fault]) -> str:
        """Count failed attempts; return why the evaluation ends, empty if it goes on."""
        for fault in faults:
            self._first = self._first or fault
            self._over = self._over or _kind(fault) != _kind(self._first)
            self._count += 1
        if self._over or self._first is None or self._count < self._limit:
            return ""
        first = self._first
        where = f" at {':'.join(place)}" if (place := _place(first)) else ""
        return (
            f"{first.error_type}: {first.message}: all of the first {self._count} attempts failed like this in "
            f"{first.phase}{where} ({first.cause}); fault_tolerance.fail_fast=false goes on all the same"
        )


def _kind(fault: Fault) -> tuple[object, ...]:
    return fault.error_type, fault.cause, fault.phase, _place(fault)


def _place(fault: Fault) -> tuple[str, ...]:
    """Return file and line of the innermost frame that is not of this package, empty if there is none."""
    frames = [frame for frame in _FRAME.findall(fault.traceback) if _PACKAGE not in Path(frame[0]).parents]
    return frames[-1] if frames else ()
