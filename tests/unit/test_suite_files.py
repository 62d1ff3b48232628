"""Files and figures of suites: what other programs read, and what is refused."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rl_eval.errors import ConfigError, UsageError
from rl_eval.results.csv_text import read_csv, write_csv
from rl_eval.results.stats.interval import Interval, no_interval
from rl_eval.suites.aggregates import aggregate_scores, learning_curves
from rl_eval.suites.exports import marl_eval_json, matrices, read_scores, rliable_json, scores_csv
from rl_eval.suites.figures import interval_figure, line_figure, pages, picture
from rl_eval.suites.scores import Run, Scores
from rl_eval.suites.tables import Estimate, Table, csv_of
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
    assert rows[1] == [ODD.replace("|", r"\|"), "0.123 (0.100 to 0.150)", "1,234 (1,100 to 1,300)"]
    assert rows[2] == ["paper", "0.5000 (no interval)", "-"]
    assert ruler.count("|") == 4
    assert "\n".join(rest).count("one run is missing") == 1


def test_markdown_has_no_characters_that_control_a_terminal_or_the_direction() -> None:
    cells = {("a\x1b[31mred\u202e", "IQM"): next(iter(TABLE.cells.values()))}
    assert "| ared |" in replace(TABLE, cells=cells).markdown()


def test_latex_escapes_names_and_has_as_many_cells_as_columns() -> None:
    text = TABLE.latex()
    assert r"50\% of\_A \& \textbar{}B\textbar{}" in text
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0].split(r"\midrule")
    rows = [line for part in body for line in part.strip().splitlines()]
    assert [len(re.split(r"(?<!\\)&", row)) for row in rows] == [3, 3, 3]
    assert all(row.endswith(r"\\") for row in rows)
    assert r"\begin{tabular}{lrr}" in text
    assert re.findall(r"\\(?:begin|end){(\w+)}", text) == ["table", "tabular", "tabular", "table"]


# ------------------------------------------------------------------------------ foreign texts


FORMULAS = [
    "=1+1", "+a", "-a--b", "@SUM(1)", "\tx", "\r=1", " =1", "'=1", "''-a", "'\tx", '=HYPERLINK("x")', "-1 x",
]  # fmt: skip
NO_FORMULAS = ["-1", "+1.5e3", "-inf", "", "a=1", "'a", "a,b", 'say "x"', "a\nb", "a\rb", "-1.5 -2.0"]


def named(*names: str) -> Table:
    cell = Estimate(-0.5, Interval(-1.0, -0.25, 0.95, "percentile", names[0]))
    return Table(names[0], "policy", "aggregate", {(name, name): cell for name in names})


def test_a_text_in_csv_is_no_formula_and_comes_back() -> None:
    """In a spreadsheet, an apostrophe is before it; numbers stay numbers."""
    rows = [[*FORMULAS, *NO_FORMULAS], [-1.5, 7, -0.0, *NO_FORMULAS[:4]]]
    text = write_csv(rows)
    first = next(csv.reader(io.StringIO(text, newline="")))
    assert first == [*(f"'{one}" for one in FORMULAS), *NO_FORMULAS]
    assert read_csv(text) == [[str(one) for one in row] for row in rows]
    lines = list(csv.DictReader(io.StringIO(named(*FORMULAS).csv(), newline="")))
    assert [line["policy"] for line in lines] == [line["aggregate"] for line in lines] == first[: len(FORMULAS)]
    assert {(line["value"], line["low"], line["note"]) for line in lines} == {("-0.5", "-1.0", "'=1+1")}


def test_several_tables_are_one_csv_that_names_them() -> None:
    """With the numbers of each table alone; names that look like formulas are text here, too."""
    lines = list(csv.DictReader(io.StringIO(csv_of({"first": TABLE, "=second": TABLE}), newline="")))
    alone = list(csv.DictReader(TABLE.csv().splitlines()))
    assert [line.pop("table") for line in lines] == ["first"] * 3 + ["'=second"] * 3
    assert [(line["row"], line["column"]) for line in lines[:3]] == [(one["policy"], one["aggregate"]) for one in alone]
    for name in ("value", "low", "high", "confidence", "method", "note", "both"):
        assert [line[name] for line in lines] == [one[name] for one in alone] * 2


def test_scores_of_policies_named_like_formulas_come_back(tmp_path: Path) -> None:
    scores = Scores({Run(name, name, 0): np.array([-1.0]) for name in (*FORMULAS, *NO_FORMULAS)})
    (tmp_path / "scores.csv").write_bytes(scores_csv(scores).encode())
    assert read_scores(tmp_path / "scores.csv").runs.keys() == scores.runs.keys()


def typeset(text: str) -> str:
    """Return what LaTeX prints of a text without commands, and fail on any other."""
    assert re.fullmatch(r"(?:[^\\~^&%$#_{}<>|\n]|\\[&%$#_{}]|\\text\w+\{\}|\{\})*", text), text
    assert not re.search(r"--|``|''|[!?]`|,,|^[\[*]", text), text
    signs = {"backslash": "\\", "asciitilde": "~", "asciicircum": "^", "less": "<", "greater": ">", "bar": "|"}
    shown = re.sub(r"\\text(\w+)\{\}", lambda found: f"\0{signs[found[1]]}", text)
    return re.sub(r"\0(.)|\\(.)|\{\}", lambda found: found[1] or found[2] or "", shown)


@pytest.mark.parametrize(
    "name",
    [
        r"\input{/etc/passwd}", "^^41", "a%b", "$x$", "a_b", "{", "}", "~", "#1", "[1cm]x", "*x", "a---b", "``x''",
        "!`?`", "<<|>>", "a\n\nb", "\\\\", "a&b", ",,x",
    ],
)  # fmt: skip
def test_latex_prints_names_as_they_are(name: str) -> None:
    """In a row, a heading, the caption and the notes."""
    text, shown = named(name).latex(), name.replace("\n", " ")
    caption, heading, body, notes = (re.search(pattern, text)[1] for pattern in (
        r"caption{(.*)}\n", r"toprule\n(.*) \\\\\n", r"midrule\n(.*) \\\\\n", r"footnotesize (.*)\n"
    ))  # fmt: skip
    assert typeset(caption) == shown
    assert typeset(notes) == f"Notes: {shown}."
    assert typeset(heading.removeprefix("policy & ")) == shown
    assert typeset(body.removesuffix(" & $-$0.50 ($-$1.00 to $-$0.25)")) == shown


def test_markdown_shows_names_as_they_are() -> None:
    """No markup, no HTML, no other cell and no other line."""
    names = [
        "<img src=x>", "a|b", r"a\|b", "**b**", "_x_", "__x__", "`c`", "[t](javascript:x)", "&lt;", "~~s~~", "$x$",
        "a\nb",
    ]  # fmt: skip
    text = named(*names).markdown()
    heading = text.splitlines()[0]
    cells = re.findall(r"(?<= \| )(?:\\.|[^\\|])*(?= \|)", heading)
    assert [re.sub(r"\\(.)", r"\1", cell) for cell in cells] == [name.replace("\n", " ") for name in names]
    for cell in cells:
        assert not re.search(r"[<|*`\[~$]|&\w|(?<![a-z])_|_(?![a-z])", re.sub(r"\\.", ".", cell)), cell
    assert text.count(r"\<img src=x>") == 4
    assert "my_policy_v2" in named("my_policy_v2").markdown()


@pytest.mark.parametrize("draw", [interval_figure, lambda table: line_figure(table, "score")])
def test_figures_show_names_as_they_are(draw: Callable[[Table], Figure]) -> None:
    """No formulas, and no label is hidden."""
    names = [r"$\frac{$", "$x$", "_y", r"\$", "<b>"]
    cell = Estimate(0.5, Interval(0.1, 0.9, 0.95, "percentile"))
    svg = picture(draw(Table("", "policy", "step", {(name, 1.0): cell for name in names})), "svg").decode()
    shown = [html.unescape(one).strip() for one in re.findall(r"<text[^>]*>(.*?)</text>", svg)]
    assert [one for one in shown if one in names] == names


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


def test_figures_are_svg_png_and_pdf_and_equal_for_equal_tables(scores: Scores) -> None:
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
        pdf = pages([figure(), figure()])
        assert pdf == pages([figure(), figure()])
        assert (pdf[:5], len(re.findall(rb"/Type /Page\b", pdf))) == (b"%PDF-", 2)
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


def test_many_scores_are_read(tmp_path: Path) -> None:
    lines = [f"a_long_name_of_a_policy_{seed % 50},a_long_name_of_a_task,{seed},1.5\n" for seed in range(90_000)]
    (tmp_path / "scores.csv").write_text("policy,task,seed,score\n" + "".join(lines))
    assert len(read_scores(tmp_path / "scores.csv").runs) == len(lines)
