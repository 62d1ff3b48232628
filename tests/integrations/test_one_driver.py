"""Fingerprints by number of runners, kind of action and network, from the command line and from a script.

Within either they are equal. Between them, ``compare`` names the numerics key that differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from fingerprint_worlds import make_config

from rl_eval import compare, load
from rl_eval.supervision.process_environment import reproducible_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ACTIONS, NETWORKS, RUNNERS = ("discrete", "continuous"), ("mlp", "sac", "cnn"), (0, 2)
CELLS = list(product(ACTIONS, NETWORKS, RUNNERS))
SCRIPT = """
import json
import sys

from rl_eval import EvalConfig, evaluate

for name, values in json.loads(sys.argv[1]).items():
    evaluate(EvalConfig.from_dict(values)).save(name)
"""


def run_script(folder: Path, configs: dict[str, Any], env: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(configs)], cwd=folder, env=env, check=True, timeout=600)


def run_commands(folder: Path, configs: dict[str, Any], env: dict[str, str]) -> None:
    for name, values in configs.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
        command = [sys.executable, "-m", "rl_eval", "run", f"{name}.yaml", "--output", name, "--quiet"]
        subprocess.run(command, cwd=folder, env=env, check=True, timeout=600)


DOORS = {"script": run_script, "command line": run_commands}


@pytest.fixture(scope="module")
def results(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Any]:
    """Results by door and cell, of processes that start without our variables; those of the cluster have them."""
    env = {name: value for name, value in os.environ.items() if name not in reproducible_environment()}
    env |= {"PYTHONPATH": str(Path(__file__).parent), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    configs = {"-".join(map(str, cell)): make_config(*cell) for cell in CELLS}
    found = {}
    for door, run in DOORS.items():
        folder = tmp_path_factory.mktemp(door.replace(" ", "_"))
        run(folder, configs, env)
        found |= {(door, *cell): load(folder / name) for cell, name in zip(CELLS, configs, strict=True)}
    return found


@pytest.mark.parametrize(("door", "actions", "network"), list(product(DOORS, ACTIONS, NETWORKS)))
def test_one_driver_has_one_fingerprint(results: Any, door: str, actions: str, network: str) -> None:
    here, there = (results[door, actions, network, runners] for runners in RUNNERS)
    assert here.status == there.status == "complete"
    assert here.provenance["numerics"] == there.provenance["numerics"]
    assert here.fingerprint == there.fingerprint


@pytest.mark.parametrize(("actions", "network", "runners"), CELLS)
def test_two_drivers_differ_by_a_key_that_is_named(results: Any, actions: str, network: str, runners: int) -> None:
    script, command = (results[door, actions, network, runners] for door in DOORS)
    found = compare(script, command)
    keys = [one.key for one in found.different_settings if one.key != "numerics.outputs"]
    assert keys == ["numerics.mkl_cbwr"]
    if script.fingerprint != command.fingerprint:
        assert "equal up to rounding" in found.verdict
        assert "numerics.mkl_cbwr" in found.verdict
