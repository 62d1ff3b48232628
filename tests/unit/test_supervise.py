"""``rl-eval supervise``: real child processes that die, are killed, finish, and are told to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rl_eval.cli import supervise as module
from rl_eval.cli.supervise import Progress, Supervisor, delay_s, is_final, supervise
from rl_eval.errors import LogError
from rl_eval.log import read_log

DRIVER = """
import json, sys
from pathlib import Path
from rl_eval.cli import supervise

folder = Path(sys.argv[1])

def progress():
    rows = (folder / "rows").read_text().count("row") if (folder / "rows").exists() else 0
    return supervise.Progress(rows, 4)

supervisor = supervise.Supervisor([sys.executable, str(folder / "child.py")], progress, int(sys.argv[2]), print)
code = supervisor.run()
print("code", code, flush=True)
sys.exit(code)
"""

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path

folder = Path(__file__).parent

def row():
    with (folder / "rows").open("a") as rows:
        rows.write("row ")

runs = folder / "runs"
number = int(runs.read_text()) + 1 if runs.exists() else 1
runs.write_text(str(number))
"""


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY_S", 0.01)


class Story:
    """A folder with a child's script; the child sees in ``number`` how often it was started."""

    def __init__(self, folder: Path, child: str) -> None:
        self.folder = folder
        self.lines: list[str] = []
        (folder / "child.py").write_text(PREAMBLE + child)

    def progress(self) -> Progress:
        rows = self.folder / "rows"
        return Progress(rows.read_text().count("row") if rows.exists() else 0, 4)

    def run(self, max_restarts: int = 3) -> int:
        return Supervisor(self.command, self.progress, max_restarts, self.lines.append).run()

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(self.folder / "child.py")]

    @property
    def runs(self) -> int:
        return int((self.folder / "runs").read_text())


def test_the_pause_doubles_up_to_a_minute() -> None:
    """One second, two, four, and never more than sixty."""
    assert [delay_s(failures) for failures in range(1, 10)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert delay_s(1_000_000) == 60


@pytest.mark.parametrize(
    ("code", "finished", "final"),
    [
        (0, 4, True),
        (0, 3, True),
        (1, 4, True),
        (1, 3, False),
        (2, 0, True),
        (3, 4, True),
        (3, 3, False),
        (4, 0, False),
        (70, 2, False),
        (130, 2, False),
        (137, 4, False),
        (143, 4, False),
    ],
)
def test_which_end_is_final(code: int, finished: int, final: bool) -> None:
    """A result over the whole plan, success and a wrong call are; a run that was killed before its result is not."""
    assert is_final(code, Progress(finished, 4)) is final


@pytest.mark.usefixtures("_quick")
def test_a_killed_run_is_started_again_until_it_is_complete(tmp_path: Path) -> None:
    """kill -9, a crash and a cluster error in turn; every line says how the run ended and how far it was."""
    story = Story(
        tmp_path,
        """
row()
if number == 1: os.kill(os.getpid(), signal.SIGKILL)
if number == 2: os.kill(os.getpid(), signal.SIGSEGV)
sys.exit({3: 4, 4: 0}[number])
""",
    )
    assert story.run(max_restarts=1) == 0
    assert story.runs == 4
    assert story.lines == [
        "run ended with 137 (SIGKILL), 1 of 4 episodes in the log; restart 1 of 1 in 0.01 s",
        "run ended with 139 (SIGSEGV), 2 of 4 episodes in the log; restart 1 of 1 in 0.01 s",
        "run ended with 4, 3 of 4 episodes in the log; restart 1 of 1 in 0.01 s",
    ]


@pytest.mark.usefixtures("_quick")
def test_the_code_of_a_result_is_passed_on(tmp_path: Path) -> None:
    """A complete log whose result is partial is not run again."""
    story = Story(tmp_path, "for _ in range(4): row()\nsys.exit(1)")
    assert story.run() == 1
    assert story.runs == 1


@pytest.mark.usefixtures("_quick")
def test_a_usage_error_is_not_repeated(tmp_path: Path) -> None:
    """It would be the same error again."""
    story = Story(tmp_path, "sys.exit(2)")
    assert story.run() == 2
    assert (story.runs, story.lines) == (1, [])


@pytest.mark.usefixtures("_quick")
def test_restarts_without_progress_are_bounded(tmp_path: Path) -> None:
    """It gives up, says so, and returns the run's code; a new episode in between starts the count again."""
    story = Story(tmp_path, "if number == 3: row()\nsys.exit(70)")
    assert story.run(max_restarts=3) == 70
    assert story.runs == 6
    assert story.lines[-1] == (
        "run ended with 70, 1 of 4 episodes in the log; gave up after 3 restarts without a new episode"
    )
    assert [line.rpartition("; ")[2].split(" in ")[0] for line in story.lines[:-1]] == [
        "restart 1 of 3",
        "restart 2 of 3",
        "restart 1 of 3",
        "restart 2 of 3",
        "restart 3 of 3",
    ]


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Supervisors in processes of their own, so that they can be sent signals."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "driver.py").write_text(DRIVER)
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(driver: list[subprocess.Popen[str]], tmp_path: Path, restarts: int = 5) -> subprocess.Popen[str]:
    """Start a supervisor of tmp_path/child.py."""
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path), str(restarts)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    driver.append(process)
    return process


def wait_for(path: Path) -> str:
    """Wait until a file has content."""
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, f"{path.name} never came"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_reaches_the_run_and_ends_both(
    driver: list[subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    """The run ends in its own time with its own code, and is not started again."""
    Story(
        tmp_path,
        f"""
def stop(number, frame):
    time.sleep(0.5)
    row()
    sys.exit(128 + number)

signal.signal({number.value}, stop)
(folder / "ready").write_text(str(os.getpid()))
time.sleep(60)
""",
    )
    process = start(driver, tmp_path)
    child = int(wait_for(tmp_path / "ready"))
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert output == f"code {128 + number}\n"
    assert (tmp_path / "rows").read_text() == "row "
    assert (tmp_path / "runs").read_text() == "1"
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_signal_during_the_pause_ends_it(driver: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """Nothing is started any more."""
    Story(tmp_path, "sys.exit(70)")
    process = start(driver, tmp_path)
    assert process.stdout is not None
    assert "restart 1 of 5" in process.stdout.readline()
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (143, "code 143\n")
    assert (tmp_path / "runs").read_text() == "1"


def test_a_run_killed_from_outside_is_started_again(driver: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    """SIGTERM for the run alone is not a wish of the supervisor's user."""
    Story(
        tmp_path,
        """
if number == 2: sys.exit(0)
(folder / "ready").write_text(str(os.getpid()))
time.sleep(60)
""",
    )
    process = start(driver, tmp_path)
    os.kill(int(wait_for(tmp_path / "ready")), signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert output.startswith("run ended with 143 (SIGTERM), 0 of 4 episodes in the log; restart 1 of 5")


def supervise_app() -> typer.Typer:
    """The command alone."""
    app = typer.Typer()
    app.command()(supervise)
    return app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "a", "b"], "supervise keeps `run` running, not 'compare'"),
        (["run", "config.yaml"], "add --run-dir DIR"),
        (["run", "config.yaml", "--run-dir"], "add --run-dir DIR"),
        (["run", "config.yaml", "--run-dir", "there", "--fresh"], "--fresh would start from nothing"),
    ],
)
def test_what_cannot_be_supervised(arguments: list[str], message: str) -> None:
    """The call is refused before anything runs."""
    result = CliRunner().invoke(supervise_app(), ["--", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_the_command_runs_what_follows_the_dashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the run are left to it, and its own log is watched."""
    seen: dict[str, object] = {}

    class Fake:
        def __init__(self, command: list[str], progress: object, max_restarts: int, say: object) -> None:
            seen.update(command=command, max_restarts=max_restarts)

        def run(self) -> int:
            return 3

    monkeypatch.setattr(module, "Supervisor", Fake)
    arguments = ["run", "config.yaml", "--run-dir=s3://bucket/run", "--set", "a.b=1", "--quiet"]
    result = CliRunner().invoke(supervise_app(), ["--max-restarts", "7", "--", *arguments])
    assert result.exit_code == 3
    assert seen == {"command": [sys.executable, "-m", "rl_eval", *arguments], "max_restarts": 7}


ENVS = '''
import time

import gymnasium as gym


class Slow(gym.Wrapper):
    """CartPole that takes its time."""

    def __init__(self, pause_s=0.0):
        super().__init__(gym.make("CartPole-v1", max_episode_steps=20))
        self.pause_s = pause_s

    def step(self, action):
        time.sleep(self.pause_s)
        return self.env.step(action)


def push():
    """Always to the right."""
    return lambda observations: [1] * len(observations)
'''

CONFIG = """
environment: {env: "envs:Slow", env_kwargs: {pause_s: 0.005}}
policy: {policy: "envs:push"}
runners: {num_runners: 0, num_envs_per_runner: 2}
evaluation: {num_episodes: 120}
"""


def test_an_evaluation_survives_kill_9_of_its_process(tmp_path: Path) -> None:
    """The command as users call it: every episode once, and the fingerprint of an undisturbed run."""
    (tmp_path / "envs.py").write_text(ENVS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    rl_eval = [sys.executable, "-m", "rl_eval"]
    run = ["run", "config.yaml", "--run-dir", "log", "--quiet"]
    with subprocess.Popen(
        [*rl_eval, "supervise", "--", *run], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as supervisor:
        try:
            wait_for_rows(tmp_path / "log", 20)
            children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
            _, said = supervisor.communicate(timeout=120)
        finally:
            supervisor.kill()
    assert supervisor.returncode == 0, said
    (line,) = said.splitlines()
    assert line.startswith("rl-eval supervise: run ended with 137 (SIGKILL), ")
    assert line.endswith(" of 120 episodes in the log; restart 1 of 10 in 1 s")
    log = read_log(tmp_path / "log")
    assert sorted(log.rows["index"]) == list(range(120))
    calm = ["run", "config.yaml", "--quiet", "--set", "environment.env_kwargs.pause_s=0", "--output", "calm"]
    subprocess.run([*rl_eval, *calm], cwd=tmp_path, env=environment, check=True)
    fingerprints = {
        json.loads((tmp_path / name / "result.json").read_text())["fingerprint"] for name in ("log", "calm")
    }
    assert len(fingerprints) == 1


def wait_for_rows(run_dir: Path, count: int) -> None:
    """Wait until a log holds some episodes."""
    end = time.monotonic() + 120
    while True:
        try:
            found = len(read_log(run_dir).rows)
        except LogError:
            found = 0
        if found >= count:
            return
        assert time.monotonic() < end, f"{found} of {count} rows"
        time.sleep(0.05)
