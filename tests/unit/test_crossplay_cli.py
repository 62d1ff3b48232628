"""``rl-eval crossplay``, with the example of its page in the docs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from rl_eval.cli import app
from tests.unit.cli_world import printed
from tests.unit.pages_world import DOCS, blocks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files of the example."""
    for block in blocks(DOCS / "multi_agent.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "dice", raising=False)
    return tmp_path


def call(*args: str) -> Result:
    return CliRunner().invoke(app, ["crossplay", "dice.yaml", *args])


def test_files_and_json_say_the_same(folder: Path) -> None:
    """``--json`` prints nothing but what ``crossplay.json`` holds, with a line break; ``-q`` prints a line."""
    done = call("--json", "-o", "out", "-n", "60")
    assert done.exit_code == 0, done.output
    assert done.stdout == Path("out/crossplay.json").read_text()
    read = printed("crossplay", done.stdout)
    assert (read["status"], read["num_games"], read["num_seeds"]) == ("complete", 60, 30)
    assert [len(turn) for turn in read["plan"]["matchups"]] == [2, 2, 2]
    files = {path.name for path in Path("out").iterdir()}
    written = {"alpharank.npz", "crossplay.json", "episodes.parquet", "openskill.json", "result.json"}
    assert files == written | {"manifest.json", "owners", "segments"}
    assert np.load("out/alpharank.npz")["payoffs"].shape == (2, 3, 3)
    assert len(json.loads(Path("out/openskill.json").read_text())["matches"]) == 60
    done = call("-q", "-o", "again", "-n", "60")
    assert (done.exit_code, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    assert {path.name for path in Path("again").iterdir()} == files


@pytest.mark.parametrize("name", ["crossplay.json", "openskill.json", "alpharank.npz"])
def test_a_file_of_another_program_is_left_alone(folder: Path, name: str) -> None:
    Path("out").mkdir()
    Path("out", name).write_text("mine")
    assert call("-q", "-o", "out", "-n", "60").exit_code == 2
    assert [path.name for path in Path("out").iterdir()] == [name]
    assert call("-q", "-o", "out", "-n", "60", "--force").exit_code == 0


def test_a_damaged_log_is_told_before_a_game_is_played(folder: Path) -> None:
    """Exit code 4, and what to do."""
    assert call("--output", "log", "-q", "--set", "evaluation.num_episodes=60").exit_code == 0
    Path("log/manifest.json").write_text("{}")
    done = call("--output", "log", "--set", "evaluation.num_episodes=60")
    assert done.exit_code == 4, done.output
    assert "manifest.json" in done.stderr


def test_a_complete_run_is_not_played_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command prints the same numbers, and plays nothing; another one is refused."""
    first = call("--output", "log", "--json")
    monkeypatch.setattr("rl_eval.execution.group.EvalRunnerGroup", None)
    again = call("--output", "log", "--json")
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert call("-o", "log", "-n", "60").exit_code == 2


@pytest.mark.parametrize(
    ("assignments", "named"),
    [
        (("evaluation.matchups=null", "evaluation.symmetric=false"), "evaluation.matchups"),
        (("policy.policies={plain: {policy: 'dice:always'}}",), "policies"),
        (("policy.policies={}",), "policies"),
        (("evaluation.matchups=[[plain, crooked]]",), "crooked"),
        (("evaluation.matchups=[[plain, even], [plain]]",), "1 seats"),
        (("evaluation.matchups=[[plain, even, loaded]]",), "3 policies"),
        (("evaluation.num_episodes=5",), "evaluation.num_episodes is 5"),
        (("evaluation.num_episodes=601",), "evaluation.num_episodes is 601"),
    ],
)
def test_who_cannot_play_is_told_so(folder: Path, assignments: tuple[str, ...], named: str) -> None:
    """Exit code 2, before a game is played, and nothing is left behind."""
    done = call(*(part for assignment in assignments for part in ("--set", assignment)))
    assert done.exit_code == 2, done.output
    assert named in " ".join(done.stderr.split())
    assert not list(Path("runs").glob("*"))


def broken(text: str) -> Any:
    source = Path("dice.py").read_text()
    Path("dice.py").write_text(
        source.replace("    def step(self, actions):\n", f"    def step(self, actions):\n{text}")
    )


def test_failed_games_are_counted(folder: Path) -> None:
    """Exit code 1; the numbers are those of whole seeds, and the ordinary report stands beside them."""
    broken("        if self.faces[0] == 5:\n            raise RuntimeError('planted')\n")
    done = call()
    assert done.exit_code == 1, done.output
    assert "planted" in done.stdout
    assert json.loads(Path("runs/latest/crossplay.json").read_text())["num_missing"] > 0


def test_games_that_all_fail_leave_the_ordinary_report(folder: Path) -> None:
    """Exit code 3, the reason, and a result that can be read."""
    broken("        raise RuntimeError('planted')\n")
    done = call("--json")
    assert done.exit_code == 3, done.output
    assert "planted" in printed("crossplay", done.stdout)["reason"]
    assert not Path("runs/latest/crossplay.json").exists()
    assert Path("runs/latest/result.json").exists()
