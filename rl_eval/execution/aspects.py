"""Aspects of an evaluation: provenance, checks and notes that do not change its records, in one list.

The other modules of an evaluation (group, loop, session, schedule, runner, record store, outcome, result) call only the
hooks of :class:`~rl_eval.execution.outcome.Aspect`. They do not name any aspect. If an aspect is removed, the records
do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from rl_eval.errors.redaction import redact_text
from rl_eval.execution.agreement import Numerics
from rl_eval.execution.determinism_check import DeterminismSample
from rl_eval.execution.outcome import Aspect, EvalOutcome
from rl_eval.results.provenance import described_settings, provenance

if TYPE_CHECKING:
    from rl_eval.execution.runner_pool import Member, RunnerPool
    from rl_eval.log import LogContents, Manifest
    from rl_eval.supervision.flight_recorder import CrashReport


_MOST_LOSSES: Final = 100
"""Maximum number of lost runners in the provenance."""


def default_aspects(code: Callable[[], dict[str, Any]]) -> Sequence[Callable[[EvalOutcome], Aspect]]:
    """Return all aspects, in the order in which their hooks are called.

    Args:
        code: Function that returns the digests of the code of this process.
    """
    return Provenance, Numerics, partial(Code, digests=code), Attendance, DeterminismSample, Redaction


@final
class Provenance(Aspect):
    """Aspect that adds settings, weights, versions and machine to the provenance."""

    def __init__(self, outcome: EvalOutcome) -> None:
        super().__init__(outcome)
        self._settings = described_settings(outcome.settings)

    def describe(self, fields: dict[str, Any]) -> None:
        """Add all data that are needed to repeat the evaluation."""
        rest = provenance(self.outcome.settings, self.outcome.weights, self.outcome.store.numerics)
        fields["provenance"] |= self._settings | rest


@final
class Code(Aspect):
    """Digests of the code of environment and policy, for all sessions of a log.

    Args:
        outcome: The evaluation.
        digests: Function that returns the digests of the code of this process.
    """

    def __init__(self, outcome: EvalOutcome, digests: Callable[[], dict[str, Any]]) -> None:
        super().__init__(outcome)
        self._described = {} if outcome.store.durable else digests()

    def continued(self, ours: Manifest, found: LogContents) -> None:
        """Use the digests in the log, and add a note on each package that had another version."""
        self._described = {"code": found.manifest.code, "code_changes": [asdict(one) for one in found.amendments]}
        for text in found.manifest.version_notes(ours):
            self.outcome.store.note(text)

    def describe(self, fields: dict[str, Any]) -> None:
        """Add the digests."""
        fields["provenance"] |= self._described


@final
class Attendance(Aspect):
    """Crash reports of lost runners, and a note if fewer runners took part than requested."""

    def __init__(self, outcome: EvalOutcome) -> None:
        super().__init__(outcome)
        self._pool: RunnerPool | None = None
        self._losses_before = self._most_ready = 0
        self._losses: list[str] = []

    def begin(self, pool: RunnerPool) -> None:
        """Remember the number of lost runners, so that only later losses are reported."""
        self._pool, self._losses_before = pool, pool.losses

    def joined(self, pool: RunnerPool) -> None:
        """Count the ready runners."""
        self._most_ready = max(self._most_ready, len(pool.ready()))

    def lost(self, member: Member, crash_report: CrashReport | None) -> None:
        """Keep the crash report of a runner."""
        if crash_report is not None and len(self._losses) < _MOST_LOSSES:
            self._losses.append(f"runner {member.position}: {crash_report}")

    def finish(self) -> None:
        """Add a note if fewer runners took part than requested, unless a note already reports a rejected runner."""
        pool, asked = self._pool, self.outcome.asked
        if pool is None or pool.hopeless or self.outcome.refusals or not 0 < self._most_ready < asked:
            return
        self.outcome.store.note(f"{self._most_ready} of {asked} runners took part: {pool.absence()}")

    def describe(self, fields: dict[str, Any]) -> None:
        """Add the lost runners."""
        lost = 0 if self._pool is None else self._pool.losses - self._losses_before
        fields["provenance"] |= {"runners_lost": lost, "losses": self._losses}


@final
class Redaction(Aspect):
    """Removal of secrets from texts of a result that come from other processes or from users' code."""

    def describe(self, fields: dict[str, Any]) -> None:
        """Redact the fields of the other aspects."""
        fields["reason"] = redact_text(fields["reason"])
        texts = fields["provenance"].keys() & {"losses", "runners_refused", "runners_excluded"}
        fields["provenance"] |= {name: [redact_text(text) for text in fields["provenance"][name]] for name in texts}
