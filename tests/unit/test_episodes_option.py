"""``--episodes 3,7-9``, in ``run`` ``--indices``: the same words choose the same episodes in every command."""

import json
from pathlib import Path

import pyarrow.csv
import pytest
from typer.main import get_command

from rl_eval.cli import app
from rl_eval.cli.exits import ExitCode
from rl_eval.cli.settings import parse_episodes
from rl_eval.errors import UsageError
from rl_eval.results.loading import load
from tests.refused import refused, untold
from tests.unit.cli_world import call, failed, faulty, make_folder, printed

COMMANDS = {
    "show": ("runs",),
    "export": ("runs", "-o", "rows.csv"),
    "export --to npz": ("runs", "--to", "npz", "-o", "steps.npz"),
    "replay": ("runs",),
    "replay --video": ("runs", "--video", "-o", "films"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = make_folder(tmp_path_factory.mktemp("episodes"), patch)
        assert call("run", "toy.yaml", "-q", "--output", "runs").exit_code == 0
        yield folder


def chosen_by(command, episodes, *more):
    return call(command.split()[0], *COMMANDS[command], "--episodes", episodes, *more)


def test_indices_and_ranges_are_read_once_each_in_their_order():
    assert parse_episodes("3, 7-9,3,0-0", 10) == [3, 7, 8, 9, 0]


@pytest.mark.parametrize("wrong", ["", "x", "-1", "2-", "1,,2", "1.5", "3-1", "3,30", "0-9999999999", "9" * 5000])
def test_other_texts_are_refused(wrong):
    with refused(UsageError, "--episodes", value=wrong):
        parse_episodes(wrong, 30)


def test_every_command_that_takes_it_is_tried():
    commands = get_command(app).commands
    takes = {name for name, command in commands.items() if "episodes" in {param.name for param in command.params}}
    assert takes == {name.split()[0] for name in COMMANDS}
    assert "indices" in {param.name for param in commands["run"].params}


def test_one_index_says_that_it_is_no_number_of_episodes(place, tmp_path):
    """In the only line with ``-q``, and in the last line of the table."""
    for output, quiet in (("a", ["-q"]), ("b", [])):
        outcome = call("run", "toy.yaml", "--output", tmp_path / output, "--indices", "10", *quiet)
        assert outcome.exit_code == 0, outcome.output
        assert untold(outcome.stdout.splitlines()[-1], "episode 10 only", "-n 10") == []
    assert "only" not in call("run", "toy.yaml", "-q", "--output", tmp_path / "c", "--indices", "3-4").output
    refused_option = call("run", "toy.yaml", "--episodes", "10")
    assert refused_option.exit_code == ExitCode.USAGE
    assert untold(refused_option.stderr, "--episodes", "-n N", "--indices") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_one_is_refused_before_anything_runs(place, command):
    for wrong in ("3-1", "3,30"):
        outcome = chosen_by(command, wrong)
        assert outcome.exit_code == ExitCode.USAGE, outcome.output
        assert f"--episodes {wrong}: " in outcome.stderr
    assert not [path for path in ("rows.csv", "steps.npz", "films") if Path(path).exists()]


def test_replay_runs_each_and_one_that_differs_is_enough_for_the_exit_code(place, monkeypatch):
    """The others are still shown."""
    from rl_eval.recording import replay

    real = replay.run_again

    def one_step_more(runner, leases):
        for report in real(runner, leases):
            report.rows["length"] += report.rows["index"] == 3
            yield report

    monkeypatch.setattr(replay, "run_again", one_step_more)
    outcome = chosen_by("replay", "3,7-8")
    assert outcome.exit_code == ExitCode.PARTIAL
    told = [line.split() for line in outcome.stdout.splitlines() if line.startswith("episode")]
    assert [(words[1], words[-1]) for words in told] == [("3,", "different"), ("7,", "identical"), ("8,", "identical")]
    assert chosen_by("replay", "7-8").exit_code == 0
    outcome = chosen_by("replay", "3,4", "--json")
    assert outcome.exit_code == ExitCode.PARTIAL
    found, same = printed("replay", outcome.stdout)
    assert (found["identical"], same["identical"]) == (False, True)
    assert found["differences"] == {"length": {"recorded": found["length"] - 1, "again": found["length"]}}


def test_show_tells_each_story(place):
    told = chosen_by("show", "3,7-8").stdout
    completed = [line.split()[:2] for line in told.splitlines() if line.endswith("completed")]
    assert completed == [["episode", index] for index in "378"]
    found = json.loads(chosen_by("show", "7,3", "--json").stdout)
    assert [story["index"] for story in found] == [7, 3]
    assert [event["kind"] for event in found[0]["events"]] == ["planned", "completed"]


def test_export_writes_the_rows_of_each(place, tmp_path):
    """In the order of the plan, as the rows of a table are."""
    assert call("export", "runs", "-o", tmp_path / "rows.csv", "--episodes", "7-8,3").exit_code == 0
    assert pyarrow.csv.read_csv(tmp_path / "rows.csv")["index"].to_pylist() == [3, 7, 8]


@pytest.mark.parametrize("begin", [0, 2])
def test_run_takes_one_range_of_the_plan_from_where_it_begins(place, tmp_path, begin):
    """With the seeds that its episodes have there, and their returns; gaps are refused."""
    whole, first = load("runs"), ("--set", f"evaluation.first_index={begin}")
    outcome = call("run", "toy.yaml", "-q", "--output", tmp_path / "some", "--indices", "8,5-7", *first)
    assert outcome.exit_code == 0, outcome.output
    some = load(tmp_path / "some")
    assert some.plan.first_index == begin + 5
    assert [(record.seed, record.episode_return) for record in some.episodes] == [
        (record.seed, record.episode_return) for record in whole.episodes[begin + 5 : begin + 9]
    ]
    for wrong in ("3,7-9", "3-1", "3,30"):
        outcome = call("run", "toy.yaml", "-q", "--output", tmp_path / "none", "--indices", wrong)
        assert outcome.exit_code == ExitCode.USAGE
        assert f"--indices {wrong}: " in outcome.stderr
    assert not (tmp_path / "none").exists()


def test_retry_runs_the_chosen_ones_of_those_that_failed(place, tmp_path):
    """The others stay failed, with their faults, and can be tried later."""
    runs = tmp_path / "flaky"
    assert call("run", "toy.yaml", "-q", "--output", runs, *faulty(1, 0.3, 0.0)).exit_code == ExitCode.PARTIAL
    first = load(runs)
    one, *others = failed(first)
    completed = min({*range(30)} - {*failed(first)})
    outcome = call("run", "--retry", runs, "--indices", completed)
    assert outcome.exit_code == ExitCode.USAGE
    assert untold(outcome.stderr, "--indices", completed, one) == []
    assert call("run", "--retry", runs, "--indices", one).exit_code == ExitCode.PARTIAL
    second = load(runs)
    assert failed(second) == others
    assert second.faults == first.faults
    assert call("run", "--retry", runs).exit_code == 0
