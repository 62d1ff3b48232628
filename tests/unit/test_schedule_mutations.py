"""Would the world of ``schedule_world`` notice a bug? Each planted one must be caught.

A mutant replaces one snippet of ``schedule.py`` or ``plan.py``. The source file is only read; the
mutated text is executed as a module of its own, without the schedule's own ``check``: the world has to
notice by itself, in the same histories that the genuine modules survive.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Literal, NamedTuple

import pytest

from tests.unit.schedule_world import GENUINE, Modules, run_history

HISTORIES = 400
"""A mutant that survives this many is not caught."""


class Mutant(NamedTuple):
    """One planted bug: its name, where it is, and what it replaces with what."""

    name: str
    where: Literal["plan", "schedule"]
    old: str
    new: str


SAFETY = [
    Mutant(
        "records a row whose lease is no longer held",
        "schedule",
        """
            if state is not None and self._holder.get(index) == runner:
                self._finish(state, index)""",
        """
            if index in self._holder:
                self._finish(self._runners[self._holder[index]], index)""",
    ),
    Mutant("drops late rows without an audit", "schedule", "audited.append(position)", "pass"),
    Mutant(
        "grants reclaimed leases before they are returned",
        "schedule",
        "state.reclaiming.update(wanted)",
        "[(state.held.pop(index), self._holder.pop(index), self._requeue(index)) for index in wanted]",
    ),
    Mutant("forgets charged attempts", "schedule", "self._attempts.get(index, 0) + 1, runner", "1, runner"),
    Mutant(
        "forgets charged attempts when a lease changes hands",
        "schedule",
        "heappush(self._quarantine if dangerous",
        "self._attempts.pop(index, None); heappush(self._quarantine if dangerous",
    ),
    Mutant(
        "charges what a lost runner reports late",
        "schedule",
        """
            if self._holder.get(index) == runner:
                self._attempts[index]""",
        """
            if not self._done[index]:
                self._attempts[index]""",
    ),
    Mutant(
        "asks for live episodes",
        "schedule",
        "len(self.held) - len(self.reclaiming) - self.lanes",
        "len(self.held) - len(self.reclaiming)",
    ),
    Mutant(
        "waits for leases that will not be returned",
        "schedule",
        "state.reclaiming.difference_update(report.live)",
        "pass",
    ),
    Mutant("grants after the cancellation", "schedule", "if self._cancelled:", "if False:"),
    Mutant("aborts the wrong runners", "schedule", "if state.held]", "if not state.held]"),
    Mutant(
        "keeps granting to a lost runner",
        "schedule",
        "self._runners.pop(loss.runner, None)",
        "self._runners.get(loss.runner)",
    ),
    Mutant(
        "does not mark finished episodes",
        "schedule",
        "self._done[index] = 1\n        self._unfinished =",
        "pass\n        self._unfinished =",
    ),
    Mutant(
        "does not skip finished episodes", "schedule", "self._next += 1\n        self._skip_done()", "self._next += 1"
    ),
    Mutant(
        "starts at an episode that is finished",
        "schedule",
        "self._cancelled = False\n        self._skip_done()",
        "self._cancelled = False",
    ),
    Mutant("grants returned leases out of order", "schedule", "heappop(self._requeued)", "self._requeued.pop()"),
    Mutant("hoards: ignores the share of the others", "schedule", "min(state.depth, share)", "state.depth"),
    Mutant(
        "hoards: ignores runners that are yet to join",
        "schedule",
        "max(self._expected, len(self._runners))",
        "len(self._runners)",
    ),
    Mutant(
        "hoards: ignores runners that came unexpected",
        "schedule",
        "max(self._expected, len(self._runners))",
        "self._expected",
    ),
    Mutant("hoards: queues without a limit", "schedule", "max(self.lanes, 2 * self.pace)", "1000"),
    Mutant(
        "depends on chance",
        "schedule",
        "key=lambda runner: len(self._runners[runner].held)",
        "key=lambda runner: (len(self._runners[runner].held), __import__('random').random())",
    ),
    Mutant(
        "seeds by root + index",
        "plan",
        "episode_seeds(self.seed, np.arange(self.first_index, self.first_index + self.num_episodes))",
        "self.seed + np.arange(self.first_index, self.first_index + self.num_episodes)",
    ),
    Mutant("seeds by an even factor", "plan", "(factor >> 33) | 1", "(factor >> 33) & ~1"),
]

EVIDENCE = [
    Mutant(
        "charges a suspect that was not alone", "schedule", "loss.suspects if index == self._alone}", "loss.suspects}"
    ),
    Mutant(
        "charges everything that a lost runner held",
        "schedule",
        "charged = dict(loss.charged) | {",
        "charged = {index: self._attempts.get(index, 0) + 1 for index in lost.held} | {",
    ),
    Mutant(
        "charges what another runner holds",
        "schedule",
        "dangerous = charged.keys()",
        "self._attempts.update({i: max(a, self._attempts.get(i, 0)) for i, a in charged.items() if i not in lost.held})"
        "\n        dangerous = charged.keys()",
    ),
    Mutant(
        "charges an attempt twice",
        "schedule",
        "if charged.get(index, 0) > self._attempts.get(index, 0):",
        "if index in charged:",
    ),
    Mutant("charges in silence", "schedule", "commands.append(Charge(index, charged[index]))", "pass"),
    Mutant("ignores proof", "schedule", "charged = dict(loss.charged) | {", "charged = {"),
    Mutant("ignores a suspicion that is proven", "schedule", "loss.suspects if index == self._alone}", "()}"),
    Mutant(
        "ignores proof after the cancellation",
        "schedule",
        "dangerous = charged.keys()",
        "charged = {} if self._cancelled else charged\n        dangerous = charged.keys()",
    ),
    Mutant(
        "gives up too early",
        "schedule",
        "if self._attempts.get(index, 0) >= self._max_attempts:",
        "if self._attempts.get(index, 0) >= self._max_attempts - 1:",
    ),
    Mutant(
        "gives up too late",
        "schedule",
        "if self._attempts.get(index, 0) >= self._max_attempts:",
        "if self._attempts.get(index, 0) > self._max_attempts:",
    ),
    Mutant("gives up in silence", "schedule", "commands.append(self._give_up(index))", "self._give_up(index)"),
    Mutant(
        "gives up again after a resume",
        "schedule",
        "for index, count in (attempts or {}).items() if not self._done[index]}",
        "for index, count in (attempts or {}).items()}",
    ),
    Mutant("gives up twice", "schedule", "spent, self._spent = self._spent, []", "spent = self._spent"),
    Mutant("forgets attempts when it resumes", "schedule", "(attempts or {}).items()", "{}.items()"),
    Mutant("runs what has no attempt left", "schedule", "self._give_up_spent() if self._spent else []", "[]"),
    Mutant(
        "starts at an episode that was given up",
        "schedule",
        "self._skip_done()\n        return commands",
        "return commands",
    ),
]

QUARANTINE = [
    Mutant("does not isolate suspects", "schedule", "charged.keys() | dict(loss.suspects).keys()", "charged.keys()"),
    Mutant(
        "does not isolate the guilty", "schedule", "charged.keys() | dict(loss.suspects).keys()", "dict(loss.suspects)"
    ),
    Mutant("isolates everything that was lost", "schedule", "dangerous=index in dangerous", "dangerous=True"),
    Mutant(
        "lets a quarantined episode go when its runner is lost",
        "schedule",
        "dangerous or index == self._alone",
        "dangerous",
    ),
    Mutant(
        "runs a quarantined episode beside others",
        "schedule",
        "if self._quarantine and self._runners and not self._holder:",
        "if self._quarantine and self._runners and self._alone not in self._holder:",
    ),
    Mutant(
        "opens the quarantine as soon as nothing waits",
        "schedule",
        "if self._quarantine and self._runners and not self._holder:",
        "if self._quarantine and self._runners and self._admitted == len(self._holder):",
    ),
    Mutant(
        "grants quarantined episodes like any other",
        "schedule",
        "self._requeued.append(self._alone)",
        "self._requeued += [self._alone, *self._quarantine]; self._quarantine.clear()",
    ),
    Mutant(
        "lets two out of the quarantine",
        "schedule",
        "            grants.append(self._grant_alone())",
        "            grants += [self._grant_alone() for _ in self._quarantine[:2]]",
    ),
    Mutant(
        "leaves the order of the plan in quarantine", "schedule", "heappop(self._quarantine)", "self._quarantine.pop()"
    ),
    Mutant(
        "draws who runs a quarantined episode",
        "schedule",
        "self._grant(min(self._runners), 1)",
        "self._grant(__import__('random').choice([*self._runners]), 1)",
    ),
    Mutant(
        "hoards: shares out what is in quarantine",
        "schedule",
        "share = -(-admitted // fleet)",
        "share = -(-self._unfinished // fleet)",
    ),
    Mutant(
        "counts what is in quarantine as waiting",
        "schedule",
        "min(admitted - len(self._holder),",
        "min(self._unfinished - len(self._holder),",
    ),
    Mutant("never opens the quarantine", "schedule", "grants.append(self._grant_alone())", "pass"),
    Mutant(
        "opens the quarantine for nobody",
        "schedule",
        "if self._quarantine and self._runners and not",
        "if self._quarantine and not",
    ),
    Mutant(
        "does not count what is given up as done",
        "schedule",
        "self._unfinished -= 1\n        return GiveUp",
        "return GiveUp",
    ),
]

LIVENESS = [
    Mutant(
        "forgets what a lost runner held",
        "schedule",
        "self._requeue(index, dangerous=index in dangerous)",
        "self._unfinished -= 1",
    ),
    Mutant(
        "does not wake idle runners after a loss",
        "schedule",
        "return commands + self._feed(self._hungry())",
        "return commands",
    ),
    Mutant(
        "does not wake runners when the fleet shrinks",
        "schedule",
        "self._expected = max(1, runners)\n                commands += self._feed(self._hungry())",
        "self._expected = max(1, runners)",
    ),
    Mutant(
        "does not wake idle runners when leases are returned",
        "schedule",
        "self._hungry() if report.returned else [runner]",
        "[runner]",
    ),
    Mutant(
        "feeds a runner once only",
        "schedule",
        "self._hungry() if report.returned else [runner]",
        "self._hungry() if report.returned else []",
    ),
    Mutant("wakes dry runners only", "schedule", "if len(state.held) < state.lanes]", "if not state.held]"),
    Mutant(
        "wakes the fullest first",
        "schedule",
        "key=lambda runner: len(self._runners[runner].held)",
        "key=lambda runner: -len(self._runners[runner].held)",
    ),
    Mutant("never reclaims", "schedule", "[*grants, *self._rebalance()]", "[*grants]"),
    Mutant("reclaims what starts next", "schedule", "reversed(state.held)", "state.held"),
    Mutant(
        "waits for an answer that a dead runner owes",
        "schedule",
        "asked = sum(",
        "asked = getattr(self, '_owed', 0); self._owed = asked + 1; asked += 0 * sum(",
    ),
    Mutant("ignores returned leases", "schedule", "for index in report.returned:", "for index in ():"),
    Mutant(
        "starves late joiners",
        "schedule",
        "self._note(runner)\n        return self._feed([runner])",
        "self._note(runner)\n        return []",
    ),
    Mutant(
        "shares out nothing near the end",
        "schedule",
        "share = -(-admitted // fleet)",
        "share = admitted // fleet",
    ),
    Mutant("is complete too early", "schedule", "return self._unfinished == 0", "return self._unfinished <= 1"),
    Mutant("is never complete", "schedule", "return self._unfinished == 0", "return False"),
]


def plant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> Modules:
    """Return the modules with one of them mutated."""
    genuine: ModuleType = getattr(GENUINE, mutant.where)
    text = inspect.getsource(genuine)
    count = text.count(mutant.old)
    assert count == 1, f"{mutant.where}.py has the snippet of {mutant.name!r} {count} times: adapt or remove the mutant"
    name = f"mutated_{mutant.where}"
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text.replace(mutant.old, mutant.new), name, "exec"), vars(module))
    if mutant.where == "schedule":
        vars(module)["Schedule"].check = lambda schedule: None
    return GENUINE._replace(**{mutant.where: module})


def verdict(modules: Modules) -> str | None:
    """Return what the first broken law says, or None if every history ends well."""
    for seed in range(HISTORIES):
        try:
            run_history(seed, modules)
        except AssertionError as broken:
            return str(broken)
    return None


def test_the_genuine_modules_survive() -> None:
    """The histories that judge the mutants find nothing wrong with the real source."""
    assert verdict(GENUINE) is None


@pytest.mark.parametrize("mutant", SAFETY + EVIDENCE + QUARANTINE + LIVENESS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mutant breaks a law in some history."""
    assert verdict(plant(mutant, monkeypatch)), f"no history notices a schedule that {mutant.name}"
