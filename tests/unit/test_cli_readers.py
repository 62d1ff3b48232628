"""``rl-eval show``, ``export`` and ``replay``: what they print and write for a log, live or not, and for a result."""

import json
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.log import EvaluationLog
from rl_eval.results.loading import load
from tests.refused import untold
from tests.unit.cli_world import call, faulty, sets


@pytest.fixture
def flaky(folder):
    """A run with faults, failed episodes among them, in the folder ``runs``."""
    args = [*faulty(2, 0.4, 0.6), *sets("evaluation.info_keys=[x]", "evaluation.gamma=0.9")]
    assert call("run", "toy.yaml", "--output", "runs", *args).exit_code == ExitCode.PARTIAL
    return load("runs")


@pytest.fixture
def plain(folder):
    """A run without, in the folder ``runs``."""
    assert call("run", "toy.yaml", "--output", "runs").exit_code == 0
    return load("runs")


# show


def test_show_prints_the_result_and_with_faults_every_traceback(flaky):
    """Beside the sessions of the log and its slowest episodes; ``--json`` has their numbers."""
    outcome = call("show", "runs")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stdout.startswith(flaky.details)
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    outcome = call("show", "runs", "--faults")
    assert outcome.stdout.count("Traceback (most recent call last)") == len(flaky.faults)
    for fault in flaky.faults:
        assert f"{fault}, on {fault.node}\n{fault.traceback.rstrip()}" in outcome.stdout


def test_show_as_json(flaky):
    """Everything that is shown, and the whole result."""
    shown = json.loads(call("show", "runs", "--json").stdout)
    assert (shown["run"]["sessions"], shown["run"]["released"], shown["num_finished"]) == (1, True, 30)
    assert shown["result"]["fingerprint"] == flaky.fingerprint
    assert len(shown["failed"]) == flaky.num_failed
    assert shown["failed"][0]["last_error"].startswith("InjectedFault")
    seconds = [episode["seconds"] for episode in shown["slowest"]]
    assert seconds == sorted(seconds, reverse=True)


def test_show_of_a_run_at_work(plain):
    """Its claim is not released."""
    Path("runs/result.json").unlink()
    log = EvaluationLog.open("runs")
    try:
        run = json.loads(call("show", "runs", "--json").stdout)["run"]
    finally:
        log.close()
    assert (run["released"], run["sessions"]) == (False, 2)


@pytest.mark.parametrize("command", [["show"], ["export", "--to", "csv"], ["replay", "--episodes", "0"]])
def test_a_damaged_log_is_4_and_no_number(plain, command):
    """The message names the segment, and what repairs the log."""
    segment = min(Path("runs/segments").iterdir())
    segment.write_bytes(segment.read_bytes()[:100])
    outcome = call(command[0], "runs", *command[1:])
    assert outcome.exit_code == ExitCode.CLUSTER
    assert outcome.stdout == ""
    assert segment.name in outcome.stderr
    assert "output='runs' (--output)" in outcome.stderr


def test_show_of_an_episode_tells_what_happened_to_it_in_order(flaky):
    """Its faults by attempt and runner, and its end; with ``--faults`` their tracebacks and no other's."""
    failed = next(record for record in flaky.episodes if record.outcome == "failed")
    outcome = call("show", "runs", "--episodes", failed.index, "--faults")
    assert outcome.exit_code == 0, outcome.output
    told = " ".join(outcome.stdout.split())
    places = [told.index(f"attempt {fault.attempt} runner 0 env failed in {fault.phase}") for fault in failed.faults]
    assert places == sorted(places)
    assert outcome.stdout.count("Traceback") == len(failed.faults) == 2
    [story] = json.loads(call("show", "runs", "--episodes", failed.index, "--json").stdout)
    assert [event["kind"] for event in story["events"]] == ["planned", "fault", "fault", "failed"]
    assert [event["fault"]["message"] for event in story["events"][1:3]] == [fault.message for fault in failed.faults]


# export


def exported(format_, *args):
    outcome = call("export", "runs", "--to", format_, *args)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def test_parquet_holds_every_bit(flaky):
    """And is what a result's own file of episodes is."""
    assert exported("parquet") == "30 of 30 episodes in runs.parquet\n"
    assert Path("runs.parquet").read_bytes() == Path("runs/episodes.parquet").read_bytes()


def test_the_name_of_the_file_tells_the_format(plain):
    """Unless an option does; a name with an unknown suffix is an error."""
    for options, written in (([], "index"), (["--to", "json"], "{")):
        outcome = call("export", "runs", "--output", "named.csv", "--force", *options)
        assert outcome.exit_code == 0, outcome.output
        assert Path("named.csv").read_text().lstrip('"').startswith(written)
    assert call("export", "runs", "--output", "named.dat").exit_code == ExitCode.USAGE


def test_csv_reads_back(flaky):
    """Returns come back bit by bit; faults are JSON text."""
    exported("csv")
    table = pyarrow.csv.read_csv("runs.csv")
    assert table["discounted_return"].to_numpy().tobytes() == flaky.table.rows["discounted_return"].tobytes()
    assert table.column_names == pq.read_table("runs/episodes.parquet").column_names
    returns = table["episode_return"].to_numpy(zero_copy_only=False)
    np.testing.assert_array_equal(returns, flaky.table.rows["episode_return"])
    faults = [fault for text in table["faults"].to_pylist() for fault in json.loads(text)]
    assert [fault["message"] for fault in faults] == [fault.message for fault in flaky.faults]


def test_json_is_one_object_per_line(flaky):
    """Strict JSON: what is not a number is null; faults are objects."""
    exported("json")
    rows = [json.loads(line, parse_constant=pytest.fail) for line in Path("runs.json").read_text().splitlines()]
    assert list(rows[0]) == pq.read_table("runs/episodes.parquet").column_names
    for row, record in zip(rows, flaky.episodes, strict=True):
        assert row["index"] == record.index
        assert row["outcome"] == record.outcome
        assert row["episode_return"] == (record.episode_return if record.outcome == "completed" else None)
        assert [fault["attempt"] for fault in row["faults"]] == [fault.attempt for fault in record.faults]


def test_a_file_that_exists_is_kept(plain):
    """Unless told otherwise."""
    Path("runs.csv").write_text("mine")
    outcome = call("export", "runs", "--to", "csv")
    assert outcome.exit_code == ExitCode.USAGE
    assert "--force" in outcome.stderr
    assert Path("runs.csv").read_text() == "mine"
    exported("csv", "--force")
    assert Path("runs.csv").read_text().startswith('"index"')
    outcome = call("export", "runs", "--output", "toy.yaml/x.csv")
    assert outcome.exit_code == ExitCode.USAGE
    assert "toy.yaml/x.csv" in outcome.stderr


def test_the_name_of_the_file(plain, folder):
    """That of the folder, or as given."""
    assert untold(exported("json", "--output", "below/mine.txt"), "below/mine.txt") == []
    assert Path("below/mine.txt").exists()
    for path in ("runs/", "runs/result.json", f"file://{folder}/runs"):
        outcome = call("export", path, "--to", "json", "--force")
        assert untold(outcome.stdout, "runs.json") == []


# replay


def test_a_different_episode_is_1(plain):
    """The environment has changed since; the recorded value and the new one are shown."""
    source = Path("cli_toys.py").read_text()
    changed = source.replace("float(action), self.steps", "float(action) + 0.5, self.steps")
    assert changed != source
    record = plain.table.record(7)
    Path("cli_toys.py").write_text(changed)
    import sys

    sys.modules.pop("cli_toys", None)
    outcome = call("replay", "runs", "--episodes", 7)
    assert outcome.exit_code == ExitCode.PARTIAL
    changed = record.episode_return + 0.5 * record.length
    assert untold(outcome.stdout, 7, repr(record.episode_return), repr(changed)) == []


def test_a_fault_of_a_replay_is_shown(flaky):
    """It fails again, with the same error."""
    failed = next(record for record in flaky.episodes if record.outcome == "failed")
    outcome = call("replay", "runs", "--episodes", failed.index)
    assert outcome.exit_code == 0, outcome.output
    assert failed.faults[-1].message in " ".join(outcome.stdout.split())
