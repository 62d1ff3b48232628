"""The first screen: a short table with its summary last, a short help, and the nearest word for a wrong one."""

import contextlib
import io

import pytest

from rl_eval.cli.exits import ExitCode
from rl_eval.results.loading import load
from tests.refused import untold
from tests.unit.cli_world import call, faulty, make_folder
from tests.unit.log_world import cut

WON = """
import cli_toys


class Won(cli_toys.Count):
    def step(self, action):
        *found, info = super().step(action)
        return *found, {"is_success": self.length % 2 == 0}


def won():
    return Won()
"""
OPTIONS = {
    "--n-envs": "--num-envs-per-runner",
    "--num-episode": "-n, ",
    "--n-episodes": "-n, ",
    "--n-eval-episodes": "-n, ",
    "--n": "-n, ",
    "--num-workers": "--num-runners",
    "--model": "--policy",
    "--out": "-o, ",
    "--seeds": "--seed",
    "--weight": "--weights",
    "--quite": "-q, ",
    "--max-steps": "--set evaluation.max_episode_steps=",
    "--device": "--set policy.device=",
    "--return-bounds": "--set evaluation.return_bounds=",
    "--environment": "--env",
    **dict.fromkeys(("--run-dir", "--out-dir", "--log", "--folder"), "-o, --output"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = make_folder(tmp_path_factory.mktemp("screen"), patch)
        (folder / "won_toys.py").write_text(WON)
        assert shown("plain")
        yield folder


def shown(output, *options):
    """Return the lines that ``run`` prints."""
    return call("run", "toy.yaml", "--output", output, *options).stdout.splitlines()


def test_the_table_has_at_most_ten_lines_and_ends_with_the_summary(place):
    lines = shown("table")
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80
    result = load("table")
    names = [line.split("  ")[0] for line in lines[2:-2]]
    assert names == ["mean return", "mean length", "episodes", "fingerprint"]
    assert f"{result.fingerprint[:16]}; 4 of 4 re-run episodes identical" in lines[-3]
    assert lines[-2] == "saved in table; next: rl-eval report table"
    assert lines[-1].startswith("complete: mean return 13.77 (")


def test_a_failed_determinism_check_is_in_the_last_line(place):
    lines = shown("shaky", "--set", "environment.env=cli_toys:unstable")
    assert "re-run episodes differ" in lines[-1]


def test_success_is_first_where_it_is_reported(place):
    lines = shown("won", "--set", "environment.env=won_toys:won")
    assert len(lines) <= 10
    assert [line.split("  ")[0] for line in lines[2:4]] == ["success", "mean return"]
    assert lines[-1].startswith("complete: success ")
    [line] = shown("won_again", "--set", "environment.env=won_toys:won", "-q")
    assert line.index("success") < line.index("mean return")


def test_a_fault_is_told_once_and_the_next_command_is_that_for_it(place):
    """The note of the interval, the reason of the result and its notes do not repeat it."""
    outcome = call("run", "toy.yaml", "--output", "flaky", *faulty(1, 0.3))
    result = load("flaky")
    assert outcome.exit_code == ExitCode.PARTIAL
    assert outcome.output.count("injected fault") == 1
    assert outcome.output.count(f"{result.num_failed} failed") == 1
    assert "rl-eval run --retry flaky" in outcome.stdout.splitlines()[-2]
    outcome = call("run", "toy.yaml", "--output", "broken", "--set", "environment.env_kwargs.fail=true")
    assert outcome.output.count("the simulator broke") == 1
    assert "rl-eval show broken --faults" in outcome.stdout.splitlines()[-2]


def test_a_run_that_was_stopped_names_no_other_command(place):
    """The same command continues it."""
    from rl_eval.cli.run import deliver

    call("run", "toy.yaml", "--output", "whole")
    cut("whole", "part", 12)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        deliver(load("part"), place / "part", quiet=False, as_json=False)
    assert printed.getvalue().endswith("saved in part\n")


def test_what_is_unusual_has_a_line(place):
    lines = shown("unstable", "--set", "environment.env=cli_toys:unstable")
    assert "FAILED" in next(line for line in lines if line.startswith("fingerprint"))
    assert any(line.startswith("note") for line in lines)


def test_a_mean_without_the_failed_episodes_says_so(place):
    outcome = call("run", "toy.yaml", "--output", "faulty", *faulty(1, 0.4))
    result = load("faulty")
    assert 0 < result.num_failed < len(result.plan)
    text = f"mean over the {result.aggregates.count} completed episodes"
    assert [text in line for line in outcome.stdout.splitlines() if "mean return" in line] == [True, True]


def test_quiet_is_one_line_with_short_notes(place):
    lines = call(
        "run", "toy.yaml", "-o", "quiet", "-q", "--set", "environment.env=cli_toys:unstable"
    ).output.splitlines()
    assert len(lines) == 1
    assert "observation is outside of its space; FAILED" in lines[0]
    outcome = call("compare", "plain", "plain", "-q")
    assert len(outcome.output.splitlines()) == 1


def test_quiet_is_one_line_if_a_requirement_is_not_met(place):
    outcome = call("run", "toy.yaml", "-o", "gate", "-q", "--require", "mean_return >= 400")
    assert outcome.exit_code == ExitCode.REQUIREMENT
    [line] = outcome.output.splitlines()
    assert "episode_return_mean >= 400: is not met" in line
    outcome = call("compare", "gate", "gate", "-q", "--fail-on", "regression", "--require", "b >= a")
    assert outcome.exit_code == ExitCode.NO_ANSWER
    [line] = outcome.output.splitlines()
    assert line.count("values are equal") == 1
    assert "b >= a: cannot be answered" in line


def test_a_comparison_names_the_run_to_continue(place):
    call("run", "toy.yaml", "--output", "sound")
    cut("sound", "short", 12)
    assert "short did not reach" in call("compare", "sound", "short", "-q").output


@pytest.mark.parametrize(
    "words", [("--weights", "nope.pt"), ("--set", "environment.env_kwargs.unknown=1"), ("--set", "policy.policy=a:b")]
)
def test_the_start_line_follows_the_checks(place, words):
    outcome = call("run", "--env", "CartPole-v1", "--policy", "cli_toys:ones", "-n", "2", *words)
    assert outcome.exit_code in (ExitCode.USAGE, ExitCode.FAILED)
    assert "2 episodes" not in outcome.output


@pytest.mark.parametrize("more", [(), ("-q",)])
def test_a_policy_for_other_spaces_has_both_spaces_in_the_advice(place, more):
    (place / "wide_net.py").write_text("import torch\ndef net():\n    return torch.nn.Linear(3, 2)\n")
    words = ("run", "--env", "CartPole-v1", "--policy", "wide_net:net", "-n", "2", "-o", f"wide{len(more)}", *more)
    output = call(*words).stdout
    assert "of Box([-4.8 -inf -0.41887903 -inf], " in output
    assert "and returns actions of Discrete(2)." in output


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("run", "toy.yaml", "-n", "ten"), "'ten': it must be"),
        (("run", "toy.yaml", "-n", "0"), "num_episodes is 0: it must be at least 1"),
        (("compare", "a", "b", "--fail-on", "worse"), ": 'worse' is not one of 'regression'"),
        (("export", "plain", "out.csv"), "out.csv) To name the output, pass --output"),
        (("export", "plain", "--format", "csv"), "No such option: --format. Did you mean --to"),
        (("run", "toy.yaml", "--set", "foo"), "such as evaluation.num_episodes=50"),
        (("run", "none.yaml"), "'none.yaml'. Pass the path of a YAML file"),
        (("run", "suite.yaml"), "'suite': run a suite with rl-eval suite run"),
    ],
)
def test_a_wrong_value_is_named_in_our_words(place, words, value):
    (place / "suite.yaml").write_text("suite: mine\n")
    outcome = call(*words)
    assert outcome.exit_code == ExitCode.USAGE
    assert value in outcome.output
    assert "nput should" not in outcome.output


def test_returns_outside_of_the_bounds_are_named(place):
    lines = shown("bounded", "--set", "evaluation.return_bounds=[0, 11]")
    assert "the returns are 10 to 19" in " ".join(" ".join(lines).split())


def test_verbose_has_all_numbers(place):
    lines = shown("plain", "-v")
    assert lines[:-1] == load("plain").details.splitlines()
    assert untold("\n".join(lines), "median", "IQM", "speed", "guarantee") == []


def options_of(text):
    """Return the options in the first section of a help text."""
    section = text.partition("\nOptions:\n")[2].partition("\n\n")[0]
    return [line for line in section.splitlines() if line.startswith("  -")]


@pytest.mark.parametrize("command", ["run", "watch", "plan", "doctor", "show", "compare", "replay", "report", "export"])
def test_the_first_screen_of_help_is_short(command):
    assert 0 < len(options_of(call(command, "--help").stdout)) <= 12


def test_the_help_has_at_most_twelve_commands_before_the_others():
    commands = call("--help").stdout.partition("\nEvaluate:\n")[2]
    first, more = commands.split("\nMore:\n")
    names = [line.split()[0] for line in first.splitlines() if line.startswith("  ") and line[2] != " "]
    assert len(names) <= 12
    assert [line.split()[0] for line in more.splitlines()] == ["init", "crossplay", "ope", "serve", "service"]


@pytest.mark.parametrize(("wrong", "right"), OPTIONS.items())
def test_a_wrong_option_names_the_nearest(wrong, right):
    outcome = call("run", wrong, "4")
    assert outcome.exit_code == ExitCode.USAGE
    assert f"No such option: {wrong}. Did you mean {right}" in outcome.stderr


def test_a_suite_without_its_command_names_it():
    outcome = call("suite", "mine.yaml")
    assert outcome.exit_code == ExitCode.USAGE
    assert "Use rl-eval suite run mine.yaml." in outcome.stderr


@pytest.mark.parametrize(("wrong", "right"), [("evaluate", "run"), ("list", "show"), ("comprae", "compare")])
def test_a_wrong_command_names_the_nearest(wrong, right):
    outcome = call(wrong)
    assert outcome.exit_code == ExitCode.USAGE
    assert right in outcome.stderr.splitlines()[-1]
