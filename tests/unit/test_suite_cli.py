"""``rl-eval suite``: chosen cells, cells that cannot run, and failed episodes that run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_eval.cli.exits import ExitCode
from tests.unit.cli_world import call

SUITE = {
    "suite": "small",
    "shared": {"evaluation": {"num_episodes": 4, "max_episode_steps": 20}},
    "tasks": {"pole": {"environment": {"env": "CartPole-v1"}}},
    "policies": {
        "push": {"policy": "suite_policies:push", "policy_kwargs": {"bad": "bad"}},
        "net": {"checkpoints": "{task}/{seed}.zip", "seeds": [0, 1, 2]},
    },
}
POLICIES = '''
from pathlib import Path


def push(bad):
    """Push to the right; fail while a file exists."""

    def policy(observations):
        if Path(bad).exists():
            raise ValueError(bad)
        return [1] * len(observations)

    return policy
'''


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(SUITE))
    (tmp_path / "suite_policies.py").write_text(POLICIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "suite_policies", raising=False)
    return tmp_path


def shown(*args: str) -> Any:
    return json.loads(call("suite", *args, "--json").stdout)


def test_chosen_cells_are_printed_alone_and_decide_the_exit_code() -> None:
    outcome = call("suite", "run", "suite.yaml", "--cell", "pole/push", "--json")
    assert outcome.exit_code == ExitCode.COMPLETE
    assert [cell["policy"] for cell in json.loads(outcome.stdout)["cells"]] == ["push"]
    quiet = call("suite", "run", "suite.yaml", "--quiet")
    assert quiet.exit_code == ExitCode.PARTIAL
    assert "0.zip" in quiet.stderr


def test_the_total_of_the_progress_is_the_chosen_cells_without_a_result() -> None:
    assert "(1 of 1 cells)" in call("suite", "run", "suite.yaml", "--cell", "pole/push").stderr
    assert "(3 of 3 cells, 3 not complete)" in call("suite", "run", "suite.yaml").stderr


def test_the_plan_leaves_out_cells_that_cannot_run_and_says_why() -> None:
    outcome = call("suite", "plan", "suite.yaml", "--json")
    (row,) = json.loads(outcome.stdout)
    assert outcome.exit_code == ExitCode.USAGE
    assert (row["cells"], row["left"], row["errors"], row["episodes"]) == (4, 1, 3, 4)
    assert "0.zip" in row["problem"]
    assert row["minutes"] > 0


def test_failed_episodes_run_again_in_the_log_of_the_cell() -> None:
    Path("bad").touch()
    (cell,) = shown("run", "suite.yaml", "--cell", "pole/push")["cells"]
    assert cell["status"] == "failed"
    Path("bad").unlink()
    assert call("run", "--trust", "--retry", Path("suites/small") / cell["folder"]).exit_code == 0
    (again,) = shown("run", "suite.yaml", "--cell", "pole/push")["cells"]
    assert (again["status"], again["count"]) == ("complete", 4)


def test_one_command_runs_the_suite_and_writes_table_figures_and_page() -> None:
    outcome = call("suite", "run", "suite.yaml", "--cell", "pole/push", "--report")
    assert "pole/push" in outcome.stdout
    page = Path("suites/small/report/report.html")
    assert str(page) in outcome.stderr
    assert all(cell in page.read_text() for cell in ("pole/push", "pole/net/2"))
    assert page.with_name("scores.csv").exists()


def test_a_report_needs_the_folder_of_a_suite() -> None:
    outcome = call("suite", "report", "suite.yaml", "--out", "wrong")
    assert outcome.exit_code == ExitCode.USAGE
    assert not Path("wrong").exists()
