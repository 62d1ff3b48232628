"""The story of an episode: what a result holds about it, in order, finished or not."""

from __future__ import annotations

import numpy as np
import pytest

from rl_eval.errors import UsageError
from rl_eval.records.determinism import Determinism, FirstDifference
from rl_eval.records.episode import ROW, EpisodeTable, Fault, Outcome, Pardon, RuleEnd
from rl_eval.results.result import EvalResult, Timing
from rl_eval.results.story import Event, story
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused, untold

PLAN = EpisodePlan(4, 7)


def fault(index: int, attempt: int, runner: int, *, charged: bool = True) -> Fault:
    return Fault(
        index=index, seed=PLAN[index].seed, attempt=attempt, cause="env", phase="step", step=12, error_type="Boom",
        message="it broke", traceback="Traceback", runner=runner, node="here", seconds=0.5, charged=charged,
    )  # fmt: skip


def result(determinism: Determinism | None = None, mismatches: tuple[int, ...] = ()) -> EvalResult:
    """Episode 0 completed at its second attempt, 1 failed, 2 never ran, 3 completed at once."""
    rows = np.zeros(3, ROW)
    rows["index"], rows["attempts"], rows["runner"] = [0, 1, 3], [2, 2, 1], [1, -1, 0]
    rows["seed"] = PLAN.seeds[[0, 1, 3]]
    rows["outcome"] = [Outcome.COMPLETED, Outcome.FAILED, Outcome.COMPLETED]
    rows["episode_return"], rows["length"], rows["terminated"] = [2.5, np.nan, 1.0], [20, 0, 9], True
    rows["success_at_end"], rows["step_seconds"] = [1, -1, -1], 0.25
    table = EpisodeTable(4, ["score"])
    faults = [fault(0, 1, 0, charged=False), fault(0, 1, 1), fault(1, 1, 0), fault(1, 2, 0)]
    table.fill(rows, np.array([[4.0], [np.nan], [np.nan]]), faults)
    return EvalResult(
        table=table, plan=PLAN, status="partial", reason="1 of 4 episodes did not finish: cancelled",
        timing=Timing.of_totals({}, 2), provenance={"config": {}}, audit_mismatches=mismatches,
        determinism=determinism or Determinism(),
    )  # fmt: skip


def test_the_faults_and_the_end_in_order() -> None:
    _, lost, broke, end = story(result(), 0)
    assert [(event.kind, event.attempt, event.runner, event.seconds) for event in (lost, broke, end)] == [
        ("fault", 1, 0, 0.5), ("fault", 1, 1, 0.5), ("completed", 2, 1, 0.25),
    ]  # fmt: skip
    assert all(part in broke.text for part in ("env", "step", "12", "Boom: it broke"))
    assert lost.text.startswith(broke.text + ";")
    assert lost.fault == fault(0, 1, 0, charged=False)
    assert untold(end.text, 2.5, 20, "terminated", "success", "score", 4, 0) == []


def test_a_pardoned_fault_says_why() -> None:
    pardoned = result()
    pardoned.table.fill(pardoned.table.rows[:0], pardons=[Pardon(1, 2, "runner 0 was excluded")])
    _, charged, last, _ = story(pardoned, 1)
    assert last.text == f"{charged.text}; no attempt used up: runner 0 was excluded"


def test_every_way_to_end() -> None:
    """A failed row that no runner reported names none; an episode that did not run has the reason of the result."""
    *_, failed = story(result(), 1)
    assert (failed.kind, failed.attempt, failed.runner) == ("failed", 2, None)
    _, missing = story(result(), 2)
    assert (missing.kind, missing.text) == ("unfinished", result().reason)
    partial = result()
    partial.ended_by = RuleEnd(3, "Rule", "enough")
    partial.table = partial.table.head(3)
    *_, missing = story(partial, 2)
    assert missing.text == partial.reason, "it is before the end by the rule"
    *_, behind = story(partial, 3)
    assert (behind.kind, behind.text) == ("unfinished", f"does not count: {partial.ended_by}")
    _, late = story(result(), 3)
    assert not result().counted[3]
    assert len(late.text.split(", ")) > 3, "its return, its end and its weights, and that it does not count"


def test_what_a_second_run_showed() -> None:
    found = Determinism(
        checked=2, mismatched=(0, 3), failed=(1,), failure="Boom: twice", first=FirstDifference(0, 7, "reward", "")
    )
    checks = [[e.text for e in story(result(found, (3,)), index) if e.kind == "check"] for index in range(4)]
    assert [len(texts) for texts in checks] == [1, 1, 0, 2]
    assert "step 7" in checks[0][0]
    assert "Boom: twice" in checks[1][0]


def test_faults_stand_where_their_attempts_ended() -> None:
    """Those that the moves do not know were before; what has no fault, or none yet, is told as it is."""
    moves = [
        Event("granted", "given", 1, 1, at=1.0),
        Event("fault", "failed", 1, 1, at=2.0),
        Event("granted", "given", 2, 0, at=2.0),
        Event("lost", "gone", 2, 0, at=3.0),
        Event("granted", "given", 2, 1, at=3.0),
    ]
    told = story(result(), 0, moves)
    assert [(event.kind, event.attempt, event.runner, event.at) for event in told] == [
        ("planned", 0, None, None),
        ("fault", 1, 0, None),
        ("granted", 1, 1, 1.0),
        ("fault", 1, 1, 2.0),
        ("granted", 2, 0, 2.0),
        ("lost", 2, 0, 3.0),
        ("granted", 2, 1, 3.0),
        ("completed", 2, 1, None),
    ]
    assert [event.fault for event in told if event.kind == "fault"] == result().table.faults[0]


@pytest.mark.parametrize("index", [-1, 4])
def test_an_episode_that_is_not_in_the_plan(index: int) -> None:
    with refused(UsageError, "episode", value=index):
        story(result(), index)
