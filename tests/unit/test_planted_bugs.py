"""Whether the simulated worlds of blocks, rules and the session notice a bug: each planted one must be caught.

As in ``test_schedule_mutations``, a mutant replaces one snippet of a module, whose file is only read.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.unit.session_world import run_session
from tests.unit.test_blocks import Driver
from tests.unit.test_rules import run_rules

HISTORIES = 300
"""A mutant that survives this many is not caught."""

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
    "waits for runners that will not come": ("_outcome.failure, self.pool.hopeless\n", "_outcome.failure, False\n"),
    "ignores a cancellation": ("self._outcome.cancelled or self._outcome.failure", "self._outcome.failure"),
    "is done before its records are committed": (
        "case Committing(reason, following) if settled:",
        "case Committing(reason, following):",
    ),
    "gives nothing to a runner that joins": (
        "self._send(events.RunnerJoined(member.incarnation, self._outcome.layout.lanes), now)",
        "self._handle(events.RunnerJoined(member.incarnation, self._outcome.layout.lanes), now)",
    ),
    "drops leases that wait for a call of their runner": (
        "            run = self._unsent.pop(runner, Run())\n",
        "            run = self._unsent.pop(runner, Run())\n            self._unsent.clear()\n",
    ),
}


def planted(name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module with one snippet replaced."""
    genuine = importlib.import_module(name)
    text = inspect.getsource(genuine)
    assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times: adapt or remove the mutant"
    module = ModuleType(f"mutated_{name.rpartition('.')[2]}")
    module.__file__ = genuine.__file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text.replace(old, new), module.__name__, "exec"), vars(module))
    return module


def check(run: Callable[[int, ModuleType], Any], module: ModuleType) -> None:
    for seed in range(HISTORIES):
        run(seed, module)


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


def test_no_history_of_the_session_breaks_a_law() -> None:
    """Reports, faults, losses, cancellations and rules, in any order."""
    for seed in range(HISTORIES):
        run_session(seed)


@pytest.mark.parametrize("name", SESSION)
def test_a_bug_in_the_session_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planted("rl_eval.execution.session", *SESSION[name], monkeypatch)
    with pytest.raises(AssertionError):
        check(run_session, module)
