"""The laws of cross-play: planted odds come back, seats cancel, draws stay, and the order of games is nothing."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, compare, evaluate, load, replay
from rl_eval.errors import ConfigError, LogMismatch, UsageError
from rl_eval.reports.pages import page_of
from rl_eval.results.crossplay import (
    CrossPlay,
    Games,
    crossplay,
    games_of,
    openskill_matches,
    payoff_tables,
    write_openskill,
    write_payoffs,
)
from rl_eval.results.observations import observed, values_of
from rl_eval.results.stats.interval import mean_interval
from rl_eval.results.stats.ratings import ELO
from tests.refused import refused
from tests.unit.games_world import LEVELS, Duel, Level, RandomMover, TicTacToe, duel_config

DUELS = {"weak": 0, "middle": 1, "strong": 3}


def games(seatings: list[str], returns: list[list[float]], seeds: list[int] | None = None, missing: int = 0) -> Games:
    """Make games of seatings such as ``"ab"``, each on its own seed unless told."""
    names = sorted(set("".join(seatings)))
    return Games(
        policies=tuple(names),
        seats=tuple(f"seat_{number}" for number in range(len(seatings[0]))),
        seeds=np.arange(len(seatings)) if seeds is None else np.array(seeds),
        seatings=np.array([[names.index(name) for name in seating] for seating in seatings]),
        returns=np.array(returns, float),
        num_missing=missing,
    )


def permuted(played: Games, order: Any) -> Games:
    return Games(played.policies, played.seats, played.seeds[order], played.seatings[order], played.returns[order])


@st.composite
def any_games(draw: st.DrawFn) -> Games:
    seats, count = draw(st.integers(2, 3)), draw(st.integers(1, 12))
    seating = st.text("abc", min_size=seats, max_size=seats)
    values = st.lists(st.sampled_from([-1.1, 0.0, 0.1, 0.7, 1e9 / 3]), min_size=seats, max_size=seats)
    seatings = ["abc"[:seats], *draw(st.lists(seating, min_size=count, max_size=count))]
    returns = draw(st.lists(values, min_size=count + 1, max_size=count + 1))
    return games(seatings, returns, [number // 2 for number in range(count + 1)])


# ------------------------------------------------------------------------------ numbers


def test_draws_stay() -> None:
    """Two wins, one draw and one loss of four: the draw is neither dropped nor lost."""
    played = crossplay(games(["ab", "ab", "ba", "ab"], [[1, -1], [0, 0], [-1, 1], [-1, 1]]))
    cell = played.cell("a", "b")
    assert cell is not None
    assert (cell.outcomes.wins, cell.outcomes.draws, cell.outcomes.losses) == (0.5, 0.25, 0.25)
    assert cell.score.mean == cell.outcomes.score == 0.625
    assert cell.mean_return.mean == 0.25
    assert cell.difference.mean == 0.5
    assert played.cell("a", "a") is None
    assert played.matrix()[0, 1] == 0.625
    assert math.isnan(played.matrix("difference")[0, 0])


def test_seats_teams_and_each() -> None:
    """The team is the sum, per capita is the mean over a policy's seats, and a shared best return is a draw."""
    played = crossplay(games(["aab", "bab"], [[1, 2, 6], [4, 4, 1]]))
    first, second = played.line_ups
    assert (first.policies, first.team.mean) == (("a", "a", "b"), 9.0)
    assert {name: each.mean for name, each in first.per_capita.items()} == {"a": 1.5, "b": 6.0}
    assert {name: each.mean for name, each in second.per_capita.items()} == {"a": 4.0, "b": 2.5}
    wins, draws, losses = zip(
        *((s.outcomes.wins, s.outcomes.draws, s.outcomes.losses) for s in played.seats), strict=True
    )
    assert (wins, draws, losses) == ((0, 0, 0.5), (0.5, 0.5, 0), (0.5, 0.5, 0.5))
    assert [standing.mean_return.mean for standing in played.standings] == [2.75, 4.25]


@settings(max_examples=25, deadline=None)
@given(played=any_games())
def test_what_one_wins_the_other_loses(played: Games) -> None:
    """Cells mirror each other, shares add up to one, and means are means over seeds."""
    result = crossplay(played)
    for cell in result.cells:
        mirrored = result.cell(cell.column, cell.row)
        assert mirrored is not None
        assert cell.outcomes.wins == pytest.approx(mirrored.outcomes.losses)
        assert cell.outcomes.wins + cell.outcomes.draws + cell.outcomes.losses == pytest.approx(1)
        assert cell.difference.mean == pytest.approx(-mirrored.difference.mean, abs=1e-6)
        assert (cell.num_games, cell.num_seeds) == (mirrored.num_games, mirrored.num_seeds)
        by_hand = [
            np.mean([
                float(ours > theirs) + 0.5 * float(ours == theirs)
                for game in np.flatnonzero(played.seeds == seed)
                for (i, ours), (j, theirs) in itertools.permutations(
                    zip(played.seatings[game], played.returns[game], strict=True), 2
                )
                if (played.policies[i], played.policies[j]) == (cell.row, cell.column)
            ] or [np.nan])
            for seed in np.unique(played.seeds)
        ]  # fmt: skip
        assert cell.score.mean == pytest.approx(np.nanmean(by_hand))


@settings(max_examples=15, deadline=None)
@given(played=any_games(), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_games_does_not_matter(played: Games, seed: int) -> None:
    """Not one bit of any number moves."""
    order = np.random.default_rng(seed).permutation(len(played))
    one, other = crossplay(played), crossplay(permuted(played, order))
    assert repr(one) == repr(other)  # NaN equals itself here.


def test_rates_of_games_have_intervals_from_0_to_1() -> None:
    """Also if one side wins every game: then it is that of a rate."""
    always = crossplay(games(["ab"] * 6, [[1, 0]] * 6))
    cell = always.cell("a", "b")
    assert cell is not None
    won = stats.binomtest(6, 6).proportion_ci(method="exact")
    for interval in (cell.score.interval, cell.outcomes.win_interval, always.standings[0].outcomes.win_interval):
        assert (interval.low, interval.high) == (pytest.approx(won.low), 1.0)
    lost = always.standings[1].outcomes.win_interval
    assert (lost.low, lost.high) == (0.0, pytest.approx(1 - won.low))
    mixed = crossplay(games(["ab"] * 5, [[1, 0], [0, 1], [0, 0], [1, 0], [0, 0]])).cell("a", "b")
    assert mixed is not None
    assert mixed.outcomes.win_interval == mean_interval([1, 0, 0, 1, 0], bounds=(0, 1))
    assert mixed.score.interval == mean_interval([1, 0, 0.5, 1, 0.5], bounds=(0, 1))
    text = shown(always)
    assert f"{100 * won.low:.1f} % to 100.0 %" in text


def test_a_seed_is_one_observation() -> None:
    """Games of one seed that always go alike make no interval narrower."""
    rng = np.random.default_rng(1)
    once = [[1.0, -1.0] if won else [-1.0, 1.0] for won in rng.random(60) < 0.6]
    alone = crossplay(games(["ab"] * 60, once)).cell("a", "b")
    twice = crossplay(
        games(["ab", "ba"] * 60, [r for a, b in once for r in ([a, b], [b, a])], [i // 2 for i in range(120)])
    )
    both = twice.cell("a", "b")
    assert alone is not None
    assert both is not None
    assert (both.num_games, both.num_seeds) == (120, 60)
    assert both.score == alone.score


def test_cross_play_needs_two_policies_and_a_game() -> None:
    """The message says what is missing."""
    with refused(UsageError, "policies", value="a"):
        crossplay(games(["aa"], [[0, 1]]))
    played = games(["ab"], [[0, 1]])
    with refused(UsageError, "games", value=0):
        crossplay(permuted(played, []))


# ------------------------------------------------------------------------------ truth


def tic_tac_toe(**evaluation: Any) -> CrossPlay:
    policies = {name: {"policy": RandomMover()} for name in ("one", "other")}
    config = EvalConfig().environment(TicTacToe).policy(policies=policies, deterministic=False)
    config.evaluation(matchups=[["one", "other"]], determinism_check=0, **evaluation).runners(num_envs_per_runner=256)
    return crossplay(games_of(evaluate(config)))


@pytest.mark.parametrize("num_episodes", [1_000, pytest.param(4_000, marks=pytest.mark.slow)])
def test_random_tic_tac_toe_has_its_known_rates(num_episodes: int) -> None:
    """Of random players the first seat wins 0.585, draws 0.127, loses 0.288, in 3 standard errors."""
    played = tic_tac_toe(num_episodes=num_episodes)
    found = played.seats[0].outcomes
    for rate, truth in ((found.wins, 0.585), (found.draws, 0.127), (found.losses, 0.288)):
        assert abs(rate - truth) < 3 * math.sqrt(truth * (1 - truth) / num_episodes)
    cell = played.cell("one", "other")
    assert cell is not None
    assert cell.score.interval.low > 0.55


def test_symmetric_pairing_cancels_the_seat() -> None:
    """Of equal players both score one half and are rated alike; the seats still show what they are worth."""
    played = tic_tac_toe(num_episodes=600, symmetric=True)
    cell = played.cell("one", "other")
    assert cell is not None
    assert cell.score.mean == 0.5
    assert [standing.rating.value for standing in played.standings] == [0.0, 0.0]
    assert played.seats[0].mean_return.interval.low > 0.1


def test_planted_strengths_come_back_through_an_evaluation() -> None:
    """Ratings of duels are the strengths of their levels."""
    played = crossplay(games_of(evaluate(duel_config(DUELS, "round_robin", 1_800, symmetric=True))))
    truth = {name: LEVELS[level] for name, level in DUELS.items()}
    centre = np.mean(list(truth.values()))
    for standing in played.standings:
        assert standing.rating.value / ELO == pytest.approx(truth[standing.policy] - centre, abs=0.25)
        assert ELO * (truth[standing.policy] - centre) in standing.rating.interval


def test_permuted_seats_take_the_bonus_out_of_the_order() -> None:
    """With the first seat nearly unbeatable, unpaired seats would rate by who sat there; paired ones do not."""
    unfair = {"env_kwargs": {"bonus": 3.0}}
    fixed = duel_config(DUELS, [["weak", "strong"]], 300).environment(Duel, **unfair)
    fair = duel_config(DUELS, [["weak", "strong"]], 600, symmetric=True).environment(Duel, **unfair)
    for config in (fixed, fair):
        config.policy(policies={name: {"policy": Level(DUELS[name])} for name in ("weak", "strong")})
    one, other = (crossplay(games_of(evaluate(config))).matrix() for config in (fixed, fair))
    assert one[1, 0] > 0.6
    assert other[1, 0] < 0.4


# ------------------------------------------------------------------------------ from an evaluation


@pytest.fixture(scope="module")
def evaluated() -> EvalResult:
    return evaluate(duel_config(DUELS, ["self", "round_robin"], 180, symmetric=True))


def test_games_are_the_plan(evaluated: EvalResult) -> None:
    """Who sat where is what the plan says, and the returns are those of the agents."""
    played = games_of(evaluated)
    assert played.policies == ("middle", "strong", "weak")
    assert played.seats == ("seat_0", "seat_1")
    for index in range(len(played)):
        assert tuple(played.policies[at] for at in played.seatings[index]) == evaluated.plan[index].seating
        info = evaluated.episodes[index].info
        assert played.returns[index].tolist() == [info["return/seat_0"], info["return/seat_1"]]


def test_a_result_keeps_its_seatings(evaluated: EvalResult, tmp_path: Path) -> None:
    """Saved and read back, it has the same plan, and gives the same cross-play."""
    evaluated.save(tmp_path)
    again = load(tmp_path)
    assert again.plan[7].seating == evaluated.plan[7].seating
    assert again.plan_fingerprint == evaluated.plan_fingerprint
    assert repr(crossplay(games_of(again))) == repr(crossplay(games_of(evaluated)))


def test_a_log_is_continued_with_its_own_seatings_only(tmp_path: Path) -> None:
    """Other matchups are another run; the same ones come back from the log."""
    config = duel_config(DUELS, "round_robin", 24, symmetric=True)
    result = evaluate(config, output=tmp_path)
    assert load(tmp_path).plan[5].seating == result.plan[5].seating
    with refused(LogMismatch, "output") as caught:
        evaluate(config.copy().evaluation(matchups="self", symmetric=False), output=tmp_path)
    assert "matchups" in caught.value.differences


def test_held_out_episodes_are_seated_by_their_own_places() -> None:
    """Episodes that a group begins elsewhere are seated as their places say, not as the configured ones."""
    with EvalRunnerGroup(duel_config(DUELS, "round_robin", 6)) as group:
        held_out = group.evaluate(num_episodes=7, first_index=4)
    played = games_of(held_out)
    for index in range(7):
        assert tuple(played.policies[at] for at in played.seatings[index]) == held_out.plan[index].seating
    assert held_out.plan[0].seating == ("strong", "weak")


def test_an_episode_is_replayed_and_checked_with_its_seating(evaluated: EvalResult) -> None:
    """What runs again has the same policies in the same seats."""
    index = next(at for at in range(180) if evaluated.plan[at].seating == ("strong", "weak"))
    assert replay(evaluated, index, trust=True).identical
    checked = evaluate(duel_config(DUELS, "round_robin", 12).evaluation(determinism_check=1.0))
    assert checked.determinism.passed


class Breaking(Duel):
    """Every attempt at one episode fails."""

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.broken = index == 5

    def step(self, actions: Any) -> Any:
        if self.broken:
            raise RuntimeError("planted")
        return super().step(actions)


def test_a_failed_game_takes_the_games_of_its_seed_along() -> None:
    """What is left of a pair would not be fair: it is counted as missing."""
    config = duel_config(DUELS, "round_robin", 30, symmetric=True).environment(Breaking)
    played = games_of(evaluate(config))
    assert (len(played), played.num_missing) == (28, 2)
    assert crossplay(played).num_missing == 2


class NeverFor(Duel):
    """Breaks wherever the policy of the highest level plays."""

    def step(self, actions: Any) -> Any:
        if max(actions.values()) == max(DUELS.values()):
            raise RuntimeError("planted")
        return super().step(actions)


def test_a_policy_without_a_whole_game_is_named() -> None:
    config = duel_config(DUELS, "round_robin", 30, symmetric=True).environment(NeverFor)
    result = evaluate(config.fault_tolerance(max_attempts_per_episode=1, fail_fast=False))
    played = crossplay(games_of(result))
    best = max(DUELS, key=DUELS.__getitem__)
    assert played.absent == (best,)
    assert best not in played.policies
    assert best in page_of(played).notes[0]


# ------------------------------------------------------------------------------ errors


def test_what_has_no_games_is_an_error() -> None:
    """No matchups, and two seats for three agents."""
    with refused(UsageError, "evaluation.matchups"):
        games_of(evaluate(duel_config({"seat_0": 0, "seat_1": 1}, None, 4)))
    with refused(ConfigError, "evaluation.matchups") as caught:
        evaluate(duel_config(DUELS, "round_robin", 6).environment(Duel, env_kwargs={"seats": 3}))
    assert all(named in str(caught.value) for named in ("2", "3", "seat_0, seat_1, seat_2"))


def test_agents_of_the_config_say_how_many_seats_there_are() -> None:
    """Three seats, six orders."""
    config = duel_config(DUELS, "round_robin", 12, symmetric=True)
    config.environment(Duel, env_kwargs={"seats": 3}, agents=["seat_2", "seat_0", "seat_1"])
    played = games_of(evaluate(config))
    assert played.seats == ("seat_2", "seat_0", "seat_1")
    assert len(np.unique(played.seeds)) == 2


def test_an_agent_that_never_appears_is_an_error() -> None:
    """A seat without a return is not worth zero."""
    played = evaluate(duel_config(DUELS, "round_robin", 6))
    played.table.infos[3, played.table.info_keys.index("return/seat_1")] = np.nan
    with refused(UsageError, "seat_1", episode=3) as caught:
        games_of(played)
    assert math.isnan(float(str(caught.value.value)))


# ------------------------------------------------------------------------------ files for others


def test_openskill_reads_the_matches(evaluated: EvalResult, tmp_path: Path) -> None:
    """Its rating of the matches puts the policies into their order."""
    models = pytest.importorskip("openskill.models")
    write_openskill(tmp_path / "openskill.json", games_of(evaluated))
    read = json.loads((tmp_path / "openskill.json").read_text())
    assert read["matches"] == openskill_matches(games_of(evaluated))
    model = models.PlackettLuce()
    ratings = {name: model.rating() for name in read["policies"]}
    for match in read["matches"]:
        if len({name for team in match["teams"] for name in team}) == 2:
            new = model.rate([[ratings[name] for name in team] for team in match["teams"]], scores=match["scores"])
            ratings |= {name: rating for team, rated in zip(match["teams"], new, strict=True) for name, rating in zip(team, rated, strict=True)}  # fmt: skip  # noqa: E501
    assert sorted(ratings, key=lambda name: ratings[name].mu) == ["weak", "middle", "strong"]


def test_alpha_rank_reads_the_payoffs(evaluated: EvalResult, tmp_path: Path) -> None:
    """The strong policy in both seats has all the mass."""
    alpharank = pytest.importorskip("open_spiel.python.egt.alpharank")
    write_payoffs(tmp_path / "alpharank.npz", games_of(evaluated))
    read = np.load(tmp_path / "alpharank.npz")
    ranking = alpharank.compute(list(read["payoffs"]), alpha=10)[2]
    profiles = list(itertools.product(read["policies"].tolist(), repeat=2))
    assert profiles[int(np.argmax(ranking))] == ("strong", "strong")


def test_payoffs_are_means_by_seating() -> None:
    """An entry for each seat and seating; those that were not played are NaN."""
    tables = payoff_tables(games(["ab", "ab", "ba"], [[1, -1], [0, 2], [5, 6]]))
    assert tables.shape == (2, 2, 2)
    assert tables[:, 0, 1].tolist() == [0.5, 0.5]
    assert tables[:, 1, 0].tolist() == [5, 6]
    assert np.isnan(tables[:, [0, 1], [0, 1]]).all()


# ------------------------------------------------------------------------------ looks


def shown(played: CrossPlay) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(played)
    return capture.get()


def test_few_draws_leave_the_ratings_open() -> None:
    few, many = (crossplay(games(["ab"] * count, [[0, 0]] * count)).standings for count in (5, 20))
    assert [one.rating.value for one in (*few, *many)] == [0.0] * 4
    assert not any(one.rating.interval.exists for one in (*few, *many)), "equal seeds do not show how others vary"


def test_the_report_says_what_is_not_known() -> None:
    """Missing games and ratings without an interval are named; a pairing that was not played is a dash."""
    played = crossplay(games(["ab", "bc"] * 30, [[1, 0]] * 60, missing=4))
    page = page_of(played)
    assert {f"{played.num_games}", f"{played.num_missing}"} == {"60", "4"} <= set(page.subtitle.split())
    assert any(all(repr(name) in note for name in "abc") for note in page.notes)
    assert " - " in shown(played)


# ------------------------------------------------------------------------------ a seed that is played in several orders


def test_episodes_that_share_a_seed_are_one_observation() -> None:
    """Their mean has an interval over seeds. Two results are compared seed by seed."""
    result = evaluate(duel_config(DUELS, "round_robin", 60, symmetric=True))
    groups = result.plan.seed_groups
    assert groups is not None
    assert [len({*result.plan.seeds[groups == group].tolist()}) for group in np.unique(groups)] == [1] * 30
    means = [result.table.rows["episode_return"][groups == group].mean() for group in range(30)]
    np.testing.assert_equal(result.interval.to_dict(), mean_interval(means, of="returns").to_dict())
    comparison = compare(result, result)
    assert (comparison.num_pairs, comparison.num_planned, comparison.success) == (30, 30, None)
    alone = evaluate(duel_config(DUELS, "round_robin", 60))
    assert alone.plan.seed_groups is None
    expected = mean_interval(alone.table.rows["episode_return"], of="returns")
    np.testing.assert_equal(alone.interval.to_dict(), expected.to_dict())


def test_a_turn_that_is_not_finished_is_no_observation() -> None:
    groups = np.array([0, 0, 1, 1, 2, 2])
    counted = np.array([True, True, True, False, True, True])
    assert observed(counted, groups).tolist() == [True, False, True]
    assert values_of(np.arange(6.0), observed(counted, groups), groups).tolist() == [0.5, 4.5]
    assert observed(counted, None).tolist() == counted.tolist()
    assert values_of(np.arange(6.0), counted, None).tolist() == [0, 1, 2, 4, 5]
