"""When two results may be compared, which episodes make a pair, and what the difference is said to show."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rl_eval.errors import ComparisonError
from rl_eval.results.comparison import Comparison, compare, verdict_of
from rl_eval.results.requirements import Answer, parse_difference
from rl_eval.results.result import EvalResult
from rl_eval.results.stats.interval import Interval, mean_interval
from rl_eval.results.stats.paired import PairedDifference, mcnemar, paired_difference, sign_flip_test
from tests.refused import refused
from tests.unit.results_world import result_of

if TYPE_CHECKING:
    from pathlib import Path

BASE = np.random.default_rng(21).normal(100.0, 20.0, 60)
NOISE = np.random.default_rng(22).normal(0.0, 5.0, 60)


BOUNDS = (0.0, 200.0)


def assert_equal(found: PairedDifference, expected: PairedDifference) -> None:
    """Also where there is no interval, whose ends are NaN."""
    np.testing.assert_equal(asdict(found), asdict(expected))


# What makes a pair


def test_comparison_is_b_minus_a_over_all_pairs() -> None:
    """All numbers are those of the paired statistics."""
    found = compare(result_of(BASE), result_of(BASE + NOISE + 4))
    assert found.difference == paired_difference(BASE, BASE + NOISE + 4)
    assert found.difference.mean > 0
    assert (found.num_planned, found.num_pairs, found.num_dropped, found.num_unfinished) == (60, 60, 0, 0)
    assert found.a.mean_return == pytest.approx(BASE.mean())
    assert found.b.mean_return == pytest.approx((BASE + NOISE + 4).mean())
    assert found.notes == []
    back = compare(result_of(BASE + NOISE + 4), result_of(BASE)).difference
    assert (back.mean, back.p_value) == (-found.difference.mean, found.difference.p_value)


def test_pairs_that_failed_on_a_side_are_dropped_and_counted() -> None:
    """Each side's mean goes over the pairs, so that they differ by the mean difference."""
    found = compare(result_of(BASE, failed=[3, 8]), result_of(BASE + NOISE, failed=[8, 20, 21]))
    kept = np.delete(np.arange(60), [3, 8, 20, 21])
    assert_equal(found.difference, paired_difference(BASE[kept], (BASE + NOISE)[kept], num_missing=4))
    assert (found.num_pairs, found.num_dropped) == (56, 4)
    assert (found.a.num_failed, found.b.num_failed) == (2, 3)
    assert found.b.mean_return - found.a.mean_return == pytest.approx(found.difference.mean)
    assert {"4", "2", "3"} <= set(re.findall(r"\d+", found.notes[0]))


def test_pairs_come_from_the_stretch_that_both_finished() -> None:
    """Episodes beyond a gap are there because they were short."""
    found = compare(result_of(BASE, missing=[40]), result_of(BASE + NOISE, missing=[50], failed=[5, 45]))
    kept = np.delete(np.arange(40), [5])
    assert_equal(found.difference, paired_difference(BASE[kept], (BASE + NOISE)[kept], num_missing=1))
    assert (found.num_pairs, found.num_dropped, found.num_unfinished) == (39, 1, 20)
    assert "20 of 60" in found.notes[1]


def test_no_pair_is_an_error() -> None:
    a, b = result_of(BASE[:4], failed=[0, 1]), result_of(BASE[:4], failed=[2, 3])
    with refused(ComparisonError, "episodes", value="(2, 2)"):
        compare(a, b)
    with refused(ComparisonError, "episodes", value="(0, 4)"):
        compare(result_of(BASE[:4], missing=[0]), result_of(BASE[:4]))


# What is refused


ENV_KWARGS = "environment.env_kwargs"


def other_env(**env: Any) -> EvalResult:
    return result_of(BASE, environment={"env": "CartPole-v1"} | env)


@pytest.mark.parametrize(
    ("other", "key", "value", "named"),
    [
        (result_of(BASE, max_episode_steps=200), "max_episode_steps", "(None, 200)", "200"),
        (other_env(env_kwargs={"gravity": 1.6}), f"{ENV_KWARGS}.gravity", "(9.8, 1.6)", f"{ENV_KWARGS}.wind"),
        (other_env(env_kwargs={"gravity": 9.8}), f"{ENV_KWARGS}.wind", "([0, 1], '(absent)')", "[0, 1]"),
        (result_of(BASE, environment="CartPole-v1"), "environment", None, "'gravity': 9.8"),
        (other_env(env_kwargs={str(key): 0 for key in range(9)}), f"{ENV_KWARGS}.gravity", None, " 6 "),
        (result_of(BASE, seed=1), "plan.seed", "(0, 1)", "plan.seed"),
        (result_of(BASE[:50], seed=9), "plan.num_episodes", "(60, 50)", "plan.seed"),
    ],
)
def test_another_setting_or_plan_is_refused_by_name(other: EvalResult, key: str, value: str | None, named: str) -> None:
    """The error names the first key and both values; the message lists more, and counts the rest."""
    with refused(ComparisonError, key, **({} if value is None else {"value": value})) as caught:
        compare(result_of(BASE), other)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "path", "name"),
    [
        ("rl_eval.integrations.sb3:load_policy", "/logs/seed_1/best_model.zip", "sb3:seed_1/best_model.zip"),
        ("rl_eval.integrations.rllib:load_policy", "/checkpoint_000010", "rllib:checkpoint_000010"),
        ("rl_eval.integrations.sb3:load_policy", "", "rl_eval.integrations.sb3:load_policy"),
        ("pkg:champion", "/logs/seed_1/best_model.zip", "pkg:champion"),
    ],
)
def test_a_model_of_another_library_has_the_name_of_its_file(factory: str, path: str, name: str) -> None:
    """And of its folder, since training runs give their best models one name; a missing normalizer is named."""
    model = result_of(BASE, policy=factory, policy_kwargs={"path": path})
    assert compare(result_of(BASE), model).b.policy == name
    bare = result_of(BASE, policy=factory, policy_kwargs={"path": path, "vecnormalize": False})
    assert compare(result_of(BASE), bare).b.policy == name + " vecnormalize=False" * (name != factory)


# What is said


@pytest.mark.parametrize(
    ("shift", "verdict"),
    [
        (4.0, "b has a higher return than a at 95 %: mean difference 4"),
        (-6.0, "b has a lower return than a at 95 %: mean difference -5"),
        (0.5, "no difference shown at 95 %: mean difference 1"),
    ],
)
def test_verdict_says_what_the_pairs_show(shift: float, verdict: str) -> None:
    """Interval and test agree in each of these cases."""
    found = compare(result_of(BASE), result_of(BASE + NOISE + shift))
    assert found.verdict.startswith(verdict)
    relation = "=" if "no difference" in verdict else "<="  # No other sign pattern is as far from 0.
    assert f"p {relation} {found.difference.p_value:.2g}" in found.verdict
    assert (f"<= {found.difference.p_value:.2g}" in " ".join(str(found).split())) == (relation == "<=")
    assert (0 in found.difference.interval) == ("no difference" in verdict)


def test_verdict_at_another_confidence() -> None:
    """The same pairs can show a difference at 80 % and none at 99.9 %."""
    a, b = result_of(BASE), result_of(BASE + NOISE + 1.5)
    assert compare(a, b, 0.8).verdict.startswith("b has a higher return than a at 80 %")
    assert compare(a, b, 0.999).verdict.startswith("no difference shown at 99.9 %")


@pytest.mark.parametrize("count", range(2, 9))
def test_pairs_that_can_show_nothing_answer_nothing(count: int) -> None:
    """However large the difference, with 5 pairs no test of signs rejects at 5 %; with 6 one does."""
    found = compare(result_of(BASE[:count]), result_of(BASE[:count] - 1000 - NOISE[:count]))
    assert found.regressed == (count >= 6)
    assert bool(found.unanswerable()) == (count < 6)


def test_pairs_that_a_side_did_not_reach_answer_nothing() -> None:
    """Whoever ended it did not plan for so few."""
    found = compare(result_of(BASE), result_of(BASE - 50 - NOISE, missing=range(40, 60)))
    assert not found.regressed
    assert found.unanswerable().startswith("b did not reach 20 of 60 episodes")
    assert found.verdict.startswith("no verdict:")
    assert found.difference.interval.exists


@pytest.mark.parametrize("count", [5, 6, 19, 20, 60])
def test_equal_differences_answer_nothing_without_bounds(count: int) -> None:
    """The next pair may be another one, by any amount; equal pairs are no exception."""
    base = np.resize(BASE, count)
    for b in (base, base - 485):
        found = compare(result_of(base), result_of(b))
        assert found.unanswerable()
        assert not found.regressed
        assert not found.difference.interval.exists
        assert found.verdict.startswith("no verdict:")


@pytest.mark.parametrize("count", [6, 19, 20, 60])
def test_equal_differences_within_bounds_answer_by_interval_and_test(count: int) -> None:
    """500 against 15 in six pairs of six is not luck; equal pairs are no regression."""
    low = result_of(np.full(count, 15.0), return_bounds=(0.0, 500.0))
    high = result_of(np.full(count, 500.0), return_bounds=(0.0, 500.0))
    found = compare(high, low)
    assert found.regressed
    assert found.verdict.startswith("b has a lower return than a")
    same = compare(high, high)
    assert (same.regressed, same.unanswerable()) == (False, "")
    assert same.difference.interval.low == pytest.approx(-500 * (1 - 0.025 ** (1 / count)))
    assert same.verdict.startswith("no difference shown")
    assert parse_difference("b >= a - 20").judge(compare(high, high).difference) is Answer.OPEN
    assert parse_difference("b >= a").judge(found.difference) is Answer.FAILS


def test_rounding_of_one_policy_is_equal_also_without_an_interval() -> None:
    """It concerns the episodes, not the means; a margin has no answer, since it does."""
    found = paired_difference(BASE, BASE * (1 + 1e-9 * (np.arange(60) < 3)), one_policy=True)
    assert found.rounding
    assert not found.interval.exists
    assert verdict_of(found, 0.95).startswith("equal up to rounding")
    require = parse_difference("b >= a - 5")
    assert require.judge(found) is Answer.OPEN
    assert require.undecided(found) == found.interval.note


def test_a_hundred_equal_pairs_meet_a_margin_of_20() -> None:
    """On [0, 500]."""
    one = result_of(np.full(100, 500.0), return_bounds=(0.0, 500.0))
    assert parse_difference("b >= a - 20").judge(compare(one, one).difference) is Answer.HOLDS


def test_bounds_that_one_result_declares_apply_to_both() -> None:
    """The environment and the step limit are the same; each side has its own bounds if it declares them."""
    bounded, plain = result_of(BASE * 0 + 7, return_bounds=BOUNDS), result_of(BASE * 0 + 7)
    expected = mean_interval(np.zeros(60), bounds=(-200.0, 200.0))
    for a, b in ((bounded, plain), (plain, bounded), (bounded, bounded)):
        assert compare(a, b).difference.interval == expected
    wider = result_of(BASE * 0 + 7, return_bounds=(-100.0, 500.0))
    assert compare(bounded, wider).difference.interval == mean_interval(np.zeros(60), bounds=(-300.0, 500.0))
    assert not compare(bounded, result_of(BASE * 0 + 700)).difference.interval.exists, "700 is outside of the bounds"


@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize("shift", [-40.0, -3.0])
def test_incomplete_pairs_are_assumed_at_their_worst_or_answer_nothing(
    bounds: tuple[float, float] | None, shift: float
) -> None:
    """Verdict, regression, requirement and interval agree, with and without bounds."""
    ours, theirs = BASE, BASE + NOISE + shift
    a = result_of(ours, return_bounds=bounds, failed=[3])
    b = result_of(theirs, return_bounds=bounds, failed=[3, 8])
    found = compare(a, b)
    assert (found.num_pairs, found.num_dropped) == (58, 2)
    differences = np.delete(theirs - ours, [3, 8])
    require = parse_difference("b >= a")
    if bounds is None:
        assert not found.difference.interval.exists
        assert "failed episodes of old and new, use rl-eval run --retry" in found.unanswerable("old", "new")
        assert (found.regressed, require.judge(found.difference)) == (False, Answer.OPEN)
        assert found.verdict.startswith("no verdict:")
        return
    interval = found.difference.interval
    assert interval.low == mean_interval([*differences, -200.0, -200.0], bounds=(-200.0, 200.0)).low
    assert interval.high == mean_interval([*differences, 200.0, 200.0], bounds=(-200.0, 200.0)).high
    tests = [sign_flip_test(np.array([*differences, *filled]))[0] for filled in ((-200.0,) * 2, (200.0,) * 2)]
    assert found.difference.p_value == max(tests)
    shown = shift == -40
    assert found.unanswerable() == ""
    assert (found.regressed, require.judge(found.difference) is Answer.FAILS) == (shown, shown)
    assert found.verdict.startswith("b has a lower return" if shown else "no difference shown")


@pytest.mark.parametrize(
    ("p_value", "low", "verdict"),
    [
        (0.009, 0.5, "b has a higher return than a at 99 %"),
        (0.011, 0.5, "no difference shown at 99 %.*the interval excludes 0, but the sign-flip test does not reject"),
        (0.009, -0.5, "no difference shown at 99 %.*the sign-flip test rejects, but the interval contains 0"),
        (0.011, -0.5, "no difference shown at 99 %.*p = 0.011$"),
    ],
)
def test_verdict_needs_interval_and_test_to_agree(p_value: float, low: float, verdict: str) -> None:
    """Each of the four combinations, at a level that is not the default."""
    difference = replace(
        paired_difference(BASE, BASE + NOISE), mean=2.0, p_value=p_value, interval=Interval(low, 4.0, 0.99, "bca")
    )
    assert re.match(verdict, verdict_of(difference, 0.99))


def test_one_pair_and_infinite_returns_have_no_verdict() -> None:
    """Neither do equal results without bounds."""
    assert compare(result_of(BASE[:1]), result_of(BASE[:1])).verdict.startswith("no verdict")
    infinite = np.array([1.0, np.inf, 2.0])
    assert compare(result_of(BASE[:3]), result_of(infinite)).verdict.startswith("no verdict")
    found = compare(result_of(BASE), result_of(BASE))
    assert found.verdict.startswith("no verdict")
    assert found.a.fingerprint == found.b.fingerprint
    assert found.notes
    assert found.difference.episodes_saved is None


def test_success_is_compared_where_both_report_it() -> None:
    """Silent pairs stay in the returns and out of McNemar's test; no success is not failure."""
    ours, theirs = np.arange(60) % 2, np.arange(60) % 3 != 0
    silent = np.where(np.arange(60) < 6, -1, ours)
    found = compare(result_of(BASE, success=silent), result_of(BASE + NOISE, success=theirs))
    assert found.success == mcnemar(ours[6:] == 1, theirs[6:])
    assert (found.num_pairs, len(found.notes)) == (60, 1)
    assert compare(result_of(BASE), result_of(BASE, success=1)).success is None


# Ways out


@pytest.fixture
def comparison() -> Comparison:
    """Return a comparison with every part: failed pairs, success, a long policy name."""
    success = (np.arange(60) % 2).astype(np.int8)
    a = result_of(BASE, failed=[2], success=success)
    return compare(a, result_of(BASE + NOISE + 2, missing=[55], success=1, policy="package.module:" + "x" * 90))


def test_comparison_of_saved_results_is_the_same(tmp_path: Path) -> None:
    """Two output folders are as good as two live results."""
    a, b = result_of(BASE, failed=[4]), result_of(BASE + NOISE, success=1)
    for name, result in (("a", a), ("b", b)):
        result.save(tmp_path / name)
    found = compare(EvalResult.load(tmp_path / "a"), EvalResult.load(tmp_path / "b"))
    assert found == compare(a, b)
    assert max(map(len, str(found).splitlines())) <= 80


def test_dict_is_strict_json(comparison: Comparison) -> None:
    """Nested parts are plain values with their names."""
    data = comparison.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["difference"]["interval"]["method"] == "none"
    assert "samples" not in data["difference"]
    assert data["verdict"] == comparison.verdict
    assert data["success"]["only_b"] == comparison.success.only_b if comparison.success else False
    assert data["notes"] == comparison.notes
