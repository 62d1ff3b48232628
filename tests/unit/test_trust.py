"""Code that a result names: it is listed, and nothing of it is imported before consent."""

import json
import os
import pty
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import rl_eval
from rl_eval.cli.exits import ExitCode
from rl_eval.config.builder import EvalConfig
from rl_eval.errors import UntrustedError
from rl_eval.recording.replay import replay
from rl_eval.recording.video import record_videos
from rl_eval.results.loading import load
from tests.refused import refused
from tests.unit.cli_world import call, call_alone, make_folder
from tests.unit.log_world import cut

TRAP = """
from pathlib import Path

Path("ran").touch()

from {kept} import *
"""


@pytest.fixture
def toys():
    """Name of a module that no other test's evaluation has named."""
    return f"toys_{uuid.uuid4().hex}"


@pytest.fixture
def stranger(tmp_path, monkeypatch, toys):
    """A run folder and a saved result of another process, and a module that leaves a trace when it is imported."""
    make_folder(tmp_path, monkeypatch)
    (tmp_path / "cli_toys.py").rename(tmp_path / f"{toys}.py")
    config = tmp_path / "toy.yaml"
    config.write_text(config.read_text().replace("cli_toys", toys))
    assert call_alone("run", "toy.yaml", "--output", "runs").returncode == 0
    Path("out/toy").mkdir(parents=True)
    for name in ("result.json", "episodes.parquet"):
        shutil.copy(f"runs/{name}", "out/toy")
    (tmp_path / f"{toys}.py").rename(tmp_path / f"{toys}_kept.py")
    (tmp_path / f"{toys}.py").write_text(TRAP.format(kept=f"{toys}_kept"))
    return tmp_path


@pytest.mark.process
def test_nothing_runs_before_consent(stranger, toys, monkeypatch):
    """Neither by the commands that run episodes nor by those that only read, nor from Python."""
    again = [
        ("replay", "--episodes", 3),
        ("replay", "--episodes", 3, "--render", "human"),
        ("replay", "--video", "-o", "films"),
    ]
    again += [("export", "--to", "npz", "-o", "steps.npz")]
    for place in ("runs", "out/toy"):
        outcome = call("run", "--retry", place)  # Of a complete run: nothing is left to run.
        assert outcome.exit_code == 0, outcome.output
        assert "no episode failed or is missing" in outcome.stdout
        for name, *options in again:
            outcome = call(name, place, *options)
            assert outcome.exit_code == ExitCode.USAGE, outcome.output
            assert f"environment.env = '{toys}:count'" in outcome.stderr
            assert f"policy.policy = '{toys}:ones'" in outcome.stderr
            assert "--trust" in outcome.stderr
        for command in (("show", place), ("export", place, "--to", "json"), ("compare", place, place)):
            assert call(*command).exit_code == 0
    assert call("show", ".").exit_code == call("report", "runs", "-o", "page.html").exit_code == 0
    monkeypatch.syspath_prepend(str(stranger))
    with refused(UntrustedError, "trust"):
        replay("runs", 3)
    with refused(UntrustedError, "trust"):
        record_videos(load("runs"), "first", "films")
    assert not Path("ran").exists()


@pytest.mark.process
def test_a_retry_of_an_unfinished_run_needs_consent(stranger):
    cut(Path("runs"), Path("cut"), 5)
    outcome = call("run", "--retry", "cut")
    assert outcome.exit_code == ExitCode.USAGE, outcome.output
    assert "--trust" in outcome.stderr
    assert not Path("ran").exists()


@pytest.mark.process
def test_trust_a_config_and_what_this_process_evaluated_run(stranger, toys, monkeypatch):
    """Another config that names other code is not trusted along with it."""
    monkeypatch.syspath_prepend(str(stranger))
    assert replay("runs", 3, config=EvalConfig.from_yaml("toy.yaml")).identical
    with refused(UntrustedError, "trust"):
        replay("runs", 3)
    assert replay("runs", 3, trust=True).identical
    saved = json.loads(Path("out/toy/result.json").read_text())
    saved["provenance"] |= {"folder": "/elsewhere", "signature": "ab" * 32}  # As older versions wrote.
    Path("out/toy/result.json").write_text(json.dumps(saved))
    outcome = call("replay", "out/toy", "--episodes", 3, "--trust")
    assert outcome.exit_code == 0, outcome.output
    assert call("run", "toy.yaml", "--output", "own").exit_code == 0
    assert replay("runs", 3).identical
    other = load("own")
    other.provenance["config"]["policy"]["policy"] = f"{toys}:alternate"
    with refused(UntrustedError, "trust"):
        replay(other, 3)


def test_every_reference_of_a_config_is_listed():
    """Wherever it stands."""
    result = rl_eval.evaluate(EvalConfig().environment("CartPole-v1").policy("random").evaluation(num_episodes=1))
    config = result.provenance["config"]
    config["policy"]["policies"] = {"a": {"policy": "m:a", "weights": "a.pt"}}
    config["environment"] |= {"env": "a:Env-v0", "wrappers": ["m:W"], "env_kwargs": {"deep": [{"file": "f.pkl"}]}}
    config["environment"] |= {"python": ["sh", "-c", "command"], "python_path": ["folder"]}
    config["runners"] |= {"init_fn": "m:init", "runtime_env": {"worker_process_setup_hook": "m.hook", "pip": ["m-1"]}}
    with refused(UntrustedError, "trust") as caught:
        replay(result, 0)
    for name in ("m:a", "a.pt", "a:Env-v0", "m:W", "f.pkl", "m:init", "m.hook", "m-1", "command", "folder"):
        assert repr(name) in str(caught.value)


def apart():
    """Variables of a process that finds this package, and nothing in the test's folder by itself."""
    return os.environ | {"PYTHONPATH": str(Path(rl_eval.__file__).parents[1])}


_COMMAND = "import sys; sys.path.pop(0); from rl_eval.cli import main; main()"  # Without the current folder.
REPLAY = [sys.executable, "-c", _COMMAND, "replay", "runs", "--episodes", "3"]


@pytest.mark.process
@pytest.mark.parametrize(("answer", "ran"), [("y", True), ("", False)])
def test_at_a_terminal_there_is_a_question(stranger, toys, answer, ran):
    """The names are shown before it; anything but yes is no."""
    master, slave = pty.openpty()
    with subprocess.Popen(REPLAY, env=apart(), stdin=slave, stdout=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        shown = b""
        while b"Run this code?" not in shown:
            shown += os.read(master, 1000)
        assert f"policy.policy = '{toys}:ones'".encode() in shown
        os.write(master, answer.encode() + b"\n")
        out, _ = process.communicate(timeout=120)
    os.close(master)
    assert (process.returncode == 0) == ran
    assert (b"identical" in out) == ran
    assert Path("ran").exists() == ran


@pytest.mark.process
def test_reading_imports_nothing_from_the_folder(stranger):
    """Modules of the names of those that reading needs lie in the current folder, and are not looked at."""
    (stranger / "pyarrow.py").write_text("from pathlib import Path; Path('ran').touch()")
    done = subprocess.run(REPLAY, env=apart(), capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert not Path("ran").exists()
