"""Rules that end an evaluation: which prefix they see, when they are asked, and what the result says."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

import rl_eval
from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, compare, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.cli.restarts import run_with_restarts
from rl_eval.errors import ConfigError, EvalError, LogMismatch
from rl_eval.log import EvaluationLog, read_log
from rl_eval.records.episode import ROW, Batch, EpisodeTable, Outcome, RuleEnd, set_aside_rows
from rl_eval.scheduling import rules as scheduling_rules
from rl_eval.scheduling.rules import Rules
from tests.refused import refused, untold
from tests.unit.cli_world import call
from tests.unit.log_world import make_batch, make_fault, make_manifest
from tests.unit.vector_world import follow, walks


class Alike:
    """Ends an evaluation at the third unsuccessful episode of one kind: one that fell, or one that ran out of time."""

    def __init__(self, most: int = 3) -> None:
        self.most = most
        self.kinds: Counter[str] = Counter()

    def after(self, k: int, rows: Any) -> str | None:
        if rows["success_at_end"][-1] != 0:
            return None
        kind = "fell" if rows["terminated"][-1] else "ran out of time"
        self.kinds[kind] += 1
        return f"{self.most} episodes {kind}" if self.kinds[kind] == self.most else None


class Course(gym.Env):
    """The seed decides how long an episode is, and whether it falls, runs out of time or succeeds."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)
    at_reset: ClassVar[dict[int, Any]] = {}
    """What to call once at the start of an episode with this index."""

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.at_reset.pop(index, int)()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.left = 0, int(self.np_random.integers(1, 40))
        self.kind = self.np_random.choice(["fell", "late", "home"], p=[0.02, 0.02, 0.96])
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps, self.left = self.steps + 1, self.left - 1
        over = self.left == 0
        return np.zeros(2, np.float32), 1.0, over and self.kind == "fell", over and self.kind != "fell", {
            "is_success": self.kind == "home"
        }  # fmt: skip


class Flaky(Course):
    """Each fifth episode raises in its first attempt, and episode 10 in each."""

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.broken = index == 10 or (index % 5 == 0 and attempt == 1)

    def step(self, action):
        if self.broken:
            raise OSError("a cable came off")
        return super().step(action)


def config(lanes: int = 1, rules: Any = (Alike,)) -> EvalConfig:
    """Return an evaluation of 200 episodes; with three alike, it ends in the first half."""
    built = EvalConfig().environment(Course).policy(lambda observations: np.zeros(len(observations), np.int64))
    return built.runners(num_envs_per_runner=lanes).evaluation(num_episodes=200, rules=rules)


def answer_of(rule: Any, table: EpisodeTable) -> tuple[int, str] | None:
    """Return the first answer about the complete table."""
    rows = table.outcomes(slice(None))
    answers = ((k, rule.after(k, rows[:k])) for k in range(1, len(rows) + 1))
    return next(((k, answer) for k, answer in answers if answer), None)


# ------------------------------------------------------------------ the pure core


class Witness:
    """Passes a rule's answers on, and keeps what it was asked."""

    def __init__(self, rule: Any) -> None:
        self.rule, self.asked, self.writeable = rule, [], False

    def after(self, k: int, rows: Any) -> str | None:
        self.asked.append((k, rows.copy()))
        self.writeable |= rows.flags.writeable
        return self.rule.after(k, rows)


def table_of(kinds: Sequence[str]) -> EpisodeTable:
    """Return a complete table of episodes that succeeded, fell, ran out of time or failed."""
    table = EpisodeTable(len(kinds))
    for index, kind in enumerate(kinds):
        row = np.zeros(1, ROW)
        row["index"], row["episode_return"] = index, np.nan if kind == "failed" else index
        row["outcome"] = Outcome.FAILED if kind == "failed" else Outcome.COMPLETED
        row["success_at_end"] = {"home": 1, "failed": -1}.get(kind, 0)
        row["terminated"] = kind == "fell"
        table.fill(row)
    return table


def run_rules(seed: int, module: ModuleType = scheduling_rules) -> None:
    """Commit the episodes of a plan in any order and in batches of any size, and check what the rules say and see.

    Safety: the first answer is that about the complete table. Liveness: it comes with the commit that completes the
    prefix. Each prefix is shown once, in order, and no row changes.
    """
    rng = random.Random(seed)
    whole = table_of(rng.choices(["home", "fell", "late", "failed"], [6, 1, 1, 1], k=rng.randint(1, 40)))
    most = rng.randint(1, 4)
    second = rng.choice([most, most + 1])
    expected = answer_of(Alike(most), whole)
    table, witness = EpisodeTable(len(whole)), Witness(Alike(most))
    rules, found = module.Rules({"alike": witness, "second": Alike(second)}, table), None
    order = rng.sample(range(len(whole)), len(whole)) if rng.random() < 0.7 else list(range(len(whole)))
    while order and found is None:
        batch = [order.pop(0) for _ in range(min(len(order), rng.randint(1, 9)))]
        table.fill(whole.rows[batch])
        found = rules.ask()
        assert (found is not None) == (expected is not None and table.prefix() >= expected[0])
    assert (found and (found.after, found.rule, found.reason)) == (expected and (expected[0], "alike", expected[1]))
    assert [k for k, _ in witness.asked] == list(range(1, 1 + (expected[0] if expected else len(whole))))
    assert not witness.writeable
    for k, rows in witness.asked:
        assert rows.tobytes() == whole.outcomes(slice(k)).tobytes()


def test_no_order_of_commits_changes_the_end() -> None:
    """Nor does the size of the commits."""
    for seed in range(300):
        run_rules(seed)


def test_of_several_rules_the_first_one_that_answers_counts() -> None:
    found = Rules({"late": Alike(4), "early": Alike(2), "second": Alike(2)}, table_of(["fell"] * 5)).ask()
    assert found == RuleEnd(2, "early", "2 episodes fell")


def test_the_head_of_a_table_has_its_first_rows_and_faults() -> None:
    """Also if one of them is missing, as when a segment of a log is damaged."""
    whole = table_of(["home", "failed", "home", "fell", "home"])
    table = EpisodeTable(5, ["x"])
    table.fill(whole.rows[[0, 1, 3, 4]], np.arange(4.0)[:, None], [make_fault(1), make_fault(4)])
    head = table.head(4)
    assert head.filled.tolist() == [True, True, False, True, False]
    assert head.rows[:4].tobytes() == table.rows[:4].tobytes()
    assert np.isnan(head.infos[[2, 4]]).all()
    assert head.infos[[0, 1, 3]].ravel().tolist() == [0, 1, 2]
    assert [*head.faults] == [1]
    head.add_fault(make_fault(1))
    assert len(table.faults[1]) == 1


def test_rows_are_a_view_of_the_columns_of_the_fingerprint() -> None:
    """Ten thousand prefixes are ten thousand views of one array, without any column that depends on the runner."""
    table, seen = EpisodeTable(10_000), []

    class Keeper:
        def after(self, k: int, rows: Any) -> None:
            seen.append(rows)

    table.rows["index"], table.rows["outcome"] = np.arange(10_000), Outcome.COMPLETED
    assert Rules({"keeper": Keeper()}, table).ask() is None
    assert [len(rows) for rows in seen] == list(range(1, 10_001))
    assert np.shares_memory(seen[0], seen[-1][:1])
    assert set(seen[-1].dtype.names) == set(table.outcomes(slice(0)).dtype.names)
    assert not {"runner", "attempts", "step_seconds"} & set(seen[-1].dtype.names)


# ------------------------------------------------------------------ an evaluation


@pytest.fixture(scope="module")
def whole() -> EvalResult:
    """All 200 episodes, without a rule."""
    return evaluate(config(rules=()))


@pytest.fixture(scope="module")
def end(whole: EvalResult) -> tuple[int, str]:
    """Where the rule must end it."""
    found = answer_of(Alike(), whole.table)
    assert found is not None
    assert 40 < found[0] < 150
    return found


def check(result: EvalResult, whole: EvalResult, end: tuple[int, str], name: str = "Alike") -> None:
    """Check that a result has the first k episodes, and says so."""
    after, reason = end
    assert result.ended_by == RuleEnd(after, name, reason)
    assert (result.status, result.reason, result.stopped_early) == ("complete", "", False)
    assert [record.index for record in result.episodes] == list(range(after))
    assert result.fingerprint == whole.table.head(after).fingerprint()
    assert result.metrics["num_episodes"] == after
    assert result.mean_return == whole.returns[:after].mean()
    assert all(index < after for index in result.determinism.mismatched)
    [note] = [note for note in result.notes if reason in note]
    assert str(after) in note
    assert note in " ".join(result.details.split())
    assert not untold(str(result), after, reason)


@pytest.mark.parametrize("lanes", [1, 8, 64])
def test_the_prefix_is_the_same_for_any_number_of_environments(lanes, whole, end, tmp_path) -> None:
    """With a log and without one; rows behind the prefix stay in the log, and do not count."""
    check(evaluate(config(lanes)), whole, end)
    check(evaluate(config(lanes), output=tmp_path), whole, end)
    loaded = rl_eval.load(tmp_path)
    check(loaded, whole, end)
    assert len(read_log(tmp_path).rows) >= end[0]
    if lanes == 64:
        assert len(read_log(tmp_path).rows) > end[0]


def test_retries_do_not_change_the_prefix(whole, end) -> None:
    """A rule sees an episode once, after its last attempt."""
    result = evaluate(config(8).environment(Flaky))
    assert result.ended_by == RuleEnd(end[0], "Alike", end[1])
    assert result.status == "partial", "an episode of the prefix failed"
    assert result.metrics["num_retried_episodes"] > 3
    counted = np.arange(end[0]) != 10
    assert result.table.rows["length"][: end[0]][counted].tolist() == whole.lengths[: end[0]][counted].tolist()
    assert {fault.index for fault in result.faults} == set(range(0, end[0], 5))


def test_failed_episodes_are_part_of_the_prefix() -> None:
    """Their return is NaN, so a rule can end an evaluation because of them; the status counts those before the end."""

    class Failed:
        def after(self, k: int, rows: Any) -> str | None:
            return "an episode failed" if np.isnan(rows["episode_return"][-1]) else None

    for lanes in (1, 8):
        result = evaluate(config(lanes, rules=[Failed]).environment(Flaky).fault_tolerance(max_failed_episodes=1))
        assert result.ended_by == RuleEnd(11, Failed.__qualname__, "an episode failed")
        assert (result.status, result.num_failed, len(result.episodes)) == ("partial", 1, 11)
        assert "1 of 11" in result.reason


def test_a_rule_can_end_within_a_block() -> None:
    """The rest of the block does not count, and a block that is not complete is not checked again."""

    class Tenth:
        def after(self, k: int, rows: Any) -> str | None:
            return "enough" if k == 10 else None

    built = EvalConfig().environment(walks).policy(follow).runners(runner="batched", num_envs_per_runner=3, block=2)
    whole = evaluate(built.evaluation(num_episodes=40))
    result = evaluate(built.evaluation(num_episodes=40, rules=[Tenth]))
    assert result.ended_by == RuleEnd(10, Tenth.__qualname__, "enough")
    assert result.fingerprint == whole.table.head(10).fingerprint()
    assert (result.determinism.passed, result.determinism.checked) == (True, 6)


def test_a_saved_result_says_what_ended_it(whole, end, tmp_path) -> None:
    evaluate(config(8)).save(tmp_path)
    data = json.loads((tmp_path / "result.json").read_text())
    assert data["ended_by"] == {"after": end[0], "rule": "Alike", "reason": end[1]}
    assert len(data["plan"]) >= 1
    assert data["plan"]["num_episodes"] == 200
    check(EvalResult.load(tmp_path), whole, end)


def test_a_result_without_a_rule_has_no_end(whole) -> None:
    assert whole.ended_by is None
    assert whole.to_dict()["ended_by"] is None


def test_a_rule_that_never_answers_changes_nothing(whole) -> None:
    result = evaluate(config(8, rules=[partial(Alike, 10_000)]))
    assert result.ended_by is None
    assert (result.fingerprint, result.status) == (whole.fingerprint, "complete")


def test_an_answer_about_the_last_episode_is_an_end(whole) -> None:
    class Last:
        def after(self, k: int, rows: Any) -> str | None:
            return "enough" if k == 200 else None

    result = evaluate(config(8, rules=[Last]))
    assert result.ended_by is not None
    assert result.ended_by.after == 200
    assert result.fingerprint == whole.fingerprint


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_continued_run_asks_from_the_first_episode(lanes, whole, end, tmp_path) -> None:
    """A run that was cancelled before its end, and one that had already ended, have the same prefix."""
    with EvalRunnerGroup(config(lanes), threaded=False) as group:
        group.submit(output=tmp_path, on_submitted=lambda handle: Course.at_reset.update({30: handle.cancel}))
    partial_run = rl_eval.load(tmp_path)
    assert (partial_run.status, partial_run.ended_by) == ("partial", None)
    check(evaluate(config(lanes), output=tmp_path), whole, end)
    rows = len(read_log(tmp_path).rows)
    check(evaluate(config(lanes), output=tmp_path), whole, end)
    assert len(read_log(tmp_path).rows) == rows, "a run that has ended ran more episodes"


def test_the_sample_of_the_determinism_check_is_within_the_prefix(whole, end) -> None:
    """All its episodes lie in the first k, and they are checked."""
    asked: list[int] = []

    class Watched(Course):
        def begin_episode(self, index: int, seed: int, attempt: int) -> None:
            asked.append(index)

    built = config(1).environment(Watched)
    result = evaluate(built)
    check(result, whole, end)
    assert result.determinism.checked > 0
    assert result.determinism.passed
    again = [index for index, count in Counter(asked).items() if count > 1]
    assert len(again) >= result.determinism.checked
    assert max(again) < end[0]


def test_a_rule_is_part_of_the_identity(tmp_path) -> None:
    """A log is not continued with another rule, another argument of it, or without it."""
    evaluate(config(), output=tmp_path)
    for other in ((), [partial(Alike, 4)], [Alike, partial(Witness, Alike())]):
        with refused(LogMismatch):
            evaluate(config(rules=other), output=tmp_path)
    assert "rules" not in config(rules=()).build().identity()


def test_results_of_one_plan_and_rule_can_be_compared(end) -> None:
    """The pairs are the episodes that both have."""
    a, b = evaluate(config()), evaluate(config(8))
    found = compare(a, b)
    assert found.num_pairs == end[0]
    assert found.a.ended_by == found.b.ended_by == a.ended_by
    assert untold(found.verdict, "a and b", 200 - end[0], "evaluation.rules") == []
    assert "long episodes" not in " ".join(found.notes)


def test_a_sample_of_episodes_asks_no_rule() -> None:
    """It has as many episodes as were asked for."""
    with EvalRunnerGroup(config(8), threaded=False) as group:
        data = group.sample(150, as_arrays=True)
    assert data["next.done"].sum() == 150


@pytest.mark.parametrize(
    ("rules", "value"),
    [
        (["tests.unit.test_rules:missing"], "tests.unit.test_rules:missing"),
        ([3], 3),
        ([dict], "dict"),
        ([partial(int, "x")], "int"),
        ([Alike, Alike], "Alike"),
    ],
)
def test_what_is_not_a_rule_is_refused(rules, value) -> None:
    with refused(ConfigError, "evaluation.rules", value=value):
        evaluate(config(rules=rules))


def test_a_rule_that_raises_ends_the_evaluation_with_its_error(tmp_path) -> None:
    """Finished episodes stay in the log."""

    class Broken:
        def after(self, k: int, rows: Any) -> str | None:
            return rows["missing"] if k == 5 else None

    with refused(EvalError, "evaluation.rules", value=Broken.__qualname__) as caught:
        evaluate(config(rules=[Broken]), output=tmp_path)
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(read_log(tmp_path).rows) >= 5


def test_a_rule_can_be_named_in_a_config(whole, end) -> None:
    result = evaluate(config(8, rules=["tests.unit.test_rules:Alike"]))
    check(result, whole, end, "tests.unit.test_rules:Alike")
    assert asdict(result.ended_by)["rule"] == "tests.unit.test_rules:Alike"


# ------------------------------------------------------------------ records that are set aside after the end


class Loose(Course):
    """Episodes 3, 7 and 12 raise while the cable is loose."""

    cable_is_loose = True

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self.raises = self.cable_is_loose and index in (3, 7, 12)

    def step(self, action):
        if self.raises:
            raise OSError("a cable came off")
        return super().step(action)


class ThreeFailed:
    def after(self, k: int, rows: Any) -> str | None:
        return "three episodes failed" if np.isnan(rows["episode_return"]).sum() >= 3 else None


def still(observations):
    return np.zeros(len(observations), np.int64)


@pytest.fixture
def loose(tmp_path, monkeypatch) -> list[Any]:
    """Options of a run that a rule ended after 13 of 40 episodes, and whose cable was then mended."""
    monkeypatch.chdir(tmp_path)
    here = __name__
    options = [f"--env={here}:Loose", f"--policy={here}:still", "--num-episodes=40", "--runners=0", "--output=runs"]
    options += ["--set", f"evaluation.rules=['{here}:ThreeFailed']"]
    monkeypatch.setattr(Loose, "cable_is_loose", True)
    assert call("run", *options).exit_code == ExitCode.PARTIAL
    assert rl_eval.load("runs").ended_by == RuleEnd(13, f"{here}:ThreeFailed", "three episodes failed")
    monkeypatch.setattr(Loose, "cable_is_loose", False)
    return options


def test_a_retry_asks_the_rules_anew(loose, monkeypatch) -> None:
    """The failed episodes run again. They no longer end the run, which gets the result of one that never failed."""
    retry = ["--retry", "runs", "--trust"]
    with monkeypatch.context() as patch:
        patch.setattr("rl_eval.execution.group.EvalRunnerGroup", lambda *args, **kwargs: 1 / 0)
        assert call("run", *retry).exit_code == ExitCode.BUG
    assert rl_eval.load("runs").ended_by is None
    outcome = call("run", *retry)
    assert outcome.exit_code == 0, outcome.output
    found = rl_eval.load("runs")
    assert (found.status, found.ended_by, len(found.episodes)) == ("complete", None, 40)
    calm = evaluate(EvalConfig().environment(Loose).policy(still).evaluation(num_episodes=40))
    assert found.fingerprint == calm.fingerprint


@pytest.mark.process
def test_a_partial_result_that_a_rule_ended_is_not_restarted(loose, monkeypatch, capfd) -> None:
    monkeypatch.setattr("sys.argv", ["rl-eval", "run", *loose, "--max-restarts", "1"])
    assert run_with_restarts("runs", 1) == ExitCode.PARTIAL
    assert "giving up" not in capfd.readouterr().err


@pytest.mark.parametrize("how", ["retry", "set aside"])
def test_an_end_before_records_were_set_aside_does_not_count(how, tmp_path) -> None:
    """Not even when their episodes have run again: the rules have not been asked about the new records."""
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    log.append(make_batch(range(12)))
    log.append(replace(make_batch([]), ended_by=RuleEnd(11, "Rule", "enough")))
    log.flush(10)
    assert read_log(tmp_path).ended_by == RuleEnd(11, "Rule", "enough")
    if how == "set aside":
        aside = set_aside_rows([3], np.arange(12))
        log.append(Batch(aside, np.full((1, 2), np.nan)))
        log.flush(10)
    log.close()
    if how == "retry":
        log = EvaluationLog.open(tmp_path)
        log.retry(make_manifest(), [3])
        log.close()
    assert read_log(tmp_path).ended_by is None
    log = EvaluationLog.open(tmp_path)
    log.begin(make_manifest())
    log.append(make_batch([3]))
    log.flush(10)
    assert read_log(tmp_path).ended_by is None
    log.append(replace(make_batch([]), ended_by=RuleEnd(9, "Rule", "enough")))
    log.flush(10)
    log.close()
    assert read_log(tmp_path).ended_by == RuleEnd(9, "Rule", "enough")
