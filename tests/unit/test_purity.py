"""The purity check: what runs twice, where, and what the comparison says."""

import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.episode import ROW, EpisodeTable, Outcome
from rl_eval.purity import Purity, PurityCheck

MLP = "rl_eval.policies.mlp:make_mlp"


def table(episodes: int = 100, runners: int = 2, failed: tuple[int, ...] = ()) -> EpisodeTable:
    rows = np.zeros(episodes, ROW)
    rows["index"], rows["seed"] = np.arange(episodes), np.arange(episodes) + 1000
    rows["outcome"], rows["runner"] = Outcome.COMPLETED, np.arange(episodes) % runners
    rows["outcome"][list(failed)] = Outcome.FAILED
    filled = EpisodeTable(episodes)
    filled.fill(rows)
    return filled


def play(check: PurityCheck, records: EpisodeTable, fleet: dict[int, int], lanes: int = 3) -> dict[int, int]:
    """Let runners (incarnation: position) do everything; return who ran what."""
    ran: dict[int, int] = {}
    for _ in range(1000):
        if check.done:
            break
        for runner, position in fleet.items():
            leases = check.take(runner, position, lanes, list(fleet.values()))
            assert len(leases) <= lanes
            for lease in leases:
                assert lease.fresh
                assert lease.attempt == 1
                assert lease.seed == records.rows["seed"][lease.index]
                ran[lease.index] = position
            check.finished(runner, records.rows[[lease.index for lease in leases]])
    assert check.done
    return ran


@pytest.mark.parametrize(("share", "count"), [(0.02, 2), (0.021, 3), (0.0001, 1), (1.0, 100)])
def test_the_share_is_of_the_plan_and_at_least_one(share: float, count: int) -> None:
    """Every chosen episode runs again, once, on a runner that did not run it the first time."""
    records = table()
    check = PurityCheck(records, share, seed=3)
    ran = play(check, records, {7: 0, 9: 1})
    assert len(ran) == count
    assert all(position != records.rows["runner"][index] for index, position in ran.items())
    assert check.result == Purity(count, ())


def test_the_choice_is_the_plans_and_leaves_failed_episodes_out() -> None:
    """The same plan checks the same episodes, another seed others; a failed episode has no outcome to compare."""
    records = table(failed=tuple(range(50)))
    chosen = [set(play(PurityCheck(records, 0.1, seed), records, {1: 0, 2: 1})) for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert all(min(indices) >= 50 for indices in chosen)


def test_a_single_runner_checks_itself() -> None:
    """In a fresh environment at least."""
    records = table(runners=1)
    assert len(play(PurityCheck(records, 0.05, 0), records, {4: 0})) == 5


def test_what_a_lost_runner_held_is_tried_again_but_not_forever() -> None:
    """A check ends, whatever dies."""
    records = table()
    check = PurityCheck(records, 0.04, 0)
    for incarnation in range(100):
        if check.done:
            break
        check.take(incarnation, 0, 8, [0])
        check.lost(incarnation)
    assert check.done
    assert check.result.checked == 0


def test_late_and_failed_rows_do_not_count() -> None:
    """Only what was handed out and completed is compared."""
    records = table()
    check = PurityCheck(records, 0.04, 0)
    leases = check.take(5, 0, 100, [0])
    check.finished(6, records.rows[:50])
    rows = records.rows[[lease.index for lease in leases]].copy()
    rows["outcome"][0] = Outcome.FAILED
    rows["episode_return"][1] += 1e-12
    check.finished(5, rows)
    check.finished(5, rows)
    assert check.done
    assert check.result == Purity(3, (int(rows["index"][1]),))


def test_the_limit_of_the_rate() -> None:
    """For none of k it is the rule of three's exact form; with mismatches Clopper and Pearson's."""
    assert Purity(100, ()).rate_below() == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)
    assert Purity(20, (3,)).rate_below() == pytest.approx(0.2161, abs=1e-4)
    assert Purity(0, ()).rate_below() == 1.0
    assert Purity(2, (0, 1)).rate_below() == 1.0
    assert str(Purity(100, ())) == "0 of 100 mismatched, rate below 0.03 at 95 %"


def test_an_impure_environment_is_found_and_a_pure_one_is_not() -> None:
    """State that leaks across resets shows when the episode starts in a fresh environment."""
    config = EvalConfig().policy(MLP).runners(num_envs_per_runner=2).evaluation(num_episodes=20, purity_check=0.5)
    impure = evaluate(config.environment("rl_eval.testing:impure"))
    assert impure.purity is not None
    assert impure.purity.checked == 10
    assert impure.purity.mismatched
    assert "not a function of the seed" in "\n".join(impure.notes)
    cured = evaluate(config.environment("rl_eval.testing:impure", env_reuse="episode"))
    pure = evaluate(config.environment("CartPole-v1", env_reuse="lane"))
    for result in (cured, pure):
        assert result.purity == Purity(10, ())
        assert "0 of 10 mismatched, rate below 0.26 at 95 %" in str(result)
        assert result.status == "complete"
        assert len(result.episodes) == 20
    unchecked = evaluate(config.evaluation(purity_check=0.0))
    assert unchecked.purity is None
    assert unchecked.fingerprint == pure.fingerprint
