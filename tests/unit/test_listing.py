"""``rl-eval show FOLDER``: a line for each run in a folder, strangers' and broken ones too; nothing of them runs."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.log import EvaluationLog
from rl_eval.reports.listing import list_runs
from rl_eval.reports.view import RunServer
from rl_eval.results.loading import load
from tests.unit.cli_world import call, faulty, make_folder
from tests.unit.log_world import cut as cut_log


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs of all kinds, made once: a result, a log, one that failed and one that was stopped."""
    with pytest.MonkeyPatch.context() as patch:
        folder = make_folder(tmp_path_factory.mktemp("runs"), patch)
        assert call("run", "toy.yaml", "-q", "--output", "all/result").exit_code == 0
        assert call("run", "toy.yaml", "-q", "--output", "all/deeper/log").exit_code == 0
        some = call("run", "toy.yaml", "-q", "--output", "all/some", *faulty(2, 0.4, 0.6))
        assert some.exit_code == ExitCode.PARTIAL
        for name in ("result", "some"):  # As Python saves them, without a log.
            for part in ("owners", "segments"):
                shutil.rmtree(f"all/{name}/{part}")
            Path(f"all/{name}/manifest.json").unlink()
        shutil.copytree("all/deeper/log", "all/stopped")
        Path("all/stopped/result.json").unlink()
        (folder / "all" / "empty").mkdir()
        date(folder / "all" / "result", 2020)
        date(folder / "all" / "some", 2099)
    return folder / "all"


def date(run, year):
    """Have a run finish in a year."""
    summary = json.loads((run / "result.json").read_text())
    summary["provenance"]["finished_at"] = f"{year}-01-01T00:00:00+00:00"
    (run / "result.json").write_text(json.dumps(summary))


@pytest.fixture
def runs(made, tmp_path, monkeypatch):
    """A copy, in a folder where nothing that they name can be imported."""
    shutil.copytree(made, tmp_path / "all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_toys", raising=False)
    return tmp_path / "all"


def listed(folder):
    return {run.path: run for run in list_runs(folder)}


def test_every_run_is_listed_with_the_numbers_of_its_result(runs):
    """Those of a complete one are in its summary, and are what loading it computes."""
    found = listed(runs)
    assert sorted(found) == ["deeper/log", "result", "some", "stopped"]
    for name, run in found.items():
        result = load(runs / name)
        assert (run.status, run.planned) == (result.status, 30)
        assert run.episodes == result.aggregates.count
        assert run.mean_return == result.mean_return
        assert (run.low, run.high) == pytest.approx((result.interval.low, result.interval.high), nan_ok=True)
        assert run.when.startswith("20")
    assert math.isnan(found["some"].low)
    assert (found["result"].policy, found["result"].environment) == ("cli_toys:ones", "cli_toys:count")


def test_a_run_is_a_line_or_an_object(runs):
    """The latest first, of columns aligned with their headings, the path last; nothing that a run names is imported."""
    headings, *lines = call("show", runs).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["some", "deeper/log", "stopped", "result"]
    named = {line.index("cli_toys:count") for line in lines if "cli_toys:count" in line}
    assert named == {headings.index("environment")}
    assert f"complete   {load(runs / 'result').mean_return:.2f} (" in lines[3]
    assert " of 30" in lines[0]

    shown = json.loads(call("show", runs, "--json").stdout)
    assert [run["path"] for run in shown] == ["some", "deeper/log", "stopped", "result"]
    assert shown[0]["low"] is None
    assert "cli_toys" not in sys.modules


def test_without_a_folder_it_is_the_one_in_which_runs_are(runs):
    assert call("show").exit_code == ExitCode.USAGE
    runs.rename("runs")
    assert call("show").stdout == call("show", "runs").stdout != ""


def test_a_run_that_is_not_a_function_of_its_seeds_is_marked(runs):
    """Its status is complete; the page of the runs has the same words."""
    summary = json.loads((runs / "result" / "result.json").read_text())
    spoil(runs / "result" / "result.json", determinism=summary["determinism"] | {"passed": False, "mismatched": [1]})
    found = listed(runs)
    assert (found["result"].deterministic, found["some"].status) == (False, "partial")
    with RunServer(runs) as server:
        for page in (call("show", runs).stdout, server.at("/")):
            assert "complete, not deterministic" in page


def test_a_run_that_ended_in_its_determinism_check_is_stopped(runs):
    """In every place that lists or shows it, until the same command has run the check."""
    cut_log(runs / "stopped", runs / "checking", 200)
    found, shown = listed(runs)["checking"], call("show", runs / "checking").stdout
    assert (found.state, found.status) == ("stopped", "complete")
    assert [line for line in call("show", runs).stdout.splitlines() if "checking" in line and "stopped" in line]
    assert shown.splitlines()[0].endswith("stopped")
    assert json.loads(call("show", runs / "checking", "--json").stdout)["state"] == "stopped"


def test_a_run_at_work_is_running(runs):
    """Whatever its status would be, and in every place that lists or shows it."""
    cut_log(runs / "stopped", runs / "live", 12)
    log = EvaluationLog.open(runs / "live")
    try:
        found, cells = listed(runs)["live"], call("show", runs).stdout
        shown = call("show", runs / "live")
        described = json.loads(call("show", runs / "live", "--json").stdout)
    finally:
        log.close()
    assert (found.state, found.status, described["state"]) == ("running", "partial", "running")
    assert [line for line in cells.splitlines() if "running" in line and "partial" not in line]
    assert shown.stdout.splitlines()[0].endswith("running")
    assert (listed(runs)["live"].state, listed(runs)["stopped"].state) == ("stopped", "finished")
    assert json.loads(call("show", runs / "live", "--json").stdout)["state"] == "stopped"
    assert json.loads(call("show", runs / "result", "--json").stdout)["state"] == "finished"


def spoil(path, **changes):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **changes}))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("result", lambda run: (run / "result.json").write_text("{"), "damaged"),
        ("result", lambda run: (run / "result.json").write_text("[]"), "list"),
        ("result", lambda run: (run / "result.json").write_bytes(b"\xff\xfe"), "damaged"),
        ("result", lambda run: (run / "result.json").write_text("[" * 100_000), "nested"),
        ("result", lambda run: pipe(run / "result.json"), "regular file"),
        ("result", lambda run: pipe(run / "episodes.parquet"), "regular file"),
        ("result", lambda run: (run / "episodes.parquet").unlink(), "episodes.parquet"),
        ("result", lambda run: (run / "episodes.parquet").write_bytes(b"PAR1"), "episodes.parquet"),
        ("result", lambda run: spoil(run / "result.json", format=99), "99"),
        ("result", lambda run: spoil(run / "result.json", plan=None), "TypeError"),
        ("result", lambda run: spoil(run / "result.json", plan={"num_episodes": 10**15}), "1000000000000000"),
        ("result", lambda run: spoil(run / "result.json", metrics={}), "KeyError"),
        ("result", lambda run: spoil(run / "result.json", status=["complete"]), "status"),
        ("result", lambda run: spoil(run / "result.json", interval={"low": "x", "high": 1}), "'x'"),
        ("stopped", lambda run: pipe(run / "manifest.json"), "regular file"),
        ("stopped", lambda run: cut(min((run / "segments").iterdir())), "segment"),
    ],
)
def test_a_broken_run_is_a_line_with_its_reason(runs, name, change, reason):
    """The others are listed as ever; it is the last one, having no time."""
    change(runs / name)
    outcome = call("show", runs)
    assert outcome.exit_code == 0, outcome.output
    _, *lines = outcome.stdout.splitlines()
    assert len(lines) == 4
    assert lines[3].split()[0] == "broken"
    assert reason in lines[3].partition(f"{name}: ")[2]


def test_foreign_names_do_not_reach_the_terminal_as_commands(runs):
    """No escape sequence, and no second line."""
    (runs / "some").rename(runs / "some\n\x1b[31mred")
    identity = {"policy": "\x1b[31mred\n\u202ebroken   /etc\r", "environment": {"env": "e" * 10_000}}
    spoil(runs / "result" / "result.json", provenance={"identity": identity, "finished_at": "\x07now"})
    _, *lines = call("show", runs).stdout.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    [line] = [line for line in lines if "  red broken /etc" in line]
    assert len(line) < 1_000
    assert not any("[31m" in line for line in lines)


def test_links_are_not_followed(runs):
    """A link to the newest run lists it once, and one that leads up lists nothing for ever."""
    (runs / "latest").symlink_to(runs / "result")
    (runs / "up").symlink_to(runs.parent)
    assert sorted(listed(runs)) == ["deeper/log", "result", "some", "stopped"]


def test_a_folder_without_runs_and_no_folder(tmp_path):
    outcome = call("show", tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (0, "")
    assert json.loads(call("show", tmp_path, "--json").stdout) == []
    outcome = call("show", tmp_path / "nowhere")
    assert outcome.exit_code == ExitCode.USAGE
    assert "nowhere" in outcome.stderr


def test_a_result_of_another_program_hides_no_run(runs):
    (runs / "result.json").write_text('{"mine": 1}')
    found = {run.path: run for run in list_runs(runs)}
    assert found.pop(".").status == "broken"
    assert sorted(found) == ["deeper/log", "result", "some", "stopped"]
