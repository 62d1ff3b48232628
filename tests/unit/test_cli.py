"""The command line: which config runs, what is printed where, which files and which exit code are left behind."""

import errno
import io
import itertools
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
from rich.console import Console
from waiting import eventually

import rl_eval
from rl_eval.cli.exits import ExitCode, code_of, reported
from rl_eval.cli.output import claimed_folder, new_folder
from rl_eval.cli.printing import print_note
from rl_eval.cli.progress import LineDisplay, LiveDisplay, Monitor, View, clock_text, mean_text, progress_line
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
from tests.unit.cli_world import CONFIG, call, call_alone, environment, make_folder, printed, start

COMMANDS = (
    *("run", "show", "export", "replay", "watch", "service", "compare", "crossplay", "ope", "doctor"),
    *("init", "list", "plan", "retry", "report", "view"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


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
call(_RL_EVAL_COMPLETE="bash_source")
call(_RL_EVAL_COMPLETE="source_zsh")
call(_RL_EVAL_COMPLETE="complete_bash", COMP_WORDS="rl-eval re", COMP_CWORD="1")
call(_RL_EVAL_COMPLETE="bash_complete", COMP_WORDS="rl-eval run --num-r", COMP_CWORD="2")
call("--show-completion", "bash")
imported("torch", "ray", "gymnasium", "scipy", "pyarrow", "tensordict")
call("compare", "ones", "alternate")
call("show", "ones", "--episodes", "3")
imported("torch", "ray")
"""


@pytest.mark.process
def test_help_and_completion_import_nothing_heavy_and_comparing_neither_torch_nor_ray(two_results):
    """While the user types, a shell waits for the answer."""
    code = f"COMMANDS = {COMMANDS!r}\n{LIGHT}"
    # Else the shell is the one that the tests were started from, if there is any.
    named = environment() | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=named, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("imported: ")] == ["imported: []"] * 2
    bash = "complete -o default -F _rl_eval_completion rl-eval"
    assert lines.count(bash) == 2
    assert {"#compdef rl-eval", "replay", "--num-runners", f"rl-eval {rl_eval.__version__}"} < set(lines)
    assert "b returns less than a" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--require", "b >= a - 100"], 0),
        (["--require", "b >= a"], 1),
        (["--require", "b is better"], 2),
        (["--fail-on", "regression"], 1),
    ],
)
def test_a_comparison_answers_with_its_exit_code(two_results, options, code):
    """One of them always earns 1 a step, the other half of the time."""
    assert call("compare", "ones", "alternate", *options).exit_code == code
    if "--fail-on" in options:
        assert call("compare", "alternate", "ones", *options).exit_code == 0


@pytest.mark.parametrize("asked", [("--fail-on", "regression"), ("--require", "b >= a - 5")])
def test_what_too_few_pairs_or_failed_episodes_leave_open_is_no_pass(folder, asked):
    """The pairs that a policy survives are not a random part of all; one pair has no interval."""
    for name, policy, episodes in (("whole", "ones", 30), ("half", "clumsy", 30), ("one", "ones", 1)):
        more = ["--set", f"policy.policy=cli_toys:{policy}", "--set", f"evaluation.num_episodes={episodes}"]
        call("run", "toy.yaml", "-q", *more, "--output", name)
    done = call("compare", "whole", "half", *asked)
    assert done.exit_code == 2
    assert re.search(r"cannot be answered: \d+ of 30 pairs lack a side that failed \(in a 0, in b \d+\)", done.output)
    assert "rl-eval retry" in done.output
    done = call("compare", "one", "one", *asked)
    assert done.exit_code == 2
    assert "cannot be answered: " in done.output


def test_a_requirement_on_a_result(folder):
    done = call("run", "toy.yaml", "--require", "episode_return_mean >= 1000")
    assert done.exit_code == ExitCode.REQUIREMENT
    assert "episode_return_mean >= 1000: does not hold, episode_return_mean is 1" in done.output
    assert call("run", "toy.yaml", "--require", "episode_return_mean < 1000").exit_code == 0


def test_a_requirement_on_a_result_that_is_not_complete_is_not_judged(folder):
    """The exit code says that the result is not complete, whatever its numbers are."""
    words = ("run", "toy.yaml", "--set", "environment.env_kwargs.fail=true", "--require", "episode_return_mean >= 0")
    done = call(*words)
    assert done.exit_code == 3
    assert "episode_return_mean >= 0: not judged, since the result is failed" in done.stderr


def test_a_requirement_on_a_number_that_is_no_function_of_its_seeds_is_left_open(folder):
    """But for numbers that say how the episodes went."""
    unstable = ["--set", "environment.env=cli_toys:unstable"]
    done = call("run", "toy.yaml", *unstable, "--require", "episode_return_mean >= 0")
    assert done.exit_code == ExitCode.REQUIREMENT
    assert "episode_return_mean >= 0: cannot be answered" in done.output
    assert "NOT a function of its seed" in done.output
    assert call("run", "toy.yaml", *unstable, "--require", "num_failed_episodes <= 0").exit_code == 0


def test_a_table_says_that_actions_were_sampled(folder):
    """Which a config may say, whatever policy the command names; a flag says otherwise."""
    network = ["--policy", "rl_eval.policies.mlp:make_mlp"]
    assert "sampled" not in call("run", "toy.yaml", *network).stdout
    config = Path("toy.yaml").read_text()
    Path("toy.yaml").write_text(config.replace("policy:\n", "policy:\n  deterministic: false\n"))
    assert "rl_eval.policies.mlp:make_mlp, sampled actions" in call("run", "toy.yaml", *network).stdout
    assert "sampled" not in call("run", "toy.yaml", *network, "--deterministic").stdout


def test_help_of_run_explains_every_exit_code():
    text = call("run", "--help").output
    for code in [*ExitCode, 130, 143]:
        assert f"  {int(code)} " in text or f" {int(code)} by" in text


def test_help_fits_80_columns():
    for command in ([], *([command] for command in COMMANDS)):
        assert max(map(len, call(*command, "--help").output.splitlines())) <= 80


# Which config runs


def test_flags_and_set_win_over_the_file(folder):
    settings = read_settings(
        folder / "toy.yaml", None, ["evaluation.seed=7"], {"evaluation.seed": 3, "evaluation.num_episodes": 5}
    )
    assert (settings.evaluation.seed, settings.evaluation.num_episodes) == (7, 5)


def test_flags_that_are_not_given_change_nothing(folder):
    settings = read_settings(folder / "toy.yaml", None, None, {})
    assert settings.evaluation.num_episodes == 30


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
    assert outcome.stdout.endswith(f"saved in {place}: result.json, episodes.parquet\n")
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


def test_the_newest_run_can_be_continued_by_the_link(folder):
    call("run", "toy.yaml")
    outcome = call("run", "toy.yaml", "--log-dir", "runs/latest")
    assert outcome.exit_code == 0
    assert "runs/latest is complete: nothing is left to run" in outcome.stderr


def test_what_is_no_link_is_left_alone(folder):
    """Somebody's folder ``runs/latest`` is theirs."""
    Path("runs/latest").mkdir(parents=True)
    assert call("run", "toy.yaml").exit_code == 0
    assert not Path("runs/latest").is_symlink()
    assert list(Path("runs/latest").iterdir()) == []


@pytest.mark.parametrize("target", ["../elsewhere", "/tmp", "mine", "2026-notes"])
def test_a_link_of_another_program_is_left_alone(folder, target):
    """Ours leads to a folder beside it that has the name of a run."""
    Path("runs").mkdir()
    Path("runs/latest").symlink_to(target)
    done = call("run", "toy.yaml")
    assert done.exit_code == 0
    assert target in done.stderr
    assert str(Path("runs/latest").readlink()) == target
    assert len(list(Path("runs").iterdir())) == 2


def test_our_link_is_replaced_when_its_run_is_gone(folder):
    """Somebody removes runs, and not the link."""
    assert call("run", "toy.yaml").exit_code == 0
    shutil.rmtree(Path("runs/latest").resolve())
    assert call("run", "toy.yaml").exit_code == 0
    assert Path("runs/latest/result.json").is_file()


def test_an_output_alone_keeps_no_log(folder):
    assert call("run", "toy.yaml", "--output", "mine").exit_code == 0
    assert not Path("runs").exists()


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


def test_a_result_in_a_given_folder_is_replaced_by_force_alone(folder):
    def run(episodes, *args):
        return call("run", "toy.yaml", "--output", "mine", "--num-episodes", episodes, *args)

    assert run(3).exit_code == 0
    refused = run(4)
    assert refused.exit_code == ExitCode.USAGE
    assert "mine holds the result of an evaluation already" in refused.stderr
    assert "--force" in refused.stderr
    assert len(EvalResult.load("mine").plan) == 3
    assert run(4, "--force").exit_code == 0
    assert len(EvalResult.load("mine").plan) == 4


@pytest.mark.parametrize("name", ["result.json", "episodes.parquet"])
def test_foreign_files_are_not_overwritten(folder, name):
    (folder / "mine").mkdir()
    (folder / "mine" / name).write_text('{"my": "data"}')
    outcome = call("run", "toy.yaml", "--output", "mine")
    assert outcome.exit_code == ExitCode.USAGE
    assert "choose another folder" in outcome.stderr
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
    assert "mean return" in outcome.stdout
    assert error.strerror in outcome.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((None, "logs/a"), Path("logs/a")),
        ((None, "s3://runs/a"), None),
        ((Path("mine"), "s3://runs/a"), Path("mine")),
    ],
)
def test_output_folder(folder, args, expected):
    """As given, else the folder of the log if it is one."""
    assert claimed_folder(*args) == expected


# What is printed


def test_quiet_is_one_line(folder):
    outcome = call("run", "toy.yaml", "--quiet")
    assert outcome.stderr == ""
    (line,) = outcome.stdout.splitlines()
    assert line.startswith("complete: mean return 13.7667 (95 % interval 12.7")
    assert line.endswith("30 of 30 episodes")


def test_quiet_tells_a_failed_determinism_check(folder):
    """An environment whose episodes depend on those before it."""
    Path("leaky_toys.py").write_text(
        "from cli_toys import Count\n\n"
        "class Leaky(Count):\n"
        "    def reset(self, **options):\n"
        "        observation, info = super().reset(**options)\n"
        "        self.length += self.episodes\n"
        "        return observation, info\n\n"
        "def leaky(context):\n"
        "    return Leaky()\n"
    )
    (line,) = call("run", "toy.yaml", "-q", "--set", "environment.env=leaky_toys:leaky").stdout.splitlines()
    assert line.startswith("complete: mean return ")
    assert "30 of 30 episodes; NOT a function of its seed: " in line


def test_one_line_has_the_notes_of_a_result(folder):
    """Weights that nobody has again, in a gate of CI too."""
    words = ("run", "--env", "CartPole-v1", "--policy", "rl_eval.policies.mlp:make_mlp", "-n", 4, "--set")
    (line,) = call(*words, "runners.num_runners=0", "-q").stdout.splitlines()
    assert line.startswith("complete: mean return ")
    assert "4 of 4 episodes; rl_eval.policies.mlp:make_mlp makes other weights each time that it is called" in line


@pytest.mark.process
def test_without_a_terminal_there_is_plain_text(folder):
    done = start("run", "toy.yaml", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0
    assert "\x1b" not in out + err
    assert out.startswith("cli_toys:count")
    assert max(map(len, out.splitlines())) <= 80
    assert "cli_toys:count: 30 episodes, seed 0, 4 environments in this process\n" in err


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
    assert shown.index("starting") < shown.index("building environment and policy") < shown.index("complete")


@pytest.mark.process
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_cost_no_result(folder, closed):
    """No file gets their descriptors either, and with them what libraries print."""
    script = f"exec {sys.executable} -m rl_eval run toy.yaml -o out --log-dir runs {closed}"
    done = subprocess.run(["sh", "-c", script], env=environment(), check=False, timeout=120)
    assert done.returncode == 0
    assert rl_eval.load("out").status == "complete"
    assert read_log("runs").mismatches == ()


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


def lines_of(*views):
    console = Console(record=True, width=200, highlight=False, file=io.StringIO())
    display = LineDisplay(console)
    for view in views:
        display.draw(view)
    return console.export_text().splitlines()


def looks(until):
    """Return when the thread that draws looks."""
    return [0.15 * look for look in range(1, round(until / 0.15))]


def test_lines_come_every_second_at_first_and_then_now_and_then():
    """No line is later than promised, and none is much earlier."""
    console = Console(file=io.StringIO(), width=200)
    display, written, sizes = LineDisplay(console), [0.0], [0]
    for seconds in looks(100):
        display.draw(View("running", seconds, SETTINGS, progress()))
        sizes.append(console.file.tell())
        if sizes[-1] > sizes[-2]:
            written.append(seconds)
    gaps = {before: after - before for before, after in itertools.pairwise(written)}
    assert max(gap for before, gap in gaps.items() if before < 30) < 1
    later = [gap for before, gap in gaps.items() if before >= 30]
    assert 4.7 < min(later) <= max(later) <= 5.001


def test_lines_come_three_times_as_often_until_something_runs():
    """Ray's start may keep the thread that writes them from running for most of a second; no two lines are equal."""
    lines = lines_of(*[View("starting Ray", seconds) for seconds in looks(12)])
    assert len(lines) >= 36
    assert lines[0] == "starting Ray, 0.3 s"
    assert len(set(lines)) == len(lines)


def test_a_command_that_is_slow_to_read_its_config_says_so_early():
    """And once what is evaluated is known, that is the next line."""
    views = [View("reading toy.yaml", seconds) for seconds in (0.0, 0.2, 0.6, 0.7)]
    assert lines_of(*views, View("loading", 0.9, SETTINGS)) == [
        "reading toy.yaml, 0.6 s",
        "CartPole-v1: 100 episodes, seed 0, 2 runners with 8 environments each",
    ]


def test_what_must_be_known_at_once_is_written_at_once():
    views = [View("stopping", 0.2 + tenth / 10, SETTINGS, progress(), "stopping") for tenth in range(3)]
    assert lines_of(View("running", 0.1, SETTINGS), *views)[1:] == ["stopping"]


def test_progress_line_says_everything():
    assert progress_line(View("running", 12.0, SETTINGS, progress(num_faults=1, num_failed=3))) == (
        "120 of 200 episodes, mean return 439.2 ± 12.1 over the first 118, 5,000 steps/s, 2 of 2 runners, 1 fault, "
        "3 failed, 0:12"
    )
    empty = progress(num_finished=0, num_prefix=0, mean_return=math.nan, half_width=math.nan, env_steps=0, seconds=0.0)
    alone = EvalConfig().environment("CartPole-v1").build()
    assert progress_line(View("running", 0.0, alone, empty)) == "0 of 200 episodes, 0 faults, 0:00"
    assert progress_line(View("starting Ray", 7.0, SETTINGS)) == "starting Ray, 0:07"


def test_that_no_episode_ends_is_said_with_what_limits_them():
    never = progress(num_finished=0, num_prefix=0, mean_return=math.nan, half_width=math.nan, env_steps=0, seconds=11.0)
    hint = "no episode has ended yet; evaluation.max_episode_steps limits "
    assert hint in progress_line(View("running", 12.0, SETTINGS, never))
    assert hint in drawn_live(View("running", 12.0, SETTINGS, never))
    assert hint not in progress_line(View("running", 12.0, SETTINGS, progress(seconds=11.0)))


class Drawn:
    """A display that keeps what it is given."""

    def __init__(self):
        self.views = []
        self.closed = 0

    def draw(self, view):
        self.views.append(view)

    def make_room(self, view):
        self.views.append("room")

    def close(self):
        self.closed += 1

    def until(self, condition):
        assert eventually(lambda: any(condition(view) for view in list(self.views))), self.views[-3:]


def test_a_monitor_draws_of_itself_while_its_maker_is_busy():
    """The clock runs, and the phase is what was said last, or what the evaluation says."""
    display = Drawn()
    monitor = Monitor(display)
    display.until(lambda view: view.phase == "starting" and view.seconds > 0.3)
    monitor.say("starting Ray")
    monitor.plan(SETTINGS)
    display.until(lambda view: (view.phase, view.settings) == ("starting Ray", SETTINGS))
    monitor.follow(lambda: progress(phase="probing the policy"))
    display.until(lambda view: view.phase == "probing the policy" and view.progress.num_finished == 120)
    monitor.announce("stopping")
    monitor.close()
    monitor.close()
    assert (display.views[-1].phase, display.views[-1].announcement) == ("stopping", "stopping")
    assert display.closed == 1
    assert [view.seconds for view in display.views] == sorted(view.seconds for view in display.views)


def test_nothing_is_drawn_while_the_result_is_printed_and_one_line_below_it():
    display = Drawn()
    monitor = Monitor(display)
    display.until(lambda view: view.seconds > 0.1)
    with monitor.room():
        drawn = len(display.views)
        assert display.views[-1] == "room"
        time.sleep(0.5)
        assert len(display.views) == drawn
    monitor.say("stopping the runners")
    display.until(lambda view: view != "room" and view.phase == "stopping the runners")
    monitor.close()
    with monitor.room():
        assert display.views.count("room") == 1


@pytest.mark.parametrize("began", [3.0, 300.0])
def test_lines_below_the_result_come_often_again(began):
    console = Console(record=True, width=200, highlight=False, file=io.StringIO())
    display = LineDisplay(console)
    display.draw(View("running", began - 1, SETTINGS, progress()))
    display.draw(View("running", began - 0.5, SETTINGS, progress()))
    display.make_room(View("running", began, SETTINGS, progress()))
    console.export_text()
    for seconds in looks(2):
        display.draw(View("stopping the runners", began + seconds, SETTINGS, progress()))
    written = console.export_text().splitlines()
    when = [began, *(float(line.removeprefix("stopping the runners, ").removesuffix(" s")) for line in written)]
    assert len(when) > 3
    assert all(0.2 < after - before < 0.5 for before, after in itertools.pairwise(when))


def test_mean_text():
    assert mean_text(progress(mean_return=math.nan)) == ""
    assert mean_text(progress(mean_return=7.0, half_width=math.nan)) == "7"
    assert mean_text(progress(mean_return=500.0, half_width=0.0)) == "500"
    assert mean_text(progress(mean_return=0.12345, half_width=0.01)) == "0.1235 ± 0.0100"


def test_clock_text():
    assert [clock_text(seconds) for seconds in (0, 7.4, 59.6, 723, 3600)] == [
        "0:00",
        "0:07",
        "1:00",
        "12:03",
        "1:00:00",
    ]


def test_live_display_shows_progress_and_cleans_up():
    text = drawn_live(View("starting", 0.0), View("running", 11.0, SETTINGS, progress()), View("stopping", 12.0))
    for words in (
        "starting",
        "running",
        "stopping",
        "439.2 ± 12.1",
        "of 200",
        "on 2 of 2 runners",
        "60 %",
        "about 0:07 left",
        "0:12",
    ):
        assert words in text


def drawn_live(*views):
    console = Console(force_terminal=True, width=100, file=io.StringIO(), record=True)
    display = LiveDisplay(console)
    for view in views:
        display.draw(view)
    display.close()
    display.close()
    return console.export_text()


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


def test_what_is_printed_below_a_result_leaves_it_as_it_is():
    terminal = Terminal()
    display = LiveDisplay(Console(force_terminal=True, width=100, file=terminal))
    display.draw(View("running", 11.0, SETTINGS, progress()))
    display.make_room(View("running", 12.0, SETTINGS, progress()))
    terminal.write("the result\nits fingerprint\n")
    display.draw(View("stopping the runners", 13.0))
    assert terminal.lines == ["the result", "its fingerprint", "stopping the runners, 0:13"]
    display.close()
    assert terminal.lines == ["the result", "its fingerprint"]


def test_a_line_beside_a_live_display_stays_above_it(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    display = LiveDisplay(Console(stderr=True, force_terminal=True, width=100))
    display.draw(View("starting", 0.0))
    print_note("running in this process")
    display.draw(View("loading", 0.2))
    assert terminal.lines[0] == "running in this process"
    assert [line.split()[-1] for line in terminal.lines[1:2]] == ["loading"]
    assert "starting" not in "".join(terminal.lines)
    display.close()
    assert terminal.lines == ["running in this process"]


def test_the_time_left_goes_by_what_this_session_has_finished():
    """After 100 episodes of an earlier one, 20 in 10 seconds are 40 seconds for 80."""
    continued = progress(num_earlier=100)
    assert "about 0:40 left" in drawn_live(View("running", 11.0, SETTINGS, continued))
    none = progress(num_earlier=120)
    assert "left" not in drawn_live(View("running", 11.0, SETTINGS, none))


# Exit codes


def test_failed_is_3_and_is_saved(folder):
    outcome = call("run", "toy.yaml", "--set", "environment.env_kwargs.fail=true", "-q")
    assert outcome.exit_code == ExitCode.FAILED
    assert outcome.stdout.startswith("failed: RuntimeError: the simulator broke: all of the first 20 attempts failed")
    assert outcome.stdout.endswith("; 0 of 30 episodes\n")
    assert EvalResult.load("runs/latest").status == "failed"


def test_an_environment_that_cannot_be_built_is_3(folder):
    outcome = call("run", "toy.yaml", "--set", "environment.env_kwargs.nonsense=1")
    assert outcome.exit_code == ExitCode.FAILED
    assert "cannot be constructed" in outcome.stderr


def test_weights_of_a_training_checkpoint_run_and_are_replayed(folder):
    """The key is all that is needed; the result is that of the weights alone, and the folder keeps the key."""
    import torch

    from rl_eval.policies.mlp import MLPActor

    weights = MLPActor(1, 2).state_dict()
    torch.save(weights, "weights.pt")
    torch.save({"epoch": 3, "model": weights}, "ckpt.pt")
    args = ["run", "toy.yaml", "-q", "--set", "policy.policy=rl_eval.policies.mlp:make_mlp", "--set"]
    assert call(*args, "policy.weights=weights.pt", "--output", "alone").exit_code == 0
    key = ["--set", "policy.weights_key=model"]
    outcome = call(*args, "policy.weights=ckpt.pt", *key, "--log-dir", "runs")
    assert outcome.exit_code == 0, outcome.output
    assert EvalResult.load("runs").fingerprint == EvalResult.load("alone").fingerprint
    assert "is complete" in call(*args[:2], *args[3:], "policy.weights=ckpt.pt", *key, "--log-dir", "runs").stderr
    assert call("replay", "runs", "--episodes", 2).exit_code == 0


def test_an_unexpected_error_shows_its_traceback(folder, monkeypatch):
    def broken(*args):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("rl_eval.cli.run.look_up", broken)
    outcome = call("run", "toy.yaml")
    assert outcome.exit_code == ExitCode.BUG
    assert "Traceback" in outcome.stderr
    assert "RuntimeError: a bug of ours" in outcome.stderr


@pytest.mark.parametrize("verbose", [False, True])
def test_what_the_factory_of_a_policy_raises_is_one_line(folder, verbose):
    """As what a constructor of an environment raises."""
    options = ["-v"] if verbose else []
    outcome = call("run", "toy.yaml", "--set", "policy.policy=cli_toys:broken", *options)
    assert outcome.exit_code == ExitCode.FAILED
    assert "error: the policy cannot be made: RuntimeError: a bug of the factory" in outcome.stderr
    assert ("with -v" in outcome.stderr) != verbose
    assert ("Traceback" in outcome.stderr) == verbose


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_shows_the_traceback_of_any_error(folder, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv("RL_EVAL_VERBOSE", "1")
    outcome = call("run", "nowhere.yaml", *(["--verbose"] if how == "flag" else []))
    assert outcome.exit_code == ExitCode.USAGE
    assert "Traceback" in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("error: ")


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
    assert capfd.readouterr().err == "error: a message\n   of two  lines\n"


# Comparing


def test_compare_shows_the_difference(two_results):
    outcome = call("compare", "alternate", "ones/result.json")
    assert outcome.exit_code == 0, outcome.output
    assert "b returns more than a" in " ".join(outcome.stdout.split())


def test_compare_as_json(two_results):
    outcome = call("compare", "ones", "alternate", "--json")
    compared = json.loads(outcome.stdout)
    assert compared["num_pairs"] == 30
    assert compared["difference"]["mean"] < 0


def test_compare_refuses_what_is_no_result(two_results):
    outcome = call("compare", "ones", "nowhere")
    assert outcome.exit_code == ExitCode.USAGE
    assert outcome.stderr == "error: there is no folder 'nowhere': give that of an evaluation\n"


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
    supervised = call_alone("run", "toy.yaml", "-q", "--max-restarts", 1, "--log-dir", "log")
    assert supervised.stdout.startswith("complete: mean return ")


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


def test_the_first_line_says_how_ray_is_used(folder):
    done = call("run", "--env", "CartPole-v1", "--policy", "random", "-n", 2)
    assert done.stderr.splitlines()[0] == "running in this process: --runners 2 runs on two Ray actors"
