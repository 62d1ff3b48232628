"""Attempts that fail alike: they end an evaluation early, and the result of a call with a mistake is an error.

An exception that the environment itself raises is never such a mistake, because it may depend on the episode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, final

from rl_eval.errors import EnvError, EpisodeError, PolicyError
from rl_eval.records.episode import Fault
from rl_eval.results.result import EvalResult

_CONTRACT: Final = EnvError.__name__
"""Type of a fault for a value that breaks Gymnasium's contract."""
_LONGEST: Final = 200
"""Maximum length of the text of a space."""
_FEWEST: Final = 20
_PER_LANE: Final = 4
"""Number of failed first attempts per lane before the evaluation ends. A runner holds up to two leases per lane, and
their first attempts may all fail before a retry completes."""
_FRAME: Final = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_PACKAGE: Final = Path(__file__).parents[1]
_LIBRARIES: Final = "/lib/python3"
"""Part of the paths of installed packages and of Python's own modules."""


def mistake_in(result: EvalResult, spaces: Callable[[], tuple[Any, Any]]) -> EpisodeError | None:
    """Return an error if every attempt failed alike before its first step was complete; otherwise None.

    The error has the result as its attribute ``result``.

    Args:
        result: Result of the evaluation.
        spaces: Returns observation space and action space. It is called only if there is an error.
    """
    faults = [fault for fault in result.faults if fault.charged]
    if not faults or result.table.completed.any():
        return None
    first = faults[0]
    of_policy, of_contract = first.cause == "policy", first.cause == "env" and first.error_type == _CONTRACT
    # A step whose return value is invalid has no successor, but it was counted.
    steps = max(fault.step for fault in faults) - (first.phase == "step" and of_contract)
    if len({kind_of(fault) for fault in faults}) > 1 or steps > 0 or not (of_policy or of_contract):
        return None
    is_ours = first.error_type in (_CONTRACT, PolicyError.__name__)
    text = first.message if is_ours else f"{first.error_type}: {first.message}"
    problem = f"all {len(faults)} attempts failed in {first.phase}: {text}"
    error: EpisodeError = EnvError(problem, key="environment", fix=f"Correct {first.phase}() of the environment.")
    if of_policy:
        observations, actions = (" ".join(str(space).split())[:_LONGEST] for space in spaces())
        takes = f"takes a batch of observations of {observations}, and returns actions of {actions}."
        lines = [] if is_ours else [":".join(frame) for frame in _frames(first) if _LIBRARIES not in frame[0]]
        fix = f"Correct {lines[-1]}: the policy {takes}" if lines else f"Pass a policy that {takes}"
        if is_ours and first.message.endswith("."):  # The message has a fix.
            fix = ""
        error = PolicyError(problem, key="policy", fix=fix)
    error.result = result
    return error


@final
class FailFast:
    """Counter of the first attempts of an evaluation, while all of them fail with the same error at the same place.

    The failures of a single runner do not end an evaluation while others may work, because the runner may be broken.

    Args:
        lanes: Number of lanes of all runners. Each lane may fail four times before the evaluation ends.
    """

    def __init__(self, lanes: int) -> None:
        self._limit = max(_FEWEST, _PER_LANE * lanes)
        self._first: Fault | None = None
        self._runners: set[int] = set()
        self._count = 0
        self._over = False

    def failed(self, faults: Iterable[Fault], *, alone: bool) -> str:
        """Count failed attempts; return the reason to end the evaluation, or an empty string to continue.

        Args:
            faults: The failed attempts.
            alone: Whether no second runner is expected to work.
        """
        for fault in faults:
            self._runners.add(fault.runner)
            self._first = self._first or fault
            self._over = self._over or kind_of(fault) != kind_of(self._first)
            self._count += 1
        if self._over or self._first is None or self._count < self._limit or not (alone or len(self._runners) > 1):
            return ""
        first = self._first
        where = f" at {':'.join(place)}" if (place := _place(first)) else ""
        return (
            f"{first.error_type}: {first.message}: all of the first {self._count} attempts failed like this in "
            f"{first.phase}{where} ({first.cause}). To continue anyway, set fault_tolerance.fail_fast=false"
        )


def kind_of(fault: Fault) -> tuple[object, ...]:
    """Return error, cause, phase and place in the user's code, which are equal in faults of the same mistake."""
    return fault.error_type, fault.cause, fault.phase, _place(fault)


def _place(fault: Fault) -> tuple[str, ...]:
    """Return the file and the line of the innermost frame outside of this package; empty if there is none."""
    frames = _frames(fault)
    return frames[-1] if frames else ()


def _frames(fault: Fault) -> list[tuple[str, str]]:
    """Return the files and lines of the frames outside of this package, the innermost last."""
    return [frame for frame in _FRAME.findall(fault.traceback) if _PACKAGE not in Path(frame[0]).parents]
