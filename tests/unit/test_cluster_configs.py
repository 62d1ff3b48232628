"""The shipped cluster files are what Ray's launcher and KubeRay take."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rl_eval import EvalConfig
from rl_eval.cli import app

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "cluster"
LAUNCHER = ["aws.yaml", "loopback.yaml", "onprem.yaml"]


def load(name: str) -> dict[str, Any]:
    content = yaml.safe_load((FOLDER / name).read_text())
    assert isinstance(content, dict)
    return content


def test_the_promised_files_are_there() -> None:
    """None without a test."""
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted([*LAUNCHER, "on_head.py", "rayjob.yaml"])


@pytest.mark.process  # Some versions of Ray ask a shell.
@pytest.mark.parametrize("name", LAUNCHER)
def test_the_launcher_takes_a_file(name: str) -> None:
    """Ray's own preparation and schema accept it, with every default filled in."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(load(name))
    validate_config(prepared)
    assert prepared["head_node_type"] in prepared["available_node_types"]


@pytest.mark.parametrize("name", LAUNCHER)
def test_the_project_is_where_on_head_looks_for_it(name: str) -> None:
    """The folder is mounted from the caller's, without what would make it large."""
    content = load(name)
    assert content["file_mounts"]["~/rl_eval_project"] == "."
    assert "**/.git" in content["rsync_exclude"]
    assert 'Path.home() / "rl_eval_project"' in (FOLDER / "on_head.py").read_text()


@pytest.mark.parametrize("name", ["aws.yaml", "onprem.yaml"])
def test_machines_of_a_network_ask_for_a_token(name: str) -> None:
    """Every ray start says so, since otherwise it would depend on Ray's version; and the token is there."""
    content = load(name)
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in content[key]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ray start ") for command in starts)
    assert content["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_the_loopback_file_leaves_other_clusters_alone() -> None:
    """`ray stop` ends every Ray process of the machine."""
    content = load("loopback.yaml")
    assert not any("ray stop" in command for command in content["head_start_ray_commands"])
    assert content["worker_start_ray_commands"] == []


def test_the_job_of_kubernetes() -> None:
    """Its command line is one of ours, its config exists, and both kinds of pods have one image."""
    content = load("rayjob.yaml")
    assert (content["apiVersion"], content["kind"]) == ("ray.io/v1", "RayJob")
    command = shlex.split(content["spec"]["entrypoint"])
    assert command[:2] == ["rl-eval", "run"]
    assert {"--output", "--max-restarts"} < set(command)
    assert "--max-restarts" in CliRunner().invoke(app, ["run", "--help"]).output
    EvalConfig.from_yaml(ROOT / command[2]).build()
    assert list(yaml.safe_load(content["spec"]["runtimeEnvYAML"])) == ["working_dir"]
    cluster = content["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {container["image"] for pod in pods for container in pod["template"]["spec"]["containers"]}
    assert len(images) == 1
    assert json.dumps(cluster)
