"""Which episodes become videos: what each selector chooses, in any result, and which are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_eval.errors import ConfigError
from rl_eval.recording.video_selection import VideoSettings, captions, select_episodes
from rl_eval.records.episode import ROW, EpisodeTable, Outcome
from rl_eval.results.result import EvalResult, Timing
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused


def made(returns, outcomes=None) -> EvalResult:
    """Build a result; outcomes are completed unless they are given."""
    plan, table = EpisodePlan(len(returns), 0), EpisodeTable(len(returns))
    rows = np.zeros(len(returns), ROW)
    rows["index"], rows["seed"], rows["episode_return"] = np.arange(len(returns)), plan.seeds, returns
    rows["outcome"] = Outcome.COMPLETED if outcomes is None else outcomes
    rows["episode_return"][rows["outcome"] == Outcome.FAILED] = np.nan
    table.fill(rows[rows["outcome"] != Outcome.MISSING])
    status = "complete" if (rows["outcome"] == Outcome.COMPLETED).all() else "partial"
    return EvalResult(
        table=table, plan=plan, status=status, reason="", timing=Timing.of_totals({}, 0), provenance={"config": {}}
    )


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("first:3", [0, 1, 2]),
        ("every:4", [0, 4]),
        ("best:3", [2, 5, 0]),
        ("worst:2", [1, 3]),
        ("median", [0]),
        ("median:3", [3, 0, 2]),
        ("median:9", [1, 3, 0, 2, 5]),
        ("failed", [4, 6]),
        ("first:99", [0, 1, 2, 3, 4, 5, 6]),
        ("best, worst ,first:2,failed", [2, 1, 0, 4, 6]),
        (["worst", "best"], [1, 2]),
        ("episode:5,episode:0,episode:7", [5, 0]),
    ],
)
def test_the_selectors(select, expected):
    """Equal returns: the lower index first."""
    failed = [Outcome.FAILED if index in (4, 6) else Outcome.COMPLETED for index in range(7)]
    assert select_episodes(made([3, 1, 9, 1, 0, 9, 0], failed), select, 99) == expected
    assert select_episodes(made([3, 1, 9, 1, 0, 9, 0], failed), select, 2) == expected[:2]


def test_captions_name_the_worst_the_median_and_the_best_episode():
    """In this order, and an episode once; without a completed episode there are none."""
    assert captions(made([3, 1, 9.5])) == {
        1: "worst: episode 1, return 1",
        0: "median: episode 0, return 3",
        2: "best: episode 2, return 9.5",
    }
    assert [*captions(made([3, 4]))] == [0, 1]
    assert [*captions(made([5, 5, 5]))] == [0, 1]
    assert captions(made([5], [Outcome.FAILED])) == {}


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("bset", "'bset': did you mean 'best'"),
        ("", "known: best, episode, every, failed, first, median, worst"),
        ([], "is empty"),
        ("every", "say every how many"),
        ("episode", "'episode': say which, such as 'episode:37'"),
        ("episode:-1", "'episode:-1': give a whole number from 0 on"),
        ("first:0", "'first:0': give a whole number from 1 on"),
        ("best:two", "'best:two'"),
    ],
)
def test_wrong_selectors_are_refused(select, message):
    """When the settings are made, not when the first evaluation ends."""
    with refused(ConfigError, "select"):
        VideoSettings(select)


@pytest.mark.parametrize("wrong", [{"max_videos": 0}, {"fps": float("nan")}, {"timeout_s": -1}])
def test_wrong_numbers_are_refused(wrong):
    """By their name."""
    with refused(ConfigError, next(iter(wrong))):
        VideoSettings(**wrong)


returns_and_outcomes = st.lists(
    st.tuples(st.sampled_from([-1.5, 0.0, 0.0, 2.0, 1e9]), st.sampled_from(list(Outcome))), min_size=1, max_size=30
)
words = st.lists(
    st.tuples(st.sampled_from(["first", "every", "best", "worst", "median", "failed"]), st.integers(1, 9)),
    min_size=1,
    max_size=5,
)


@given(returns_and_outcomes, words, st.integers(1, 12))
def test_any_selection_of_any_result(episodes, chosen, cap):
    """Never twice, never one without a record, never more than allowed, and what the words say."""
    result = made(*zip(*episodes, strict=True))
    outcomes = result.table.rows["outcome"]
    indices = select_episodes(result, [f"{kind}:{number}" for kind, number in chosen], cap)
    assert len(indices) == len(set(indices)) <= cap
    assert all(outcomes[index] != Outcome.MISSING for index in indices)
    assert indices == select_episodes(result, ",".join(f"{kind}:{number}" for kind, number in chosen), cap)
    assert indices == select_episodes(result, [f"{kind}:{number}" for kind, number in chosen], 999)[:cap]
    counted = [float(value) for value in result.counted_rows["episode_return"]]
    for kind, number in chosen:
        alone = select_episodes(result, f"{kind}:{number}", 999)
        found = [float(result.table.rows["episode_return"][index]) for index in alone]
        if kind in ("best", "worst"):
            assert found == sorted(counted, reverse=kind == "best")[:number]
            assert all(result.counted[index] for index in alone)
        elif kind == "median":
            count = min(number, len(counted))
            first = (len(counted) - count) // 2
            assert found == sorted(counted)[first : first + count]
        elif kind == "failed":
            assert alone == [index for index in range(len(outcomes)) if outcomes[index] == Outcome.FAILED][:number]
        else:
            asked = range(0, len(outcomes), number) if kind == "every" else range(min(number, len(outcomes)))
            assert alone == [index for index in asked if outcomes[index] != Outcome.MISSING]
