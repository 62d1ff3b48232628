"""``rl-eval run --max-restarts``: exit codes that are final, and real runs that are killed or terminated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from waiting import eventually

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.restarts import Progress, repeated, without_option
from rl_eval.errors import LogError
from rl_eval.log import read_log
from rl_eval.results.loading import load
from tests.unit.cli_world import call, make_folder, start

RUN = """
code=$(sed -n "$(($(wc -l < ends) + 1))p" plan)
echo >> ends
case $code in K) kill -KILL $$ ;; *) exit "$code" ;; esac
"""
"""Exits with the code in the next line of ``plan``; K is a kill."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("ends", "max_restarts", "code", "restarts"),
    [
        ([("K", 1), ("139", 2), ("4", 3), ("0", 4)], 1, 0, [1, 1, 1]),  # A new episode starts the count again.
        ([("1", 4)], 5, 1, []),
        ([("3", 4)], 5, 3, []),
        ([("2", 0)], 5, 2, []),
        ([("1", 3), ("0", 4)], 1, 0, [1]),
        ([("3", 0), ("0", 4)], 1, 0, [1]),  # It ended before there was a log.
        ([("70", 0), ("70", 0), *[("70", 1)] * 4], 3, 70, [1, 2, 1, 2, 3]),
        ([("K", 0)] * 2, 1, 137, [1]),
    ],
)
def test_a_run_is_started_again_until_that_is_final(tmp_path, monkeypatch, capfd, ends, max_restarts, code, restarts):
    """Each line has the exit code and the number of restarts without a new episode."""
    monkeypatch.chdir(tmp_path)
    Path("plan").write_text("".join(f"{end}\n" for end, _ in ends))
    Path("ends").touch()

    def progress() -> Progress:
        done = len(Path("ends").read_text())
        return Progress(ends[done - 1][1], 4) if done and ends[done - 1][1] else Progress()

    assert repeated(["sh", "-c", RUN], progress, max_restarts, first_delay_s=0.001) == code
    assert len(Path("ends").read_text()) == len(ends)
    err = capfd.readouterr().err
    assert [int(number) for number in re.findall(r"restart (\d+) of", err)] == restarts
    assert (f"after {max_restarts} restarts" in err) == (code in (70, 137))


@pytest.mark.process
@pytest.mark.parametrize("moment", ["run", "pause"])
def test_a_signal_is_forwarded_and_ends_the_restarts(tmp_path: Path, moment: str) -> None:
    """The exit code is that of the child, which ends in its own time; during the pause the command ends immediately."""
    trap = "trap 'exit 9' TERM; touch $0/up; sleep 60 & wait" if moment == "run" else "touch $0/up; exit 70"
    script = f"until [ -e {tmp_path}/up ]; do sleep 0.01; done; sleep 0.3; kill -TERM {os.getpid()}"
    waiting = subprocess.Popen(["sh", "-c", script])
    assert repeated(["sh", "-c", trap, str(tmp_path)], Progress, 3, 60.0) == (9 if moment == "run" else 143)
    waiting.wait()


def test_the_child_has_the_same_command_without_the_option() -> None:
    kept = ["run", "config.yaml", "--output=s3://bucket/run", "--set", "a.b=1", "--quiet"]
    for position in range(1, len(kept) + 1):
        for option in (["--max-restarts", "7"], ["--max-restarts=7"]):
            assert without_option([*kept[:position], *option, *kept[position:]]) == kept


def test_a_run_that_cannot_be_named_again_is_refused() -> None:
    assert call("run", "config.yaml", "--max-restarts", 3).exit_code == ExitCode.USAGE


def rows(log_dir: str) -> int:
    try:
        return len(read_log(log_dir).rows)
    except LogError:
        return 0


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.process
def test_an_evaluation_survives_kill_9_of_its_process_and_saves_when_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every episode has one record, none that was in the log runs again, and the result is that of a calm run.

    The environment is slow for as long as there is a file.
    """
    make_folder(tmp_path, monkeypatch)
    Path("slow").touch()
    run = ["run", "toy.yaml", "--output", "log", "--quiet", "--num-envs-per-runner", 1]
    run += ["--set", "environment.env_kwargs={slow: slow, pause_s: 0.1}"]
    with start(*run, "--max-restarts", 3, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert eventually(lambda: rows("log") > 0, process=process)
            (first,) = children(process)
            os.kill(first, signal.SIGKILL)
            assert eventually(lambda: children(process) not in ([], [first]), process=process)
            (second,), before = children(process), rows("log")
            assert eventually(lambda: rows("log") > before, process=process)
            process.send_signal(signal.SIGTERM)
            _, printed = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 143, printed
    assert " 137," in printed
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    Path("slow").unlink()
    assert call(*run).exit_code == 0
    assert call("run", "toy.yaml", "--output", "calm").exit_code == 0
    assert load("log").fingerprint == load("calm").fingerprint
    segments = [pq.read_table(path)["index"].to_pylist() for path in Path("log/segments").glob("[0-9]*-episodes-*")]
    assert sorted(index for segment in segments for index in segment) == list(range(30))
    assert read_log("log").mismatches == ()
