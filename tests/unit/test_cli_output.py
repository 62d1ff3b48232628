"""``rl-eval run --output`` with an unfinished, a complete and another run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rl_eval import Evaluator, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import ConfigError, LogFenced, UsageError
from rl_eval.execution import group
from rl_eval.log import EvaluationLog, read_log
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult
from tests.refused import refused, untold
from tests.unit.cli_world import call, environment
from tests.unit.log_world import cut


def run(*args, output="runs"):
    return call("run", "toy.yaml", "--output", output, *args)


@pytest.fixture
def complete(folder, monkeypatch):
    """A complete run, after which nothing may start runners; the bytes of its result."""
    assert run().exit_code == 0

    def forbidden(*args, **kwargs):
        raise AssertionError("runners were started")

    monkeypatch.setattr(group.EvalRunnerGroup, "__init__", forbidden)
    return Path("runs/result.json").read_bytes()


def test_a_run_folder_is_a_log_and_a_result(folder):
    """Both are written, and nothing in the default folder."""
    outcome = run()
    assert outcome.exit_code == 0, outcome.output
    assert "saved in runs; " in outcome.stdout
    assert len(read_log("runs").rows) == 30
    assert EvalResult.load("runs").status == "complete"
    assert not Path("out").exists()


def test_behind_a_uri_there_is_no_result_beside_the_log(folder):
    """The log has all of it."""
    uri = f"file://{folder}/runs"
    outcome = run(output=uri)
    assert outcome.exit_code == 0, outcome.output
    assert untold(outcome.stdout, "result.json", "episodes.parquet") == ["result.json", "episodes.parquet"]
    assert not Path("runs/result.json").exists()
    assert run(output=uri).exit_code == 0
    assert load(uri).status == "complete"


def test_only_what_is_missing_runs(folder):
    """The first line says how much was there; the result is that of an undisturbed run."""
    run(output="whole")
    cut("whole", "runs", 12)
    outcome = run("--num-envs-per-runner", 7)  # Another layout continues the same run.
    assert outcome.exit_code == 0, outcome.output
    assert any(untold(line, "runs", 12, 30) == [] for line in outcome.stderr.splitlines())
    assert EvalResult.load("runs").fingerprint == EvalResult.load("whole").fingerprint
    sessions = [path.name.split("-")[0] for path in sorted(Path("runs/segments").iterdir())]
    assert sessions[0] == "000001"
    assert set(sessions[1:]) == {"000002"}


def test_another_result_is_not_saved_over_a_run(folder):
    """Of which the log would be of other episodes than the result beside it."""
    assert call("run", "toy.yaml", "--output", "runs").exit_code == 0
    assert call("run", "toy.yaml", "-n", 5, "--output", "other").exit_code == 0
    with refused(UsageError, "runs"):
        load("other").save("runs")
    load("runs").save("runs")
    assert len(load("runs").plan) == 30


def test_a_complete_run_is_printed_at_once(complete):
    """No runner is started, and the saved result stays as it is."""
    outcome = run("--quiet")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.stderr == ""
    assert outcome.stdout.startswith("complete")
    assert untold(outcome.stdout, "13.7667") == []
    outcome = run()
    assert outcome.stdout.startswith(f"{EvalResult.load('runs')}\ncomplete: ")
    assert Path("runs/result.json").read_bytes() == complete


def test_a_result_that_was_not_saved_is_saved_by_the_next_call(complete):
    """The run was killed between its last episode and the end."""
    Path("runs/result.json").unlink()
    outcome = run()
    assert outcome.exit_code == 0, outcome.output
    assert "saved in runs; " in outcome.stdout
    assert json.loads(Path("runs/result.json").read_text())["fingerprint"] == EvalResult.load("runs").fingerprint


def test_a_complete_run_has_the_exit_code_of_its_status(folder):
    """Its failed episodes have used up their attempts: they are not run again."""
    args = ["--set", "environment.env_kwargs.fail=true", "--set", "fault_tolerance.fail_fast=false"]
    codes = [run(*args).exit_code for _ in range(2)]
    assert codes == [ExitCode.FAILED, ExitCode.FAILED]
    assert len(list(Path("runs/owners").iterdir())) == 1


def test_determinism_is_checked_although_all_episodes_were_finished(folder):
    """The log keeps the outcome of the check, so the next call runs nothing."""
    run("--set", "evaluation.determinism_check=0")
    check = ["--set", "evaluation.determinism_check=0.1"]
    outcome = run(*check)
    assert outcome.exit_code == 0, outcome.output
    assert EvalResult.load("runs").determinism.passed
    sessions = list(Path("runs/owners").iterdir())
    assert run(*check).exit_code == 0
    assert list(Path("runs/owners").iterdir()) == sessions


@pytest.mark.parametrize(
    ("args", "difference"),
    [
        (["--seed", 4], "seed: 0 -> 4"),
        (["--num-episodes", 31], "num_episodes: 30 -> 31"),
        (["--set", "policy.policy=cli_toys:alternate"], 'identity.policy: "cli_toys:ones" -> "cli_toys:alternate"'),
        (["--set", "environment.env_kwargs.pause_s=0.001"], "identity.environment.env_kwargs.pause_s"),
    ],
)
def test_another_run_is_refused_and_the_difference_shown(folder, args, difference):
    """Nothing of the run that is there changes."""
    run()
    before = sorted((path, path.stat().st_size) for path in Path("runs").rglob("*") if "owners" not in str(path))
    outcome = run(*args)
    assert outcome.exit_code == ExitCode.USAGE
    assert difference in outcome.stderr
    assert "--force" in outcome.stderr
    assert before == sorted((p, p.stat().st_size) for p in Path("runs").rglob("*") if "owners" not in str(p))


def edit(folder, old, new):
    path = folder / "cli_toys.py"
    path.write_text(path.read_text().replace(old, new))
    sys.modules.pop("cli_toys", None)


@pytest.mark.parametrize("finished", [12, 30])
def test_a_run_whose_environment_was_edited_is_refused_unless_that_is_accepted(folder, finished):
    """Also a complete one: its result is not that of the code as it is now."""
    run(output="whole")
    cut("whole", "runs", finished)
    edit(folder, "integers(10, 20)", "integers(5, 6)")
    refused = run()
    assert refused.exit_code == ExitCode.USAGE, refused.stderr
    assert untold(refused.stderr, f"{folder}/cli_toys.py", "cli_toys", "--accept-code-change") == []
    assert len(read_log("runs").rows) == finished

    accepted = run("--accept-code-change")
    assert accepted.exit_code == 0, accepted.stderr
    lengths = [record.length for record in EvalResult.load("runs").episodes]
    assert (min(lengths[:finished]), set(lengths[finished:])) == (10, {5} if finished < 30 else set())

    assert run().exit_code == 0
    shown = json.loads(call("show", "runs", "--json").stdout)["result"]
    (change,) = shown["provenance"]["code_changes"]
    assert change["num_finished"] == finished
    assert change["differences"] == [change["differences"][0]]
    assert shown["provenance"]["code"]["files"]["cli_toys"] != change["code"]["files"]["cli_toys"]
    assert [note for note in shown["notes"] if str(finished) in note]
    assert EvalResult.load("runs").provenance["code_changes"] == [change]
    edit(folder, "integers(5, 6)", "integers(10, 20)")
    assert run().exit_code == ExitCode.USAGE


def test_a_damaged_segment_is_set_aside_and_its_episodes_run_again(folder):
    """The segment is named, and the result is right."""
    run()
    fingerprint = EvalResult.load("runs").fingerprint
    segment = min(Path("runs/segments").iterdir())
    segment.write_bytes(segment.read_bytes()[:-1])
    outcome = run()
    assert outcome.exit_code == 0, outcome.output
    assert segment.name in outcome.stderr
    assert EvalResult.load("runs").fingerprint == fingerprint
    assert segment.name in json.loads(call("show", "runs", "--json").stdout)["run"]["damaged"][0]


def is_a_file():
    Path("runs").touch()


def lacks_its_manifest():
    run()
    Path("runs/manifest.json").unlink()


@pytest.mark.parametrize(
    ("make", "code"),
    [(is_a_file, ExitCode.USAGE), (lacks_its_manifest, ExitCode.CLUSTER)],
)
def test_a_folder_that_cannot_be_continued_is_refused_and_named(folder, make, code):
    make()
    outcome = run()
    assert outcome.exit_code == code
    assert "runs" in outcome.stderr


def test_a_run_that_another_driver_writes_is_refused(folder, monkeypatch):
    """At the beginning, and when it was taken over meanwhile."""
    log = EvaluationLog.open("runs")
    try:
        assert run().exit_code == ExitCode.USAGE
    finally:
        log.close()

    def taken(self):
        raise LogFenced("taken over by process 7")

    monkeypatch.setattr(EvaluationLog, "poll", taken)
    assert run().exit_code == ExitCode.CLUSTER


RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Without these rights the superuser is refused what others are."""

TWICE = """
import sys
from rl_eval.cli import main

for name in ("both", "log"):
    sys.argv = ["rl-eval", "run", "toy.yaml", "--output", name]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    sys.stderr.write("== ")
"""


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="nobody without rights to ask as")
def test_a_complete_run_in_a_folder_that_can_only_be_read_is_printed(folder):
    """Neither a lock nor a file is needed to say what is there, with the result beside the log or without."""
    assert run(output="both").exit_code == 0
    shutil.copytree("both", "log")
    Path("log/result.json").unlink()
    Path("log/episodes.parquet").unlink()
    paths = [path for name in ("both", "log") for path in [Path(name), *sorted(Path(name).rglob("*"))]]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    done = subprocess.run(
        [*(RIGHTS if os.geteuid() == 0 else []), sys.executable, "-c", TWICE],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    for path in paths:
        path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cli_toys:count") == 2
    assert ["writable" in text for text in done.stderr.split("== ")] == [False, True, False]
    assert paths == [path for name in ("both", "log") for path in [Path(name), *sorted(Path(name).rglob("*"))]]


def test_a_file_is_no_folder_of_a_run(folder):
    Path("file").touch()
    outcome = run(output="file")
    assert outcome.exit_code == ExitCode.USAGE
    assert "file is a file" in outcome.stderr


@pytest.mark.parametrize("option", ["--log-dir=runs", "--fresh", "--no-fresh"])
def test_an_option_that_is_gone_names_the_present_one(folder, option):
    outcome = call("run", "toy.yaml", option)
    assert outcome.exit_code == ExitCode.USAGE
    assert option.partition("=")[0] in outcome.stderr
    if option != "--no-fresh":
        assert "--output" in outcome.stderr


def test_a_keyword_that_is_gone_names_the_present_one():
    for function in (evaluate, group.EvalRunnerGroup.submit, Evaluator):
        with refused(ConfigError, "log_dir") as caught:
            function("CartPole-v1", log_dir="runs")
        assert "'output'" in str(caught.value)


def test_a_report_of_the_latest_run_names_it(folder):
    """Also if it is in another folder."""
    assert run(output="elsewhere").exit_code == 0
    outcome = call("report", "runs/latest")
    assert outcome.exit_code == 0, outcome.output
    assert untold(outcome.stderr, "runs/latest", "elsewhere") == []
