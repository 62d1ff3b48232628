"""Whose results may run the code that they name: this user's, made on this machine, in this folder."""

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rl_eval
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import UntrustedError
from rl_eval.results import trust
from rl_eval.results.loading import load
from rl_eval.results.replay import replay
from rl_eval.video import record_videos
from tests.unit.cli_world import call, environment, make_folder

TRAP = """
from pathlib import Path

Path("ran").touch()

from cli_toys_kept import *
"""


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A user without a key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    trust._key.cache_clear()
    yield tmp_path / "state"
    trust._key.cache_clear()


@pytest.fixture
def folder(tmp_path, state, monkeypatch):
    (tmp_path / "work").mkdir()
    return make_folder(tmp_path / "work", monkeypatch)


@pytest.fixture
def own(folder):
    """A run folder, and a saved result, of this user."""
    assert call("run", "toy.yaml", "--log-dir", "runs").exit_code == 0
    assert call("run", "toy.yaml", "--output", "out/toy").exit_code == 0
    return folder


@pytest.fixture
def stranger(own, tmp_path, monkeypatch):
    """The same as somebody else has made it, whose modules leave a trace when they are imported."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    trust._key.cache_clear()
    (own / "cli_toys.py").rename(own / "cli_toys_kept.py")
    (own / "cli_toys.py").write_text(TRAP)
    monkeypatch.delitem(sys.modules, "cli_toys", raising=False)
    return own


@pytest.mark.parametrize("place", ["runs", "out/toy"])
def test_what_this_user_made_is_replayed(own, place):
    outcome = call("replay", place, "--episodes", 3)
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "--episodes", 3),
        ("replay", "--episodes", 3, "--render", "human"),
        ("replay", "--video", "--output", "films"),
    ],
    ids=["replay", "window", "video"],
)
@pytest.mark.parametrize("place", ["runs", "out/toy"])
def test_what_a_stranger_made_runs_nothing(stranger, place, command):
    """The message shows what would be imported, and how to go on; nothing of it was."""
    name, *options = command
    outcome = call(name, place, *options)
    assert outcome.exit_code == ExitCode.USAGE
    assert "environment.env = 'cli_toys:count'" in outcome.stderr
    assert "policy.policy = 'cli_toys:ones'" in outcome.stderr
    assert "--trust" in outcome.stderr
    assert not Path("ran").exists()


def test_a_stranger_can_be_trusted(stranger):
    outcome = call("replay", "runs", "--episodes", 3, "--trust")
    assert outcome.exit_code == 0, outcome.output
    assert Path("ran").exists()


def test_python_needs_trust_too(stranger, monkeypatch):
    monkeypatch.syspath_prepend(str(stranger))
    with pytest.raises(UntrustedError, match="trust=True"):
        replay("runs", 3)
    with pytest.raises(UntrustedError, match="trust=True"):
        record_videos(load("runs"), "first", "films")
    assert not Path("ran").exists()
    assert replay("runs", 3, trust=True).identical


def test_a_config_that_is_given_needs_no_trust(stranger, monkeypatch):
    """What runs then is the caller's, and not the folder's."""
    from rl_eval.config.builder import EvalConfig

    monkeypatch.syspath_prepend(str(stranger))
    assert replay("runs", 3, config=EvalConfig.from_yaml("toy.yaml")).identical


def test_an_edited_config_is_a_strangers(own):
    """The signature is over the config: who changes what is called, loses it."""
    path = Path("out/toy/result.json")
    result = json.loads(path.read_text())
    result["provenance"]["config"]["policy"]["policy"] = "cli_toys:alternate"
    path.write_text(json.dumps(result))
    assert call("replay", "out/toy", "--episodes", 3).exit_code == ExitCode.USAGE


def test_an_own_result_beside_foreign_modules_is_a_strangers(own, tmp_path, monkeypatch):
    """A published result can be copied with its signature, beside other modules of the same names."""
    shutil.copytree(own, tmp_path / "bait")
    monkeypatch.chdir(tmp_path / "bait")
    assert call("replay", "runs", "--episodes", 3).exit_code == ExitCode.USAGE
    monkeypatch.chdir(own)
    assert call("replay", tmp_path / "bait" / "runs", "--episodes", 3).exit_code == 0


def test_a_result_without_a_signature_is_a_strangers(own):
    """Such as one from before there were any."""
    result = load("runs")
    del result.provenance["signature"]
    with pytest.raises(UntrustedError):
        replay(result, 3)


def apart():
    """Variables of a process that finds this package, and nothing in the test's folder by itself."""
    return environment() | {"PYTHONPATH": str(Path(rl_eval.__file__).parents[1])}


_COMMAND = "import sys; sys.path.pop(0); from rl_eval.cli import main; main()"  # Without the current folder.
REPLAY = [sys.executable, "-c", _COMMAND, "replay", "runs", "--episodes", "3"]


@pytest.mark.process
@pytest.mark.parametrize(("answer", "ran"), [("y", True), ("", False)])
def test_who_sits_at_a_terminal_is_asked(stranger, answer, ran):
    """The names are shown before the question; anything but yes is no."""
    master, slave = pty.openpty()
    with subprocess.Popen(REPLAY, env=apart(), stdin=slave, stdout=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        shown = b""
        while b"Run this code?" not in shown:
            shown += os.read(master, 1000)
        assert b"policy.policy = 'cli_toys:ones'" in shown
        os.write(master, answer.encode() + b"\n")
        out, _ = process.communicate(timeout=120)
    os.close(master)
    assert (process.returncode == 0) == ran
    assert (b"identical" in out) == ran
    assert Path("ran").exists() == ran


@pytest.mark.process
def test_nothing_beside_a_foreign_result_is_imported_to_read_it(stranger):
    """Modules of the names of those that reading needs lie in the current folder, and are not looked at."""
    (stranger / "pyarrow.py").write_text("from pathlib import Path; Path('ran').touch()")
    done = subprocess.run(REPLAY, env=apart(), capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert not Path("ran").exists()


# Why not


def test_a_result_of_another_folder_says_which(own, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UntrustedError, match=f"made by you, working in {own}, .*are in {tmp_path}/elsewhere"):
        replay(own / "runs", 3)


def test_a_folder_that_a_stranger_wrote_is_not_believed(own, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    result = load("runs")
    result.provenance["folder"] = "/trust/me"
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UntrustedError) as refused:
        replay(result, 3)
    assert "/trust/me" not in str(refused.value)


def test_a_key_that_cannot_be_kept_is_named(own, state):
    """Then nothing is known as this user's, whoever made it."""
    (state / "rl_eval" / "key").chmod(0o644)
    trust._key.cache_clear()
    with pytest.raises(UntrustedError, match=f"cannot keep your key: {state}/rl_eval/key .*XDG_STATE_HOME"):
        replay("runs", 3)


def test_a_user_without_a_home_is_told(own, monkeypatch):
    monkeypatch.setattr(trust, "_key_file", lambda: None)
    with pytest.raises(UntrustedError, match=r"cannot keep your key: .* no home .*XDG_STATE_HOME"):
        replay("runs", 3)


# The key


def test_the_key_is_this_users_alone(state):
    trust.sign({})
    path = state / "rl_eval" / "key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [found.name for found in path.parent.iterdir()] == ["key"]
    first = trust.sign({"a": 1})
    trust._key.cache_clear()
    assert trust.sign({"a": 1}) == first != trust.sign({"a": 2})


def test_a_key_that_others_can_read_is_not_used(state):
    first = trust.sign({})
    (state / "rl_eval" / "key").chmod(0o644)
    trust._key.cache_clear()
    assert trust.sign({}) != first


def test_without_a_place_for_a_key_this_process_trusts_itself(state):
    """Nothing can be written there; the next process asks."""
    state.write_text("a file")
    first = trust.sign({})
    assert trust.sign({}) == first
    assert trust.is_own({"config": {}, "signature": first})
    trust._key.cache_clear()
    assert not trust.is_own({"config": {}, "signature": first})


def test_a_working_folder_that_is_gone_signs_nothing(state, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert trust.sign({}) is None
    assert not trust.is_own({"config": {}, "signature": None})
