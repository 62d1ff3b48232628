"""Options that mean the same everywhere: who has them, by which letter, and what they do."""

import json
import os
import re
from pathlib import Path

import pytest
from typer.main import get_command

from rl_eval.cli import app
from tests.unit.cli_world import call, make_folder
from tests.unit.test_reference_pages import commands_of

COMMANDS = {name.removeprefix("rl-eval "): command for name, command in commands_of(get_command(app))}
LETTERS = {"-n": "--num-episodes", "-o": "--output", "-q": "--quiet", "-v": "--verbose"}
COLOR = re.compile(r"\x1b\[[0-9;]*3[0-9]m")


def options(command):
    """Return the options of a command, by their long names."""
    return {opt: param for param in command.params for opt in param.opts if opt.startswith("--")}


def having(option):
    return {name for name, command in COMMANDS.items() if option in options(command)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_letter_stands_for_one_option_and_the_option_has_its_letter(name):
    found = {opt: param for param in COMMANDS[name].params for opt in param.opts if len(opt) == 2}
    assert found.keys() <= LETTERS.keys()
    for letter, long in LETTERS.items():
        param = options(COMMANDS[name]).get(long)
        assert found.get(letter) is param


@pytest.mark.parametrize("option", ["--verbose", "--no-color"])
def test_every_command_has_these(option):
    assert having(option) == set(COMMANDS)


@pytest.mark.parametrize("option", ["--json", "--quiet", "--verbose", "--no-color"])
def test_they_are_flags_that_say_the_same(option):
    """The doctor has no result whose one line could be left."""
    found = {name: options(command)[option] for name, command in COMMANDS.items() if option in options(command)}
    assert all(param.is_flag for param in found.values())
    assert len({param.help for name, param in found.items() if (name, option) != ("doctor", "--quiet")}) == 1


# ------------------------------------------------------------------------------ what they do


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run, and a terminal as far as rich can tell."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    make_folder(tmp_path, monkeypatch)
    assert call("run", "toy.yaml", "-q", "--output", "runs").exit_code == 0
    return tmp_path


def test_no_color_prints_none(folder):
    """Neither in a table nor in an error; processes that it starts learn of it."""
    for words in (("show", "runs"), ("show", "nowhere")):
        assert COLOR.search(call(*words).output)
        for plain in ((*words, "--no-color"), ("--no-color", *words)):
            assert not COLOR.search(call(*plain).output)
            assert os.environ.pop("NO_COLOR") == "1"


def test_a_traceback_may_be_asked_for_before_the_command_and_by_a_variable(folder, monkeypatch):
    monkeypatch.setenv("RL_EVAL_VERBOSE", "")
    assert "Traceback" not in call("show", "nowhere").output
    for words in (("show", "nowhere", "-v"), ("-v", "show", "nowhere")):
        assert "Traceback" in call(*words).output
    monkeypatch.setenv("RL_EVAL_VERBOSE", "1")
    assert "Traceback" in call("show", "nowhere").output


def test_json_is_all_that_is_printed(folder):
    """Where it is saved goes to stderr, and with quiet nowhere; the exit code is as ever."""
    outcome = call("run", "toy.yaml", "-o", "out", "--json")
    saved = json.loads(Path("out/result.json").read_text())
    assert json.loads(outcome.stdout)["fingerprint"] == saved["fingerprint"]
    assert outcome.stderr.strip() == "saved in out; next: rl-eval report out"
    again = call("run", "toy.yaml", "-o", "more", "--json", "-q")
    assert json.loads(again.stdout)["fingerprint"] == saved["fingerprint"]
    assert again.stderr == ""
    assert json.loads(call("run", "--retry", "runs", "--json").stdout)["fingerprint"] == saved["fingerprint"]
