"""The variables that processes start with, and what the command line does where they are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_eval.supervision.process_environment import reproducible_environment, runner_environment
from tests.unit.cli_world import call_alone, make_folder

HASHING = """
import numpy as np


def hashing():
    return lambda observations: np.array([hash(f"step {row[0]}") % 2 for row in observations])
"""


@pytest.mark.parametrize(("name", "value"), [("MKL_CBWR", "COMPATIBLE"), ("PYTHONHASHSEED", "7")])
def test_what_the_user_exported_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A mode and a hash seed are the user's to choose."""
    monkeypatch.setenv(name, value)
    assert reproducible_environment()[name] == value
    monkeypatch.delenv(name)
    assert reproducible_environment()[name] not in ("", value)


@pytest.mark.parametrize("mode", ["COMPATIBLE", None])
def test_runners_have_the_mode_of_their_driver(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    """The only variable in which runners differ from the command line; unset is empty, for nodes that have one."""
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if mode is not None:
        monkeypatch.setenv("MKL_CBWR", mode)
    assert runner_environment() == {**reproducible_environment(), "MKL_CBWR": mode or ""}


@pytest.mark.process
def test_a_policy_of_hashes_has_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python hashes texts differently in each process, and an evaluation in one process cannot see that."""
    make_folder(tmp_path, monkeypatch)
    (tmp_path / "hash_toys.py").write_text(HASHING)
    for name in reproducible_environment():
        monkeypatch.delenv(name, raising=False)

    def fingerprint(hash_seed: str | None = None) -> str:
        if hash_seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        done = call_alone("run", "toy.yaml", "--policy", "hash_toys:hashing", "--output", f"out{hash_seed}", "--json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["fingerprint"])

    assert fingerprint() == fingerprint("") == fingerprint("0") != fingerprint("7")


@pytest.mark.process
def test_the_end_of_a_command_looks_through_nothing() -> None:
    """Objects of torch and Ray are not searched for cycles, which would take most of a second."""
    code = "import atexit, gc, rl_eval.__main__ as r; atexit.register(lambda: print(gc.get_freeze_count())); r.main()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    version, frozen = done.stdout.split("\n", 1)
    assert version.startswith("rl-eval")
    assert int(frozen) > 10_000
