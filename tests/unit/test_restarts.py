"""``rl-eval run --max-restarts``: which ends are final, and real runs that are killed or asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from waiting import eventually

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.restarts import Child, Progress, delay_s, is_final, repeated, without_option
from rl_eval.errors import LogError
from rl_eval.log import read_log
from rl_eval.results.loading import load
from tests.unit.cli_world import call, make_folder, start


def test_the_pause_doubles_up_to_a_minute() -> None:
    assert [delay_s(failures) for failures in (1, 2, 3, 4, 5, 6, 7, 8, 1_000_000)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_which_end_is_final() -> None:
    """A result over the whole plan, success and a wrong call are; a run that was killed before its result is not."""
    final = {(code, finished) for code in (0, 1, 2, 3, 4, 70, 130, 137, 143) for finished in (0, 3, 4)
             if is_final(code, Progress(finished, 4))}  # fmt: skip
    assert final == {(0, 0), (0, 3), (0, 4), (1, 4), (2, 0), (2, 3), (2, 4), (3, 4)}
    assert not is_final(ExitCode.FAILED, Progress())


def told(ends: list[tuple[int, int]], max_restarts: int, asked: int | None = None) -> tuple[int, list[str], int]:
    """Repeat a run that ends with each code and number of rows in turn; return code, lines and the number of runs."""
    rows, lines, runs = [0], [], iter(ends)
    done = 0

    def run() -> int:
        nonlocal done
        code, rows[0] = next(runs)
        done += 1
        return code

    code = repeated(run, lambda: Progress(rows[0], 4), max_restarts, lambda pause_s: asked, lines.append)
    return code, lines, done


def test_a_killed_run_is_started_again_until_it_is_complete() -> None:
    """Every line says how the run ended and how far it was; a new episode starts the count again."""
    assert told([(137, 1), (139, 2), (4, 3), (0, 4)], 1) == (0, [
        "run ended with 137 (SIGKILL), 1 of 4 episodes in the log; restart 1 of 1 in 1 s",
        "run ended with 139 (SIGSEGV), 2 of 4 episodes in the log; restart 1 of 1 in 1 s",
        "run ended with 4, 3 of 4 episodes in the log; restart 1 of 1 in 1 s",
    ], 4)  # fmt: skip


@pytest.mark.parametrize("end", [(1, 4), (2, 0), (-143, 2)], ids=["a partial result", "a usage error", "as asked"])
def test_a_final_end_is_not_repeated(end: tuple[int, int]) -> None:
    assert told([end], 5) == (abs(end[0]), [], 1)


def test_restarts_without_progress_are_bounded() -> None:
    code, lines, runs = told([(70, 0), (70, 0), *[(70, 1)] * 4], 3)
    assert (code, runs) == (70, 6)
    assert lines[-1] == "run ended with 70, 1 of 4 episodes in the log; gave up after 3 restarts without a new episode"
    assert [line.rpartition("; ")[2] for line in lines[:-1]] == [
        f"restart {failures} of 3 in {delay_s(failures):g} s" for failures in (1, 2, 1, 2, 3)
    ]


def test_a_signal_during_the_pause_ends_it() -> None:
    code, lines, runs = told([(70, 0)], 3, asked=143)
    assert (code, len(lines), runs) == (143, 1, 1)


def test_the_child_has_the_same_command_without_the_option() -> None:
    kept = ["run", "config.yaml", "--log-dir=s3://bucket/run", "--set", "a.b=1", "--quiet"]
    for position in range(1, len(kept) + 1):
        for option in (["--max-restarts", "7"], ["--max-restarts=7"]):
            assert without_option([*kept[:position], *option, *kept[position:]]) == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "give --log-dir"), (["--log-dir", "there", "--fresh"], "--fresh would start from nothing")],
)
def test_what_cannot_be_continued_is_refused(arguments: list[str], message: str) -> None:
    outcome = call("run", "config.yaml", "--max-restarts", 3, *arguments)
    assert outcome.exit_code == ExitCode.USAGE
    assert message in outcome.stderr


@pytest.fixture
def _handlers() -> Iterator[None]:
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.mark.process
@pytest.mark.usefixtures("_handlers")
def test_a_signal_is_forwarded_and_the_child_ends_in_its_own_time(tmp_path: Path) -> None:
    """With its own code; a signal during the pause, or before the child is up, is not lost either."""
    script = f"""
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
Path({str(tmp_path)!r}, "up").touch()
time.sleep(60)
"""
    child = Child([sys.executable, "-c", script])
    signal.signal(signal.SIGTERM, child.forward)
    waiting = subprocess.Popen(
        ["sh", "-c", f"until [ -e {tmp_path}/up ]; do sleep 0.01; done; kill -TERM {os.getpid()}"]
    )
    assert child.run() == -9
    waiting.wait()
    assert child.sleep(60.0) == 143
    assert Child(["sh", "-c", "kill -KILL $$"]).run() == 137
    late = Child(["sleep", "60"])
    late.forward(signal.SIGTERM, None)
    assert late.run() == -143


def rows(run_dir: str) -> int:
    try:
        return len(read_log(run_dir).rows)
    except LogError:
        return 0


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.process
def test_an_evaluation_survives_kill_9_of_its_process_and_saves_when_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every episode has one record, none that was in the log runs again, and the result is that of a calm run.

    The environment is slow, and hangs in its fourth episode, for as long as there is a file.
    """
    make_folder(tmp_path, monkeypatch)
    Path("hang").touch()
    run = ["run", "toy.yaml", "--log-dir", "log", "--quiet"]
    run += ["--set", "environment.env_kwargs={hang: hang, slow: hang, pause_s: 0.015}"]
    slow = ["--num-envs-per-runner", 1, "--max-restarts", 3]
    with start(*run, *slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert eventually(lambda: rows("log") > 0, process=process)
            before = rows("log")
            os.kill(children(process)[0], signal.SIGKILL)
            assert eventually(lambda: rows("log") > before, process=process)
            (second,) = children(process)
            process.send_signal(signal.SIGTERM)
            _, printed = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143, printed
    assert "rl-eval: run ended with 137 (SIGKILL), " in printed
    assert " of 30 episodes in the log; restart 1 of 3 in 1 s" in printed
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    Path("hang").unlink()
    assert call(*run).exit_code == 0
    assert call("run", "toy.yaml", "--output", "calm").exit_code == 0
    assert load("log").fingerprint == load("calm").fingerprint
    segments = [pq.read_table(path)["index"].to_pylist() for path in Path("log/segments").glob("[0-9]*-episodes-*")]
    assert sorted(index for segment in segments for index in segment) == list(range(30))
    assert read_log("log").mismatches == ()
