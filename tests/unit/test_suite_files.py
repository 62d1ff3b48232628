"""Files and figures of suites: what other programs read, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rl_eval.errors import ConfigError, UsageError
from rl_eval.results.stats.interval import Interval, no_interval
from rl_eval.suites.aggregates import aggregate_scores, learning_curves
from rl_eval.suites.exports import marl_eval_json, matrices, read_scores, rliable_json, scores_csv
from rl_eval.suites.figures import interval_figure, line_figure, picture
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.tables import Estimate, Table
from tests.refused import refused

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ODD = "50% of_A & |B|"
TABLE = Table(
    "Two policies.",
    "policy",
    "aggregate",
    {
        (ODD, "IQM"): Estimate(0.123456, Interval(0.1, 0.15, 0.95, "percentile")),
        (ODD, "mean"): Estimate(1234.0, Interval(1100.0, 1300.0, 0.95, "percentile", "one run is missing")),
        ("paper", "IQM"): Estimate(0.5, no_interval(0.95, "one run is missing")),
    },
)


METRICS = {"x": "success", "y": "return"}


@pytest.fixture
def scores() -> Scores:
    rng = np.random.default_rng(1)
    return Scores(
        {
            Run(policy, task, seed): rng.normal(size=3)
            for policy in ("a", "b")
            for task in ("y", "x")
            for seed in (5, 2, 9)
        }
    )


def without(scores: Scores, *absent: Run) -> Scores:
    return Scores({run: values for run, values in scores.runs.items() if run not in absent})


# ------------------------------------------------------------------------------ tables


def test_csv_has_all_digits() -> None:
    lines = list(csv.DictReader(TABLE.csv().splitlines()))
    assert [line["value"] for line in lines] == ["0.123456", "1234.0", "0.5"]
    assert lines[0]["policy"] == ODD
    assert (lines[2]["low"], lines[2]["method"], lines[2]["note"]) == ("", "none", "one run is missing")


def test_markdown_has_a_cell_for_each_pair_and_each_note_once() -> None:
    heading, ruler, *rest = TABLE.markdown().splitlines()
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in (heading, *rest[:2])]
    assert rows[0] == ["policy", "IQM", "mean"]
    assert rows[1] == [ODD.replace("|", r"\|"), "0.123 [0.100, 0.150]", "1,234 [1,100, 1,300]"]
    assert rows[2] == ["paper", "0.5000", "-"]
    assert ruler.count("|") == 4
    assert "\n".join(rest).count("one run is missing") == 1


def test_latex_escapes_names_and_has_as_many_cells_as_columns() -> None:
    text = TABLE.latex()
    assert r"50\% of\_A \& |B|" in text
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0].split(r"\midrule")
    rows = [line for part in body for line in part.strip().splitlines()]
    assert [len(re.split(r"(?<!\\)&", row)) for row in rows] == [3, 3, 3]
    assert all(row.endswith(r"\\") for row in rows)
    assert r"\begin{tabular}{lrr}" in text
    assert re.findall(r"\\(?:begin|end){(\w+)}", text) == ["table", "tabular", "tabular", "table"]


# ------------------------------------------------------------------------------ scores


def test_scores_come_back_from_csv_bit_by_bit(tmp_path: Path, scores: Scores) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(scores_csv(scores))
    assert scores_csv(read_scores(path)) == path.read_text()
    assert aggregate_scores(read_scores(path), "run").cells == aggregate_scores(scores, "run").cells


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "baselines"),
        ("policy,task,score\na,x,1\n", "baselines"),
        ("policy,task,seed,score,note\na,x,0,1,\n", "baselines"),
        ("policy,task,seed,score\na,x,0,high\n", "baselines"),
        ("policy,task,seed,score\na,x,0.5,1\n", "baselines"),
        ("policy,task,seed,score\na,x,0\n", "baselines"),
        ("policy,task,seed,score\na,x,0,1\na,x,0,2\n", "seed"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "paper.csv"
    path.write_text(text)
    with refused(ConfigError, key=key) as caught:
        read_scores(path)
    assert re.search(r"paper\.csv:[123]: ", str(caught.value))


def test_a_file_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """With a byte order mark at the start and a blank line at the end."""
    path = tmp_path / "paper.csv"
    path.write_text("\ufeffpolicy,task,seed,score\na,x,0,1\n\n")
    assert scores_csv(read_scores(path)) == "policy,task,seed,score\na,x,0,1.0\n"


def test_a_file_that_is_absent_or_empty_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, key="baselines"):
        read_scores(tmp_path / "paper.csv")
    (tmp_path / "paper.csv").write_text("policy,task,seed,score\n")
    with refused(UsageError, key="runs"):
        read_scores(tmp_path / "paper.csv")


def test_a_matrix_has_runs_by_seed_and_tasks_in_order(scores: Scores) -> None:
    runs = matrices(scores, "run")["a"]
    assert runs.shape == (3, 2)
    assert runs[0, 1] == pytest.approx(scores.runs[Run("a", "x", 2)].mean(), abs=1e-15)
    episodes = matrices(scores, "episode")["a"]
    assert episodes[:, 0].tolist() == np.concatenate([scores.runs[Run("a", "y", seed)] for seed in (2, 5, 9)]).tolist()
    stored = json.loads(rliable_json(scores, "run"))
    assert stored["tasks"] == ["y", "x"]
    assert np.array(stored["scores"]["a"]).tolist() == runs.tolist()


def test_a_matrix_of_incomplete_scores_is_refused(scores: Scores) -> None:
    partial = without(scores, Run("b", "x", 5))
    for export in (matrices, rliable_json, lambda scores, unit: marl_eval_json({1: scores}, "suite", METRICS)):
        with refused(UsageError, key="runs", value=1):
            export(partial, "run")
    shorter = Scores({**scores.runs, Run("a", "x", 2): np.zeros(1)})
    with refused(UsageError, key="unit", value="episode"):
        matrices(shorter, "episode")


def test_marl_eval_gets_every_episode_of_every_step(scores: Scores) -> None:
    late = Scores({run: values + 1 for run, values in scores.runs.items()})
    stored = json.loads(marl_eval_json({2000: late, 1000: scores}, "suite", METRICS))
    run = stored["suite"]["x"]["b"]["run_2"]
    values = scores.runs[Run("b", "x", 5)]
    assert run["step_1"] == {"step_count": 1000, "success": values.tolist()}
    assert run["step_2"]["step_count"] == 2000
    assert run["absolute_metrics"]["success"] == pytest.approx([values.mean() + 1])
    assert list(stored["suite"]["x"]["b"]) == ["run_1", "run_2", "run_3"]
    assert "return" in stored["suite"]["y"]["b"]["run_1"]["step_1"]


def test_marl_eval_gets_no_run_without_one_of_its_steps(scores: Scores) -> None:
    seed_2 = [Run("a", "x", 2), Run("a", "y", 2)]
    with refused(UsageError, key="runs", value=2):
        marl_eval_json({1000: without(scores, *seed_2), 2000: scores}, "suite", METRICS)
    once = without(scores, *(run for run in scores.runs if run.policy == "a"))
    stored = json.loads(marl_eval_json({0: scores, 1000: once}, "suite", METRICS))
    assert list(stored["suite"]["x"]["a"]["run_1"]) == ["step_1", "absolute_metrics"]


# ------------------------------------------------------------------------------ figures


def test_figures_are_svg_and_png_and_equal_for_equal_tables(scores: Scores) -> None:
    from matplotlib.image import imread

    table, curve = aggregate_scores(scores, "run"), learning_curves({1: scores, 2: without(scores)}, "run")
    figures: list[Callable[[], Figure]] = [
        lambda: interval_figure(table),
        lambda: line_figure(curve, "IQM"),
        lambda: interval_figure(TABLE),
    ]
    for figure in figures:
        svg = picture(figure(), "svg")
        assert svg == picture(figure(), "svg")
        assert svg.lstrip().startswith(b"<?xml")
        png = picture(figure(), "png")
        assert png.startswith(b"\x89PNG")
        assert imread(io.BytesIO(png)).std() > 0


def test_a_figure_shows_each_interval_at_its_place() -> None:
    [left, right] = interval_figure(TABLE).axes
    bars = [bar.get_extents().transformed(left.transData.inverted()) for bar in left.patches]
    assert (bars[0].x0, bars[0].x1) == pytest.approx((0.1, 0.15))
    assert [sum(len(line.get_xdata()) > 0 for line in axes.lines) for axes in (left, right)] == [2, 1]
    [low, high] = left.get_xlim()
    assert low < 0.1
    assert high > 0.5


def test_a_figure_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused(ConfigError, key="figures") as caught:
        interval_figure(TABLE)
    assert "rl-eval[plot]" in caught.value.fix
