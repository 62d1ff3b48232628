"""Lanes of a policy server: each row gets its own answer in time, no lane is lost; planted bugs are noticed."""

from __future__ import annotations

import pytest

from rl_eval.integrations.openpi import lanes
from rl_eval.integrations.openpi.lanes import GONE, NO_LANE, TOGETHER, Lanes, Refusal, Reply, Row
from tests.unit.lanes_world import run_history
from tests.unit.planting import HISTORIES, check, planted

MUTANTS = {
    "keeps the lanes of a lost connection": ("self._release(lambda key: key[0] == connection, now)", "[]"),
    "keeps the rows of a lost connection": (
        "self._ready = deque(one for one in self._ready if not ends(one[1]))",
        "pass",
    ),
    "forgets repeated requests": ("for one in (row, *held.repeats)]", "for one in (row,)]"),
    "computes a repeated request again": (
        "if row.step == held.row.step and row.begin == held.row.begin:",
        "if False:",
    ),
    "gives a lane twice": ("heapq.heappop(self._free)", "self._free[0]"),
    "frees no lane": ("            heapq.heappush(self._free, lane)\n", "            pass\n"),
    "does not admit who waits": ("while self._free and self._waiting:", "while False:"),
    "begins an episode again with each row": ("None, row.begin", "None, True"),
    "never begins an episode": ("    begins: bool = True\n", "    begins: bool = False\n"),
    "waits for a full block for ever": ("or now >= self._ready[0][0] + self.pass_s / 2", ""),
    "does not wake for a block": ("self._ready[0][0] + self.pass_s / 2 - now", "1e9"),
    "does not wake for a lane": ("self._waiting[0][0] + self._patience_s - now]", "1e9]"),
    "drops a row of the block": ("for _ in range(min(self._block, len(self._ready)))]", "for _ in range(1)][1:]"),
    "a block has too many rows": ("range(min(self._block, len(self._ready)))", "range(len(self._ready))"),
    "refuses at once": ("now >= self._waiting[0][0] + self._patience_s:", "True:"),
    "computes an episode without its state": ("elif self._memory and not row.begin:", "elif False:"),
}


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_each_row_gets_its_own_answer_and_no_lane_is_lost(seed: int) -> None:
    run_history(seed, lanes)


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = planted(lanes.__name__, *MUTANTS[bug], monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        check(run_history, module)


def rows(count: int) -> list[Row]:
    return [Row(1, episode) for episode in range(count)]


def test_a_block_waits_at_most_half_of_a_pass_for_other_episodes() -> None:
    table = Lanes(64, 16, memory=True, patience_s=9)
    for row in rows(20):
        table.add(row, 0.0)
    first = table.next_block(0.0)
    assert [place.row for place in first] == rows(20)[:16]
    for place in first:
        table.answered(place.row, b"")
    table.pass_s = 1.0
    assert (table.next_block(0.4), table.wait_s(0.4)) == ([], pytest.approx(0.1))
    assert [place.row for place in table.next_block(0.5)] == rows(20)[16:]


def test_a_block_that_no_episode_can_join_does_not_wait() -> None:
    table = Lanes(64, 16, memory=True, patience_s=9)
    table.pass_s = 1.0
    for row in rows(3):
        table.add(row, 0.0)
    assert table.wait_s(0.0) == 0.0
    assert len(table.next_block(0.0)) == 3


def test_what_is_refused() -> None:
    table = Lanes(1, 16, memory=True, patience_s=9)
    first, second = rows(2)
    assert table.add(second._replace(begin=False, step=4), 0.0) == (second._replace(begin=False, step=4), GONE)
    assert table.add(first, 0.0) is None
    assert isinstance(early := table.add(first._replace(begin=False, step=1), 0.0), Refusal)
    assert early.reason == TOGETHER
    assert table.add(second, 1.0) is None
    assert (table.overdue(9.9), table.overdue(10.0)) == ([], [Refusal(second, NO_LANE)])
    table.next_block(10.0)
    assert table.answered(first, b"a") == [Reply(first, b"a")]
    assert table.add(first, 11.0) == Reply(first, b"a")
