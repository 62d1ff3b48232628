"""Suites: strict files, the matrix of cells, and a folder to which every call only adds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_eval.atomic_write import write_text
from rl_eval.errors import ConfigError
from rl_eval.execution.handle import EvalHandle
from rl_eval.log import ownership
from rl_eval.results.loading import load
from rl_eval.suites.atari import human_scale
from rl_eval.suites.cells import Cell, PlannedCell, definition_of
from rl_eval.suites.definition import SuiteDefinition
from rl_eval.suites.ledger import CellState, Ledger, Score
from rl_eval.suites.result import SuiteResult
from rl_eval.suites.running import SuiteEvents
from rl_eval.suites.suite import Suite
from rl_eval.supervision.processes import machine_id
from tests.refused import refused, untold

BASE: Mapping[str, Any] = {
    "suite": "small",
    "shared": {"evaluation": {"num_episodes": 6, "max_episode_steps": 20}},
    "tasks": {"pole": {"environment": {"env": "CartPole-v1"}}, "hill": {"environment": {"env": "MountainCar-v0"}}},
    "policies": {"random": {"policy": "random"}},
}


SCALE = {"low": 0, "high": 1}


def changed(*path: str, to: Any) -> dict[str, Any]:
    """Return the base suite with another value at a place."""
    values: Any = json.loads(json.dumps(BASE))
    inner = values
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
    inner[path[-1]] = to
    return dict(values)


def table(result: SuiteResult) -> str:
    """Return everything that a result says."""
    return json.dumps(result.to_dict())


class Watched(SuiteEvents):
    """Events of a run: started and ended cells; stops after a number of starts."""

    def __init__(self, stop_after: int = 1_000) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.counts: list[int] = []
        self._stop_after = stop_after

    def on_begin(self, count: int) -> None:
        self.counts.append(count)

    def on_start(self, planned: PlannedCell, handle: EvalHandle) -> None:
        self.started.append(str(planned.cell))

    def on_end(self, state: CellState) -> None:
        self.ended.append(str(state.planned.cell))

    def stopping(self) -> bool:
        return len(self.started) >= self._stop_after


# ------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("values", "key", "marked"),
    [
        (changed("suit", to="x"), "suit", "suit:"),
        (changed("tasks", "pole", "lo", to=1), "tasks.pole.lo", "lo:"),
        (changed("tasks", "pole", "environment", "envv", to=1), "tasks.pole.environment.envv", "envv:"),
        (changed("tasks", "pole", "low", to=1.0), "tasks.pole", "pole:"),
        (changed("shared", "evaluation", "episodes", to=1), "shared.evaluation.episodes", "episodes:"),
        (changed("policies", "random", "polic", to="x"), "policies.random.polic", "polic:"),
        (changed("policies", "random", "seeds", to=[0, 1]), "policies.random.seeds", "seeds:"),
        (changed("policies", "random", "steps", to=[5]), "policies.random", "random:"),
        (changed("policies", "random", "checkpoints", to="a/{seed}"), "policies.random.seeds", "random:"),
        (changed("policies", "random", "checkpoints", to="a/{tsk}"), "policies.random.checkpoints", "checkpoints:"),
        (changed("policies", "random", "steps", to={"frist": 1}), "policies.random.steps.frist", "frist:"),
        (changed("policies", "random", "policy", to="my:step_{step}"), "policies.random", "random:"),
        (
            changed("policies", "random", to={"policy": "my:seed_{seed}", "seeds": [1, 1]}),
            "policies.random.seeds",
            "seeds:",
        ),
        (changed("tasks", "pole", "human_normalized", to=True), "tasks.pole.human_normalized", "human_normalized:"),
        (
            changed("tasks", "pole", to={"environment": {"env": "ALE/Pong-v5"}, "human_normalized": True, **SCALE}),
            "tasks.pole.human_normalized",
            "human_normalized:",
        ),
        (changed("skip", to=[{"task": "pole"}]), "skip.0.why", "task:"),
        (changed("skip", to=[{"task": "bowl", "why": "x"}]), "skip.0.task", "task:"),
        (changed("compare", "baseline", to="ppo"), "compare.baseline", "baseline:"),
        (changed("aggregate", "unit", to="seed"), "aggregate.unit", "unit:"),
        (changed("suite", to=".."), "suite", "suite:"),
        (changed("suite", to="."), "suite", "suite:"),
        (changed("tasks", "..", to={}), "tasks....[key]", "..:"),
        (changed("policies", "...", to={}), "policies.....[key]", "'...':"),
        (changed("version", to=0), "version", "version:"),
        (changed("tasks", to={}), "tasks", "tasks:"),
        (changed("tasks", "a/b", to={}), "tasks.a/b.[key]", "a/b:"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_place(
    tmp_path: Path, values: dict[str, Any], key: str, marked: str
) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    with refused(ConfigError, key=key) as caught:
        SuiteDefinition.from_yaml(path)
    line, column = map(int, str(caught.value).removeprefix(f"{path}:").split(":")[:2])
    assert path.read_text().splitlines()[line - 1][column - 1 :].startswith(marked)


def test_a_suite_of_a_catalogue_has_the_tasks_that_it_names() -> None:
    values = changed("tasks", to={"cat-*": {"catalogue": f"{__name__}:CATALOGUE", "pick": ["b*"], "low": 0, "high": 1}})
    suite = SuiteDefinition.from_dict(values)
    assert {name: task.environment["env"] for name, task in suite.tasks.items()} == {"cat-bowl": "B-v0"}
    assert suite.tasks["cat-bowl"].high == 1
    with refused(ConfigError, key="tasks.cat-*.pick"):
        SuiteDefinition.from_dict(changed("tasks", "cat-*", to={"catalogue": f"{__name__}:CATALOGUE", "pick": ["z"]}))


def test_a_game_is_human_normalized_wherever_it_is_named() -> None:
    shared = {"environment": {"env": "ALE/Pong-v5"}}
    tasks = {"easy": {"human_normalized": True}}
    scales = SuiteDefinition.from_dict({**BASE, "shared": shared, "tasks": tasks}).scales
    assert scales == {"easy": human_scale("Pong")}


def test_one_pattern_picks_from_a_catalogue() -> None:
    values = changed("tasks", to={"*": {"catalogue": f"{__name__}:CATALOGUE", "pick": "a*"}})
    assert [*SuiteDefinition.from_dict(values).tasks] == ["apple"]


@pytest.mark.parametrize(
    ("tasks", "key"),
    [
        ({"one": {"catalogue": f"{__name__}:CATALOGUE"}}, "tasks.one"),
        ({"*": {"catalogue": f"{__name__}:CATALOGUE"}, "bowl": {}}, "tasks.*"),
        ({"*": {"catalogue": f"{__name__}:FLAT"}}, "tasks.*.catalogue"),
        ({"*": {"catalogue": f"{__name__}:CATALOGUE", "pick": 3}}, "tasks.*.pick"),
    ],
)
def test_a_catalogue_that_gives_no_tasks_of_their_own_names_is_refused(tasks: dict[str, Any], key: str) -> None:
    with refused(ConfigError, key=key):
        SuiteDefinition.from_dict({**BASE, "tasks": tasks})


FLAT = {"apple": "A-v0"}
CATALOGUE = {"apple": {"environment": {"env": "A-v0"}}, "bowl": {"environment": {"env": "B-v0"}}}


# ------------------------------------------------------------------ the matrix


def matrix(tmp_path: Path, **policy: Any) -> list[str]:
    values = changed("policies", "random", to={"policy": "my:make", **policy})
    return [str(one.cell) for one in Suite.from_dict(values, tmp_path).cells if one.cell.task == "pole"]


def test_cells_are_named_by_what_is_on_disk(tmp_path: Path) -> None:
    for seed, step in [(0, 5), (0, 10), (0, 15), (1, 10)]:
        path = tmp_path / "runs" / "pole" / f"s{seed}" / f"step_{step:04}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    there = {"checkpoints": "runs/{task}/s{seed}/step_{step}.pt", "seeds": [0, 1]}
    assert matrix(tmp_path, **there) == ["pole/random/0/15", "pole/random/1/10"]
    assert matrix(tmp_path, **there, steps="all") == [f"pole/random/0/{step}" for step in (5, 10, 15)] + [
        "pole/random/1/10"
    ]
    assert matrix(tmp_path, **there, steps=[10]) == ["pole/random/0/10", "pole/random/1/10"]
    ranged = matrix(tmp_path, **there, steps={"first": 5, "stride": 10})
    assert ranged == ["pole/random/0/5", "pole/random/0/15", "pole/random/1/5"]
    some = matrix(tmp_path, **there, steps={"first": 6})
    assert some == ["pole/random/0/10", "pole/random/0/15", "pole/random/1/10"]
    late = Suite.from_dict(
        changed("policies", "late", to={"policy": "my:make", **there, "steps": {"first": 11}}), tmp_path
    )
    assert [not untold(one.problem, "10") for one in late.cells if str(one.cell) == "pole/late/1"] == [True]
    assert matrix(tmp_path) == ["pole/random"]
    again = tmp_path / "runs" / "7" / "0_70.pt"
    again.parent.mkdir()
    again.touch()
    twice = {"checkpoints": "runs/{step}/{seed}_{step}0.pt", "seeds": [0]}
    assert matrix(tmp_path, **twice, steps="all") == ["pole/random/0/7"]


def test_a_checkpoint_that_is_missing_is_an_error_of_its_cell(tmp_path: Path) -> None:
    values = changed("policies", "ppo", to={"policy": "my:make", "checkpoints": "{task}.pt"})
    (tmp_path / "pole.pt").touch()
    missing = [str(one.cell) for one in Suite.from_dict(values, tmp_path).cells if one.problem]
    assert missing == ["hill/ppo"]


def test_a_skipped_cell_has_its_reason() -> None:
    values = changed("skip", to=[{"task": "h*", "why": "no camera"}])
    suite = Suite.from_dict(values)
    assert [str(one.cell) for one in suite.cells] == ["pole/random"]
    assert [(str(cell), why) for cell, why in suite.result("nowhere").skipped] == [("hill/random", "no camera")]


def test_names_and_digests_tell_cells_apart() -> None:
    cells = [Cell("a", "b"), Cell("a", "b", 1), Cell("a", "b", None, 1), Cell("a", "b", 1, 1), Cell("b", "a")]
    assert len({cell.folder for cell in cells}) == len({str(cell) for cell in cells}) == len(cells)
    assert Cell("hopper", "my ppo", 1).folder.startswith("cells/hopper-my-ppo-1-"), "a folder is found by its name"


# ------------------------------------------------------------------ running


def test_each_cell_is_the_evaluation_that_its_settings_give(tmp_path: Path) -> None:
    result = Suite.from_dict(BASE).run(tmp_path)
    assert result.complete
    for state in result.cells:
        logged = load(tmp_path / state.planned.cell.folder)
        assert state.score is not None
        assert logged.fingerprint == state.score.fingerprint
        assert state.score.mean == logged.mean_return
        assert logged.provenance["config"]["evaluation"]["num_episodes"] == 6


def test_the_same_call_only_adds(tmp_path: Path) -> None:
    first = Suite.from_dict(BASE).run(tmp_path)
    again = Watched()
    assert table(Suite.from_dict(BASE).run(tmp_path, events=again)) == table(first)
    assert again.started == []
    more = Watched()
    Suite.from_dict(changed("tasks", "acro", to={"environment": {"env": "Acrobot-v1"}})).run(tmp_path, events=more)
    assert more.started == ["acro/random"]


def test_a_suite_that_was_stopped_continues_to_the_same_table(tmp_path: Path) -> None:
    undisturbed = Suite.from_dict(BASE).run(tmp_path / "a")
    stopped = Suite.from_dict(BASE).run(tmp_path / "b", events=Watched(stop_after=1))
    assert not stopped.complete
    assert table(Suite.from_dict(BASE).run(tmp_path / "b")) == table(undisturbed)


def test_a_score_is_made_again_from_the_log(tmp_path: Path) -> None:
    first = Suite.from_dict(BASE).run(tmp_path)
    for score in tmp_path.glob("cells/*/score.json"):
        score.write_text("{")
    assert table(Suite.from_dict(BASE).run(tmp_path)) == table(first)


@pytest.mark.parametrize(
    "values",
    [
        changed("tasks", "pole", "environment", "env_kwargs", to={"sutton_barto_reward": True}),
        changed("shared", "evaluation", "num_episodes", to=7),
        changed("policies", "random", "deterministic", to=False),
    ],
)
def test_a_cell_is_never_changed(tmp_path: Path, values: dict[str, Any]) -> None:
    first = Suite.from_dict(BASE).run(tmp_path)
    events = Watched()
    result = Suite.from_dict(values).run(tmp_path, events=events)
    assert events.started == []
    assert "error" in {state.status for state in result.cells}
    assert table(Suite.from_dict(BASE).run(tmp_path)) == table(first)


@pytest.mark.parametrize("steps", ["all", "last", {"first": 5}])
def test_a_result_stays_when_its_checkpoint_is_deleted(tmp_path: Path, steps: Any) -> None:
    """As where a training keeps only its last checkpoints."""
    for step in ("05", "10"):
        (tmp_path / f"pole_{step}").write_text("0")
    policy = {"policy": f"{__name__}:constant", "policy_kwargs": {"path": "{checkpoint}"}, "steps": steps}
    values = changed("policies", to={"ppo": {**policy, "checkpoints": "{task}_{step}"}})
    values["tasks"] = {"pole": values["tasks"]["pole"]}
    before = Suite.from_dict(values, tmp_path).run(tmp_path / "out")
    assert before.complete
    (tmp_path / "pole_10").unlink()
    after = Suite.from_dict(values, tmp_path).run(tmp_path / "out")
    assert after.to_dict() == before.to_dict()


def test_a_checkpoint_that_changed_is_an_error_of_its_cell(tmp_path: Path) -> None:
    values = changed("policies", to={"net": {"policy": f"{__name__}:constant", "checkpoints": "{task}.txt"}})
    values["policies"]["net"] |= {"policy_kwargs": {"path": "{checkpoint}"}}
    for task in ("pole", "hill"):
        (tmp_path / f"{task}.txt").write_text("0")
    assert Suite.from_dict(values, tmp_path).run(tmp_path / "out").complete
    (tmp_path / "pole.txt").write_text("1")
    states = Suite.from_dict(values, tmp_path).run(tmp_path / "out").cells
    assert [state.status for state in states] == ["error", "complete"]
    (tmp_path / "pole.txt").unlink()  # A trainer may remove it later.
    (tmp_path / "hill.txt").unlink()
    assert Suite.from_dict(values, tmp_path).result(tmp_path / "out").complete


def test_a_condition_file_that_changed_is_an_error_of_its_cells(tmp_path: Path) -> None:
    values = changed("conditions", to="starts.json")
    values["tasks"]["hill"]["evaluation"] = {"conditions": [{"id": "x", "light": 1}]}
    suite, rows = Suite.from_dict(values, tmp_path), tmp_path / "starts.json"
    rows.write_text('[{"id": "a", "low": -0.01, "high": 0.01}]')
    for planned in suite.cells:
        ledger = Ledger(tmp_path / "out", suite.definition)
        ledger.claim(planned)
        write_text(ledger.folder_of(planned) / "manifest.json", "{}")
    rows.write_text('[{"id": "a", "low": -0.02, "high": 0.02}]')
    states = Suite.from_dict(values, tmp_path).result(tmp_path / "out").cells
    assert [state.status for state in states] == ["error", "missing"]


def test_conditions_of_a_task_replace_those_of_the_suite() -> None:
    own = {"axes": {"light": [1, 2]}}
    values = changed("conditions", to={"rows": [{"id": "x", "light": 1}], "counts": {"x": 2}})
    values["tasks"]["hill"]["evaluation"] = {"conditions": own}
    suite = Suite.from_dict(values)
    found = [definition_of(suite.definition, one)["evaluation"]["conditions"] for one in suite.cells]
    assert found == [values["conditions"], own]


def constant(path: str) -> Callable[[Any], Any]:
    """Return a policy that takes the action in a file."""
    action = int(Path(path).read_text())
    return lambda observations: [action] * len(observations)


@pytest.mark.parametrize("other", [{"suite": "other"}, {"version": 2}])
def test_another_suite_or_version_does_not_share_a_folder(tmp_path: Path, other: dict[str, Any]) -> None:
    Suite.from_dict(BASE).run(tmp_path, cells=["pole"])
    with refused(ConfigError, key="--out"):
        Suite.from_dict({**BASE, **other}).run(tmp_path)


def test_of_two_suites_that_begin_at_once_in_one_folder_one_is_refused(tmp_path: Path) -> None:
    first, second = (Ledger(tmp_path, SuiteDefinition.from_dict({**BASE, "suite": name})) for name in ("one", "two"))
    first.begin()
    first.begin()
    with refused(ConfigError, key="--out"):
        second.begin()


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    values = changed("tasks", to={"gone": {"environment": {"env": "Gone-v0"}}, **BASE["tasks"]})
    values["policies"]["broken"] = {"policy": f"{__name__}:broken"}
    result = Suite.from_dict(values).run(tmp_path)
    done = {str(state.planned.cell): state for state in result.cells}
    assert [name for name, state in done.items() if state.score] == ["pole/random", "hill/random"]
    assert not untold(done["gone/random"].reason, "Gone-v0")
    assert not untold(done["pole/broken"].reason, "KeyError", "wheel")
    again = Watched()
    Suite.from_dict(values).run(tmp_path, events=again)
    assert "pole/random" not in again.started


def broken() -> Any:
    """Build no policy."""
    raise KeyError("wheel")


def test_a_cell_whose_first_attempt_failed_runs_with_a_corrected_definition(tmp_path: Path) -> None:
    wrong = Suite.from_dict(changed("tasks", "pole", "environment", "env", to="CartPol-v1"))
    assert not wrong.run(tmp_path, cells=["pole"]).complete
    assert Suite.from_dict(BASE).run(tmp_path).complete
    assert wrong.run(tmp_path).cells[0].status == "error"


def test_a_cell_of_a_machine_that_died_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 0.1)
    suite = Suite.from_dict(BASE)
    dead = ownership.Claim(1, "elsewhere", 7, "12", "another boot", "then")
    write_text(tmp_path / suite.cells[0].cell.folder / "owners" / "000001", json.dumps(asdict(dead)))
    assert suite.result(tmp_path).cells[0].status == "running"
    events = Watched()
    assert suite.run(tmp_path, events=events).complete
    assert events.started == ["hill/random", "pole/random"]


class Fenced(Watched):
    """Events of a run whose first log is taken over by a process that then dies."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_start(self, planned: PlannedCell, handle: EvalHandle) -> None:
        super().on_start(planned, handle)
        if len(self.started) == 1:
            later = ownership.Claim(2, "here", 2**22 + 1, "12", machine_id(), "then")
            write_text(self._folder / planned.cell.folder / "owners" / "000002", json.dumps(asdict(later)))


def test_a_cell_that_another_process_took_over_is_not_an_error(tmp_path: Path) -> None:
    events = Fenced(tmp_path)
    assert Suite.from_dict(BASE).run(tmp_path, events=events).complete
    assert events.started == ["pole/random", "hill/random", "pole/random"]
    assert events.ended == ["hill/random", "pole/random"]


def test_another_kind_of_score_is_made_from_the_log(tmp_path: Path) -> None:
    returns = Suite.from_dict(BASE).run(tmp_path)
    success = Suite.from_dict(changed("tasks", "pole", "score", to="success_once"))
    assert [state.status for state in success.result(tmp_path).cells] == ["failed", "complete"]
    for state in returns.cells:
        place = tmp_path / state.planned.cell.folder / "score.json"
        place.write_text(place.read_text().replace('"return"', '"success_once"'))
    assert table(Suite.from_dict(BASE).result(tmp_path)) == table(returns)


def test_a_score_that_was_not_complete_follows_its_log(tmp_path: Path) -> None:
    first = Suite.from_dict(BASE).run(tmp_path)
    place = tmp_path / first.cells[0].planned.cell.folder / "score.json"
    place.write_text(place.read_text().replace('"complete"', '"partial"'))
    assert table(Suite.from_dict(BASE).result(tmp_path)) == table(first)


@pytest.mark.parametrize("found", ["", "{"])
def test_a_folder_that_was_only_begun_is_joined(tmp_path: Path, found: str) -> None:
    (tmp_path / "suite.json").write_text(found)
    Suite.from_dict(BASE).run(tmp_path, cells=["pole"])
    with refused(ConfigError, key="--out"):
        Suite.from_dict({**BASE, "version": 2}).result(tmp_path)


@pytest.mark.parametrize("found", ["[1]", "mine: 1", '{"a": 1,}', '{"name": "my app"}'])
def test_a_suite_file_of_another_program_is_left_alone(tmp_path: Path, found: str) -> None:
    (tmp_path / "suite.json").write_text(found)
    with refused(ConfigError, key="--out"):
        Suite.from_dict(BASE).run(tmp_path)
    assert (tmp_path / "suite.json").read_text() == found


def test_the_steps_of_a_folder_do_not_come_from_foreign_files(tmp_path: Path) -> None:
    suite = Suite.from_dict(BASE)
    suite.run(tmp_path)
    for name in ("cell.json", "score.json"):
        write_text(tmp_path / "cells" / "0" / name, '{"cell": "pole/random/0/-"}')
    assert suite.result(tmp_path).complete


def test_a_result_outlives_a_checkpoint_whose_type_was_guessed(tmp_path: Path) -> None:
    values = changed("policies", to={"net": {"checkpoints": "{task}.zip"}})
    suite = Suite.from_dict(values, tmp_path)
    for planned in suite.cells:
        folder = tmp_path / "out" / planned.cell.folder
        write_text(folder / "manifest.json", "{}")
        write_text(
            folder / "cell.json",
            json.dumps(
                {"cell": str(planned.cell), "definition": definition_of(suite.definition, planned), "checkpoint": None}
            ),
        )
        write_text(
            folder / "score.json", json.dumps(asdict(Score("return", "complete", "", "f", "exact", 1, (1.0,), 1.0)))
        )
    assert suite.result(tmp_path / "out").complete


def test_a_cell_that_raised_is_an_error_and_runs_again(tmp_path: Path) -> None:
    values = changed("policies", to={"broken": {"policy": f"{__name__}:broken"}})
    states = Suite.from_dict(values).run(tmp_path, cells=["pole"]).cells
    assert [(state.status, state.open) for state in states] == [("error", True)]


def test_a_suite_without_cells_is_refused() -> None:
    with refused(ConfigError, key="skip"):
        Suite.from_dict(changed("skip", to=[{"why": "no time"}])).cells  # noqa: B018


def test_success_is_a_score_only_if_it_is_reported(tmp_path: Path) -> None:
    result = Suite.from_dict(changed("tasks", "pole", "score", to="success_once")).run(tmp_path, cells=["pole"])
    assert [state.status for state in result.cells] == ["failed"]


def test_chosen_cells_run_alone(tmp_path: Path) -> None:
    events = Watched()
    result = Suite.from_dict(BASE).run(tmp_path, cells=["hill/random"], events=events)
    assert events.started == [str(state.planned.cell) for state in result.cells] == ["hill/random"]
    Suite.from_dict(BASE).run(tmp_path, events=events)
    assert events.counts == [1, 1]
    with refused(ConfigError, key="--cell", value="hill/randon") as caught:
        Suite.from_dict(BASE).run(tmp_path, cells=["hill/randon"])
    assert "hill/random" in caught.value.fix


# ------------------------------------------------------------------ processes


def command(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    args = [sys.executable, "-m", "rl_eval", "suite", "run", "suite.yaml", "--out", "out", "--quiet", *more]
    return subprocess.Popen(args, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300)
def test_killed_three_times_and_run_by_two_processes_it_gives_the_same_table(tmp_path: Path) -> None:
    shared = {"evaluation": {"num_episodes": 60}}
    tasks = {name: {"environment": {"env": env}} for name, env in [("pole", "CartPole-v1"), ("acro", "Acrobot-v1")]}
    values = {**BASE, "shared": shared, "tasks": tasks}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(values))
    undisturbed = Suite.from_yaml(tmp_path / "suite.yaml").run(tmp_path / "calm")
    for _ in range(3):
        running = command(tmp_path)
        cells = len([*(tmp_path / "out").glob("cells/*/segments/*")])
        while running.poll() is None and len([*(tmp_path / "out").glob("cells/*/segments/*")]) == cells:
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
        running.wait()
    pair = [command(tmp_path), command(tmp_path)]
    assert [one.wait() for one in pair] == [0, 0]
    assert table(Suite.from_yaml(tmp_path / "suite.yaml").result(tmp_path / "out")) == table(undisturbed)


def test_a_cell_of_another_process_is_left_to_it(tmp_path: Path) -> None:
    from rl_eval.log import EvaluationLog

    suite = Suite.from_dict(BASE)
    log = EvaluationLog.open(tmp_path / suite.cells[0].cell.folder)
    events = Watched(stop_after=1)
    result = suite.run(tmp_path, events=events)
    log.close()
    assert events.started == ["hill/random"]
    assert result.cells[0].status == "running"
