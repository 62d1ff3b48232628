"""Ctrl-C and SIGTERM: what they end, how soon, with which code, and what of the evaluation is kept."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from waiting import eventually

import rl_eval
from rl_eval.cli import signals
from rl_eval.cli.exits import reported
from rl_eval.cli.signals import Interrupted, Interruption
from rl_eval.errors import LogError
from rl_eval.log import read_log
from tests.unit.cli_world import environment, make_folder, start


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path, monkeypatch)


@pytest.fixture
def quick(monkeypatch):
    """The time that SIGTERM leaves is over at once; every end is noted."""
    monkeypatch.setattr(signals, "_GRACE_S", 0.1)
    monkeypatch.setattr(signals, "_TURN_S", 0.05)
    return []


def test_a_signal_before_the_evaluation_ends_the_command_and_its_process(quick, capfd):
    """At once, without the end of libraries that are half started; and should that not be the end, after a while."""
    with pytest.raises(typer.Exit) as caught, Interruption(quick.append), reported(debug=False):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert quick[0] == 143
    assert "interrupted before there was a result" in capfd.readouterr().err
    assert eventually(lambda: quick == [143, 143])


def test_during_the_evaluation_the_first_signal_is_noted_and_the_second_ends_it(quick):
    """And what handled the signals before handles them again."""
    before = signal.getsignal(signal.SIGTERM)
    with Interruption(quick.append) as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        assert interruption.number == signal.SIGINT
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_sets_no_deadline(quick):
    """Only SIGTERM is followed by SIGKILL; a person may wait."""
    with Interruption(quick.append) as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
    assert quick == []


def test_after_sigterm_the_log_is_flushed_and_the_process_ends(quick, capfd):
    """Also when the main thread never comes back from what it does."""
    flushed = []
    with Interruption(quick.append) as interruption:
        interruption.defer(flushed.append)
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)
    assert quick == [143]
    assert len(flushed) == 1
    assert "what had finished is in the log" in capfd.readouterr().err


def test_a_log_that_cannot_be_flushed_is_said(quick, capfd):
    """The process ends all the same."""

    def full(timeout_s):
        raise LogError("no space left")

    with Interruption(quick.append) as interruption:
        interruption.defer(full)
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)
    assert quick == [143]
    assert "no space left" in capfd.readouterr().err


def test_after_the_result_is_out_the_process_ends_with_its_code_and_in_silence(quick, capfd):
    """Stopping the runners may take longer than the time that is left."""
    with Interruption(quick.append) as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGTERM)
        interruption.conclude(3)
        assert eventually(lambda: quick)
    assert quick == [3]
    assert capfd.readouterr().err == ""


def test_the_evaluation_is_asked_to_stop_and_the_terminal_given_back(quick):
    """By Ctrl-C at once, and the display stays; after SIGTERM in any case, and it goes."""
    events = []
    with Interruption(quick.append) as interruption:
        interruption.defer(cancel=lambda: events.append("cancel"), hide=lambda: events.append("hide"))
        signal.raise_signal(signal.SIGINT)
        assert events == ["cancel"]
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)
    assert events.count("hide") == 1
    assert quick == [143]


def test_sigterm_after_ctrl_c_gives_nothing_up(quick):
    """A supervisor that ends what somebody has asked to stop; a third signal does give up."""
    with Interruption(quick.append) as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert interruption.number == signal.SIGTERM
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)


def test_a_hangup_is_treated_as_sigterm(quick):
    """It may come twice, from the kernel and from the shell: the second one gives nothing up."""
    flushed = []
    with Interruption(quick.append) as interruption:
        interruption.defer(flushed.append)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert interruption.number == signal.SIGHUP
        assert eventually(lambda: quick)
    assert quick == [129]
    assert len(flushed) == 1


def test_a_hangup_after_sigterm_changes_nothing(quick):
    """systemd sends both."""
    with Interruption(quick.append) as interruption:
        interruption.defer()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert interruption.number == signal.SIGTERM
        assert eventually(lambda: quick)
    assert quick == [143]


def test_nohup_stays_in_force(quick):
    """A command that was started to ignore hangups ignores them."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption(quick.append) as interruption:
            interruption.defer()
            signal.raise_signal(signal.SIGHUP)
            assert interruption.number is None
    finally:
        signal.signal(signal.SIGHUP, former)
    assert quick == []


def test_what_has_finished_is_saved_by_another_thread_if_the_main_one_does_not_come(quick, capfd):
    """Once, and the process ends when that is done."""
    rescuers = []

    def rescue():
        rescuers.append(threading.current_thread())
        return "it is saved in out/toy"

    with Interruption(quick.append) as interruption:
        interruption.defer(rescue=rescue)
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)
    assert quick == [143]
    assert len(rescuers) == 1
    assert rescuers[0] is not threading.main_thread()
    assert "it is saved in out/toy" in capfd.readouterr().err


def test_who_saves_is_not_interrupted_by_the_end_of_the_time(quick):
    """Neither the main thread nor the other one: a slow disk must not cost the result."""
    events = []

    def rescue():
        time.sleep(0.5)
        events.append("rescued")
        return ""

    with Interruption(events.append) as interruption:
        interruption.defer(rescue=rescue)
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: 143 in events)
    assert events == ["rescued", 143]

    events.clear()
    with Interruption(events.append) as interruption:
        interruption.defer(rescue=rescue)
        interruption.claim()
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)
        events.append("saved")
        interruption.conclude(1)
        assert eventually(lambda: 1 in events)
    assert events == ["saved", 1]


def test_who_comes_too_late_to_save_waits_for_the_end(quick, monkeypatch):
    """The other thread is at it; two would write the same files."""
    monkeypatch.setattr(signals, "_SAVING_S", 0.1)
    with Interruption(quick.append) as interruption:
        interruption.defer(rescue=lambda: "")
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)
        with pytest.raises(Interrupted):
            interruption.claim()


def test_what_cannot_be_saved_is_said(quick, capfd):
    """The process ends all the same."""

    def rescue():
        raise OSError("no space left")

    with Interruption(quick.append) as interruption:
        interruption.defer(rescue=rescue)
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)
    assert quick == [143]
    assert "no space left" in capfd.readouterr().err


def test_a_flush_that_hangs_does_not_hold_up_the_end_for_ever(quick, monkeypatch):
    """Nor does a terminal that takes nothing more."""
    monkeypatch.setattr(signals, "_SAVING_S", 0.1)
    with Interruption(quick.append) as interruption:
        interruption.defer(lambda timeout_s: time.sleep(60))
        signal.raise_signal(signal.SIGTERM)
        assert eventually(lambda: quick)
    assert quick == [143]


def test_rays_own_handler_ends_the_command_like_ours():
    """``ray.init`` turns SIGTERM into ``sys.exit(15)`` until the evaluation begins; other exits are left alone."""
    with pytest.raises(typer.Exit) as caught, reported(debug=False):
        sys.exit(signal.SIGTERM)
    assert caught.value.exit_code == 143
    with pytest.raises(SystemExit), reported(debug=False):
        sys.exit(1)


def test_an_interrupted_command_says_so(capfd):
    """One line, and the signal's code."""
    with pytest.raises(typer.Exit) as caught, reported(debug=False):
        raise Interrupted(signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert "interrupted" in capfd.readouterr().err


@pytest.mark.process
def test_the_thread_hears_sigterm_while_the_main_thread_is_stuck(folder):
    """The main thread waits in C for a lock, where Python runs no handler; the log is flushed nevertheless."""
    script = """
from pathlib import Path
from rl_eval.cli import signals
from rl_eval.cli.signals import Interruption
import ctypes
signals._GRACE_S = 0.3
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(128)
libc.pthread_mutex_lock(mutex)
with Interruption() as interruption:
    interruption.defer(lambda timeout_s: Path("flushed").touch())
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)  # Waits for ever, and through signals.
"""
    process = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert Path("flushed").exists()


@pytest.mark.process
def test_what_does_not_close_is_left_behind(folder):
    """The result is out, and a ``close`` that hangs in this process cannot be ended otherwise."""
    with Path("cli_toys.py").open("a") as module:
        module.write("""
class Clings(Count):
    def close(self):
        while True:
            time.sleep(1)

def clings(context):
    return Clings()
""")
    script = "import sys\nfrom rl_eval.cli import main, signals\nsignals._PARTING_S = 0.5\nmain()"
    command = [sys.executable, "-c", script, "run", "toy.yaml", "--set", "environment.env=cli_toys:clings"]
    command += ["--set", "evaluation.determinism_check=0"]  # It would close an environment before it builds a new one.
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "does not close" in done.stderr
    assert rl_eval.EvalResult.load("runs/latest").status == "complete"


# Whole commands

ENDLESS = ("run", "toy.yaml", "--set", "evaluation.num_episodes=1000000", "--set")
PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.process
def test_a_signal_saves_what_has_finished(folder):
    """As a partial result over the finished prefix; who has a log is told how to continue, and nobody else."""
    cases = [
        (signal.SIGINT, Path("runs"), ["--log-dir", "runs"]),
        (signal.SIGTERM, Path("out/toy"), ["--output", "out/toy"]),
    ]
    started = [
        start(*ENDLESS, f"environment.env_kwargs={{pause_s: 0.01, flag: {place.name}.third}}", *args, **PIPED)
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
        assert "stopping" in err
        assert ("--log-dir runs continues" in err) == (place == Path("runs"))


@pytest.mark.process
def test_a_terminal_that_goes_away_costs_nothing(folder):
    """The hangup of a closed terminal saves what has finished, although nothing can be printed any longer."""
    master, terminal = os.openpty()
    hangs = "environment.env_kwargs={pause_s: 0.01, flag: third}"
    process = start(
        *ENDLESS,
        hangs,
        *("--output", "out/toy"),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        start_new_session=True,
    )
    os.close(terminal)
    while not Path("third").exists():
        os.read(master, 65536)  # The display draws on.
    os.close(master)
    assert process.wait(60) == 129
    result = rl_eval.EvalResult.load("out/toy")
    assert result.status == "partial"
    assert result.aggregates.count > 0


@pytest.mark.process
def test_a_step_that_hangs_does_not_keep_sigterm_from_keeping_what_has_finished(folder):
    """In the log, or else as a partial result, printed and in the usual files; the step itself cannot be ended.

    The live display of the one on a terminal hides the cursor, which is shown again before the process may end.
    """
    for name in ("logged", "plain"):
        Path(name).mkdir()
    Path("hang").touch()
    hangs = f"environment.env_kwargs={{hang: {folder}/hang}}"
    ours, theirs = os.openpty()
    config = str(folder / "toy.yaml")
    logged = start(
        "run", config, "--set", hangs, "--log-dir", "../runs", stdout=theirs, stderr=theirs, stdin=theirs, cwd="logged"
    )
    os.close(theirs)
    plain = start("run", config, "--set", hangs, "--output", "out/toy", **PIPED, cwd="plain")
    assert eventually(Path("logged/hanging").exists, process=logged)
    logged.send_signal(signal.SIGTERM)
    assert eventually(Path("plain/hanging").exists, process=plain)
    plain.send_signal(signal.SIGTERM)
    shown = b""
    with suppress(OSError):
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert logged.wait(60) == 143
    assert b"what had finished is in the log" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert len(read_log("runs").rows) > 0

    out, err = plain.communicate(timeout=120)
    assert plain.returncode == 143, err
    result = rl_eval.EvalResult.load("plain/out/toy")
    assert result.status == "partial"
    assert result.aggregates.count > 0
    assert "ended by SIGTERM" in result.reason
    assert str(result) in out
    assert "saved in out/toy" in err
