"""Ctrl-C, SIGTERM and SIGHUP: their exit codes, and the saved part of the evaluation."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM

import pytest
import typer
from waiting import eventually

import rl_eval
from rl_eval.cli.exits import reported
from rl_eval.cli.signals import Interrupted, Interruption
from rl_eval.errors import LogError
from rl_eval.log import read_log
from tests.refused import untold
from tests.unit.cli_world import start


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_before_the_evaluation_ends_the_command_and_its_process(number):
    """At once, without the end of libraries that are half imported."""
    ends, before = [], signal.getsignal(number)
    with pytest.raises(typer.Exit) as caught, Interruption(ends.append), reported(debug=False):
        signal.raise_signal(number)
    assert caught.value.exit_code == 128 + number
    assert ends == [128 + number]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("sent", "noted", "gives_up"),
    [
        ([SIGINT], SIGINT, False),
        ([SIGINT, SIGINT], SIGINT, True),
        ([SIGTERM, SIGTERM], SIGTERM, True),
        ([SIGTERM, SIGINT], SIGTERM, True),
        ([SIGINT, SIGTERM], SIGTERM, False),  # A supervisor ends what a person has asked to stop.
        ([SIGINT, SIGTERM, SIGTERM], SIGTERM, True),
        ([SIGHUP, SIGHUP], SIGHUP, False),  # From the kernel and from the shell.
        ([SIGTERM, SIGHUP], SIGTERM, False),  # From systemd.
    ],
)
def test_during_the_evaluation_the_first_signal_asks_to_stop_and_the_second_gives_up(sent, noted, gives_up):
    *first, last = sent
    with Interruption(lambda code: None) as interruption:
        interruption.defer()
        for number in first:
            signal.raise_signal(number)
        if gives_up:
            with pytest.raises(Interrupted):
                signal.raise_signal(last)
        else:
            signal.raise_signal(last)
        assert interruption.number == noted


@pytest.mark.parametrize("number", [SIGINT, SIGTERM, SIGHUP])
def test_a_request_cancels_the_evaluation_and_then_flushes_its_log(number):
    """A log that cannot be written is reported by the evaluation's end."""
    events = []

    def flush(timeout_s):
        events.append("flush")
        raise LogError("no space left")

    with Interruption(events.append) as interruption:
        interruption.defer(flush, cancel=lambda: events.append("cancel"))
        signal.raise_signal(number)
        assert eventually(lambda: len(events) == 2)
    assert events == ["cancel", "flush"]


def test_after_the_result_is_out_a_signal_ends_the_process_with_its_code():
    ends = []
    with Interruption(ends.append) as interruption:
        interruption.defer()
        interruption.conclude(3)
        signal.raise_signal(SIGTERM)
    assert ends == [3]


@pytest.mark.parametrize("number", [SIGHUP, SIGINT])
def test_an_ignored_signal_stays_ignored(number):
    """As by ``nohup``, and by a script that starts a command in the background."""
    former = signal.signal(number, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            interruption.defer()
            signal.raise_signal(number)
            assert interruption.number is None
    finally:
        signal.signal(number, former)


def test_rays_own_handler_ends_the_command_like_ours():
    """``ray.init`` turns SIGTERM into ``sys.exit(15)`` meanwhile; other exits are left alone."""
    with pytest.raises(typer.Exit) as caught, reported(debug=False):
        sys.exit(SIGTERM)
    assert caught.value.exit_code == 143
    with pytest.raises(SystemExit), reported(debug=False):
        sys.exit(1)


# Whole commands

ENDLESS = ("run", "toy.yaml", "--set", "evaluation.num_episodes=1000000", "--set")
PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture
def begin():
    """Start commands, and end those that a test has not seen end."""
    processes = []

    def started(*args, **streams):
        processes.append(start(*args, **streams))
        return processes[-1]

    yield started
    for process in processes:
        with process:
            process.kill()


@pytest.mark.process
@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_a_signal_ends_a_pilot_and_is_no_fault_of_its_environment(folder, begin, number):
    """Although it comes while a step is computed, as here from the step itself."""
    step = f"    def step(self, action):\n        signal.raise_signal({int(number)})\n"
    Path("sends.py").write_text(f"import signal\nfrom cli_toys import Count\n\nclass Sends(Count):\n{step}")
    process = begin("plan", "toy.yaml", "--set", "environment.env=sends:Sends", **PIPED)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, ""), err


@pytest.mark.process
def test_a_signal_saves_what_has_finished(folder, begin):
    """A partial result over the finished prefix; with a log, the command to continue is printed."""
    cases = [
        (SIGINT, Path("runs"), ["--output", "runs"]),
        (SIGTERM, Path("out/toy"), ["--output", "out/toy"]),
    ]
    started = [
        begin(*ENDLESS, f"environment.env_kwargs={{pause_s: 0.01, flag: {place.name}.third}}", *args, **PIPED)
        for _, place, args in cases
    ]
    for process, (number, place, _) in zip(started, cases, strict=True):
        assert eventually(Path(f"{place.name}.third").exists, process=process)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 128 + number, err
        result = rl_eval.EvalResult.load(place)
        assert result.status == "partial"
        assert result.aggregates.count > 0
        assert str(result) in out
        assert ("--output runs" in err) == (place == Path("runs"))


@pytest.mark.process
@pytest.mark.parametrize("restarts", [[], ["--max-restarts", 1]])
def test_a_command_that_ignores_signals_completes(folder, begin, restarts):
    """As with ``nohup`` and in the background of a script."""

    def ignore():
        for number in (SIGHUP, SIGINT):
            signal.signal(number, signal.SIG_IGN)

    changes = "environment.env_kwargs={pause_s: 0.01, flag: third}"
    process = begin("run", "toy.yaml", "--set", changes, "--output", "runs", *restarts, preexec_fn=ignore, **PIPED)
    assert eventually(Path("third").exists, process=process)
    for number in (SIGHUP, SIGINT):
        process.send_signal(number)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert rl_eval.load("runs").status == "complete"


@pytest.mark.process
def test_a_terminal_that_goes_away_costs_nothing(folder, begin):
    """The hangup of a closed terminal saves what has finished, although nothing can be printed any longer."""
    master, terminal = os.openpty()
    process = begin(
        *ENDLESS,
        "environment.env_kwargs={pause_s: 0.01, flag: third}",
        *("--output", "out/toy"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        start_new_session=True,
    )
    os.close(terminal)
    with os.fdopen(master, "rb", buffering=0) as screen:
        while not Path("third").exists():
            screen.read(65536)  # The live line goes on.
    assert process.wait(60) == 129
    result = rl_eval.EvalResult.load("out/toy")
    assert result.status == "partial"
    assert result.aggregates.count > 0


@pytest.mark.process
def test_while_a_step_hangs_sigterm_flushes_the_log_and_a_second_one_ends_the_process(folder, begin):
    """The next command continues there."""
    Path("hang").touch()
    hangs = f"environment.env_kwargs={{hang: {folder}/hang}}"
    command = ("run", "toy.yaml", "--set", hangs, "--output", "runs")
    process = begin(*command, **PIPED)
    assert eventually(Path("hanging").exists, process=process)
    process.send_signal(SIGTERM)
    assert eventually(lambda: len(read_log("runs").rows) > 0)
    process.send_signal(SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    Path("hang").unlink()
    finished = len(read_log("runs").rows)
    again = begin(*command, **PIPED)
    _, told = again.communicate(timeout=60)
    assert any(untold(line, "runs", finished, 30) == [] for line in told.splitlines()), told
    assert again.returncode == 0
