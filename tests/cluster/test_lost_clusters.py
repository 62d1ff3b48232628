"""Runs on a cluster of somebody else, whose only node or head dies."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launched import free_ports, machine, start_options

import rl_eval
from rl_eval.log import read_log
from tests.unit.cli_world import call, start

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize("killed", ["raylet", "gcs_server"])
def test_the_only_node_or_the_head_of_a_cluster_dies_and_the_log_continues(folder, killed):
    """Within a minute, and announced at once; Ray's client would wait for a node, or end the process with 1."""
    slow = f"environment.env_kwargs={{pause_s: 0.05, slow: {folder}/slow}}"
    args = ["run", "toy.yaml", "--output", "runs", "--num-episodes", 200, "--set", slow]
    Path("slow").touch()
    with machine(RAY_AUTH_MODE="disabled") as host:
        ports = free_ports(4)
        started = host.run("ray", "start", "--head", *start_options(ports))
        assert started.returncode == 0, started.stdout
        there = ["--num-runners", 2, "--address", f"127.0.0.1:{ports[0]}"]
        process = start(*args, *there, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not list(Path("runs/segments").glob("[0-9]*-episodes-*")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        for pid in host.processes():
            if Path(f"/proc/{pid}/exe").resolve().name == killed:
                os.kill(pid, signal.SIGKILL)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 4, told
    lines = [line for line in told.splitlines() if "Ray cluster" in line]
    assert len(lines) == 2, told
    assert told.splitlines()[-1] == lines[-1]
    assert "--output runs" in lines[-1]
    assert 0 < len(read_log("runs").rows) < 200
    Path("slow").unlink()
    assert call(*args).exit_code == 0
    assert call(*args, "--output", "undisturbed").exit_code == 0
    assert rl_eval.load("runs").fingerprint == rl_eval.load("undisturbed").fingerprint
