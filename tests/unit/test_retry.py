"""``rl-eval run --retry``: failed episodes run again, as if they had had so many attempts at once."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.errors import LogError
from rl_eval.log import EvaluationLog, read_log
from rl_eval.results.loading import load
from tests.refused import refused, untold
from tests.unit.cli_world import call, failed, faulty
from tests.unit.log_world import make_batch, make_manifest


@pytest.fixture
def flaky(folder):
    """A run in which some episodes failed twice; nothing fails a third time."""
    outcome = call("run", "toy.yaml", "--output", "runs", *faulty(2, 0.4, 0.6))
    assert outcome.exit_code == ExitCode.PARTIAL
    assert "next: rl-eval run --retry runs\n" in outcome.stdout
    return load("runs")


def test_a_retry_gives_the_result_of_a_run_with_more_attempts(flaky):
    """Bit for bit, with all faults of either session, and a note that says what happened."""
    outcome = call("run", "--retry", "runs")
    assert outcome.exit_code == 0, outcome.output
    assert call("run", "toy.yaml", "--output", "whole", *faulty(5, 0.4, 0.6)).exit_code == 0
    found, whole = load("runs"), load("whole")
    assert found.fingerprint == whole.fingerprint
    assert found.status == "complete"
    faults = [sorted((fault.index, fault.attempt) for fault in result.faults) for result in (found, whole)]
    assert faults[0] == faults[1]
    assert any(untold(note, flaky.num_failed, failed(flaky)[0]) == [] for note in found.notes)
    kept = flaky.table.completed  # With their times.
    assert found.table.rows[kept].tobytes() == flaky.table.rows[kept].tobytes()
    assert json.loads(Path("runs/result.json").read_text())["fingerprint"] == found.fingerprint


def test_what_fails_again_is_failed_and_can_be_retried_again(folder):
    """Attempts are counted on, and no fault is lost."""
    call("run", "toy.yaml", "--output", "runs", *faulty(1, 0.3, 1.0, 1.0, 0.0))
    first = load("runs")
    assert call("run", "--retry", "runs", "--attempts", 2).exit_code == ExitCode.PARTIAL
    second = load("runs")
    assert second.num_failed > 1
    assert {*failed(second)} <= {*failed(first)}
    assert {*second.table.rows["attempts"][failed(second)].tolist()} == {3}
    assert call("run", "--retry", "runs", "--attempts", 1).exit_code == 0
    third = load("runs")
    assert {*third.table.rows["attempts"][failed(second)].tolist()} == {4}
    assert third.faults == second.faults


def test_a_retry_that_did_not_come_to_run_leaves_a_log_to_continue(flaky, monkeypatch):
    """The episodes are unfinished then, the saved result is older and no contradiction, and retry goes on."""
    with monkeypatch.context() as patch:
        patch.setattr("rl_eval.execution.group.EvalRunnerGroup", lambda *args, **kwargs: 1 / 0)
        assert call("run", "--retry", "runs").exit_code == ExitCode.BUG
    between = load("runs")
    assert len(between.episodes) == 30 - flaky.num_failed
    assert len(between.faults) == len(flaky.faults)
    assert call("run", "--retry", "runs").exit_code == 0
    assert load("runs").status == "complete"


def test_where_nothing_failed_nothing_runs(folder):
    call("run", "toy.yaml", "--output", "runs")
    before = sorted(Path("runs/segments").iterdir())
    assert call("run", "--retry", "runs").exit_code == 0
    assert sorted(Path("runs/segments").iterdir()) == before


def test_a_result_without_a_log_is_a_usage_error(flaky):
    shutil.copytree("runs", "copy", ignore=lambda *_: ["segments", "manifest.json", "owners"])
    assert call("run", "--retry", "copy").exit_code == ExitCode.USAGE


def test_other_code_is_refused_before_anything_is_put_aside(folder, monkeypatch):
    """Unless it is accepted: often it is what mends the episodes. A note counts the episodes of the former code."""
    source = Path("cli_toys.py").read_text()
    broken = source.replace("self.episodes += 1", "self.episodes += 1\n        assert self.np_random.random() < 0.8")
    Path("cli_toys.py").write_text(broken)
    assert call("run", "toy.yaml", "--output", "runs").exit_code == ExitCode.PARTIAL
    before = load("runs")
    Path("cli_toys.py").write_text(source)
    outcome = call("run", "--retry", "runs")
    assert outcome.exit_code == ExitCode.USAGE
    assert all(named in outcome.stderr for named in ("cli_toys.py", "rl-eval show runs", "--accept-code-change"))
    assert load("runs").fingerprint == before.fingerprint
    monkeypatch.delitem(sys.modules, "cli_toys")
    assert call("run", "--retry", "runs", "--accept-code-change").exit_code == ExitCode.COMPLETE
    after = load("runs")
    assert after.num_failed == 0 < before.num_failed
    [change] = after.provenance["code_changes"]
    assert change["num_finished"] == before.aggregates.count
    assert any(untold(note, before.aggregates.count, "the code changed") == [] for note in after.notes)


# The log


def write_failures(log_dir, indices=range(20)):
    log = EvaluationLog.open(log_dir)
    log.begin(make_manifest())
    log.append(make_batch(indices))
    log.flush(10)
    log.close()


def test_failed_records_of_earlier_sessions_are_put_aside_and_no_others(tmp_path):
    """Of the indices 3, 10 and 17 that failed, 3 and 10 are retried, and so is 4, which had completed."""
    write_failures(tmp_path)
    log = EvaluationLog.open(tmp_path)
    log.retry(make_manifest(), [3, 10, 4])
    log.close()
    found = read_log(tmp_path)
    assert sorted(found.rows["index"]) == sorted({*range(20)} - {3, 10})
    assert found.infos.shape == (18, 2)
    assert found.retried == (3, 4, 10)
    write_failures(tmp_path, [3])
    assert sorted(read_log(tmp_path).rows["index"]) == sorted({*range(20)} - {10})
    assert read_log(tmp_path).mismatches == ()


def test_a_damaged_retry_is_no_silent_one(tmp_path):
    write_failures(tmp_path)
    log = EvaluationLog.open(tmp_path)
    log.retry(make_manifest(), [3])
    log.close()
    path = tmp_path / "retries" / "000001.json"
    path.write_text(path.read_text().replace("[3]", "[4]"))
    with refused(LogError, "retries/000001.json"):
        read_log(tmp_path)
