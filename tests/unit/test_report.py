"""Reports: what a page holds, and that it is inert, small, equal for equal results, and safe to make."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rl_eval import EvalConfig, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.recording.video_selection import video_name, videos_of
from rl_eval.records.episode import Outcome
from rl_eval.reports.charts import WIDTH, Plot, Row, axis_over, estimates, histogram, lines
from rl_eval.reports.html import Source, episode_data, pack, render
from rl_eval.reports.listing import list_runs
from rl_eval.reports.page import Table
from rl_eval.reports.pages import headlines, result_page
from rl_eval.reports.report import comparisons, group_tables, overview, run_page
from rl_eval.results.comparison import compare
from rl_eval.results.files import RESULT_FILE
from rl_eval.results.result import EvalResult
from rl_eval.results.stats.interval import mean_interval
from rl_eval.results.story import story
from tests.refused import untold
from tests.unit.cli_world import call
from tests.unit.games_world import Duel, Level
from tests.unit.results_world import TRACEBACK, drawn_result, make_result

EVIL = "</script></style><img src=x onerror=alert(1)>\u2028{{ 7 * 7 }}"


def labels(page: str) -> list[str]:
    """Return the descriptions of the charts of a page."""
    return [value or "" for name, value in Elements(page).attributes if name == "aria-label"]


class Elements(HTMLParser):
    """Elements of a page: tags, attributes, all text, and the contents of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._tag = ""
        self.feed(page.replace("<wbr>", ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        self.inside.get(self._tag, self.text).append(data)

    @property
    def shown(self) -> str:
        """All text, with single spaces."""
        return " ".join(" ".join(self.text).split())

    @property
    def data(self) -> list:
        """Data that the script reads."""
        return json.loads(self.inside["script"][0])


def with_column(result: EvalResult, name: str, values: object) -> EvalResult:
    """Return a result with other values in one field of its records."""
    result.table.rows[name] = values
    parts = ("table", "plan", "status", "reason", "timing", "provenance")
    return EvalResult(**{part: getattr(result, part) for part in parts})


def page(*results: EvalResult) -> str:
    return render([Source(f"runs/{place}", result) for place, result in enumerate(results)])


def inflate(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


# One result


def test_a_report_holds_the_page_of_its_result() -> None:
    """Each number and each note that a terminal shows, and the meaning of the interval."""
    result = drawn_result(400, failed=(5, 7), return_bounds=(0, 1000))
    shown = Elements(page(result)).shown
    lines = [line for section in result_page(result).sections for line in section]
    assert {"mean return", "success", "episodes", "determinism"} <= {line.label for line in lines}
    [chart, *_] = [section for section in run_page(result).sections if isinstance(section, Plot)]
    [whisker] = [shape for shape in chart.shapes if shape.css == "whisker"]
    drawn = [float(point.split()[0]) for point in whisker.at["d"][1:].split("L")]
    assert [min(drawn), max(drawn)] == pytest.approx(
        chart.x.place([result.interval.low, result.interval.high]), abs=0.06
    )
    tops = [float(bar.at["y"]) for bar in chart.shapes if bar.css == "bar"]
    assert float(whisker.at["d"].rpartition(" ")[2]) < min(tops), "the interval is hidden by the bars"
    for text in [line.strong for line in lines] + [line.rest for line in lines] + result.notes:
        assert " ".join(text.split()) in shown
    assert f"{result.interval.low:.1f} to {result.interval.high:.1f}" in shown


@pytest.mark.parametrize("arguments", [{"failed": (1,)}, {"failed": tuple(range(30)), "status": "failed"}])
def test_the_meaning_claims_no_more_than_is_known(arguments: dict) -> None:
    """Without an interval, the page has no range for the true mean return."""
    assert "plausibly" not in Elements(page(drawn_result(30, **arguments))).shown


def test_it_is_readable_without_javascript() -> None:
    """The first hundred episodes stand in the page, under the names that links use, and faults with tracebacks."""
    result = drawn_result(250, failed=(5,))
    found = Elements(page(result))
    names = [value for name, value in found.attributes if name == "id" and value and value.startswith("episode-")]
    assert names == [f"episode-{index}" for index in range(100)]
    record = result.table.record(37)
    assert f"37 {record.seed} {float(f'{record.episode_return:.7g}')} {record.length}" in found.shown
    assert " ".join(TRACEBACK.split()) in found.shown
    assert "rl-eval replay runs/0 --episodes I" in found.shown


def unpack(packed):
    """Return the argument of :func:`pack`, with seven digits."""
    kind, count, text = packed
    planes = np.frombuffer(inflate(text), np.uint8).reshape(int(kind[1:]), count)
    return np.ascontiguousarray(planes.T).view(f"<{kind}").reshape(count)


def test_episodes_are_there_bit_by_bit_up_to_seven_digits() -> None:
    """Every finished episode, its faults in order, and each different traceback once."""
    result = drawn_result(500, failed=(5, 7))
    [run] = Elements(page(result)).data
    rows, columns = result.table.rows, {name: unpack(packed) for name, packed in run["columns"].items()}
    for name in ("index", "seed", "length", "attempts"):
        np.testing.assert_array_equal(columns[name], rows[name])
    np.testing.assert_allclose(columns["return"], rows["episode_return"], rtol=1e-7)
    np.testing.assert_allclose(columns["seconds"], rows["step_seconds"], rtol=2e-4)
    np.testing.assert_array_equal(columns["runner"] - 1, rows["runner"])
    completed = rows[result.table.completed]
    ends = [int(completed["terminated"].sum()), int(completed["truncated"].sum()), 0, 2]
    assert np.bincount(columns["end"]).tolist() == ends
    [(name, packed)] = run["infos"]
    assert name == "distance"
    np.testing.assert_allclose(unpack(packed), result.table.infos[:, 0], rtol=1e-7)
    faults = json.loads(inflate(run["faults"]))
    assert [row[:2] for row in faults["rows"]] == [[5, 1], [5, 2], [7, 1], [7, 2]]
    assert [row[3] for row in faults["rows"]] == [e.text for index in (5, 7) for e in story(result, index) if e.fault]
    assert faults["tracebacks"] == [TRACEBACK]


def test_faults_are_shown_by_kind_with_one_in_full() -> None:
    """The most frequent first; without a record there is nothing to replay."""
    result = drawn_result(30, failed=(3, 5, 7))
    assert f"RuntimeError: env failed in step 6 3, 5, 7 {result.faults[0]}, on host" in Elements(page(result)).shown
    shown = Elements(page(with_column(result, "outcome", Outcome.MISSING))).shown
    assert "rl-eval replay" not in shown


def test_each_metric_has_its_own_digits() -> None:
    """Not those of the return: a rate is not rounded to 0 or 1, and a count has no decimals."""
    result = drawn_result(30)
    [table] = [one for one in run_page(result).sections if isinstance(one, Table) and one.title == "Numbers"]
    compared = overview({"x": result, "y": result}).sections[-1]
    for shown in (dict(table.rows), dict(zip(compared.headings, compared.rows[0], strict=True))):
        for name, value in result.metrics.items():
            assert float(shown[name].replace(",", "").replace("n/a", "nan")) == pytest.approx(value, 6e-4, nan_ok=True)
        assert (shown["num_episodes"], shown["num_env_steps_sampled"]) == ("30", "1,000")


def test_a_failed_episode_has_no_length_and_no_seconds() -> None:
    found = Elements(page(drawn_result(10, failed=(5,)))).shown
    assert re.search(r" 5 \d+ - failed 2 \d+ - 6 ", found)


def test_completed_episodes_are_counted_of_the_planned_ones() -> None:
    """Beside the other results, where a mean of fewer episodes looks like the others."""
    table = overview({"x": drawn_result(30, failed=(5,)), "y": drawn_result(30)}).sections[-1]
    assert [row[list(table.headings).index("episodes")] for row in table.rows] == ["29 of 30", "30"]


def test_the_reason_for_a_missing_interval_is_given_once() -> None:
    """In one result, and for several results with the same reason. It counts in the singular, too."""
    result = drawn_result(30, failed=(5,))
    assert result.interval.note.startswith("1 of 30 values is")
    assert Elements(page(result)).shown.count(result.interval.note) == 1
    equal = make_result(returns=np.full(30, 500.0))
    several = overview({"x": equal, "y": equal, "z": drawn_result(30)})
    [note] = [note for note in several.notes if equal.interval.note in note]
    assert untold(note, "x", "y") == []
    bounded = make_result(returns=np.full(30, 500.0), return_bounds=(0, 500))
    assert untold(equal.interval.note, "evaluation.return_bounds", f"{bounded.interval.low:.3g} to 500") == []


def test_minus_zero_is_zero() -> None:
    returns = np.where(np.arange(30) % 2, -0.0, -3.0)
    assert not re.search(r"-0(\.0*)? ", Elements(page(with_column(drawn_result(30), "episode_return", returns))).shown)


@given(st.lists(st.floats(), max_size=50))
def test_any_numbers_can_be_packed(values: list[float]) -> None:
    """NaN, infinities, and numbers that a float of four bytes cannot hold."""
    np.testing.assert_allclose(unpack(pack(np.array(values, np.float64))), values, rtol=1.1e-7)


@given(st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=20))
def test_any_integers_can_be_packed(values: list[int]) -> None:
    """Exactly, where a browser can count."""
    assert unpack(pack(np.array(values, np.int64))).tolist() == values


def test_columns_and_rows_beyond_the_limits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones stay; the numbers go over all of them."""
    monkeypatch.setattr("rl_eval.reports.html._MOST_TEXT", 6_000)
    data = episode_data(drawn_result(200, info_keys=[f"key{n}" for n in range(30)]))
    assert 0 < len(data["infos"]) == 30 - data["infos_omitted"] < 30
    assert data["infos"][0][0] == "key0"
    monkeypatch.setattr("rl_eval.reports.html._MOST_ROWS", 50)
    data = episode_data(drawn_result(80))
    assert (data["omitted"], data["columns"]["index"][1]) == (30, 50)


# Groups


def test_a_task_has_its_own_numbers() -> None:
    """An info scalar of a few whole numbers divides the counted episodes; those that have none are in no group."""
    result = drawn_result(90, info_keys=("distance", "task", "level"))
    result.table.infos[:, 1] = np.arange(90) % 3
    result.table.infos[80:, 1] = np.nan
    result.table.infos[:, 2] = 5
    [group] = group_tables(result)
    assert (group.caption, group.title, group.headings[0]) == ("", "By task", "task")
    assert [row[:2] for row in group.rows] == [("0", "27"), ("1", "27"), ("2", "26")]
    rows = result.table.rows[[i for i in range(80) if i % 3 == 1]]
    interval = mean_interval(rows["episode_return"])
    expected = (
        f"{rows['episode_return'].mean():.2f}", f"{interval.low:.2f} to {interval.high:.2f}",
        f"{rows['length'].mean():.1f}", f"{100 * np.mean(rows['success_at_end'] == 1):.1f} %",
    )  # fmt: skip
    assert group.rows[1][2:6] == expected
    low, high = (float(end.removesuffix(" %")) for end in group.rows[1][6].split(" to "))
    assert low < float(expected[3].removesuffix(" %")) < high
    assert "By task" in Elements(page(result)).shown


def test_no_part_has_an_interval_if_an_episode_failed() -> None:
    """Nobody knows the part to which a failed episode belongs; nothing is drawn as if it did."""
    result = drawn_result(90, info_keys=("task",), failed=(4,))
    result.table.infos[:, 0] = np.arange(90) % 3
    [group] = group_tables(result)
    assert group.caption
    assert {(row[3], row[6]) for row in group.rows} == {("n/a", "n/a")}
    drawn = [[shape.css for shape in one.shapes] for one in run_page(result).sections if isinstance(one, Plot)]
    assert not any("band" in shapes for shapes in drawn)


def test_few_episodes_of_a_task_have_a_caption() -> None:
    result = drawn_result(40, info_keys=("task",))
    result.table.infos[:, 0] = np.arange(40) < 19
    assert group_tables(result)[0].caption


@pytest.mark.parametrize("values", [np.arange(90) / 2, np.full(90, np.inf), np.full(90, np.nan), np.arange(90)])
def test_a_measurement_divides_nothing(values: np.ndarray) -> None:
    result = drawn_result(90, info_keys=("distance",))
    result.table.infos[:, 0] = values
    assert group_tables(result) == []


def test_unreported_successes_are_unknown() -> None:
    """A group of which some are reported has an interval that is true whatever the others were."""
    reports = [-1] * 20 + [1] * 10 + [-1] * 10
    result = with_column(drawn_result(40, info_keys=("task",)), "success_at_end", reports)
    result.table.infos[:, 0] = np.arange(40) // 20
    none, half = group_tables(result)[0].rows
    assert (none[5:], half[5:]) == (("n/a", "n/a"), ("50.0 %", "29.9 % to 100.0 %"))


# Several results


@pytest.mark.parametrize("names", [("seat_0", "seat_1"), ("one",)])
def test_a_zero_sum_game_has_the_same_numbers_in_the_list_and_in_its_reports(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Those of all policies or agents, the highest first; the sum over the agents, which is 0, is nowhere."""
    policies = {name: Level(place) for place, name in enumerate(names)}
    result = evaluate(EvalConfig().environment(Duel).policy(policies=policies).evaluation(num_episodes=40))
    result.save(tmp_path)
    lines = headlines(result)
    assert len(lines) == 2
    assert float(lines[0].strong) > 0 > float(lines[1].strong)
    both = overview({"x": result, "y": result})
    table = both.sections[-1]
    cell = table.rows[0][list(table.headings).index("mean return")]
    shown = list_runs(tmp_path)[0].cells["mean return"]
    for line in lines:
        name = line.label.removeprefix("return of ")
        assert f"{name} {line.strong} (" in cell
        assert float(shown.partition(f"{name} ")[2].partition(",")[0]) == pytest.approx(float(line.strong), abs=0.1)
    assert not any(re.match("Returns of the episodes", section.title) for section in both.sections)
    [first, *_] = run_page(result).sections
    assert not any(isinstance(section, Plot) for section in run_page(result).sections)
    assert not first[0].strong, "a browser enlarges the first number"


def test_results_of_one_plan_are_compared_with_each_other() -> None:
    """With the verdict of ``rl-eval compare``, by name, and the differences; each result can be the baseline."""
    a, b = drawn_result(200, 1), drawn_result(200, 2, shift=30)
    text = page(a, b)
    assert compare(a, b).verdict.startswith("b has a higher return than a at 95 %")
    assert compare(a, b).verdict_on("0", "1") in Elements(text).shown
    assert compare(b, a).verdict_on("1", "0") in Elements(text).shown
    assert any(untold(label.lower(), 200, "difference", "returns") == [] for label in labels(text))
    baselines = [value for name, value in Elements(text).attributes if name == "data-baseline"]
    assert baselines == ["0", "1"]


def test_charts_show_the_means_and_the_differences_with_the_intervals_of_the_library() -> None:
    """Of success, return and paired differences, all results on one axis each; success is first."""
    results = [drawn_result(200, draw, shift=10.0 * draw) for draw in range(3)]
    names = ["x", "y", "z"]
    rates, returns, samples, *_ = overview(dict(zip(names, results, strict=True))).sections
    against = comparisons(dict(zip(names, results, strict=True)))[1]
    found = [compare(results[1], other).difference for other in (results[0], results[2])]
    for chart, intervals in (
        (rates, [(100 * one.success_interval.low, 100 * one.success_interval.high) for one in results]),
        (returns, [(one.interval.low, one.interval.high) for one in results]),
        (samples, [(one.interval.low, one.interval.high) for one in results]),
        (against.figure, [(one.interval.low, one.interval.high) for one in found]),
    ):
        assert isinstance(chart, Plot)
        whiskers = [shape.at["d"] for shape in chart.shapes if shape.css == "whisker"]
        drawn = [[float(point.split()[0]) for point in path[1:].split("L")] for path in whiskers]
        ends = [(min(places), max(places)) for places in drawn]
        assert ends == [pytest.approx(chart.x.place(pair), abs=0.06) for pair in intervals]
        assert [name for _, name, _ in chart.rows] == (names if chart is not against.figure else ["x", "z"])
    assert sum(shape.css == "bar" for shape in samples.shapes) > 3
    assert "success" in rates.title.lower()
    assert against.baseline == "y"


def test_without_success_there_is_no_column_and_no_chart_of_it() -> None:
    silent = [make_result(30, success=np.full(30, -1)) for _ in range(2)]
    page_ = overview({"x": silent[0], "y": silent[1]})
    assert "success" not in page_.sections[-1].headings
    assert not any("uccess" in section.title for section in page_.sections)
    assert "success" in overview({"x": silent[0], "y": drawn_result(30)}).sections[-1].headings


def test_returns_of_different_environments_share_no_axis() -> None:
    """Their scales have nothing in common; success rates do."""
    one, other = drawn_result(30), drawn_result(30, 1)
    other.provenance["identity"] = {**other.provenance.get("identity", {}), "environment": {"env": "Other-v0"}}
    titles = [section.title for section in overview({"x": one, "y": other}).sections]
    assert [title for title in titles if "uccess" in title]
    assert not [title for title in titles if "eturn" in title]


def test_any_metric_can_be_a_column() -> None:
    """Those beyond the usual ones are hidden until they are chosen."""
    results = [drawn_result(30), drawn_result(40, 1)]
    table = overview({"x": results[0], "y": results[1]}).sections[-1]
    hidden = list(table.headings)[-table.num_hidden :]
    assert {*hidden} == {*results[0].metrics} | {*results[1].metrics}
    assert {len(row) for row in table.rows} == {len(table.headings)}
    found = Elements(page(*results))
    assert sum(name == "hidden" for name, _ in found.attributes) >= 3 * table.num_hidden


def test_many_results_have_the_first_one_as_their_baseline() -> None:
    """All comparisons are in the page, so their number has a limit; a note says what to do."""
    results = [drawn_result(20, draw) for draw in range(11)]
    names = [str(number) for number in range(11)]
    assert [each.baseline for each in comparisons(dict(zip(names[:6], results[:6], strict=True)))] == names[:6]
    [only] = comparisons(dict(zip(names, results, strict=True)))
    assert (only.baseline, len(only.pages)) == ("0", 8)
    assert len(only.notes) == 3
    assert all(note in Elements(page(*results)).shown for note in only.notes)


def test_a_refused_comparison_has_its_reason() -> None:
    """The page is made all the same; the others are on it."""
    text = page(drawn_result(50), drawn_result(50, env="Walker2d-v5"))
    shown = Elements(text).shown
    assert all(named in shown for named in ("environment.env", "'Hopper-v5'", "'Walker2d-v5'"))
    assert shown.startswith("Hopper-v5 and Walker2d-v5: 2 evaluations rl-eval report Hopper-v5 and Walker2d-v5 ")
    many = [drawn_result(20, env=env) for env in ("Ant-v5", "Hopper-v5", "Walker2d-v5")]
    assert Elements(page(*many)).shown.startswith("3 environments: 3 evaluations")


def test_comparisons_are_counted_with_the_probability_of_any_error() -> None:
    """One comparison has its own level, so a note would say nothing more."""
    results = [drawn_result(20, draw) for draw in range(4)] + [drawn_result(20, 4, env="Walker2d-v5")]
    names = [str(number) for number in range(5)]
    [note] = comparisons(dict(zip(names, results, strict=True)))[0].notes
    assert {"3", "95", "15"} <= set(re.findall(r"\d+", note))
    assert note in Elements(page(*results)).shown
    assert comparisons(dict(zip(names[:2], results[:2], strict=True)))[0].notes == []


def checkpoint(number: int, key: str) -> EvalResult:
    """Return a result of a checkpoint with a number in the name of the file of weights, or of the model."""
    result, file = drawn_result(50), f"runs/1/rl_model_{number}_steps.zip"
    result.provenance["config"] = {"policy": {"weights": file} if key == "weights" else {}}
    if key == "path":
        result.provenance["identity"]["policy_kwargs"] = {"path": file}
    return result


def test_checkpoints_of_one_run_have_a_curve() -> None:
    """Over versions, or over the numbers of their files; results of different policies have none."""
    curve = "Mean return over checkpoints"
    assert curve in page(
        drawn_result(50, version=200), drawn_result(50, 1, version=100), drawn_result(50, 2, version=300)
    )
    assert curve not in page(drawn_result(50), drawn_result(50, version=8, policy="other"))
    assert curve not in page(drawn_result(50), drawn_result(50))
    for key in ("weights", "path"):
        text = page(checkpoint(2000, key), checkpoint(100, key), drawn_result(50, env="Walker2d-v5"))
        assert curve in text
        assert "number in the checkpoint" in text
        assert curve not in page(checkpoint(100, key), checkpoint(100, key))


def test_a_mean_is_drawn_over_checkpoints_or_in_a_row() -> None:
    """Not twice. An axis without 0 says so."""
    steps = {f"{step}": drawn_result(50, step, version=step) for step in (100, 200, 300)}
    plots = {one.title: one for one in overview(steps).sections if isinstance(one, Plot)}
    assert not any(title.startswith("Mean returns") for title in plots)
    others = steps | {"other": drawn_result(50, 4, policy="other", version=9)}
    more = {one.title: one for one in overview(others).sections if isinstance(one, Plot)}
    assert more.keys() > plots.keys()
    [means_of] = [plot for title, plot in more.items() if title.startswith("Mean returns")]
    for plot in (plots["Mean return over checkpoints"], means_of):
        assert untold(plot.caption, "axis", "0") == []
    assert estimates("X", "x", [Row("x", 1.0, -1.0, 2.0, "")]).caption == ""


def test_the_line_of_no_difference_crosses_no_text() -> None:
    row = Row("a name at the left", 3.0, 2.0, 4.0, "3.0 (2.0 to 4.0)")
    plot = estimates("X", "x", [row] * 3, within=(0,))
    lines = [shape.at["d"] for shape in plot.shapes if shape.css == "equal"]
    ends = [[float(point.split()[1]) for point in line[1:].split("L")] for line in lines]
    assert len(ends) == len(plot.rows)
    for (low, high), (baseline, _, _) in zip(map(sorted, ends), plot.rows, strict=True):
        assert baseline + 4 < low < high < plot.y.start
        assert not any(low < other - 12 < high for other, _, _ in plot.rows)


@pytest.mark.parametrize("samples", [(), [np.arange(5.0)] * 3])
def test_a_rule_follows_each_row_and_the_grid_crosses_no_text(samples: list[np.ndarray]) -> None:
    """Otherwise, a dot between two names belongs to either."""
    plot = estimates("X", "x", [Row("name", 3.0, 2.0, 4.0, "3.0")] * 3, samples=samples)
    grids = [shape.at["d"] for shape in plot.shapes if shape.css == "grid"]
    dots = [float(shape.at["cy"]) for shape in plot.shapes if shape.css == "point"]
    for number, (grid, dot) in enumerate(zip(grids, dots, strict=True)):
        top, rule = float(re.search(r"M\S+ (\S+)V", grid)[1]), float(re.search(r"M\S+ (\S+)H", grid)[1])
        assert plot.rows[number][0] + 4 < top < dot - 5 < dot + 5 < rule
        assert all(rule < text - 14 for text, _, _ in plot.rows[number + 1 :])
    svg = page(drawn_result(30, 1), drawn_result(30, 2)).partition('aria-label="Mean returns')[2].partition("</svg>")[0]
    assert all("H" in path for path in re.findall('class="grid" d="(.*?)"', svg)), "a line through all rows"


def test_a_mean_without_an_interval_is_a_hollow_circle_everywhere() -> None:
    """In a histogram and on a curve, with its own key; only intervals that exist are counted."""
    equal = {f"{step}": make_result(returns=np.full(30, 500.0), version=step) for step in (1, 2)}
    drawn = {f"{step}": make_result(30, version=step) for step in (3, 4)}
    for results, hollow, counted in ((equal, 2, ""), (equal | drawn, 2, "2 intervals")):
        [curve] = [one for one in overview(results).sections if "checkpoints" in one.title]
        dots = [shape.css for shape in curve.shapes if shape.css.startswith("dot")]
        assert sum("open" in css for css in dots) == hollow
        assert curve.caption.startswith(counted or "The highest")
        assert "dot open" in dict(curve.key)
    for result, css in ((equal["1"], "point open"), (drawn["3"], "whisker")):
        [plot] = [one for one in run_page(result).sections if isinstance(one, Plot)]
        assert {"point open", "whisker"} & {*dict(plot.key)} == {css}
        bars = [float(shape.at["y"]) for shape in plot.shapes if shape.css == "bar"]
        [mean] = [float(shape.at["cy"]) for shape in plot.shapes if shape.css.startswith("point")]
        assert mean + 5 < plot.y.end <= min(bars), "the mean looks like a value of the vertical axis"


@pytest.mark.parametrize("count", [1, 2])
def test_a_count_agrees_with_its_noun(count: int) -> None:
    """In titles, tables, tooltips and lines."""
    result = drawn_result(count + 1, failed=(0,))
    result.timing = replace(result.timing, num_runners=count, env_steps=count)
    texts = Elements(page(result)).text
    assert f"Returns of {count} episode{'s' * (count > 1)}" in texts
    assert not [text for text in texts if re.search(r"\b1 (faults|episodes|rows|runners|steps|pairs)\b", text)]


def test_faults_are_in_sight() -> None:
    sections = run_page(drawn_result(30, failed=(3,))).sections
    [faults] = [one for one in sections if isinstance(one, Table) and one.title == "Faults"]
    assert not faults.folded
    assert faults.headings[0] == "fault"


def test_folders_of_one_name_are_told_apart() -> None:
    """By as much of their paths as that takes."""
    result = drawn_result(10)
    shown = Elements(render([Source("old/cartpole", result), Source("new/cartpole/result.json", result)])).shown
    assert "old/cartpole" in shown
    assert "new/cartpole" in shown
    assert "cartpole (2)" in render([Source("x/cartpole", result), Source("x/cartpole", result)])


# Inert, small, equal


def test_foreign_text_stays_text() -> None:
    """Names, messages, tracebacks, paths and keys cannot add an element, an attribute or a placeholder."""
    hostile = drawn_result(
        30, failed=(3,), policy=EVIL, env=EVIL, info_keys=[EVIL], traceback=EVIL, reason=EVIL,
    )  # fmt: skip
    text = render([Source(EVIL, hostile), Source(f"b/{EVIL}", hostile)])
    plain = Elements(page(drawn_result(30, failed=(3,)), drawn_result(30, failed=(3,))))
    found = Elements(text)
    assert found.tags <= plain.tags | {"p"}
    assert {name for name, _ in found.attributes} <= {name for name, _ in plain.attributes}
    assert len(found.inside["script"]) == len(found.inside["style"]) * 2 == 2
    assert "49" not in found.shown.replace("{{ 7 * 7 }}", "")[:200]
    assert EVIL.replace("\u2028", " ") in found.shown
    assert "<img" not in text
    assert "\u2028" not in found.inside["script"][0]
    assert found.data[0]["infos"][0][0] == EVIL.replace("\u2028", "\n")


def test_a_page_has_no_characters_that_control_a_terminal_or_the_direction() -> None:
    """In no form: in HTML, in its data, in a notebook and as plain text; also of the files of others."""
    name = "a\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\u202egnp\u2066\u200f.exe\x00"
    result = drawn_result(
        30, failed=(3,), policy=name, env=name, info_keys=[name], traceback=name, reason=name
    )  # fmt: skip
    result.provenance["notes"] = [name]
    shown = result_page(result)
    data = episode_data(result)
    texts = [render([Source(name, result)]), shown._repr_html_(), str(shown), inflate(data["faults"]).decode()]
    controls = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]|\\u202e|\\u001b|\[31m"
    for text in (*texts, *(info[0] for info in data["infos"])):
        assert re.findall(controls, text) == []
    assert all("aredgnp.exe" in text for text in texts)


def test_the_policy_of_the_page_allows_its_own_script_and_style_alone() -> None:
    """By their digests; nothing is loaded, and no attribute runs code or styles."""
    found = Elements(page(drawn_result(20)))
    policy = next(v for _, v in found.attributes if v and "default-src" in v)
    digests = re.findall(r"'sha256-([^']+)'", policy)
    own = [found.inside["style"][0], found.inside["script"][1]]
    assert digests == [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in own]
    assert policy.startswith("default-src 'none'; style-src")
    assert "unsafe" not in policy
    names = {name for name, _ in found.attributes}
    assert not names & {"src", "style", "srcset", "action"}
    assert not any(name.startswith("on") for name in names)
    assert all(value.startswith("#") for name, value in found.attributes if name == "href" and value)


def test_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    """Whether they were just made or read from files."""
    result = drawn_result(300, failed=(5,))
    result.save(tmp_path / "x")
    assert render([Source("x", result)]) == render([Source("x", EvalResult.load(tmp_path / "x"))])


@pytest.mark.parametrize(("num_episodes", "limit"), [(1, 250_000), (10_000, 500_000), (100_000, 2_000_000)])
def test_the_page_is_small(num_episodes: int, limit: int) -> None:
    """Whatever the number of episodes, with 1 % of them failed: bytes of the whole page."""
    assert len(page(drawn_result(num_episodes, failed=range(1, num_episodes, 100))).encode()) <= limit


def test_a_comparison_of_ten_thousand_pairs_is_no_larger() -> None:
    """Seeds, and whatever else both sides have in common, are in it once."""
    text = page(*(drawn_result(10_000, seed, failed=range(1, 10_000, 100)) for seed in (1, 2)))
    assert len(text.encode()) <= 500_000
    first, second = Elements(text).data
    assert {"return", "length"} <= set(second["columns"])
    assert "seed" in set(first["columns"]) - set(second["columns"])


# Videos


def filmed(folder: Path, result: EvalResult, index: int) -> str:
    """Put a file that is named like the video of an episode where videos are; return its name."""
    record = result.table.record(index)
    name = video_name(index, record.seed, None if record.outcome == "failed" else record.episode_return)
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    (folder / "videos" / name).touch()
    return name


def test_the_videos_of_a_run_are_those_that_its_records_agree_with(tmp_path: Path) -> None:
    """By index, seed and return; of another run, another evaluation, or named otherwise, they are not its own."""
    result, other = drawn_result(30, failed=(5,)), drawn_result(40, 1)
    names = {index: filmed(tmp_path, result, index) for index in (12, 5)}
    for index in (7, 35):
        filmed(tmp_path, other, index)
    for name in ("episode_3.mp4", names[5].replace(".mp4", ".mp4.tmp"), names[12].replace("12_", "11_"), "x" * 200):
        (tmp_path / "videos" / name).touch()
    (tmp_path / "videos" / names[12].replace("12_", f"{10**30}_")).touch()
    linked = filmed(tmp_path / "elsewhere", result, 20)
    (tmp_path / "videos" / linked).symlink_to(tmp_path / "elsewhere" / "videos" / linked)
    assert videos_of(result, tmp_path) == {index: tmp_path / "videos" / names[index] for index in (5, 12)}
    result.save(tmp_path)
    assert [*videos_of(result, tmp_path / RESULT_FILE)] == [5, 12]
    assert videos_of(result, "s3://bucket/run") == videos_of(result, tmp_path / "nowhere") == {}


def test_a_report_links_to_the_videos_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their place beside it, whatever folders are called; in the page and for its script."""
    monkeypatch.chdir(tmp_path)
    result, strange = drawn_result(20, failed=(5,)), "no javascript:alert(1)#?% <b>"
    result.save(strange)
    names = [filmed(Path(strange), result, index) for index in (3, 5)]
    Path("pages").mkdir()
    for output, beside in (("pages/one.html", "../"), ("here.html", "")):
        assert call("report", strange, "-o", output).exit_code == 0
        found = Elements(Path(output).read_text())
        links = [value for name, value in found.attributes if name == "href" and not value.startswith("#")]
        assert [unquote(link) for link in links] == [f"{beside}{strange}/videos/{name}" for name in names]
        assert all(re.fullmatch(r"[\w./%+-]+", link) for link in links)
        assert found.data[0]["videos"] == {"3": links[0], "5": links[1]}


# Charts


def check_drawn(plot: Plot | None) -> None:
    """Every coordinate is a number on the drawing."""
    if plot is None:
        return
    ticks = [at for axis in (plot.x, plot.y) for at, _ in axis.ticks] + [at for at, _, _ in plot.rows]
    texts = [text for shape in plot.shapes for name, text in shape.at.items() if not name.startswith("data")]
    found = [float(part) for text in texts for part in re.findall(r"[^ MLZVH]+", text)]
    assert all(math.isfinite(value) and -1 <= value <= WIDTH + 1 for value in found + ticks)
    assert len(ticks) <= 40


@given(st.lists(st.floats(), min_size=1, max_size=40))
@example([0.0, 0.0, 0.0, -1e54, -1e-254])  # The range is more widths of a bin than a float can tell.
def test_charts_can_be_drawn_of_any_numbers(values: list[float]) -> None:
    """NaN, infinities, equal and extreme values leave the page whole."""
    array = np.array(values)
    row = Row("x", values[0], values[-1], values[0], "", values[:2])
    check_drawn(histogram(array, "x", row, marks=[("median", "median", 0.0)]))
    check_drawn(estimates("X", "x", [row, row], within=(0.0,)))
    check_drawn(estimates("X", "x", [row, row], samples=[array, array[1:]]))
    points = [(float(at), Row("", value, value, value, "")) for at, value in enumerate(values)]
    check_drawn(lines("X", "step", "x", {"a": points, "b": points[:1]}))


@given(st.floats(-1e300, 1e300), st.floats(1e-300, 1e300))
def test_ticks_are_round_and_on_the_axis(low: float, width: float) -> None:
    """Between two and nine of them, in order."""
    axis = axis_over("x", [low, low + width], 10.0, 110.0)
    assert axis is not None
    places = [at for at, _ in axis.ticks]
    assert len({text for _, text in axis.ticks}) == len(places)
    assert places == sorted(places)
    assert 2 <= len(places) <= 9
    assert 9.99 <= places[0] <= places[-1] <= 110.01


@pytest.mark.parametrize("values", [np.arange(30.0) % 7, np.random.default_rng(0).normal(size=999), np.full(9, 3.5)])
def test_a_histogram_counts_every_value_once(values: np.ndarray) -> None:
    """Bars say how many values they stand for; their ranges do not overlap."""
    plot = histogram(values, "return", Row("Returns", values.mean(), math.nan, math.nan, ""))
    assert plot is not None
    bars = [shape for shape in plot.shapes if shape.css == "bar"]
    assert sum(int(bar.title.rpartition(": ")[2].split()[0].replace(",", "")) for bar in bars) == len(values)
    ranges = [(float(bar.at["data-low"]), float(bar.at["data-high"])) for bar in bars]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))


def test_a_line_has_its_points_and_a_band_of_their_intervals() -> None:
    """Of each series in its own colour. A point without an interval is no part of the band."""
    rows = [(100.0, Row("", 5.0, 4.0, 7.0, "")), (200.0, Row("", 6.0, math.nan, math.nan, "")),
            (300.0, Row("", 9.0, 8.0, 9.5, ""))]  # fmt: skip
    plot = lines("X", "step", "score", {"p": rows, "q": rows[:1]})
    assert plot is not None
    [(across, up), *_], [(low_across, low_up), *_] = (
        [
            np.array([point.split() for point in shape.at["d"][1:].split("L")], float).T
            for shape in plot.shapes
            if css in shape.css
        ]
        for css in ("line", "band")
    )
    assert across == pytest.approx(plot.x.place([100, 200, 300]), abs=0.06)
    assert up == pytest.approx(plot.y.place([5, 6, 9]), abs=0.06)
    assert low_across == pytest.approx(plot.x.place([100, 300, 300, 100]), abs=0.06)
    assert low_up == pytest.approx(plot.y.place([4, 8, 9.5, 7]), abs=0.06)
    colours = {name: css for css, name in plot.key}
    assert colours["p"] != colours["q"]
    assert "interval" in colours


# The command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two saved results."""
    monkeypatch.chdir(tmp_path)
    drawn_result(40, 1, failed=(3,)).save("a")
    drawn_result(40, 2).save("b")
    return tmp_path


def test_the_command_writes_one_file(folder: Path) -> None:
    """By default ``report.html``; an older report is replaced, and a link has the name of its target."""
    outcome = call("report", "a")
    assert outcome.exit_code == 0, outcome.output
    first = (folder / "report.html").read_bytes()
    assert outcome.stdout == f"report.html: 1 result, {len(first) / 1000:,.0f} kB\n"
    assert call("report", "a", "b").exit_code == 0
    assert any(untold(label.lower(), 39, "difference") == [] for label in labels((folder / "report.html").read_text()))
    (folder / "latest").symlink_to("a")
    assert call("report", "latest").exit_code == 0
    assert (folder / "report.html").read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b", "latest", "report.html"]


def test_a_file_that_is_not_a_report_is_kept(folder: Path) -> None:
    """Unless ``--force`` is given; so is a folder, even then, and a missing result writes nothing."""
    (folder / "mine.html").write_text("<p>mine")
    outcome = call("report", "a", "-o", "mine.html")
    assert outcome.exit_code == ExitCode.USAGE
    assert "mine.html" in outcome.stderr
    assert (folder / "mine.html").read_text() == "<p>mine"
    assert call("report", "a", "-o", "mine.html", "--force").exit_code == 0
    assert (folder / "mine.html").read_text().startswith("<!doctype html>")
    assert call("report", "a", "-o", "b", "--force").exit_code == ExitCode.USAGE
    assert call("report", "a", "-o", "mine.html/x.html").exit_code == ExitCode.USAGE
    assert call("report", "nowhere").exit_code == ExitCode.USAGE
    assert not (folder / "report.html").exists()


READERS = [
    ("show", "a"), ("show", "a", "--episodes", "1"), ("compare", "a", "b"), ("compare", "b", "a"), ("report", "a"),
    ("export", "a", "--to", "csv"), ("replay", "a", "--episodes", "1"), ("run", "--retry", "a"),
    ("replay", "a", "--episodes", "1", "--video"), ("show", "."),
]  # fmt: skip
DEEP = {"beyond every limit": 100_000, "within that of the parser": 500}


@pytest.mark.parametrize("depth", DEEP.values(), ids=list(DEEP))
@pytest.mark.parametrize("words", READERS, ids=" ".join)
def test_a_deeply_nested_result_is_refused(folder: Path, words: tuple[str, ...], depth: int) -> None:
    """By every command, in a line that names the file; a list goes on."""
    nested = "[" * depth + "]" * depth
    (folder / "a" / RESULT_FILE).write_text(f'{{"format": 1, "status": "complete", "provenance": {nested}}}')
    outcome = call(*words)
    assert outcome.exit_code == (0 if words == ("show", ".") else ExitCode.USAGE), outcome.output
    assert untold(outcome.output, RESULT_FILE) == []


def test_a_deeply_nested_log_is_refused(folder: Path) -> None:
    (folder / "a" / "segments").mkdir()
    (folder / "a" / "segments" / "x").touch()
    (folder / "a" / "manifest.json").write_text("[" * 100_000)
    outcome = call("show", "a")
    assert outcome.exit_code == ExitCode.CLUSTER, outcome.output
    assert untold(outcome.stderr, "manifest.json") == []


@pytest.mark.parametrize(
    ("name", "plain"),
    [("\ud800x", " x"), ("x\nmean 1e9", "x mean 1e9"), ("x\x1b[2J\x9b2J\u202e", "x")],
    ids=["half", "lines", "command"],
)
@pytest.mark.parametrize(
    "words",
    [("show", "a"), ("show", "a", "--faults"), ("show", "a", "--episodes", "3"), ("compare", "a", "b")],
    ids=" ".join,
)
def test_foreign_names_are_printed_on_one_line(folder: Path, words: tuple[str, ...], name: str, plain: str) -> None:
    """Whatever they hold: a second line would be taken for one of ours, and half a character cannot be written."""
    shown = []
    for given_name in (name, plain):
        data = json.loads((folder / "a" / RESULT_FILE).read_text())
        data["provenance"]["identity"]["policy"], data["provenance"]["notes"] = given_name, [given_name]
        named = {"error_type": given_name, "node": given_name, "message": given_name}
        data["faults"] = [fault | named for fault in data["faults"]]
        (folder / "a" / RESULT_FILE).write_text(json.dumps(data))
        outcome = call(*words)
        assert outcome.exit_code == 0, outcome.output
        assert all(line.isprintable() for line in outcome.stdout.splitlines())
        shown.append(outcome.stdout)
    assert shown[0] == shown[1]


def test_foreign_names_in_an_error_are_not_commands(folder: Path) -> None:
    path = folder / "a" / RESULT_FILE
    data = json.loads(path.read_text())
    data["provenance"]["identity"]["environment"]["env"] = "\x9b2J\ud800x"
    path.write_text(json.dumps(data))
    outcome = call("compare", "a", "b")
    assert outcome.exit_code == ExitCode.USAGE
    assert untold(outcome.stderr, "environment.env") == []
    assert outcome.stderr.strip().isprintable()
