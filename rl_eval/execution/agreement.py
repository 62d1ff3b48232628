"""Agreement of all runners on one numerics key and one policy, from the first to the last episode."""

from __future__ import annotations

from array import array
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from rl_eval.backends.requests import Apply
from rl_eval.errors import ConfigError, NumericsMismatch, PolicyUnavailable
from rl_eval.execution.outcome import Aspect, EvalOutcome
from rl_eval.execution.session import Phase
from rl_eval.policies.inference.probe import numerics_again
from rl_eval.records.guarantee import NUMERICS, is_of_guarantee, is_served
from rl_eval.results.provenance import described_settings
from rl_eval.results.text import policy_name

if TYPE_CHECKING:
    from rl_eval.execution.jobs import Job
    from rl_eval.execution.runner_pool import Member
    from rl_eval.records.episode import RunReport
    from rl_eval.supervision.flight_recorder import CrashReport


_PATIENCE_S: Final = 30.0
"""Time limit of the last probes, in seconds. They must not delay a finished result for long."""
_ASK_S: Final = 600.0
"""Time limit of the first probe, in seconds, of a run that was complete before this session. A slow server needs it."""
_FIRST: Final = "Start that policy again."


@final
class Numerics(Aspect):
    """Check that all runners have the same numerics key, from the first to the last episode.

    The key contains the facts, except the weights, on which floats depend. The reference is the most frequent key when
    the first records are reported. It does not change later, even if more runners have another key, because these
    records have been committed.

    If a runner gets another key while it runs episodes, its policy changed: for example, a server was replaced. Then
    the records since its last probe are set aside.
    """

    def __init__(self, outcome: EvalOutcome) -> None:
        super().__init__(outcome)
        self._unproven: defaultdict[int, array[int]] = defaultdict(partial(array, "q"))
        """Indices of the episodes that were recorded since the last probe, by position of the runner."""
        self._probes: dict[int, int] = {}
        """Number of probes of each runner that had the reference key, by the runner's number."""
        self._reported: dict[int, tuple[dict[str, Any], str]] = {}
        """Numerics key of each runner, and digest of the weights with which its policy was built, by the runner's
        number."""
        self.has_asked = False
        """Whether a runner has reported its key in this session."""
        self._records = False
        """Whether an episode was recorded in this session."""

    def reported(self, member: Member, report: RunReport) -> None:
        """Compare the key of a runner with the reference key.

        Raises:
            NumericsMismatch: The keys differ, so the runner's floats could differ, too.
            ConfigError: The runner built its policy with other weights than the other runners, or another policy
                answers at its server than in earlier sessions.
        """
        if not report.numerics:
            return
        store = self.outcome.store
        built = report.extra.get(NUMERICS, "")
        self._reported[member.number] = report.numerics, built
        self.has_asked = True
        if not store.numerics:
            served = is_served(report.numerics)
            if not (len(report.rows) or served):
                return
            store.numerics = self._most_frequent()
            if served:  # So that another policy cannot continue the log, even if no episode finishes.
                store.add_numerics()
        key = report.numerics
        different = self._different(key)
        if not different:
            if report.probes > self._probes.get(member.number, report.probes):
                self._unproven.pop(member.position, None)
            self._probes[member.number] = report.probes
            return
        raise self._mismatch(member, key, different, built)

    def _mismatch(self, member: Member, key: dict[str, Any], different: list[str], built: str) -> NumericsMismatch:
        """Return the error for a runner whose key differs from the reference key.

        Raises:
            ConfigError: As for :meth:`reported`.
        """
        store = self.outcome.store
        if member.position in self._unproven:
            return self._changed(member, key, different)
        has_agreed = member.number in self._probes
        if is_served(key):
            if not (self._records or has_agreed):
                self._check_server(key, different)
        elif different == ["outputs"] and self.outcome.weights is None and self._built_others(built):
            problem = (
                f"runner {member.position} built its policy with other weights than the other runners, which happens "
                "if a factory draws random weights, or if another policy answers at a server"
            )
            fix = (
                "Set policy.weights, or call sync_weights before the evaluation. For a server, start the first policy "
                "again."
            )
            raise ConfigError(problem, key="policy.weights", runner=member.position, fix=fix)
        others = "the records in the log" if store.durable else "its group"
        why = f"runner {member.position} would compute other floats than {others}: {self._shown(key, different)}"
        if has_agreed:
            why = self._change(member, key, different)
        elif problem := self._other_policy(key, different):
            why = f"{problem}. {_FIRST}"
        self.outcome.refusals.append(why)
        store.note(f"{why}; the runner was excluded")
        return NumericsMismatch(why, key=different[0], value=key.get(different[0]), runner=member.position)

    def counted(self, report: RunReport, indices: set[int]) -> None:
        """Note that episodes were recorded since the last probe of their runner."""
        if indices:
            self._records = True
            self._unproven[int(report.rows["runner"][0])].extend(indices)

    def follow_up(self) -> Job | None:
        """Return the job that probes the policies again; None if no runner has outputs that can be compared."""
        key = self.outcome.store.numerics
        exact = any(value for name, value in key.items() if name.rpartition("/")[2] == "outputs")
        continued = is_served(key) and not self.has_asked
        return PolicyCheck(self.outcome, self) if continued or (exact and self._unproven) else None

    @property
    def unproven(self) -> list[int]:
        """Positions of the runners that recorded episodes since their last probe."""
        return sorted(self._unproven)

    def probed(self, member: Member, key: dict[str, Any]) -> None:
        """Compare the key of a runner after its last episode with the reference key.

        Raises:
            ConfigError: The runner had no episode to run, and another policy answers at the server.
        """
        different, self.has_asked = self._different(key), True
        if different and member.position in self._unproven:
            self._changed(member, key, different)
        else:
            self._check_server(key, different)
            self._unproven.pop(member.position, None)

    def lost(self, member: Member, crash_report: CrashReport | None) -> None:
        """Remove the key of a lost runner."""
        self._reported.pop(member.number, None)
        self._unproven.pop(member.position, None)

    def describe(self, fields: dict[str, Any]) -> None:
        """Add the reference key."""
        fields["provenance"]["numerics"] = dict(self.outcome.store.numerics or self._most_frequent())

    def _different(self, key: dict[str, Any]) -> list[str]:
        """Return the names of the entries in which a key differs from the reference key."""
        known = self.outcome.store.numerics
        if key == known:
            return []
        # An older log may lack other facts.
        named = dict.fromkeys([*known, *filter(is_of_guarantee, key)])
        return [name for name in named if known.get(name) != key.get(name)]

    def _shown(self, key: dict[str, Any], different: list[str]) -> str:
        known = self.outcome.store.numerics
        return ", ".join(f"{name} is {key.get(name)!r}, not {known.get(name)!r}" for name in different)

    def _check_server(self, key: dict[str, Any], different: list[str]) -> None:
        """Check that the server has the policy of the earlier records.

        Raises:
            ConfigError: It has other weights or outputs.
        """
        if problem := self._other_policy(key, different):
            fix = f"{_FIRST} To evaluate this one, use another folder."
            raise ConfigError(problem, key="policy.policy", value=_served(self.outcome), fix=fix)

    def _other_policy(self, key: dict[str, Any], different: list[str]) -> str:
        """Return the sentence that a server has another policy than the records have; empty if it has the same."""
        if is_served(key) and any(name.rpartition("/")[2] in ("weights", "outputs") for name in different):
            name = _served(self.outcome)
            return f"{name} is not the policy with which this run began: {self._shown(key, different)}"
        return ""

    def _changed(self, member: Member, key: dict[str, Any], different: list[str]) -> NumericsMismatch:
        """Set the records since the last probe of a runner aside, because its policy changed; return the error."""
        outcome, indices = self.outcome, sorted(self._unproven.pop(member.position))
        why = (
            f"{self._change(member, key, different)}. Since its last probe, runner {member.position} finished "
            f"{len(indices)} episodes, which are set aside and do not count"
        )
        outcome.set_aside(indices, why)
        outcome.refusals.append(why)
        return NumericsMismatch(why, key=different[0], value=key.get(different[0]), runner=member.position)

    def _change(self, member: Member, key: dict[str, Any], different: list[str]) -> str:
        """Return the sentence that the policy of a runner changed."""
        whose = _served(self.outcome) if is_served(key) else f"runner {member.position}"
        return f"the policy of {whose} changed during the evaluation: {self._shown(key, different)}"

    def _most_frequent(self) -> dict[str, Any]:
        """Return the most frequent key, or the first of several that are equally frequent.

        Return an empty dict if there is no key.
        """
        keys = [key for key, _ in self._reported.values()]
        return max(keys, key=keys.count, default={})

    def _built_others(self, built: str) -> bool:
        """Whether every runner with the reference key built its policy with other weights than ``built``."""
        theirs = {weights for key, weights in self._reported.values() if key == self.outcome.store.numerics}
        return not built or built not in theirs


def _served(outcome: EvalOutcome) -> str:
    return policy_name(described_settings(outcome.settings))


@final
class PolicyCheck(Phase):
    """Job that probes the policy of each runner again after its last episode.

    A runner that does not answer causes a note, because it cannot be checked whether its policy changed. If the run was
    complete before this session, one runner asks whether the server still has the policy; without an answer, the
    evaluation fails.

    Args:
        outcome: The evaluation.
        numerics: Aspect that compares the answers.
    """

    def __init__(self, outcome: EvalOutcome, numerics: Numerics) -> None:
        super().__init__(outcome)
        self._numerics = numerics
        self._asked: set[int] = set()
        """Numbers of the runners that have not answered."""
        self._reason_of: dict[int, str] = {}
        """Reason why a runner could not probe its policy, by position."""
        self._ends, self._limit_s = 0.0, _PATIENCE_S if numerics.has_asked else _ASK_S
        self._awaits = not numerics.has_asked
        """Whether a runner has yet to ask, for a run that was complete before this session."""

    def _begin(self, now: float) -> None:
        self._ends = now + self._limit_s
        for member in self.pool.ready():
            self.joined(member, now)

    @override
    def joined(self, member: Member, now: float) -> None:
        if self._awaits or member.position in self._numerics.unproven:
            self._awaits, self._ends = False, now + self._limit_s
            self._asked.add(member.number)
            self.pool.call(member, Apply(numerics_again), tag=self.tag, now=now)

    @override
    def replied(self, member: Member, value: Any, now: float) -> None:
        self._asked.discard(member.number)
        if isinstance(value, str):
            self._reason_of[member.position] = value
        elif self._outcome.state == "running":
            self._numerics.probed(member, value)

    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        self._asked.discard(member.number)
        return False

    def _watch(self, now: float) -> None:
        if now > self._ends:
            self._asked.clear()

    def _abandon(self, now: float) -> None:
        """Do nothing, because no episode is live."""

    @property
    def _complete(self) -> bool:
        return not (self._asked or self._awaits)

    def _ended(self, reason: str) -> None:
        if not self._numerics.has_asked:
            why = next(iter(self._reason_of.values()), reason or "the runner did not answer")
            raise PolicyUnavailable(why, key="policy.policy", value=_served(self._outcome))
        for position in self._numerics.unproven:
            why = self._reason_of.get(position, "the runner did not answer")
            self._outcome.suspect = "the policy did not answer after the last episode"
            self._outcome.store.note(
                f"the policy of runner {position} was not probed again after the last episode: {why}. So it is not "
                "checked whether one policy acted in all its episodes"
            )
