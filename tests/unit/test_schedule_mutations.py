"""Whether the world of ``schedule_world`` notices a bug: each planted one must be caught."""

import pytest

from tests.unit.planting import check, planted
from tests.unit.schedule_world import run_history

ALONE = "if len(suspects) == 1 and all(map(self._isolation.alone, suspects)):"
MUTANTS = {
    "records a row whose lease is no longer held": (
        "if self._holder.get(index) == runner and index not in recorded",
        "if index not in recorded",
    ),
    "forgets charged attempts": ("attempts.get(index, 0) + 1, runner", "1, runner"),
    "retries where it failed": ("return runner not in failed_on or not (", "return True or not ("),
    "gives up too late": (
        "self._pardoned.get(index, 0) >= self._max_attempts",
        "self._pardoned.get(index, 0) > self._max_attempts",
    ),
    "forgets pardons after a resume": ("dict(pardoned or {})", "{}"),
    "charges what failed on an excluded runner": ("self._pardoned[index] = self._pardoned.get(index, 0) + 1", "pass"),
    "charges a suspect that was not alone": ("if lost.isolating and len(held) == 1:", "if True:"),
    "lets a suspect run beside others": (
        "if index in self._isolation:\n            self._isolation.add(index)\n        else:\n            insort",
        "insort",
    ),
    "feeds a runner that only fails": ("if state.isolating or self._suspended(runner):", "if state.isolating:"),
    "does not wake idle runners after a loss": (
        "return Verdict(charge=tuple(charge)), commands + self._feed(self._runners.hungry())",
        "return Verdict(charge=tuple(charge)), commands",
    ),
    "hoards: ignores the share of the others": ("min(state.depth, share)", "state.depth"),
    "never reclaims": ("*self._rebalance(), ", ""),
    "takes back what may have started": ("count = -(-state.queued // 2)", "count = state.queued + 1"),
    "waits for an answer that cannot come": ("        state.reclaiming.difference_update(report.live)\n", ""),
    "charges an attempt twice": (
        "if charged.get(index, 0) > self._attempts.get(index, 0):",
        "if index in charged:",
    ),
    "records a row twice": (" and index not in recorded", ""),
    "drops a late row": ("                audited.append(position)", "                pass"),
    "acts on a second loss of a runner": (
        "        if lost is None:\n            return Verdict(), []\n",
        "        if lost is None:\n            return Verdict(), [Abort(loss.runner)]\n",
    ),
    "runs what was proven beside others": ("                self._isolation.suspect([index])", "                pass"),
    "shares out what is isolated": (
        "common = self._unfinished - len(self._isolation) - self._num_isolated",
        "common = self._unfinished",
    ),
    "grants after a cancellation": ("        if self._cancelled:\n            return []\n", ""),
    "forgets what had no attempt left": ("self._give_up_spent() if self._spent else []", "[]"),
    "leaves a smaller pool its shares": (
        "                commands = self._feed(self._runners.hungry())\n            case Cancelled",
        "                commands = []\n            case Cancelled",
    ),
    "charges all suspects of a shared fault": (ALONE, "if suspects:"),
    "never proves a suspect": (ALONE, "if False:"),
    "charges a suspect that others were stepped with": (ALONE, "if len(suspects) == 1:"),
    "isolates an episode where it failed": (
        "[index for index in self._isolation.waiting if self._may_retry(runner, index)]",
        "list(self._isolation.waiting)",
    ),
    "runs suspects of a shared fault beside others": ("        self._isolation.suspect(suspects)\n", ""),
    "counts suspects against their runner": ("list(failed.items())", "[*failed.items(), *suspects.items()]"),
    "drops only one suspect": ("for index in [*failed, *suspects]:", "for index in [*failed, *[*suspects][:1]]:"),
    "charges a suspect without saying so": (
        "Verdict(record, audit, charge=tuple(failed.items()))",
        "Verdict(record, audit, charge=tuple(self._held_attempts(runner, report.failed_attempts).items()))",
    ),
    "keeps a retry from a free lane": ("free=len(taken) < state.free", "free=False"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mutant breaks a law in some history; ``test_schedule`` shows that the genuine one breaks none."""
    module = planted("rl_eval.scheduling.schedule", *MUTANTS[name], monkeypatch)
    with pytest.raises(AssertionError):
        check(run_history, module)
