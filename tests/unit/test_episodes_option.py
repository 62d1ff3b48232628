"""``--episodes 3,7-9``: the same words choose the same episodes in every command that takes them."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.main import get_command

from rl_eval.cli import app
from rl_eval.cli.episodes import parse_episodes
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import UsageError
from rl_eval.results.loading import load
from tests.unit.cli_world import call, make_folder, printed

COMMANDS = {
    "run": ("toy.yaml", "-q"),
    "show": ("runs",),
    "export": ("runs", "-o", "rows.csv"),
    "export --to npz": ("runs", "--to", "npz", "-o", "steps.npz"),
    "replay": ("runs",),
    "replay --video": ("runs", "--video", "-o", "films"),
}
WRONG = {
    "": "'' is not an index or a range",
    "x": "'x' is not an index or a range",
    "-1": "'-1' is not an index or a range",
    "2-": "'2-' is not an index or a range",
    "1,,2": "'' is not an index or a range",
    "1.5": "'1.5' is not an index or a range",
    "3-1": "3-1 ends before it begins: give 1-3",
    "3,30": "there is no episode 30: the plan has 30, from 0 on",
    "0-9999999999": "there is no episode 9999999999",
    "9" * 5000: "'999",
}
FLAKY = (
    *("--set", "environment.env=rl_eval.testing:faulty", "--set", "fault_tolerance.max_attempts_per_episode=1"),
    *("--set", "environment.env_kwargs={env: two_length, attempt_rates: [0.3, 0.0]}"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = make_folder(tmp_path_factory.mktemp("episodes"), patch)
        assert call("run", "toy.yaml", "-q", "--log-dir", "runs").exit_code == 0
        yield folder


def chosen_by(command, episodes, *more):
    return call(command.split()[0], *COMMANDS[command], "--episodes", episodes, *more)


def test_indices_and_ranges_are_read_once_each_in_their_order():
    assert parse_episodes("3, 7-9,3,0-0", 10) == [3, 7, 8, 9, 0]
    with pytest.raises(UsageError, match="there is no episode 9: the plan has 9"):
        parse_episodes("3,7-9", 9)


def test_every_command_that_takes_it_is_tried():
    commands = get_command(app).commands
    takes = {name for name, command in commands.items() if "episodes" in {param.name for param in command.params}}
    assert takes == {name.split()[0] for name in COMMANDS}


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong[:8] for wrong in WRONG])
def test_what_is_no_episode_is_named(wrong):
    with pytest.raises(UsageError) as caught:
        parse_episodes(wrong, 30)
    assert str(caught.value).startswith(f"--episodes {wrong}: {WRONG[wrong]}")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_one_is_told_before_anything_runs(place, command):
    for wrong in ("3-1", "3,30"):
        outcome = chosen_by(command, wrong)
        assert outcome.exit_code == ExitCode.USAGE, outcome.output
        assert f"--episodes {wrong}: {WRONG[wrong]}" in outcome.stderr
    assert not [path for path in ("rows.csv", "steps.npz", "films") if Path(path).exists()]


def test_replay_runs_each(place):
    outcome = chosen_by("replay", "3,7-8")
    assert outcome.exit_code == 0, outcome.output
    plan = load("runs").plan
    assert [
        line.split(" identical")[0].strip() for line in outcome.stdout.splitlines() if line.startswith("episode")
    ] == [f"episode {index}, seed {plan[index].seed}" for index in (3, 7, 8)]


def test_one_that_differs_is_enough_for_the_exit_code(place, monkeypatch):
    """The others are still shown."""
    from rl_eval.results import replay

    real = replay.run_lease

    def one_step_more(runner, lease):
        report = real(runner, lease)
        report.rows["length"] += lease.index == 3
        return report

    monkeypatch.setattr(replay, "run_lease", one_step_more)
    outcome = chosen_by("replay", "3,4")
    assert outcome.exit_code == ExitCode.PARTIAL
    assert [line.split()[-1] for line in outcome.stdout.splitlines() if line.startswith("episode")] == [
        "different",
        "identical",
    ]
    outcome = chosen_by("replay", "3,4", "--json")
    assert outcome.exit_code == ExitCode.PARTIAL
    found, same = printed("replay", outcome.stdout)
    assert (found["identical"], same["identical"]) == (False, True)
    assert found["differences"] == {"length": {"recorded": found["length"] - 1, "again": found["length"]}}


def test_show_tells_each_story(place):
    told = chosen_by("show", "3,7-8").stdout
    assert [line.split()[:2] for line in told.splitlines() if line.endswith("completed")] == [
        ["episode", "3"],
        ["episode", "7"],
        ["episode", "8"],
    ]
    found = json.loads(chosen_by("show", "7,3", "--json").stdout)
    assert [story["index"] for story in found] == [7, 3]
    assert [event["kind"] for event in found[0]["events"]] == ["planned", "completed"]


@pytest.mark.parametrize("format_", ["csv", "json", "parquet"])
def test_export_writes_the_rows_of_each(place, tmp_path, format_):
    """In the order of the plan, as the rows of a table are."""
    path = tmp_path / "rows"
    outcome = call("export", "runs", "--to", format_, "-o", path, "--episodes", "7-8,3")
    assert "3 of 30 episodes" in outcome.stdout
    if format_ == "csv":
        with path.open() as file:
            found = [int(row["index"]) for row in csv.DictReader(file)]
    elif format_ == "json":
        found = [json.loads(line)["index"] for line in path.read_text().splitlines()]
    else:
        found = pq.read_table(path)["index"].to_pylist()
    assert found == [3, 7, 8]


def test_export_writes_the_steps_of_each(place, tmp_path):
    path = tmp_path / "steps.npz"
    outcome = call("export", "runs", "--to", "npz", "-o", path, "--episodes", "7-8,3")
    assert outcome.exit_code == 0, outcome.output
    with np.load(path) as data:
        assert list(dict.fromkeys(data["collector.index"].tolist())) == [7, 8, 3]


def test_run_takes_one_range_of_the_plan(place, tmp_path):
    """With the seeds that its episodes have there, and their returns."""
    whole = load("runs")
    outcome = call("run", "toy.yaml", "-q", "--log-dir", tmp_path / "some", "--episodes", "8,5-7")
    assert outcome.exit_code == 0, outcome.output
    some = load(tmp_path / "some")
    assert [(record.seed, record.episode_return) for record in some.episodes] == [
        (record.seed, record.episode_return) for record in whole.episodes[5:9]
    ]
    assert some.plan.first_index == 5


def test_run_counts_from_where_the_plan_begins(place, tmp_path):
    first = ("--set", "evaluation.first_index=5")
    call("run", "toy.yaml", "-q", "--log-dir", tmp_path / "some", "--episodes", "2-3", *first)
    assert load(tmp_path / "some").plan.first_index == 7


def test_run_refuses_gaps(place):
    outcome = chosen_by("run", "3,7-9")
    assert outcome.exit_code == ExitCode.USAGE
    assert "an evaluation runs one range of the plan, such as 3-9" in outcome.stderr


def failed(result):
    return np.flatnonzero(result.table.filled & ~result.table.completed).tolist()


def test_retry_runs_the_chosen_ones_of_those_that_failed(place, tmp_path):
    """The others stay failed, with their faults, and can be tried later."""
    runs = tmp_path / "flaky"
    assert call("run", "toy.yaml", "-q", "--log-dir", runs, *FLAKY).exit_code == ExitCode.PARTIAL
    first = load(runs)
    one, *others = failed(first)
    completed = min({*range(30)} - {*failed(first)})
    refused = call("run", "--retry", runs, "--episodes", completed)
    assert refused.exit_code == ExitCode.USAGE
    assert f"episode {completed} did not fail; of this run did: {one}, " in refused.stderr
    assert call("run", "--retry", runs, "--episodes", one).exit_code == ExitCode.PARTIAL
    second = load(runs)
    assert failed(second) == others
    assert second.faults == first.faults
    assert call("run", "--retry", runs).exit_code == 0


def test_where_nothing_failed_a_chosen_one_is_refused(place):
    outcome = call("run", "--retry", "runs", "--episodes", "3")
    assert outcome.exit_code == ExitCode.USAGE
    assert "episode 3 did not fail; of this run did: none" in outcome.stderr
