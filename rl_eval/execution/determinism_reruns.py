"""Reruns of the determinism check: finished episodes run again in fresh environments, and are compared bit by bit.

An environment that leaks state from one episode into the next, or a policy that draws from a generator of its own,
makes the result depend on the layout. Traces tell the first difference: equal observations and another action are the
policy's doing, anything else is the environment's. Where the environment is the cause, the episodes run a third time,
to see whether fresh environments agree with each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from rl_eval.records.determinism import Determinism, FirstDifference
from rl_eval.records.episode import Lease, RunReport, different_columns, outcomes_of
from rl_eval.records.trace import first_divergence

__all__ = ["Origin", "Reruns"]

_MAX_TRIES: Final = 3


class Origin(NamedTuple):
    """How an episode came to its record."""

    row: npt.NDArray[np.void]
    """Array of :data:`rl_eval.records.episode.ROW`, shape (1,)."""
    outcome: npt.NDArray[np.void]
    """What is compared of it: :func:`rl_eval.records.episode.outcomes_of` it, shape (1,)."""
    position: int
    """Position of the runner; -1 for another process than all runners there are."""
    trace: npt.NDArray[np.void] | None
    """Array of :data:`rl_eval.records.trace.TRACE`, if it was traced."""


@dataclass(slots=True)
class _Pass:
    """Episodes that run again, and what they are compared with."""

    origins: Mapping[int, Origin]
    waiting: dict[int, None]
    held: dict[int, set[int]] = field(default_factory=dict)
    """Indices by the incarnation that runs them."""
    tries: Counter[int] = field(default_factory=Counter)
    again: dict[int, Origin] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return not self.waiting and not any(self.held.values())

    @property
    def mismatched(self) -> list[int]:
        return [index for index, again in sorted(self.again.items()) if not _equal(self.origins[index], again)]

    def put_back(self, index: int, why: str) -> None:
        """Try an episode again, a few times."""
        if self.tries[index] < _MAX_TRIES:
            self.waiting[index] = None
        else:
            self.failed[index] = why


@final
class Reruns:
    """Hands out the episodes to be run again, and takes their reports.

    Args:
        origins: What is recorded, by index, of the episodes to run again.
        try_env_reuse: Whether to see if a new environment for each episode would help.
        num_runners: Runners that were asked for.
        in_used: Why the episodes run again in environments that have served others; empty to build fresh ones. Those
            have another history than the first time, so a difference shows as well.
        info_keys: Names of the info scalars of a row.
    """

    def __init__(
        self,
        origins: Mapping[int, Origin],
        try_env_reuse: bool,
        num_runners: int,
        in_used: str = "",
        info_keys: Sequence[str] = (),
    ) -> None:
        self._try_env_reuse = try_env_reuse and not in_used
        self._num_runners = num_runners
        self._in_used = in_used
        self._info_keys = info_keys
        self._cut = ""
        self._first = self._current = _Pass(origins, dict.fromkeys(sorted(origins)))

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return self._current.done

    def holds(self, runner: int) -> bool:
        """Whether a runner has anything to do."""
        return bool(self._current.held.get(runner))

    def take(self, runner: int, position: int, lanes: int, positions: Collection[int]) -> tuple[Lease, ...]:
        """Give a runner as many episodes as it has lanes free.

        Args:
            runner: Its incarnation.
            position: Its position in the group.
            lanes: How many lanes it has.
            positions: Positions of all runners that are up: where there is another, no runner checks itself.
        """
        now, others = self._current, set(positions) - {position}
        held = now.held.setdefault(runner, set())
        fit = [index for index in now.waiting if now.origins[index].position != position or not others]
        taken = fit[: max(0, lanes - len(held))]
        for index in taken:
            del now.waiting[index]
            held.add(index)
            now.tries[index] += 1
        return tuple(self._lease(index, runner) for index in taken)

    def _lease(self, index: int, runner: int) -> Lease:
        origin = self._current.origins[index]
        row = origin.row[0]
        # At the attempt of the record: what failed earlier attempts is no part of the episode that counts.
        return Lease(index, int(row["seed"]), int(row["attempts"]), runner, not self._in_used, origin.trace is not None)

    def reported(self, runner: int, position: int, report: RunReport) -> None:
        """Take what a runner finished."""
        now = self._current
        held = now.held.get(runner, set())
        for place, index in enumerate(report.rows["index"].tolist()):
            if index in held:
                held.remove(index)
                row, infos = report.rows[place : place + 1], report.infos[place : place + 1]
                outcome = outcomes_of(row, infos, self._info_keys)
                now.again[index] = Origin(row, outcome, position, report.traces.get(index))
        for fault in report.faults:
            if fault.index in held:
                held.remove(fault.index)
                now.put_back(fault.index, f"{fault.error_type}: {fault.message}")
        self._go_on()

    def lost(self, runner: int) -> None:
        """A runner is gone: what it held is tried again, a few times."""
        for index in sorted(self._current.held.pop(runner, ())):
            self._current.put_back(index, "its runner was lost")
        self._go_on()

    def stop(self, why: str) -> None:
        """End the check; what has not finished says nothing."""
        if not self.done:
            self._cut = why
            self._current.waiting, self._current.held = {}, {}

    def _go_on(self) -> None:
        """After a pass with mismatches, see whether fresh environments agree with each other."""
        mismatched = self._first.mismatched
        if self._current is not self._first or not self.done or not mismatched or not self._try_env_reuse:
            return
        if self._difference(mismatched[0]).cause != "policy":
            origins = {index: self._first.again[index] for index in mismatched}
            self._current = _Pass(origins, dict.fromkeys(mismatched))

    # ------------------------------------------------------------------ the finding

    @property
    def result(self) -> Determinism:
        """What has been found so far."""
        first, second = self._first, self._current if self._current is not self._first else None
        mismatched, failed = first.mismatched, sorted(first.failed)
        elsewhere = sum(again.position != first.origins[index].position for index, again in first.again.items())
        helps = None
        if second is not None and (second.mismatched or second.failed or not self._cut):
            helps = not second.mismatched and not second.failed
        return Determinism(
            checked=len(first.again),
            elsewhere=elsewhere,
            mismatched=tuple(mismatched),
            failed=tuple(failed),
            failure=first.failed[failed[0]] if failed else "",
            first=self._difference(mismatched[0]) if mismatched else None,
            env_reuse_helps=helps,
            remark=self._remark(elsewhere),
        )

    def _remark(self, elsewhere: int) -> str:
        first = self._first
        if self._cut and len(first.again) + len(first.failed) < len(first.origins):
            return f"{len(first.again)} of {len(first.origins)} had run again when the check was cut short: {self._cut}"
        alone = "no second runner was up for it" if self._num_runners > 1 else "only one process took part"
        return "; ".join(filter(None, ("" if elsewhere else alone, self._in_used)))

    def _difference(self, index: int) -> FirstDifference:
        one, other = self._first.origins[index], self._first.again[index]
        cause: Literal["policy", "environment", ""] = ""
        if one.trace is not None and other.trace is not None:
            parted = first_divergence(one.trace, other.trace)
            cause = "policy" if parted is not None and parted.what == "action" else "environment"
            if parted is not None:
                return FirstDifference(index, parted.step, parted.what, cause)
        names = different_columns(one.outcome, other.outcome)
        return FirstDifference(index, -1, names[0] if names else "trace", cause)


def _equal(one: Origin, other: Origin) -> bool:
    """Compare outcomes, and traces where there are two: equal returns may hide that an episode took another course."""
    if different_columns(one.outcome, other.outcome):
        return False
    return one.trace is None or other.trace is None or one.trace.tobytes() == other.trace.tobytes()
