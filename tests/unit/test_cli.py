"""The command line: which config runs, what is printed where, which files and which exit code are left behind."""

import errno
import io
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyte
import pytest
import yaml
from waiting import eventually

import rl_eval
from rl_eval.cli import COMMANDS
from rl_eval.cli.exits import ExitCode, code_of, reported
from rl_eval.cli.output import new_folder
from rl_eval.cli.printing import print_note
from rl_eval.cli.progress import Monitor, Row, headline, progress_line
from rl_eval.cli.settings import read_settings
from rl_eval.config.builder import EvalConfig
from rl_eval.errors import (
    ComparisonError,
    ConfigError,
    EnvError,
    EvalError,
    LogError,
    LogFenced,
    LogMismatch,
    LogOwned,
    PolicyError,
    RunnerStartError,
    WeightsError,
)
from rl_eval.execution.handle import EvalProgress
from rl_eval.log import read_log, writer
from rl_eval.results.result import EvalResult
from tests.refused import untold
from tests.unit.cli_world import CONFIG, call, call_alone, environment, printed, start
from tests.unit.log_world import cut

NAMES = [*(name for _, name, *_ in COMMANDS), "service"]


@pytest.fixture
def two_results(folder):
    for policy in ("ones", "alternate"):
        call("run", "toy.yaml", "-q", "--set", f"policy.policy=cli_toys:{policy}", "--output", policy)
    return folder


def progress(**changes):
    values = {
        "num_episodes": 200, "num_finished": 120, "num_failed": 0, "num_faults": 0, "num_prefix": 118,
        "mean_return": 439.25, "half_width": 12.1, "env_steps": 50_000, "seconds": 10.0, "num_runners": 2,
    }  # fmt: skip
    return EvalProgress(**{**values, **changes})


def test_a_runner_class_in_the_current_folder_is_found(tmp_path, monkeypatch):
    """As environments and policies are, also by the script ``rl-eval``, whose module path does not have the folder."""
    Path(tmp_path, "runner_here.py").write_text(
        "from rl_eval import VectorEvalRunner\n\n\nclass Mine(VectorEvalRunner): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    named = ["environment.env=CartPole-v1", "policy.policy=random", "runners.runner=runner_here:Mine"]
    assert read_settings(None, None, named).runners.runner == "runner_here:Mine"


# Help


LIGHT = """
import os, sys
from rl_eval.cli import main

def call(*args, **variables):
    os.environ.update(variables)
    sys.argv = ["rl-eval", *args]
    try:
        main()
    except SystemExit as end:
        assert not end.code or args == ("run",), (args, end.code)
    for name in variables:
        del os.environ[name]

def imported(*packages):
    print("imported:", sorted(set(packages) & set(sys.modules)))

for command in COMMANDS:
    call(command, "--help")
call("--help")
call("--version")
call("run")
call(_RL_EVAL_COMPLETE="source_bash")
call(_RL_EVAL_COMPLETE="source_zsh")
call(_RL_EVAL_COMPLETE="complete_bash", COMP_WORDS="rl-eval re", COMP_CWORD="1")
call(_RL_EVAL_COMPLETE="complete_bash", COMP_WORDS="rl-eval run --num-r", COMP_CWORD="2")
call("--show-completion", "bash")
imported("torch", "ray", "gymnasium", "scipy", "pyarrow", "tensordict")
call("compare", "ones", "alternate")
call("show", "ones", "--episodes", "3")
imported("torch", "ray")
"""


@pytest.mark.process
def test_help_and_completion_import_nothing_heavy_and_comparing_neither_torch_nor_ray(two_results):
    """While the user types, a shell waits for the answer."""
    code = f"COMMANDS = {NAMES!r}\n{LIGHT}"
    # Else the shell is the one that the tests were started from, if there is any.
    named = environment() | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=named, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("imported: ")] == ["imported: []"] * 2
    bash = "complete -o default -F _rl_eval_completion rl-eval"
    assert lines.count(bash) == 2
    assert {"#compdef rl-eval", "replay", "--num-runners", f"rl-eval {rl_eval.__version__}"} < set(lines)


FAILS = ("--set", "environment.env_kwargs.fail=true")
UNSTABLE = ("--set", "environment.env=cli_toys:unstable")


@pytest.mark.parametrize(
    ("options", "requirement", "code", "answer"),
    [
        ((), "episode_return_mean < 1000", 0, "is met"),
        ((), "episode_return_mean >= 1000", 5, "is not met"),
        (FAILS, "episode_return_mean >= 0", 3, ""),
        (UNSTABLE, "episode_return_mean >= 0", 6, "cannot be answered"),
        (UNSTABLE, "num_failed_episodes <= 0", 0, "is met"),
    ],
)
def test_a_requirement_is_judged_on_what_can_answer_it(folder, options, requirement, code, answer):
    """That is a complete result, and for numbers of the episodes one that is a function of its seeds."""
    done = call("run", "toy.yaml", *options, "--require", requirement)
    assert done.exit_code == code
    assert f"{requirement}: {answer}" in done.stderr


@pytest.mark.parametrize("wrong", ["mean_retrun", "retrun_mean", "mean_retrn"])
def test_a_misspelt_metric_gets_the_nearest_names(folder, wrong):
    done = call("run", "toy.yaml", "--require", f"{wrong} >= 3")
    assert done.exit_code == ExitCode.USAGE
    assert "did you mean" in done.stderr
    assert "episode_return_mean" in done.stderr or "'mean_return'" in done.stderr


def test_help_fits_80_columns():
    for command in ([], *([command] for command in NAMES)):
        assert max(map(len, call(*command, "--help").output.splitlines())) <= 80


# Which config runs


def test_flags_and_set_win_over_the_file(folder):
    settings = read_settings(
        folder / "toy.yaml", None, ["evaluation.seed=7"], {"evaluation.seed": 3, "evaluation.num_episodes": 5}
    )
    assert (settings.evaluation.seed, settings.evaluation.num_episodes) == (7, 5)


def test_set_reads_yaml_and_reaches_into_mappings(folder):
    assignments = [
        "environment.env_kwargs={a: 1, deep: {b: 2}}",
        "environment.env_kwargs.deep.c=[1, x]",
        "policy.weights=null",
    ]
    settings = read_settings(folder / "toy.yaml", None, assignments)
    assert settings.environment.env_kwargs == {"a": 1, "deep": {"b": 2, "c": [1, "x"]}}
    assert settings.policy.weights is None


def test_section_selects_a_part_of_a_larger_file(folder):
    (folder / "large.yaml").write_text(yaml.safe_dump({"lr": 0.1, "test": {"easy": CONFIG}}))
    outcome = call("run", "large.yaml", "--section", "test.easy", "--quiet")
    assert outcome.exit_code == 0, outcome.output
    assert Path("runs/latest").resolve().name.endswith("-large-test.easy")
    assert Path("runs/latest/result.json").is_file()


# Files


def test_a_run_leaves_result_and_episodes(folder):
    outcome = call("run", "toy.yaml", "--num-episodes", 12, "--seed", 5)
    assert outcome.exit_code == 0, outcome.output
    place = f"runs/{Path('runs/latest').readlink()}"
    assert re.fullmatch(r"runs/20\d\d-\d\d-\d\d-\d{6}-toy", place)
    assert f"\nsaved in {place}; next: rl-eval report runs/latest\n" in outcome.stdout
    assert outcome.stdout.splitlines()[-1].startswith("complete: mean return ")
    result = EvalResult.load("runs/latest")
    assert (result.status, len(result.plan), result.plan.seed) == ("complete", 12, 5)
    assert str(result) in outcome.stdout
    described = json.loads(Path("runs/latest/result.json").read_text())
    assert described["fingerprint"] == result.fingerprint
    assert described["provenance"]["config"]["evaluation"]["num_episodes"] == 12


def test_an_earlier_result_stays(folder):
    """By default every run has a folder of its own, with a log, and the link leads to the newest."""
    for episodes in (3, 4, 5):
        assert call("run", "toy.yaml", "--num-episodes", episodes).exit_code == 0
        assert len(rl_eval.load("runs/latest").plan) == episodes
    places = [place for place in Path("runs").iterdir() if not place.is_symlink()]
    assert sorted(len(read_log(place).rows) for place in places) == [3, 4, 5]


@pytest.mark.parametrize("target", [None, "../elsewhere", "/tmp", "mine", "2026-notes"])
def test_what_another_program_calls_latest_is_left_alone(folder, target):
    """A folder, or a link to something that is not a run."""
    latest = Path("runs/latest")
    latest.parent.mkdir()
    latest.symlink_to(target) if target else latest.mkdir()
    latest.resolve().mkdir(exist_ok=True)
    (latest / "notes.txt").touch()
    before = [*Path("runs").iterdir()]
    assert call("run", "toy.yaml").exit_code == 0
    assert (str(latest.readlink()) if latest.is_symlink() else None) == target
    assert len([*Path("runs").iterdir()]) == len(before) + 1
    (latest / "notes.txt").unlink()


def test_our_link_is_replaced_when_its_run_is_gone(folder):
    """Somebody removes runs, and not the link."""
    assert call("run", "toy.yaml").exit_code == 0
    shutil.rmtree(Path("runs/latest").resolve())
    assert call("run", "toy.yaml").exit_code == 0
    assert Path("runs/latest/result.json").is_file()


def test_two_runs_at_once_have_two_folders(folder):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: new_folder(Path("out/toy")), range(8)))
    assert sorted(map(str, found)) == ["out/toy", *(f"out/toy-{number}" for number in range(2, 9))]


def test_a_run_without_a_result_leaves_no_folder(folder):
    """And the link leads where it led."""
    broken = ["run", "toy.yaml", "--set", "policy.policy=cli_toys:broken"]
    assert call(*broken).exit_code == ExitCode.FAILED
    assert list(Path("runs").iterdir()) == []
    call("run", "toy.yaml")
    before = Path("runs/latest").readlink()
    assert call(*broken).exit_code == ExitCode.FAILED
    assert Path("runs/latest").readlink() == before
    assert len(list(Path("runs").iterdir())) == 2


def test_another_run_in_a_given_folder_is_replaced_by_force_alone(folder):
    """The same run is never replaced, and the link leads to it."""

    def run(episodes, *args):
        return call("run", "toy.yaml", "--output", "mine", "--num-episodes", episodes, *args)

    assert run(3).exit_code == 0
    assert Path("runs/latest").resolve() == Path("mine").resolve()
    assert [path.name for path in Path("runs").iterdir()] == ["latest"]
    refused = run(4)
    assert refused.exit_code == ExitCode.USAGE
    assert "--force" in refused.stderr
    assert len(EvalResult.load("mine").plan) == 3
    assert run(4, "--force").exit_code == 0
    assert len(EvalResult.load("mine").plan) == len(read_log("mine").rows) == 4
    before = Path("mine/manifest.json").stat().st_mtime_ns
    assert run(4, "--force").exit_code == 0
    assert Path("mine/manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("log", [True, False])
def test_the_same_command_again_prints_the_result_and_judges_its_gates(folder, log):
    """Also a result that was saved without a log, and with the exit code of this call."""
    first = call("run", "toy.yaml", "--output", "mine")
    if not log:
        rl_eval.load("mine").save("saved")
        shutil.rmtree("mine")
        Path("saved").rename("mine")
    again = call("run", "toy.yaml", "--output", "mine")
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert set(again.stdout.splitlines()) <= set(first.stdout.splitlines())
    assert call("run", "toy.yaml", "--output", "mine", "--require", "episode_return_mean >= 1000").exit_code == 5
    other = call("run", "toy.yaml", "--output", "mine", "--seed", 3)
    assert other.exit_code == ExitCode.USAGE
    assert "seed: 0 -> 3" in other.stderr


def test_an_unfinished_result_without_a_log_is_not_continued(folder):
    """Nothing tells which episodes it lacks, and it stays."""
    call("run", "toy.yaml", "--output", "whole")
    cut("whole", "part", 12)
    rl_eval.load("part").save("mine")
    assert call("run", "toy.yaml", "--output", "mine").exit_code == ExitCode.USAGE
    assert len(rl_eval.load("mine").episodes) == 12


@pytest.mark.parametrize("name", ["result.json", "episodes.parquet"])
def test_foreign_files_are_not_overwritten(folder, name):
    (folder / "mine").mkdir()
    (folder / "mine" / name).write_text('{"my": "data"}')
    outcome = call("run", "toy.yaml", "--output", "mine")
    assert outcome.exit_code == ExitCode.USAGE
    assert (folder / "mine" / name).read_text() == '{"my": "data"}'


@pytest.fixture
def failing(monkeypatch):
    """Have so many attempts to save a result fail; return the attempts."""
    tried, save = [], EvalResult.save

    def fail(count, error):
        def saved(self, target):
            tried.append(target)
            if len(tried) <= count:
                raise error
            save(self, target)

        monkeypatch.setattr(writer, "RETRY_SECONDS", (0.001, 0.01))
        monkeypatch.setattr(EvalResult, "save", saved)
        return tried

    return fail


def test_a_result_is_saved_when_the_disk_has_recovered(folder, failing):
    """As a segment of the log is."""
    tried = failing(2, OSError(errno.ENOSPC, "No space left on device"))
    outcome = call("run", "toy.yaml")
    assert outcome.exit_code == ExitCode.COMPLETE
    assert len(tried) == 3
    assert outcome.stderr.count("No space left on device") == 1
    assert Path("runs/latest/result.json").is_file()


@pytest.mark.parametrize(
    ("error", "attempts"),
    [(OSError(errno.ENOSPC, "No space left on device"), 1 + writer.RETRIES), (OSError(errno.EROFS, "Read-only"), 1)],
)
def test_a_result_that_cannot_be_saved_is_printed_all_the_same(folder, failing, error, attempts):
    """The machine is at fault, and not the call; what cannot recover is not tried again."""
    tried = failing(100, error)
    outcome = call("run", "toy.yaml")
    assert outcome.exit_code == ExitCode.CLUSTER
    assert len(tried) == attempts
    assert str(rl_eval.load("runs/latest")) in outcome.stdout
    assert error.strerror in outcome.stderr


# What is printed


def test_a_name_between_colons_is_no_picture(folder):
    """Rich would print a sailing boat for ``:Boat:``."""
    source = Path("cli_toys.py").read_text()
    Path("cli_toys.py").write_text(f"{source}\n\nBoat = count\n")
    outcome = call("run", "toy.yaml", "--set", "environment.env=cli_toys:Boat")
    assert outcome.exit_code == 0, outcome.output
    assert "cli_toys:Boat:" in outcome.stderr
    assert "cli_toys:Boat" in outcome.stdout


def test_one_line_has_the_notes_of_a_result(folder):
    """Weights that no other run has, in a gate of CI too."""
    words = ("run", "--env", "CartPole-v1", "--policy", "rl_eval.policies.mlp:make_mlp", "-n", 4, "--set")
    (line,) = call(*words, "runners.num_runners=0", "-q").stdout.splitlines()
    assert line.startswith("complete")
    assert untold(line, 4, "rl_eval.policies.mlp:make_mlp") == []


@pytest.mark.process
def test_without_a_terminal_there_is_plain_text(folder):
    done = start("run", "toy.yaml", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0
    assert "\x1b" not in out + err
    assert out.startswith("cli_toys:count")
    assert max(map(len, out.splitlines())) <= 80
    assert untold(err.splitlines()[0], "cli_toys:count", 30, 0, 4, 1) == []


@pytest.mark.process
def test_on_a_terminal_a_live_display_shows_the_clock_while_an_import_takes_its_time(folder):
    """The main thread is in the import of the user's module until the clock has been seen to run."""
    Path("slow_toys.py").write_text(
        "import time\nfrom pathlib import Path\nfrom cli_toys import count\n"
        "while not Path('go').exists():\n    time.sleep(0.01)\n"
    )
    ours, theirs = pty.openpty()
    args = ["--set", "environment.env=slow_toys:count"]
    done = start("run", "toy.yaml", *args, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown, end = "", time.monotonic() + 120
    try:
        while part := os.read(ours, 65536).decode():
            assert time.monotonic() < end, shown[-2000:]
            shown += part
            clocks = re.findall(r"\d:\d\d", shown.partition("building environment and policy")[2])
            if len(set(clocks)) >= 2:
                Path("go").touch()
    except OSError:
        pass
    os.close(ours)
    assert done.wait(120) == 0
    assert "\x1b[" in shown
    assert shown.index("building environment and policy") < shown.index("complete")


@pytest.mark.process
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_cost_no_result(folder, closed):
    """No file gets their descriptors either, and with them what libraries print."""
    script = f"exec {sys.executable} -m rl_eval run toy.yaml -o out {closed}"
    done = subprocess.run(["sh", "-c", script], env=environment(), check=False, timeout=120)
    assert done.returncode == 0
    assert rl_eval.load("out").status == "complete"
    assert read_log("out").mismatches == ()


@pytest.mark.process
def test_on_a_terminal_a_closed_stdout_costs_the_page_alone(folder):
    """As ``>&-`` closes it: the display is on stderr, and the result in its folder."""
    ours, theirs = pty.openpty()
    command = 'exec "$0" -m rl_eval run toy.yaml --output out >&-'
    done = subprocess.Popen(["sh", "-c", command, sys.executable], stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert done.wait(120) == 0, shown[-2000:]
    assert b"\x1b[" in shown
    assert rl_eval.load("out").status == "complete"


SETTINGS = EvalConfig().environment("CartPole-v1").policy("toys:make").runners(num_runners=2).build()
NOTHING = {"num_finished": 0, "num_prefix": 0, "mean_return": math.nan, "half_width": math.nan, "env_steps": 0}


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        ({}, ["120 of 200 episodes", "mean return 439.2 ± 12.1 over the first 118", "5,000 steps/s", "about 7 s left"]),
        ({"num_earlier": 100}, ["about 40 s left"]),  # By what this session has finished: 20 in 10 seconds.
        ({"half_width": math.nan}, ["mean return 439.2 over"]),
        ({"num_faults": 4, "num_failed": 3}, ["4 faults, 3 failed"]),
        ({**NOTHING, "seconds": 11.0}, ["0 of 200 episodes", "evaluation.max_episode_steps"]),
        ({**NOTHING, "seconds": 0.0}, ["0 of 200 episodes, 2 of 3 runners, 0:12"]),
        ({**NOTHING, "seconds": 11.0, "unavailable": "no server"}, ["0 of 200 episodes, no server, 2 of 3"]),
    ],
)
def test_a_line_of_progress(state, parts):
    line = progress_line("running", 12.0, progress(**state), num_runners=3)
    assert [part for part in parts if part not in line] == []


class Terminal(io.TextIOWrapper):
    """A terminal that is looked at."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self):
        return True

    @property
    def lines(self):
        screen = pyte.Screen(100, 40)
        pyte.ByteStream(screen).feed(self.buffer.getvalue().replace(b"\n", b"\r\n"))
        return [line.rstrip() for line in screen.display if line.strip()]

    def line(self, number):
        """The line, which is empty until it is drawn: another thread draws while a test reads."""
        return dict(enumerate(self.lines)).get(number, "")


def stderr_on_a_terminal(monkeypatch):
    """Return the terminal; a fixture would come before pytest replaces the streams."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_without_a_terminal_lines_come_at_the_start_now_and_then_and_at_the_end(capfd):
    """Also while Ray starts and stops; nothing is written while the result is printed."""
    monitor = Monitor(quiet=False, interval_s=0.05)
    monitor.announce(headline(SETTINGS))
    monitor.say("starting Ray")
    told = ""

    def read():
        nonlocal told
        told += capfd.readouterr().err
        return told

    assert eventually(lambda: read().count("starting Ray, 0:00\n") >= 2)
    monitor.follow(lambda: progress(phase="probing the policy"))
    assert eventually(lambda: any(untold(line, "probing the policy", 120, 200) == [] for line in read().splitlines()))
    with monitor.room():
        lines = read().splitlines()
        time.sleep(0.2)
        assert read().splitlines() == lines
    assert {"CartPole-v1", "100", "2"} <= set(re.findall(r"[\w-]+", lines[0]))
    monitor.say("stopping the runners")
    assert eventually(lambda: "stopping the runners, 0:0" in read())
    monitor.close()
    monitor.close()


def test_on_a_terminal_one_line_lives_below_all_others(monkeypatch):
    """It makes room for the result, and leaves nothing behind."""
    terminal = stderr_on_a_terminal(monkeypatch)
    monitor = Monitor(quiet=False)
    monitor.follow(lambda: progress(num_runners=1))
    assert eventually(lambda: any(untold(line, 120, 200) == [] for line in terminal.lines))
    print_note("running in this process")
    monitor.announce("stopping")
    assert eventually(lambda: untold(terminal.line(2), 120, 200) == [])
    assert terminal.lines[:2] == ["running in this process", "stopping"]
    with monitor.room():
        terminal.write("the result\n")
    monitor.say("stopping the runners")
    assert eventually(lambda: "stopping the runners" in terminal.lines[-1])
    monitor.close()
    assert terminal.lines == ["running in this process", "stopping", "the result"]


def test_on_a_terminal_the_row_of_all_evaluations_stands_above_that_of_the_present_one(monkeypatch):
    terminal = stderr_on_a_terminal(monkeypatch)
    monitor = Monitor(quiet=False)
    monitor.say("reading")
    assert eventually(lambda: len(terminal.lines) == 1)
    monitor.follow(lambda: progress(phase="pole/lean"), whole=lambda: Row(3, 8, "3 of 8 cells"))
    assert eventually(lambda: "3 of 8 cells" in terminal.line(0) and "pole/lean" in terminal.line(1))
    monitor.announce("pole/lean is complete")
    assert eventually(lambda: "3 of 8 cells" in terminal.line(1) and "pole/lean" in terminal.line(2))
    monitor.close()
    assert terminal.lines == ["pole/lean is complete"]


# Exit codes


def test_failed_is_3_and_is_saved(folder):
    outcome = call("run", "toy.yaml", "--set", "environment.env_kwargs.fail=true", "-q")
    assert outcome.exit_code == ExitCode.FAILED
    assert outcome.stdout.startswith("failed")
    assert "RuntimeError: the simulator broke" in outcome.stdout
    assert EvalResult.load("runs/latest").status == "failed"


def test_an_unexpected_error_shows_its_traceback(folder, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("rl_eval.cli.run.carry_out", broken)
    outcome = call("run", "toy.yaml")
    assert outcome.exit_code == ExitCode.BUG
    assert "Traceback" in outcome.stderr
    assert "RuntimeError: a bug of ours" in outcome.stderr


@pytest.mark.parametrize("verbose", [False, True])
def test_what_the_factory_of_a_policy_raises_is_one_line(folder, verbose):
    """Like an error of an environment's constructor."""
    options = ["-v"] if verbose else []
    outcome = call("run", "toy.yaml", "--set", "policy.policy=cli_toys:broken", *options)
    assert outcome.exit_code == ExitCode.FAILED
    assert "RuntimeError: a bug of the factory" in outcome.stderr.splitlines()[-1]
    assert ("Traceback" in outcome.stderr) == verbose


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (WeightsError("x"), 2),
        (ComparisonError("x"), 2),
        (EnvError("x"), 3),
        (PolicyError("x"), 3),
        (EvalError("x"), 3),
        (RunnerStartError("x"), 4),
        (LogMismatch("x"), 2),
        (LogOwned("x"), 2),
        (LogError("x"), 4),
        (LogFenced("x"), 4),
    ],
)
def test_every_error_has_its_code(error, code):
    assert code_of(error) == code


def test_errors_keep_their_lines_and_no_terminal_codes(capfd):
    import typer

    with pytest.raises(typer.Exit), reported(debug=False):
        raise ConfigError("a \x1b[1mmessage\x1b[0m\n   of two\x07 lines\n")
    assert capfd.readouterr().err == "error: a message\n   of two lines\n"


@pytest.mark.process
def test_a_current_folder_that_was_removed_is_a_usage_error(folder):
    script = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m rl_eval list ."
    done = subprocess.run(["sh", "-c", script], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("error: ")


@pytest.mark.process
def test_what_an_environment_prints_is_no_part_of_the_result(folder):
    """Neither by ``print`` nor below Python; stderr has it."""
    Path("loud_toys.py").write_text(
        "import os\nfrom cli_toys import Count\n\n"
        "def loud(context):\n    print('from Python')\n    os.write(1, b'from below\\n')\n    return Count(**context)\n"
    )
    done = call_alone("run", "toy.yaml", "--json", "--set", "environment.env=loud_toys:loud")
    assert done.returncode == 0, done.stderr
    printed("run", done.stdout)
    assert {"from Python", "from below"} <= set(done.stderr.splitlines())
    supervised = call_alone("run", "toy.yaml", "-q", "--max-restarts", 1, "--output", "log")
    assert supervised.stdout.startswith("complete")


@pytest.mark.process
@pytest.mark.parametrize(("stdout", "code", "words"), [("gone", 141, ""), ("full", 2, "No space left on device")])
def test_a_gate_whose_output_cannot_be_written_is_no_verdict(folder, stdout, code, words):
    """Exit code 1 would say that b is worse."""
    call("run", "toy.yaml", "-q", "--output", "same")
    read, write = os.pipe()
    os.close(read)
    with Path("/dev/full").open("wb") as full:
        target = {"gone": write, "full": full}[stdout]
        done = start("compare", "same", "same", "--fail-on", "regression", stdout=target, stderr=subprocess.PIPE)
        _, stderr = done.communicate(timeout=60)
    os.close(write)
    assert done.returncode == code
    assert words in stderr.decode()
    assert "Traceback" not in stderr.decode()
