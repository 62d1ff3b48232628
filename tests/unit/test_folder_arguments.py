"""Folders as people write them: ``.``, ``..``, with a slash at the end, and a link; in every command that takes one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rl_eval.policies.mlp import MLPActor
from rl_eval.reports.view import RunServer
from tests.unit.cli_world import call

OPTIONS = ("--env", "CartPole-v1", "--policy", "random", "-n", "6", "--envs-per-runner", "2")


WATCHED = (
    *("--env", "CartPole-v1", "--policy", "rl_eval.policies.mlp:make_mlp", "-n", "4"),
    *("--once", "--poll-s", "0.01", "--held-out", "0"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, with log and result."""
    folder = tmp_path_factory.mktemp("made") / "one"
    outcome = call("run", *OPTIONS, "--output", folder)
    assert outcome.exit_code == 0, outcome.output
    save_file(MLPActor(4, 2).state_dict(), folder / "step_1.safetensors")
    return folder


@pytest.fixture(params=[".", "..", "one/", "link"])
def given(request: pytest.FixtureRequest, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the folder ``one`` of the run is written in the working directory."""
    text = str(request.param)
    shutil.copytree(made, tmp_path / "one")
    (tmp_path / "link").symlink_to("one")
    monkeypatch.chdir({".": tmp_path / "one", "..": tmp_path / "one" / "segments"}.get(text, tmp_path))
    return text


@pytest.mark.parametrize(
    "command",
    [
        ["show", "PATH"],
        ["compare", "PATH", "PATH"],
        ["replay", "PATH", "--episodes", "1", "--trust"],
        pytest.param(["replay", "PATH", "--video", "--episodes", "1", "--trust"], marks=pytest.mark.process),
        ["run", "--retry", "PATH", "--trust"],
        ["watch", *WATCHED, "PATH"],
        ["run", *OPTIONS, "--output", "PATH"],
        ["run", *OPTIONS, "-o", "PATH", "--force"],
    ],
    ids=" ".join,
)
def test_the_folder_is_that_of_the_run(given: str, command: Sequence[str], tmp_path: Path) -> None:
    """All commands find it, and write into it."""
    outcome = call(*(given if word == "PATH" else word for word in command))
    assert outcome.exit_code == 0, outcome.output
    assert any((tmp_path / "one" / "videos").glob("*.mp4")) == ("--video" in command)
    assert (tmp_path / "one" / "eval" / "curve.csv").is_file() == (command[0] == "watch")


def test_a_report_has_the_name_of_the_folder(given: str, tmp_path: Path) -> None:
    """Of the folder itself, whatever the path; from ``result.json`` as well."""
    for path in (given, os.path.join(given, "result.json")):  # noqa: PTH118 - As it is typed.
        outcome = call("report", path, "-o", tmp_path / "page.html", "--force")
        assert outcome.exit_code == 0, outcome.output
    assert call("report", given, given, "-o", tmp_path / "page.html").exit_code == 0
    assert "one (2)" in (tmp_path / "page.html").read_text()


def test_a_file_without_a_name_is_called_like_the_folder(given: str, tmp_path: Path) -> None:
    """``export`` writes beside the user, under the folder's name or that of the link."""
    assert call("export", given, "--to", "csv").exit_code == 0
    assert Path("link.csv" if given == "link" else "one.csv").is_file()


def test_a_site_shows_the_run(given: str) -> None:
    """``rl-eval view``: the index, and the page of a run in the folder itself."""
    with RunServer(given) as server:
        [run] = re.findall(r'"report\?run=(\w+)"', server.at("/"))
        assert server.at(f"/report?run={run}")
