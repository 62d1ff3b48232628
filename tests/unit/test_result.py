"""What a result reports, over which episodes, and that it comes back from disk unchanged."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rl_eval.errors import UsageError
from rl_eval.records.episode import COLUMNS
from rl_eval.results.metrics import Timing
from rl_eval.results.result import EvalResult
from rl_eval.results.stats.aggregate import aggregate
from rl_eval.results.stats.interval import mean_interval, success_interval
from rl_eval.results.text import decimals, number
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused
from tests.unit.results_world import TIMING, drawn_result, make_fault, make_result

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = {*make_result().metrics}


def same(a: Any, b: Any) -> bool:
    """Whether two metrics are equal, NaN included."""
    return bool(a == b or (math.isnan(a) and math.isnan(b)))


# Records


def test_episodes_are_a_sequence_in_index_order_of_those_that_finished() -> None:
    """As for a list: length, negative indices, slices, iteration; failed episodes are in it, missing ones are not."""
    episodes = make_result(10).episodes
    assert len(episodes) == 10
    assert [record.index for record in episodes] == list(range(10))
    assert episodes[-1].index == 9
    assert [record.index for record in episodes[2:8:3]] == [2, 5]
    assert episodes[-2:][0].length == 9
    with pytest.raises(IndexError):
        episodes[10]
    episodes = make_result(6, missing=[1, 4], failed=[2]).episodes
    assert [(record.index, record.outcome) for record in episodes] == [
        (0, "completed"), (2, "failed"), (3, "completed"), (5, "completed"),
    ]  # fmt: skip
    assert episodes[1].faults == tuple(make_fault(2, attempt) for attempt in (1, 2, 3))


# Numbers


def test_complete_result_reports_over_all_episodes() -> None:
    """Every metric has the value that the rows give by hand."""
    result = make_result(40)
    returns = result.table.rows["episode_return"]
    numbers, interval, success = aggregate(returns), mean_interval(returns), success_interval(20, 40)
    expected = {
        "episode_return_mean": numbers.mean, "episode_return_min": returns.min(), "episode_return_max": returns.max(),
        "episode_return_std": numbers.std, "episode_return_sem": numbers.sem, "episode_return_median": numbers.median,
        "episode_return_iqm": numbers.iqm, "episode_return_cvar10": numbers.cvar10,
        "episode_return_q05": numbers.q05, "episode_return_q25": numbers.q25,
        "episode_return_q75": numbers.q75, "episode_return_q95": numbers.q95,
        "episode_return_ci_low": interval.low, "episode_return_ci_high": interval.high,
        "discounted_return_mean": pytest.approx(numbers.mean / 2),
        "episode_len_mean": 20.5, "episode_len_min": 1, "episode_len_max": 40, "episode_duration_sec_mean": 0.875,
        "num_episodes": 40, "num_failed_episodes": 0, "num_faults": 0, "num_retried_episodes": 0,
        "num_determinism_checked": 0, "num_determinism_mismatched": 0,
        "terminated_rate": 0.8, "truncated_rate": 0.2, "weights_version": 7,
        "success_rate": 0.5, "success_once_rate": 1.0, "success_ci_low": success.low, "success_ci_high": success.high,
        "num_env_steps_sampled": 300, "env_steps_per_second": 150.0, "wall_seconds": 2.0,
        "reset_seconds": 0.1, "step_seconds": 1.5, "inference_seconds": 0.4,
        "info_mean/x": 40.0, "info_mean/height": 39.0,
    }  # fmt: skip
    assert result.metrics == expected
    assert result.mean_return == numbers.mean
    assert result.aggregates == numbers
    assert result.interval == interval
    assert result.mean_return_bounds == (numbers.mean, numbers.mean)
    assert result.notes == []


def test_metrics_always_have_the_same_keys() -> None:
    """A logger or a stopping rule finds every key, whatever happened."""
    some, all_failed = make_result(5, success=-1), make_result(5, failed=[0, 1, 2, 3, 4])
    for result in (make_result(5), some, all_failed, make_result(5, missing=[0]), make_result(1)):
        assert set(result.metrics) == KEYS
        assert all(isinstance(value, int | float) for value in result.metrics.values())


@pytest.mark.parametrize("name", ["result.json", "episodes.parquet"])
def test_saving_replaces_a_result_and_nothing_else(tmp_path: Path, name: str) -> None:
    make_result(5).save(tmp_path)
    make_result(6).save(tmp_path)
    assert len(EvalResult.load(tmp_path).plan) == 6
    Path(tmp_path, name).write_text('{"my": "file"}')
    with refused(UsageError, str(tmp_path / name)):
        make_result(5).save(tmp_path)
    assert Path(tmp_path, name).read_text() == '{"my": "file"}'


@pytest.mark.parametrize("count", [2, 20, 200])
def test_equal_returns_have_an_interval_only_within_bounds(count: int) -> None:
    """Of episodes that all end at the limit, a gate would believe that every other does."""
    returns = np.full(count, 500.0)
    result = make_result(count, returns=returns)
    assert not result.interval.exists
    assert math.isnan(result.metrics["episode_return_ci_low"])
    bounded = make_result(count, returns=returns, return_bounds=(0.0, 500.0))
    assert bounded.metrics["episode_return_ci_low"] == pytest.approx(500 * 0.025 ** (1 / count))
    assert bounded.metrics["episode_return_ci_high"] == 500


def test_failed_episodes_are_counted_and_remove_the_interval() -> None:
    """The mean goes over the completed ones; without bounds nobody knows what the others would return."""
    result = make_result(30, failed=[3, 17])
    completed = np.delete(make_result(30).table.rows["episode_return"], [3, 17])
    assert result.mean_return == aggregate(completed).mean
    assert result.metrics["num_episodes"] == 28
    assert result.num_failed == 2
    assert result.num_retried == 2
    assert result.fault_counts == {"RuntimeError": 6}
    assert [fault.attempt for fault in result.faults] == [1, 2, 3, 1, 2, 3]
    assert result.interval.method == "none"
    assert "2 of 30" in result.interval.note
    assert result.mean_return_bounds is None
    assert math.isnan(result.metrics["episode_return_ci_low"])
    assert result.reason.startswith("2 of 30")


def test_failed_episodes_with_known_bounds_span_worst_to_best() -> None:
    """Interval and mean come as "all failed ones worst" to "all failed ones best"."""
    result = make_result(30, failed=[3, 17], return_bounds=(0.0, 100.0))
    completed = np.delete(make_result(30).table.rows["episode_return"], [3, 17])
    assert result.interval == mean_interval(completed, num_missing=2, bounds=(0.0, 100.0))
    assert result.interval.exists
    assert result.mean_return_bounds == pytest.approx((completed.sum() / 30, (completed.sum() + 200) / 30))


def test_failed_episodes_widen_the_success_interval() -> None:
    """Success has known bounds, so its interval always exists; None, not 0, without any report."""
    silent = make_result(5, success=-1)
    assert (silent.success_rate, silent.success_interval) == (None, None)
    assert all(math.isnan(silent.metrics[name]) for name in ("success_rate", "success_once_rate"))
    result = make_result(30, failed=[3, 17])
    assert result.success_rate == 15 / 28
    assert result.success_interval == success_interval(15, 28, num_unknown=2)


def test_episodes_that_report_no_success_count_as_not_successful() -> None:
    """Otherwise an environment that reports only its successes would be at 100 %."""
    table = make_result(10).table
    table.rows["success_at_end"] = np.where(table.rows["success_at_end"] == 1, 1, -1)
    result = make_result(10, table=table)
    assert result.success_rate == 0.5
    assert result.success_interval == success_interval(5, 5, num_unknown=5)
    assert any("5" in note.split() for note in result.notes)


def test_nothing_completed_gives_no_plausible_number() -> None:
    """Every number about episodes is NaN."""
    result = make_result(4, failed=[0, 1, 2, 3], return_bounds=(0.0, 1.0))
    about_the_run = {"env_steps_per_second", "inference_seconds", "reset_seconds", "step_seconds", "wall_seconds"}
    about_episodes = {key for key in KEYS - about_the_run if not key.startswith("num_")}
    assert all(math.isnan(result.metrics[key]) for key in about_episodes)
    assert math.isnan(result.aggregates.mean)
    assert result.success_rate is None
    assert result.interval.method == "none"
    assert result.mean_return_bounds is None
    assert result.metrics["num_episodes"] == 0


def test_run_stopped_early_counts_the_leading_stretch_only() -> None:
    """Episodes beyond the first gap finished early because they were short."""
    result = make_result(30, missing=[12, 20])
    expected = make_result(30).table.rows["episode_return"][:12]
    assert result.metrics["num_episodes"] == 12
    assert result.aggregates == aggregate(expected)
    pairs = ((result.interval, mean_interval(expected)), (result.success_interval, success_interval(6, 12)))
    for found, plain in pairs:
        assert replace(found, note="") == replace(plain, note="")
        assert found.note.startswith(plain.note)
        assert len(found.note) > len(plain.note), "the interval has a note on the prefix"
    assert result.metrics["episode_len_max"] == 12
    assert len(result.episodes) == 28
    assert "0 to 11 of 30" in result.notes[0]
    assert "16" in result.notes[1]


def test_failed_episode_beyond_the_gap_does_not_touch_the_interval() -> None:
    """It is reported as failed all the same; with a gap at the start nothing is left to count."""
    result = make_result(30, missing=[12], failed=[25])
    assert result.interval.exists
    assert result.num_failed == 1
    assert "1 of 12" in make_result(30, missing=[12], failed=[5]).interval.note
    assert math.isnan(make_result(30, missing=[0]).aggregates.mean)


def test_return_outside_the_bounds_is_said_and_removes_the_interval() -> None:
    """Wrong bounds must not cost a finished evaluation its result."""
    assert not make_result(30, failed=[3], return_bounds=(0.0, 5.0)).interval.exists
    result = make_result(30, return_bounds=(0.0, 5.0))
    assert not result.interval.exists
    assert result.mean_return > 5
    assert any("return_bounds" in note for note in result.notes)
    odd = make_result(4, returns=[1.0, math.nan, 2.0, 3.0])
    assert math.isnan(odd.aggregates.mean)
    assert not odd.interval.exists


TWO_VERSIONS = make_result(5).table
TWO_VERSIONS.rows["weights_version"][3] = 8


@pytest.mark.parametrize(
    ("arguments", "key", "fields"),
    [
        ({"plan": EpisodePlan(6, seed=3)}, "table", {"value": 5}),
        ({"plan": EpisodePlan(5, seed=4)}, "records", {"episode": 0}),
        ({"status": "complete", "missing": [4]}, "status", {"value": "complete"}),
        ({"status": "completed"}, "status", {"value": "completed"}),
        ({"return_bounds": (1.0, 0.0)}, "return_bounds", {"value": "(1.0, 0.0)"}),
        ({"return_bounds": (0.0, math.inf)}, "return_bounds", {"value": "(0.0, inf)"}),
        ({"table": TWO_VERSIONS}, "weights_version", {"value": "[7, 8]"}),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], key: str, fields: dict[str, Any]) -> None:
    """A result that cannot be true is not made."""
    with refused(UsageError, key, **fields):
        make_result(5, **arguments)


def test_fingerprint_ignores_how_episodes_were_run() -> None:
    """Attempts, runners and times do not matter; a last bit of a return does."""
    table = make_result(8).table
    table.rows["attempts"], table.rows["runner"], table.rows["step_seconds"] = 2, 0, 9.0
    assert make_result(8, table=table).fingerprint == make_result(8).fingerprint
    table.rows["episode_return"][5] = np.nextafter(table.rows["episode_return"][5], np.inf)
    assert make_result(8, table=table).fingerprint != make_result(8).fingerprint


def test_timing_shares_are_fractions_of_the_runners_time() -> None:
    """Two runners for two seconds have four seconds to spend."""
    assert TIMING.shares == pytest.approx({"step": 0.375, "inference": 0.1, "reset": 0.025, "other": 0.5})
    assert Timing(0.0, 0, 0.0, 0.0, 0.0, 0).shares == {}
    assert Timing(1.0, 9, 1.0, 1.0, 0.0, 0).shares["other"] == 0


# Disk


def test_the_time_says_who_waits_for_whom() -> None:
    """21 slots ask 310 rows per second; a row is at the server for 64 % of the time."""
    asking = Timing(10.0, 3100, 0.0, 150.0, 60.0, 0, answer_seconds=6.38)
    assert asking.waiting == "the server waits 36% of the time for simulators, which ask 310 rows/s: add 12 slots"
    one_process = Timing(10.0, 3100, 0.0, 7.0, 2.0, 0, answer_seconds=5.0)
    assert one_process.waiting == "the server waits 50% of the time for simulators, which ask 310 rows/s: add 1 runner"
    full = Timing(10.0, 3100, 0.0, 105.0, 105.0, 2, answer_seconds=20.0)
    assert "50%" in full.waiting
    assert Timing(10.0, 3100, 0.0, 150.0, 60.0, 0).waiting == ""


def test_result_survives_the_disk(tmp_path: Path) -> None:
    """Rows come back bit by bit, faults and numbers with them."""
    result = make_result(30, failed=[3], missing=[20, 29], audit_mismatches=(4,), return_bounds=(-1.0, 90.0))
    result.table.add_fault(make_fault(20, error_type="TimeoutError"))
    result.save(tmp_path / "deep" / "out")
    loaded = EvalResult.load(tmp_path / "deep" / "out")
    assert loaded.fingerprint == result.fingerprint
    assert loaded.table.rows.tobytes() == result.table.rows.tobytes()
    np.testing.assert_array_equal(loaded.table.infos, result.table.infos)
    assert loaded.table.info_keys == ("height", "x")
    assert loaded.faults == result.faults
    assert {fault.index for fault in loaded.faults} == {3, 20}
    assert all(same(loaded.metrics[key], value) for key, value in result.metrics.items())
    assert loaded.to_dict() == result.to_dict()
    assert str(loaded) == str(result)


def test_json_is_strict_and_whole(tmp_path: Path) -> None:
    """NaN is null: readers other than Python can parse it."""
    result = make_result(4, failed=[0, 1, 2, 3])
    data = json.loads(result.to_json(tmp_path / "r.json"), parse_constant=pytest.fail)
    assert data == result.to_dict() == json.loads((tmp_path / "r.json").read_text())
    assert data["fingerprint"] == result.fingerprint
    assert data["plan"]["fingerprint"] == result.plan_fingerprint
    assert data["metrics"]["episode_return_mean"] is None
    assert data["fault_counts"] == {"RuntimeError": 12}
    assert data["provenance"]["identity"]["policy"] == "pkg:champion"


def test_parquet_reads_without_this_package(tmp_path: Path) -> None:
    """Columns have clear names and values: text, booleans, null for "none"."""
    result = make_result(6, failed=[2], missing=[4])
    result.to_parquet(tmp_path / "e.parquet")
    columns = pq.read_table(tmp_path / "e.parquet").to_pydict()
    assert columns["index"] == [0, 1, 2, 3, 5]
    assert columns["outcome"] == ["completed", "completed", "failed", "completed", "completed"]
    assert columns["truncated_by"] == ["environment", None, None, None, "max_episode_steps"]
    assert columns["success_at_end"] == [True, False, None, False, False]
    assert columns["info_x"] == result.table.infos[[0, 1, 2, 3, 5], 1].tolist()
    assert [len(json.loads(faults)) for faults in columns["faults"]] == [0, 0, 3, 0, 0]
    assert json.loads(columns["faults"][2])[0]["message"] == make_fault(2).message
    assert {"seed", "episode_return", "length", "attempts", "weights_version"} <= set(columns)


def _rewrite(folder: Path, change: Any) -> None:
    episodes = pq.read_table(folder / "episodes.parquet")
    pq.write_table(change(episodes), folder / "episodes.parquet")


def _set_return(episodes: pa.Table) -> pa.Table:
    returns = episodes.column("episode_return").to_numpy().copy()
    returns[1] += 1e-9
    return episodes.set_column(episodes.column_names.index("episode_return"), "episode_return", pa.array(returns))


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


TAMPERED: dict[str, tuple[Callable[[Path], object], str, str | None, str]] = {
    "a return": (lambda f: _rewrite(f, _set_return), "", "table of records", ""),
    "a record gone": (lambda f: _rewrite(f, lambda t: t.slice(1)), "", "table of records", ""),
    "a record twice": (lambda f: _rewrite(f, lambda t: pa.concat_tables([t.slice(6)] * 2)), "", None, ""),
    "a column gone": (lambda f: _rewrite(f, lambda t: t.drop_columns(["seed"])), "", None, "seed"),
    "half a file": (
        lambda f: (f / "episodes.parquet").write_bytes((f / "episodes.parquet").read_bytes()[:200]),
        "episodes.parquet",
        None,
        "",
    ),
    "no records": (lambda f: (f / "episodes.parquet").unlink(), "episodes.parquet", None, ""),
    "no summary": (lambda f: (f / "result.json").unlink(), "", None, "result.json"),
    "half a summary": (lambda f: (f / "result.json").write_text('{"format": 1,'), "result.json", None, ""),
    "not a summary": (lambda f: (f / "result.json").write_text("[]"), "result.json", None, "list"),
    "a fingerprint": (lambda f: _edit(f, fingerprint="0" * 64), "", "table of records", "0" * 16),
    "another plan": (
        lambda f: _edit(f, plan={"num_episodes": 12, "seed": 4, "fingerprint": "1" * 64}),
        "",
        "plan",
        "1" * 16,
    ),
    "another format": (lambda f: _edit(f, format=2), "", "format", "2"),
    "a field gone": (lambda f: _edit(f, timing={}), "", "result", "timing.wall_seconds"),
    "a bad fault": (lambda f: _edit(f, faults=[{"index": 0}]), "", None, "faults.0.seed"),
}  # fmt: skip
"""What is done to a folder, the file that is named, the key of the cause, and a name or value in the message."""


@pytest.mark.parametrize("case", TAMPERED)
def test_damaged_output_is_refused(tmp_path: Path, case: str) -> None:
    """A folder whose records are not those that were saved is not loaded, and the error names the damage."""
    make_result(12).save(tmp_path)
    EvalResult.load(tmp_path)
    tamper, file, key, named = TAMPERED[case]
    tamper(tmp_path)
    with refused(UsageError, str(tmp_path / file)) as caught:
        EvalResult.load(tmp_path)
    assert getattr(caught.value.__cause__, "key", None) == key
    assert named in str(caught.value).replace(str(tmp_path), "")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", [*COLUMNS, "info_height", "info_x"])
def test_a_changed_value_of_any_column_is_noticed(tmp_path: Path, name: str) -> None:
    """Also of those that are not in the fingerprint, such as the discounted return."""
    result = make_result(12)
    result.save(tmp_path)
    values = pq.read_table(tmp_path / "episodes.parquet").column(name).to_pylist()
    words = {"outcome": "failed", "truncated_by": None, "success_once": False, "success_at_end": None}
    first = words[name] if name in words else values[0] + 1 if type(values[0]) is not bool else not values[0]
    assert first != values[0]
    column = pa.array([first, *values[1:]])
    _rewrite(tmp_path, lambda t: t.set_column(t.column_names.index(name), name, column.cast(t.schema.field(name).type)))
    with refused(UsageError, str(tmp_path)):
        EvalResult.load(tmp_path)


def test_a_file_without_a_digest_of_its_columns_loads(tmp_path: Path) -> None:
    """As older versions wrote it. Edited metrics are not believed: numbers are computed from the records again."""
    result = make_result(12)
    result.save(tmp_path)
    path = tmp_path / "result.json"
    kept = {key: one for key, one in json.loads(path.read_text()).items() if key != "records_digest"}
    path.write_text(json.dumps(kept | {"metrics": {"episode_return_mean": 1e9}}))
    assert EvalResult.load(path).metrics == result.metrics


def test_every_nan_of_a_column_is_the_same(tmp_path: Path) -> None:
    """A Parquet file keeps one of them."""
    result = make_result(12)
    result.table.infos[:3, 0] = [np.nan, -np.nan, np.uint64(0x7FF8_0000_0000_0BAD).view(np.float64)]
    result.save(tmp_path)
    assert np.isnan(EvalResult.load(tmp_path).table.infos[:3, 0]).all()


def test_no_flipped_bit_changes_a_number(tmp_path: Path) -> None:
    """A file with one either loads with the same numbers, or does not."""
    result = make_result(40)
    result.save(tmp_path)
    path = tmp_path / "episodes.parquet"
    data, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for place in rng.choice(len(data) * 8, 300, replace=False).tolist():
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            assert EvalResult.load(tmp_path).metrics == result.metrics
        except UsageError:
            refused += 1
    assert refused > 100


def test_frame_has_nullable_success() -> None:
    """One row per finished episode; "not reported" is missing, not false."""
    frame = make_result(6, failed=[2], missing=[4]).to_frame()
    assert list(frame["index"]) == [0, 1, 2, 3, 5]
    assert str(frame["success_at_end"].dtype) == "boolean"
    assert frame["success_at_end"].isna().tolist() == [False, False, True, False, False]


def test_missing_pandas_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the fix."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(UsageError, "pandas"):
        make_result(3).to_frame()


# Looks


PAGES = {
    "complete": make_result(40),
    "failed episodes": make_result(40, failed=[3], return_bounds=(-1000.0, 1000.0)),
    "no interval": make_result(40, failed=[3]),
    "stopped early": make_result(40, missing=[30]),
    "all equal": make_result(40, returns=np.full(40, 500.0)),
    "nothing": make_result(3, failed=[0, 1, 2]),
    "tiny": make_result(40, returns=np.random.default_rng(0).normal(0, 1e-12, 40)),
    "huge": make_result(40, returns=np.random.default_rng(0).normal(0, 1e15, 40)),
    "bare": make_result(40, provenance={}),
}


@pytest.mark.parametrize("case", PAGES)
def test_print_fits_80_columns_in_text_and_in_colour(case: str) -> None:
    screen = io.StringIO()
    Console(width=80, file=screen).print(PAGES[case])
    assert max(map(len, str(PAGES[case]).splitlines())) <= 80
    assert str(PAGES[case]).replace("-" * 80, "").split() == screen.getvalue().replace("─" * 80, "").split()


def test_numbers_are_written_as_precisely_as_they_are_known() -> None:
    """Two digits of the standard error; without one, four of the value."""
    for value, spread, text in (
        (1234.5678, 12.3, "1,235"),
        (1234.5678, 0.123, "1,234.57"),
        (500.0, 0.0, "500"),
        (-21.1465, math.nan, "-21.15"),
        (0.0012345, 0.0, "0.001234"),
        (1.5e-12, 2e-13, "1.5e-12"),
        (3.25e15, 1e14, "3.25e+15"),
        (math.nan, math.nan, "n/a"),
        (math.inf, math.nan, "inf"),
        (-0.0, 0.0, "0"),
        (-0.0, 1.5, "0.0"),
        (-0.01, 1.5, "0.0"),
        (-0.1, 1.5, "-0.1"),
    ):
        assert number(value, decimals(spread, value)) == text


def test_few_episodes_with_many_info_scalars_are_read(tmp_path: Path) -> None:
    """Most of the file is its metadata."""
    keys = [f"a_rather_long_name_of_a_metric/{number}" for number in range(2_500)]
    drawn_result(3, info_keys=keys).save(tmp_path / "run")
    assert EvalResult.load(tmp_path / "run").table.info_keys == tuple(keys)
