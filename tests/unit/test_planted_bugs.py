"""Whether the simulated worlds of blocks, rules, pardons and session notice a bug: each planted one must be caught."""

import dataclasses
import random
from types import ModuleType

import numpy as np
import pytest

import rl_eval.records.episode
from tests.unit.log_world import make_fault
from tests.unit.planting import HISTORIES, check, planted
from tests.unit.session_world import run_session
from tests.unit.test_blocks import Driver
from tests.unit.test_rules import run_rules

BLOCKS = {
    "records a block of which a row is missing": (" if len(found) == len(self._indices(block))}", "}"),
    "does not run a block that an earlier session finished in part": (
        "if count == len(self._indices(block))]",
        "if count]",
    ),
    "forgets attempts that a later episode of a block used up": (
        "in (numbers or {}).items():",
        "in ((at, n) for at, n in (numbers or {}).items() if at % self._size == 0):",
    ),
    "gives up only the first episode of a block": (
        "for index in self._indices(block):\n                        yield",
        "for index in self._indices(block)[:1]:\n                        yield",
    ),
    "charges an episode that has the number of the block": (
        "tuple((block * self._size, attempt) for block, attempt in verdict.charge)",
        "verdict.charge",
    ),
    "grants a runner a block for each of its slots": ("replace(event, lanes=1)", "event"),
}
RULES = {
    "shows a prefix with a gap": (
        "        while end < len(outcome) and outcome[end] != Outcome.MISSING:\n            end += 1\n",
        "        end = int((outcome != Outcome.MISSING).sum())\n",
    ),
    "asks only about the longest of several new prefixes": ("range(first + 1, end + 1)", "range(end, end + 1)"),
    "asks about the last prefix again": ("range(first + 1, end + 1)", "range(max(first, 1), end + 1)"),
    "shows the episode behind the prefix": ("self._shown[:k]", "self._shown[: k + 1]"),
    "keeps only the rows of the first commit": (
        "self._table.outcomes(slice(first, end))",
        "self._rows[first:end] if first else self._table.outcomes(slice(first, end))",
    ),
    "lets a rule change what the next one sees": ("self._shown.flags.writeable = False", "pass"),
    "lets the last of several rules answer": ("in self._rules.items():", "in reversed(self._rules.items()):"),
}
SESSION = {
    "lets a report after the end change the records": (
        '        if self._outcome.state != "running":\n            return  # The table no longer changes.\n',
        "",
    ),
    "leaves live episodes running": (
        "        self._abandon(now)\n        self._ended(reason)\n",
        "        self._ended(reason)\n",
    ),
    "goes on after a rule has answered": (" or self._outcome.store.ended_by is not None\n", "\n"),
    "waits for runners that will not come": ("not self.pool.members and self.pool.hopeless", "False"),
    "ignores a cancellation": ("self._outcome.cancelled or self._outcome.failure", "self._outcome.failure"),
    "is done before its records are committed": (
        "case Committing(reason, following) if settled:",
        "case Committing(reason, following):",
    ),
    "gives nothing to a runner that joins": ("self._send(events.RunnerJoined(", "self._handle(events.RunnerJoined("),
    "pardons nothing after an exclusion": (
        '        outcome.store.pardon(pardoned, f"runner {member.position} was excluded: {why}")\n',
        "",
    ),
    "charges what failed on a runner that replaced a broken one": (
        "            self._outcome.store.pardon(pardoned, text)\n",
        "",
    ),
    "pardons an episode that was given up": (" if not self._schedule.gave_up(index)]", "]"),
    "drops leases that wait for a call of their runner": (
        "            run = self._unsent.pop(runner, Run())\n",
        "            run = self._unsent.pop(runner, Run())\n            self._unsent.clear()\n",
    ),
}


PARDONS = {
    "pardons a fault that was not charged": ("if fault.charged and (index", "if (index"),
    "pardons all faults of an episode": (
        "if fault.charged and (index, fault.attempt) in reasons",
        "if fault.charged and reasons.setdefault((index, fault.attempt), '?')",
    ),
    "gives the number of a pardoned attempt to another": (
        "for fault in counted:\n",
        "for fault in (one for one in counted if one.charged):\n",
    ),
    "counts a pardoned attempt as used up": (
        "in counted if fault.pardon))",
        "in counted if not fault))",
    ),
}


def run_pardons(seed: int, module: ModuleType) -> None:
    """Fill a table with the faults and pardons of random attempts, and check it against books of its own."""
    rng, table, books = random.Random(seed), module.EpisodeTable(5), dict[int, list[tuple[int, bool, str]]]()
    fields = {field.name: getattr(make_fault(0), field.name) for field in dataclasses.fields(make_fault(0))}
    for _ in range(rng.randint(1, 30)):
        index, told = rng.randrange(5), rng.random() < 0.3
        known = books.setdefault(index, [])
        number = 1 + sum(charged or bool(pardon) for _, charged, pardon in known)
        known.append((number, not told, ""))
        faults = [module.Fault(**fields | {"index": index, "attempt": number, "charged": not told})]
        charged = [place for place, (_, is_charged, _) in enumerate(known) if is_charged]
        pardons = []
        if charged and rng.random() < 0.4:
            place = rng.choice(charged)
            known[place] = known[place][0], False, "broken"
            pardons = [module.Pardon(index, known[place][0], "broken")]
        table.fill(np.zeros(0, module.ROW), None, faults, pardons)
    for shown in (table, table.copy(), table.head(5)):
        for index, known in books.items():
            assert [(one.attempt, one.charged, one.pardon) for one in shown.faults[index]] == known
    attempts, pardoned = module.used_attempts(table)
    counted = {index: [one for one in known if one[1] or one[2]] for index, known in books.items()}
    assert attempts == {index: len(known) for index, known in counted.items() if known}
    forgiven = {index: sum(bool(pardon) for *_, pardon in known) for index, known in counted.items()}
    assert pardoned == {index: count for index, count in forgiven.items() if count}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_bug_in_blocks_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planted("rl_eval.scheduling.blocks", *BLOCKS[name], monkeypatch)
    with pytest.raises(AssertionError):
        check(lambda seed, module: Driver(seed, module).run(), module)


@pytest.mark.parametrize("name", RULES)
def test_a_bug_in_rules_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planted("rl_eval.scheduling.rules", *RULES[name], monkeypatch)
    with pytest.raises(AssertionError):
        check(run_rules, module)


def test_no_history_of_faults_breaks_a_law() -> None:
    for seed in range(HISTORIES):
        run_pardons(seed, rl_eval.records.episode)


@pytest.mark.parametrize("name", PARDONS)
def test_a_bug_in_pardons_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planted("rl_eval.records.episode", *PARDONS[name], monkeypatch)
    with pytest.raises(AssertionError):
        check(run_pardons, module)


def test_no_history_of_the_session_breaks_a_law() -> None:
    """Reports, faults, losses, cancellations and rules, in any order."""
    for seed in range(HISTORIES // 2):
        run_session(seed)


@pytest.mark.parametrize("name", SESSION)
def test_a_bug_in_the_session_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planted("rl_eval.execution.session", *SESSION[name], monkeypatch)
    with pytest.raises(AssertionError):
        check(run_session, module)
