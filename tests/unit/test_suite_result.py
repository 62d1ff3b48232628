"""Result and report of a suite, from scores in its folder."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from rich.console import Console

from rl_eval.atomic_write import write_bytes
from rl_eval.errors import ConfigError
from rl_eval.reports.html import GENERATOR
from rl_eval.suites.definition import SuiteDefinition
from rl_eval.suites.ledger import SCORE_FILE, Score
from rl_eval.suites.report import PAGE, record_cell_videos, write_report
from rl_eval.suites.result import SuiteResult
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.suite import Suite
from rl_eval.suites.tables import Table
from tests.refused import refused, untold


def suite_of(
    folder: Path, num_tasks: int, num_policies: int, num_seeds: int, steps: int = 0, extra: Any = None, **more: Any
) -> Suite:
    """Return a suite whose cells have scores in its folder, drawn by their names."""
    method: dict[str, Any] = {"policy": "my:make", "policy_kwargs": {"seed": "{seed}"}, "seeds": list(range(num_seeds))}
    if steps:
        method |= {"checkpoints": "ck/{seed}-{step}", "steps": [1000 * step for step in range(1, steps + 1)]}
    values = {
        "suite": "made",
        "tasks": {f"t{number}": {"environment": {"env": "my:Env"}, "low": 0, "high": 1} for number in range(num_tasks)},
        "policies": {f"p{number}": method for number in range(num_policies)} | ({"p9": extra} if extra else {}),
        "aggregate": {"unit": "run"},
        **more,
    }
    suite = Suite.from_dict(values)
    for planned in suite.cells:
        rng = np.random.default_rng(int(planned.cell.folder[-16:], 16))
        values_of_cell = tuple((rng.random(10) + 0.1 * int(planned.cell.policy[1:])).tolist())
        place = folder / planned.cell.folder / SCORE_FILE
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(asdict(Score("return", "complete", "", "f", "exact", 10, values_of_cell, 1.0))))
    return suite


def test_every_table_is_there_and_equal_results_give_equal_files(tmp_path: Path) -> None:
    suite = suite_of(tmp_path / "made", 3, 2, 3, steps=2, compare={"baseline": "p0"})
    written = []
    for name in ("one", "two"):
        result = suite.result(tmp_path / "made")
        files, notes = write_report(result, tmp_path / name, tmp_path / "made")
        assert notes == []
        written.append({path.name: path.read_bytes() for path in files})
    assert written[0] == written[1]
    tables = suite.result(tmp_path / "made").tables
    assert list(tables) == ["aggregates", "improvement", "tasks", "profiles", "curves"]
    assert all(isinstance(table, Table) for table in tables.values())
    assert set(written[0]) == {
        "tables.csv", "tables.md", "tables.tex", "figures.pdf", "scores.csv", "rliable.json", "marl_eval.json", PAGE,
    }  # fmt: skip
    lines = list(csv.DictReader(io.StringIO(written[0]["tables.csv"].decode(), newline="")))
    assert {line["table"] for line in lines} == set(tables)
    assert written[0]["tables.tex"].count(b"begin{tabular}") == written[0]["tables.md"].count(b"## ") == 4
    assert len(re.findall(rb"/Type /Page\b", written[0]["figures.pdf"])) == 5


@pytest.mark.parametrize(("num_seeds", "unit"), [(2, "run"), (4, "run"), (12, "run"), (3, "episode")])
def test_captions_are_short_and_every_definition_is_in_the_page(tmp_path: Path, num_seeds: int, unit: str) -> None:
    """At most 25 words, whatever the intervals; how they are made is told elsewhere."""
    suite = suite_of(tmp_path / "made", 2, 2, num_seeds, steps=2, aggregate={"unit": unit})
    result = suite.result(tmp_path / "made")
    files, _ = write_report(result, tmp_path / "report", tmp_path / "made")
    texts = {path.name: path.read_text() for path in files if path.suffix in (".html", ".tex")}
    found = re.findall(r"caption\{(.*)\}\n", texts["tables.tex"])
    assert len(found) == 4
    for caption in [*found, *(table.caption for table in result.tables.values() if isinstance(table, Table))]:
        assert 4 < len(caption.split()) <= 25, caption
    for table in result.tables.values():
        assert isinstance(table, Table)
        assert table.details in html.unescape(texts["report.html"])
    assert "mean of the middle half" in texts["tables.tex"]


def test_the_page_starts_with_a_dot_and_an_interval_per_task_and_policy(tmp_path: Path) -> None:
    """Before any note. Without an interval, the numbers of both seeds are marked."""
    for num_seeds in (2, 3):
        suite = suite_of(tmp_path / f"made{num_seeds}", 3, 2, num_seeds)
        (tmp_path / f"made{num_seeds}" / suite.cells[0].cell.folder / SCORE_FILE).unlink()
        result = suite.result(tmp_path / f"made{num_seeds}")
        files, _ = write_report(result, tmp_path / f"report{num_seeds}", tmp_path / f"made{num_seeds}")
        text = next(path for path in files if path.name == PAGE).read_text()
        before, _, _ = text.partition('class="note')
        assert result.page.notes
        assert before.count('<circle class="point') == 6
        assert before.count('class="whisker"') == (0 if num_seeds == 2 else 5)
        assert before.count('<circle class="part"') == (10 if num_seeds == 2 else 2)
        table = result.tables["tasks"]
        assert isinstance(table, Table)
        assert all(html.escape(table.text(*pair)) in before for pair in table.cells)


def test_bounds_of_the_tasks_are_those_of_the_scores(tmp_path: Path) -> None:
    """Success is in [0, 1]. Scores outside of the bounds are a problem of each table, and end nothing."""
    bounds = {"shared": {"evaluation": {"return_bounds": [0, 2]}}}
    result = suite_of(tmp_path / "made", 2, 1, 3, **bounds).result(tmp_path / "made")
    assert result.normalized_scores.bounds == {"t0": (0.0, 2.0), "t1": (0.0, 2.0)}
    tasks = {"t": {"environment": {"env": "my:Env"}, "score": "success_once"}}
    suite = {"suite": "made", "tasks": tasks, "policies": {"p": {"policy": "my:make"}}}
    assert SuiteDefinition.from_dict(suite).bounds == {"t": (0.0, 1.0)}
    bounds["shared"]["evaluation"]["return_bounds"] = [0, 0.1]
    wrong = suite_of(tmp_path / "wrong", 2, 2, 3, steps=2, **bounds).result(tmp_path / "wrong")
    assert {getattr(table, "key", None) for table in wrong.tables.values()} == {"bounds"}
    assert wrong.page.notes


def test_the_numbers_are_those_of_the_last_step(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 1, 1, 2, steps=2)
    result = suite.result(tmp_path)
    last = [np.mean(state.score.values) for state in result.cells if state.score and state.planned.cell.step == 2000]
    table = result.tables["tasks"]
    assert isinstance(table, Table)
    assert table.cells["t0", "p0"].value == pytest.approx(np.mean(last), abs=1e-12)


def test_cells_without_a_result_are_named_and_the_others_are_counted(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 2, 2, 3)
    (tmp_path / suite.cells[0].cell.folder / SCORE_FILE).unlink()
    result = suite.result(tmp_path)
    assert result.page.state == "partial"
    described = result.to_dict()
    assert [cell["status"] for cell in described["cells"]].count("missing") == 1
    assert any(str(suite.cells[0].cell.task) in note for note in result.page.notes)


class Blind(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole without a picture."""

    def __init__(self, **_: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))


@pytest.mark.process
def test_a_cell_that_cannot_render_is_named_and_the_others_have_videos(tmp_path: Path) -> None:
    tasks = {"blind": {"environment": {"env": Blind}}, "pole": {"environment": {"env": "CartPole-v1"}}}
    evaluation = {"num_episodes": 2, "max_episode_steps": 40}
    values = {
        "suite": "s",
        "shared": {"evaluation": evaluation},
        "tasks": tasks,
        "policies": {"r": {"policy": "random"}},
    }
    result = Suite.from_dict(values).run(tmp_path)
    (blind, why), (pole, count) = record_cell_videos(result, tmp_path, "best,worst,median")
    assert (blind, pole, count) == ("blind/r", "pole/r", 2)  # The median of two is the worst.
    files, _ = write_report(result, tmp_path / "report", tmp_path)
    page = next(path for path in files if path.name == PAGE).read_text()
    captions = re.findall(r'<video [^>]*src="(.*?)"></video><figcaption><a [^>]*>(\w+): episode', page)
    assert [name for _, name in captions] == ["worst", "best"]
    assert all((tmp_path / "report" / source).is_file() for source, _ in captions)
    assert not untold(str(why), "does not render")
    with refused(ConfigError, key="select"):
        list(record_cell_videos(result, tmp_path, "bset"))


def test_scores_for_rliable_are_normalized(tmp_path: Path) -> None:
    tasks = {"t0": {"low": 0, "high": 2}}
    files, _ = write_report(suite_of(tmp_path, 1, 1, 2, tasks=tasks).result(tmp_path), tmp_path / "report", tmp_path)
    by_name = {path.name: path.read_text() for path in files if path.suffix in (".csv", ".json")}
    raw = [float(line.rpartition(",")[2]) for line in by_name["scores.csv"].splitlines()[1:]]
    assert json.loads(by_name["rliable.json"])["scores"]["p0"] == [[pytest.approx(score / 2)] for score in raw]


def without(folder: Path, suite: Suite, *names: str) -> SuiteResult:
    """Return the result of a suite after the scores of cells are removed."""
    for planned in suite.cells:
        if str(planned.cell) in names:
            (folder / planned.cell.folder / SCORE_FILE).unlink()
    return suite.result(folder)


def test_an_empty_table_is_a_note(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 1, 2, 2, compare={"baseline": "p0"})
    result = without(tmp_path, suite, "t0/p1/0", "t0/p1/1")
    files, _ = write_report(result, tmp_path / "report", tmp_path)
    assert b"improvement" not in next(path for path in files if path.name == "tables.csv").read_bytes()
    assert any(note.startswith("Probability of improvement") for note in result.page.notes)


def test_a_run_without_its_last_step_and_an_incomplete_suite_are_marked_in_every_file(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 1, 2, 2, steps=2)
    result = without(tmp_path, suite, "t0/p1/0/2000")
    for name, table in result.tables.items():
        assert isinstance(table, Table)
        for text in (table.csv(), table.markdown(), table.latex()):
            assert "cells without a complete result: 1 of 8" in text
            assert ("t0/p1/0/2000 has no score" in text) == (name != "curves")


def test_seeds_that_end_at_different_steps_are_named(tmp_path: Path) -> None:
    """As where the last checkpoint of a training is missing: the numbers are of the steps that are there."""
    method = {"policy": "my:make", "checkpoints": "{policy}/{seed}-{step}", "seeds": [0, 1]}
    values = {
        "suite": "made",
        "tasks": {"t0": {"environment": {"env": "my:Env"}, "low": 0, "high": 1}},
        "policies": {"p0": method},
        "aggregate": {"unit": "run"},
    }
    (tmp_path / "p0").mkdir()
    for name in ("0-1000", "0-2000", "1-1000"):
        (tmp_path / "p0" / name).touch()
    suite = Suite.from_dict(values, tmp_path)
    for planned in suite.cells:
        place = tmp_path / "made" / planned.cell.folder / SCORE_FILE
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(asdict(Score("return", "complete", "", "f", "exact", 2, (0.0, 1.0), 1.0))))
    result = suite.result(tmp_path / "made")
    assert set(result.tables) == {"aggregates", "profiles", "tasks"}
    for table in result.tables.values():
        assert isinstance(table, Table)
        assert untold(" ".join(table.own_notes), "t0/p0", "1000", "2000") == []


def test_a_suite_without_scores_of_its_last_steps_has_a_page(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 1, 1, 2, steps=2)
    for steps, status in (((2000,), "partial"), ((1000,), "failed")):  # First the last steps, then the others as well.
        gone = [str(planned.cell) for planned in suite.cells if planned.cell.step in steps]
        result = without(tmp_path, suite, *gone)
        assert result.status == status
        assert PAGE in {path.name for path in write_report(result, tmp_path / "report", tmp_path)[0]}


def test_cells_of_different_code_are_named(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 2, 1, 2)
    for planned, digest in zip(suite.cells, "aaba", strict=True):
        place = tmp_path / planned.cell.folder / SCORE_FILE
        place.write_text(json.dumps(json.loads(place.read_text()) | {"code": {"my": digest, "other": "c"}}))
    notes = suite.result(tmp_path).page.notes
    assert [untold(note, "t0/p0/0", "t1/p0/0", "my") for note in notes if "other" not in note][-1] == []


def test_on_a_narrow_terminal_the_names_of_the_rows_stay(tmp_path: Path) -> None:
    console = Console(width=60, file=io.StringIO())
    console.print(suite_of(tmp_path, 2, 2, 3).result(tmp_path))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert sum(line[:1] == ["p0"] for line in lines) >= 2
    assert sum(line[:1] == ["t1/p1/2"] for line in lines) == 1


def test_curves_are_those_of_the_policies_with_steps(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 1, 1, 2, steps=2, extra={"policy": "random"})
    curves = suite.result(tmp_path).tables["curves"]
    assert isinstance(curves, Table)
    assert curves.columns == (1000, 2000)


def test_a_text_lists_the_incomplete_of_many_cells(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 6, 6, 3)
    text = str(without(tmp_path, suite, "t1/p1/1"))
    assert "t1/p1/1" in text
    assert "t0/p0/0" not in text


def test_scales_are_those_of_every_task_or_of_none(tmp_path: Path) -> None:
    with refused(ConfigError, key="tasks.b"):
        SuiteDefinition.from_dict(
            {
                "suite": "s",
                "tasks": {"a": {"low": 0, "high": 1}, "b": {}},
                "policies": {"p": {"policy": "random"}},
            }
        )
    suite = suite_of(tmp_path, 2, 2, 2, tasks={"t0": {}, "t1": {}})
    assert set(suite.result(tmp_path).tables) == {"improvement", "tasks"}


def test_a_note_on_several_tables_or_cells_is_told_once(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, 2, 2, 2)
    result = suite.result(tmp_path)
    cells = tuple(replace(state, reason="no display") for state in result.cells if state.planned.cell.seed == 0)
    texts = [note.partition(": ")[2] for note in replace(result, cells=cells).page.notes]
    assert len({*texts}) == len(texts)
    assert "no display" in texts


def test_a_missing_interval_is_said_at_its_number_and_the_note_names_task_and_policy(tmp_path: Path) -> None:
    """Two of three runs with equal scores have no interval; the other cells of the table have one."""
    result = suite_of(tmp_path, 2, 2, 3).result(tmp_path)
    equal = Run("p0", "t0", 0), Run("p0", "t0", 1), Run("p0", "t0", 2)
    scores = Scores({**result.scores.runs, **{run: np.full(4, 7.0) for run in equal}})
    changed = replace(result)
    changed.__dict__["scores"] = scores
    table = changed.tables["tasks"]
    assert isinstance(table, Table)
    assert table.text("t0", "p0") == "7 (no interval)"
    assert "no interval" not in table.text("t0", "p1")
    [note] = [note for note in changed.page.notes if "values are equal" in note]
    assert untold(note, "t0", "p0", "no interval") == []
    assert "p1" not in note
    [seeds] = [line for line in changed.page.sections[0] if line.label == "training seeds"]
    assert seeds.strong == "3"


def test_one_training_seed_says_nothing_about_others(tmp_path: Path) -> None:
    with refused(ConfigError, key="aggregate.unit"):
        suite_of(tmp_path, 2, 2, 1)
    assert isinstance(
        suite_of(tmp_path, 2, 2, 1, aggregate={"unit": "episode"}).result(tmp_path).tables["tasks"], Table
    )


def test_published_scores_stand_beside_those_of_the_suite(tmp_path: Path) -> None:
    suite = suite_of(tmp_path / "made", 2, 1, 2)
    (tmp_path / "paper.csv").write_text("policy,task,seed,score\npaper,t0,0,0.9\npaper,t1,0,0.8\n")
    table = suite.result(tmp_path / "made", tmp_path / "paper.csv").tables["tasks"]
    assert isinstance(table, Table)
    assert table.cells["t1", "paper"].value == 0.8


@pytest.mark.slow
def test_the_page_of_a_large_suite_stays_small(tmp_path: Path) -> None:
    suite = suite_of(tmp_path / "made", 50, 5, 5)
    files, _ = write_report(suite.result(tmp_path / "made"), tmp_path / "report", tmp_path / "made")
    assert next(path for path in files if path.name == PAGE).stat().st_size < 2_000_000


def test_a_report_replaces_only_a_report(tmp_path: Path) -> None:
    """Files of others stay, and nothing of an older report remains beside a newer one."""
    suite = suite_of(tmp_path / "made", 2, 1, 2, steps=2)
    result, folder = suite.result(tmp_path / "made"), tmp_path / "report"
    folder.mkdir()
    (folder / "scores.csv").write_text("mine")
    with refused(ConfigError, key="--output", value=str(folder)):
        write_report(result, folder, tmp_path / "made")
    assert [path.name for path in folder.iterdir()] == ["scores.csv"]
    (folder / PAGE).write_text(f"<html>{GENERATOR}</html>")  # A report of a run is not a report of a suite.
    with refused(ConfigError, key="--output", value=str(folder)):
        write_report(result, folder, tmp_path / "made")
    assert (folder / "scores.csv").read_text() == "mine"
    (folder / PAGE).unlink()
    (folder / "scores.csv").rename(folder / "mine.csv")
    first, _ = write_report(result, folder, tmp_path / "made")
    unscaled = suite_of(tmp_path / "unscaled", 0, 1, 2, steps=2, tasks={"t0": {"environment": {"env": "my:Env"}}})
    partial = without(tmp_path / "unscaled", unscaled, "t0/p0/1/2000")  # marl-eval needs the same runs at each step.
    second, _ = write_report(partial, folder, tmp_path / "unscaled")
    assert {path.name for path in first} > {path.name for path in second}
    assert {path.name for path in folder.iterdir()} == {path.name for path in second} | {"mine.csv"}


def test_a_report_that_was_interrupted_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suite_of(tmp_path / "made", 2, 1, 2, steps=2)
    result, folder = suite.result(tmp_path / "made"), tmp_path / "report"
    left = [2]

    def write(path: Path, content: bytes) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write_bytes(path, content)

    monkeypatch.setattr("rl_eval.suites.report.write_bytes", write)
    with pytest.raises(KeyboardInterrupt):
        write_report(result, folder, tmp_path / "made")
    monkeypatch.undo()
    files, _ = write_report(result, folder, tmp_path / "made")
    assert {*folder.iterdir()} == {*files}
