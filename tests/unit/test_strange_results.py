"""Saved results of strangers, which hold what this package never writes: shown, or refused in a sentence; and small."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_eval import EvalConfig, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import UsageError
from rl_eval.log.manifest import checksum
from rl_eval.log.segments import Kind, Segment, decode, name_of
from rl_eval.records.columns import episode_columns, fault_columns
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import COLUMNS, ROW, EpisodeTable, Outcome
from rl_eval.records.foreign import MOST_UNRECORDED, check_claim
from rl_eval.reports.listing import list_runs
from rl_eval.results.comparison import is_shown, verdict_of
from rl_eval.results.files import EPISODES_FILE, RESULT_FILE, read_folder, write_episodes
from rl_eval.results.loading import load
from rl_eval.results.stats.paired import paired_difference
from rl_eval.scheduling.matchups import make_matchups
from rl_eval.scheduling.plan import EpisodePlan
from tests.unit.cli_world import call
from tests.unit.log_world import make_fault
from tests.unit.report_world import make_result
from tests.unit.strange_world import STRANGE, changed, is_shown_or_refused, ones, places

EPISODES = 8
AGENTS = ("return/a", "length/a", "terminated/a", "truncated/a", "policy/a")
LISTED = ("metrics", "interval", "plan", "determinism", "provenance")
COMPUTED = ("metrics", "interval", "success_interval", "mean_return_bounds", "notes", "fault_counts")
"""Fields that are computed anew when a result is loaded."""
NUMBERS = pa.array(np.ones(EPISODES))
COLUMNS_OF_OTHERS = {
    "null": pa.nulls(EPISODES),
    "lists": pa.array([[1]] * EPISODES),
    "decimals": pa.array([decimal.Decimal("1.50")] * EPISODES),
    "text": pa.array(["<b>"] * EPISODES),
    "numbers as text": pa.array(["1"] * EPISODES),
    "codes of texts": pa.array(["completed", "x"] * (EPISODES // 2)).dictionary_encode(),
    "codes of numbers": pa.array([1, 2] * (EPISODES // 2)).dictionary_encode(),
    "bytes": pa.array([b"\xff"] * EPISODES),
    "booleans": pa.array([True, False] * (EPISODES // 2)),
    "times": pa.array([datetime.datetime(2020, 1, 1)] * EPISODES),  # noqa: DTZ001
    "some missing": pa.array([1] * (EPISODES - 1) + [None]),
    "some booleans missing": pa.array([True] * (EPISODES - 1) + [None]),
    "negative": pa.array([-5] * EPISODES),
    "the greatest int": pa.array([2**63 - 1] * EPISODES),
    "more than an int": pa.array([2**64 - 1] * EPISODES, pa.uint64()),
    "halves": pa.array([0.5] * EPISODES),
    "NaN": pa.array([math.nan] * EPISODES),
    "infinite": pa.array([math.inf, -math.inf] * (EPISODES // 2)),
    "the greatest floats": pa.array([1.7e308, -1.7e308] * (EPISODES // 2)),
    "great numbers": pa.array([1e200, -1e200] * (EPISODES // 2)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A result with something in every field."""
    found = Determinism(checked=3, mismatched=(2,), failed=(4,), failure="it broke")
    result = make_result(
        EPISODES, failed=(1,), info_keys=("distance", *AGENTS), determinism=found, audit_mismatches=(2,),
        return_bounds=(0.0, 1000.0),
    )  # fmt: skip
    result.table.infos[:] = 0.0
    result.save(tmp_path / "run")
    rewrite(tmp_path / "run", ("determinism", "first"), {"episode": 2, "step": 1, "what": "reward", "cause": "policy"})
    assert is_shown_or_refused(tmp_path / "run")
    return tmp_path / "run"


def rewrite(folder: Path, place: tuple[Any, ...], value: Any) -> None:
    path = folder / RESULT_FILE
    path.write_text(json.dumps(changed(json.loads(path.read_text()), place, value)))


def rewrite_episodes(folder: Path, name: str, column: Any) -> None:
    """Replace a column, and the fingerprint and digest of the records if they can be read."""
    path = folder / EPISODES_FILE
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)
    try:
        _, records = read_folder(folder)
    except UsageError:
        return
    rewrite(folder, ("fingerprint",), records.fingerprint())
    rewrite(folder, ("records_digest",), records.digest())


def test_a_strangers_summary(folder: Path) -> None:
    """Whatever stands in a field, or if it is missing."""
    data = json.loads((folder / RESULT_FILE).read_text())
    for number, place in enumerate(places({**data, **dict.fromkeys(COMPUTED)}, deepest=2)):
        for strange in [*(STRANGE if len(place) < 2 else STRANGE[number % 2 :: 2]), ...]:
            (folder / RESULT_FILE).write_text(json.dumps(changed(data, place, strange)))
            is_shown_or_refused(folder)


def test_a_strangers_summary_is_listed(folder: Path) -> None:
    """A complete result is, without being loaded."""
    data = json.loads((folder / RESULT_FILE).read_text()) | {"status": "complete"}
    for place in places({key: data[key] for key in LISTED}, deepest=2):
        for strange in [*STRANGE, ...]:
            (folder / RESULT_FILE).write_text(json.dumps(changed(data, place, strange)))
            [run] = list_runs(folder)
            assert json.dumps(run.to_dict(), allow_nan=False)
            assert f"{run.count} {run.mean} {run.name} {run.problem}".isprintable()


@pytest.mark.parametrize(
    "name", [*COLUMNS, "info_distance", *(f"info_{name}" for name in AGENTS[:2]), "info_policy/a", "faults"]
)
def test_a_strangers_column(folder: Path, name: str) -> None:
    """Whatever it holds."""
    for column in COLUMNS_OF_OTHERS.values():
        rewrite_episodes(folder, name, column)
        is_shown_or_refused(folder)


GREAT = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1.7e308, -1.7e308, 1e200, 1e-170, 5e-324])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(GREAT, GREAT), min_size=1, max_size=25))
def test_returns_of_any_size_are_compared(pairs: list[tuple[float, float]]) -> None:
    """A p-value is one, or NaN; then there is no verdict, and nothing is shown."""
    difference = paired_difference(*np.array(pairs).T)
    assert 0 <= difference.p_value <= 1 or math.isnan(difference.p_value)
    verdict, shown = verdict_of(difference, 0.95), is_shown(difference, 0.95)
    assert "nan" not in verdict
    assert not (shown and verdict.startswith("no "))
    if math.isnan(difference.p_value):
        assert verdict.startswith("no verdict: ")
        assert not shown
    interval = difference.interval
    assert (interval.low <= interval.high) if interval.exists else interval.note


def test_differences_near_the_greatest_float_have_no_verdict(tmp_path: Path) -> None:
    """In a comparison and in a report on both."""
    for name, value in (("a", -1e307), ("b", 1e307)):
        result = make_result(30)
        result.table.rows["episode_return"][:20] = value
        result.save(tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    outcome = call("compare", a, b, "--fail-on", "regression")
    assert "no verdict: " in outcome.stdout
    assert outcome.exit_code == 2, outcome.output
    assert json.loads(call("compare", a, b, "--json").stdout)["difference"]["p_value"] is None
    page = tmp_path / "page.html"
    assert call("report", a, b, "-o", str(page)).exit_code == 0
    assert "no verdict: " in page.read_text()


def test_times_that_are_no_numbers_are_null_in_json(folder: Path) -> None:
    rewrite_episodes(folder, "step_seconds", COLUMNS_OF_OTHERS["NaN"])
    shown = json.loads(call("show", str(folder), "--json").stdout)
    assert {episode["seconds"] for episode in shown["slowest"]} == {None}


def test_a_name_that_is_not_utf8_is_shown(folder: Path) -> None:
    """With the bytes that are none as escapes; a result is saved under it, too."""
    path = folder.with_name(os.fsdecode(b"bad\xff"))
    load(folder).save(path)
    shown = call("show", str(path))
    assert shown.exit_code == 0, shown.output
    assert "bad\\xff" in shown.stdout
    [line] = [line for line in call("list", str(path.parent)).stdout.splitlines() if line.endswith("bad\\xff")]
    assert "broken" not in line
    page = path.with_name("page.html")
    assert call("report", str(path), "-o", str(page)).exit_code == 0
    (path / EPISODES_FILE).unlink()
    refused = call("show", str(path))
    assert refused.exit_code == ExitCode.USAGE
    assert "bad\\xff" in refused.stderr


# ------------------------------------------------------------------------------ what says that it is large

CLAIMS = [10**12, 2 * 10**9, 10**8, MOST_UNRECORDED + EPISODES + 1]


@contextmanager
def little_memory() -> Iterator[None]:
    """What numpy and Python allocate meanwhile is little."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("planned", CLAIMS)
def test_a_plan_of_far_more_episodes_than_records_is_refused(folder: Path, planned: int) -> None:
    """Before any memory is taken for them."""
    rewrite(folder, ("plan", "num_episodes"), planned)
    with little_memory(), pytest.raises(UsageError, match=r"its plan has|less than or equal to 2147483648"):
        load(folder)


def test_a_plan_of_more_episodes_than_records_is_read(tmp_path: Path) -> None:
    """It may have just begun."""
    begun = make_result(100_000, status="partial")
    begun.table.rows[10:] = np.zeros(1, ROW)
    begun.save(tmp_path)
    assert load(tmp_path).aggregates.count == 10


@pytest.mark.parametrize("planned", CLAIMS)
def test_a_logs_plan_of_far_more_episodes_than_records_is_refused(tmp_path: Path, planned: int) -> None:
    """As that of a result."""
    config = EvalConfig().environment("rl_eval.testing:faulty", env_kwargs={"env": "two_length"})
    evaluate(config.evaluation(num_episodes=EPISODES), ones, run_dir=tmp_path)
    path = tmp_path / "manifest.json"
    body = json.loads(path.read_text()) | {"num_episodes": planned}
    body.pop("checksum")
    form = body.pop("format")
    path.write_text(json.dumps({"format": form, "checksum": checksum(body), **body}))
    with little_memory(), pytest.raises(UsageError, match=r"its plan has|evaluation.num_episodes is 1000000000000"):
        load(tmp_path)


@pytest.mark.parametrize(("missing", "scalars"), [(MOST_UNRECORDED, 11), (2, 10**8), (1, 10_001)])
def test_info_scalars_count_too(missing: int, scalars: int) -> None:
    """They take as much memory as rows."""
    with pytest.raises(ValueError, match=f"{scalars:,} info scalars each: at most"):
        check_claim(missing + 5, 5, scalars)


def constant_rows(count: int) -> dict[str, pa.Array]:
    """Return columns of episodes that are all the same, which take hardly any bytes."""
    return episode_columns(np.broadcast_to(make_result(1).table.rows, count).copy(), np.zeros((count, 0)), ())


def test_more_rows_than_planned_are_refused(folder: Path) -> None:
    """Before they are read."""
    pq.write_table(pa.table(constant_rows(200_000)), folder / EPISODES_FILE)
    with little_memory(), pytest.raises(UsageError, match="has 200,000 rows for a plan of 8 episodes"):
        load(folder)
    (folder / EPISODES_FILE).unlink()  # Not all of it is to be searched for planted secrets; so below.


def test_more_rows_than_bytes_can_hold_are_refused(folder: Path) -> None:
    pq.write_table(pa.table(constant_rows(200_000)), folder / EPISODES_FILE)
    rewrite(folder, ("plan", "num_episodes"), 200_000)
    with little_memory(), pytest.raises(UsageError, match=r"200,000 rows, which its [\d,]+ bytes cannot hold"):
        load(folder)
    (folder / EPISODES_FILE).unlink()


def test_rows_that_compress_best_are_read(tmp_path: Path) -> None:
    """Failed episodes, all orders of a seating on one seed; there is room between them and what is refused."""
    plan = EpisodePlan(99_984, matchups=make_matchups("round_robin", list("abcd"), symmetric=True, seats=4))
    rows = np.zeros(len(plan), ROW)
    rows["index"], rows["seed"], rows["outcome"] = np.arange(len(plan)), plan.seeds, Outcome.FAILED
    table = EpisodeTable(len(plan), [f"info{number}" for number in range(20)])
    table.fill(rows)
    write_episodes(tmp_path / EPISODES_FILE, table)
    assert (tmp_path / EPISODES_FILE).stat().st_size > 4.5 * len(plan)
    (tmp_path / RESULT_FILE).write_text(json.dumps({"plan": plan.to_dict(), "faults": []}))
    _, found = read_folder(tmp_path)
    assert found.fingerprint() == table.fingerprint()
    (tmp_path / EPISODES_FILE).unlink()


def segment(kind: Kind, columns: dict[str, pa.Array]) -> Segment:
    """Decode a segment of columns."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, metadata={"rl_eval": json.dumps({"format": 1, "session": "me"})}), sink)
    data = bytes(sink.getvalue().to_pybytes())
    return decode(name_of(data, 1, 1, kind), data)


def test_a_segment_of_more_rows_than_bytes_can_hold_is_refused() -> None:
    with little_memory(), pytest.raises(ValueError, match="cannot hold"):
        segment("episodes", constant_rows(200_000))


@pytest.mark.parametrize(("count", "reason"), [(1_000_001, "it has 1,000,001 faults"), (200_000, "cannot hold")])
def test_a_segment_of_very_many_faults_is_refused(count: int, reason: str) -> None:
    one = pa.table(fault_columns([make_fault(3)]))
    columns = {name: pa.repeat(one[name][0], count) for name in one.column_names}
    with little_memory(), pytest.raises(ValueError, match=reason):
        segment("faults", columns)


def test_a_long_text_in_each_row_is_kept_once() -> None:
    """Of a megabyte in each of many rows the file has one."""
    text = "".join(map(chr, np.random.default_rng(0).integers(0x4E00, 0x9000, 300_000)))
    words, count = pa.array([text]), 20_000
    codes = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), words)
    faults = fault_columns([make_fault(number) for number in range(count)]) | {"traceback": codes}
    with little_memory():
        assert len({id(fault.traceback) for fault in segment("faults", faults).faults}) == 1
    rows = make_result(count).table.rows
    columns = episode_columns(rows, np.zeros((count, 0)), ()) | {"outcome": codes}
    with little_memory(), pytest.raises(ValueError, match="column outcome holds a value other than"):
        segment("episodes", columns)


def test_a_text_where_numbers_are_is_not_read() -> None:
    columns = constant_rows(3) | {"length": pa.array(["1", "2", "3"])}
    with pytest.raises(ValueError, match="its column length holds string"):
        segment("episodes", columns)


def test_any_number_of_faults_of_one_episode_is_read() -> None:
    """Each that is no longer charged replaces itself, and is looked up, not searched for."""
    faults = [make_fault(0, step=step) for step in range(30_000)]
    table = EpisodeTable(1)
    table.fill(table.rows[:0], faults=faults)
    uncharged = [replace(fault, charged=False) for fault in faults]
    copied = table.copy()
    copied.fill(table.rows[:0], faults=[*uncharged, uncharged[0]])
    assert copied.faults[0] == [*uncharged, uncharged[0]]
    assert table.faults[0] == faults
