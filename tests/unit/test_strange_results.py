"""Results and logs of strangers, which hold what this package never writes: shown, or refused; and small."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import ComparisonError, EvalError, UsageError
from rl_eval.log.manifest import FORMAT, checksum
from rl_eval.log.segments import Kind, Segment, SegmentName, decode, name_of
from rl_eval.records.determinism import Determinism
from rl_eval.records.episode import COLUMNS, ROW, EpisodeTable, Outcome, Pardon
from rl_eval.records.parquet import episode_columns, fault_columns
from rl_eval.records.plain import MOST_UNRECORDED, check_claim
from rl_eval.reports.html import Source, render
from rl_eval.reports.listing import list_runs
from rl_eval.results.comparison import compare, is_shown, verdict_of
from rl_eval.results.files import EPISODES_FILE, RESULT_FILE, read_folder, write_episodes
from rl_eval.results.loading import load
from rl_eval.results.stats.paired import paired_difference
from rl_eval.scheduling.matchups import make_matchups
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused
from tests.unit import cli_world
from tests.unit.log_world import make_fault
from tests.unit.results_world import drawn_result

STRANGE: Final = [None, "<b>\n\x1b[2J", -5, 10**30, 10**400, math.nan, math.inf, True, [["a"]], {"a": 1}, "\ud800x"]
EPISODES = 8
AGENTS = ("return/a", "length/a", "terminated/a", "truncated/a", "policy/a")
LISTED = ("metrics", "interval", "plan", "determinism", "provenance")
COMPUTED = ("metrics", "interval", "success_interval", "mean_return_bounds", "notes", "fault_counts")
"""Fields that are computed anew when a result is loaded."""
COLUMNS_OF_OTHERS = [
    pa.nulls(EPISODES),
    pa.array([[1]] * EPISODES),
    pa.array(["<b>"] * EPISODES),
    pa.array(["1"] * EPISODES),
    pa.array(["completed", "x"] * (EPISODES // 2)).dictionary_encode(),
    pa.array([b"\xff"] * EPISODES),
    pa.array([True] * (EPISODES - 1) + [None]),
    pa.array([1] * (EPISODES - 1) + [None]),
    pa.array([2**63 - 1] * EPISODES),
    pa.array([2**64 - 1] * EPISODES, pa.uint64()),
    pa.array([-0.5] * EPISODES),
    pa.array([math.nan] * EPISODES),
    pa.array([math.inf, -math.inf] * (EPISODES // 2)),
    pa.array([1.7e308, -1.7e308] * (EPISODES // 2)),
]
NUMBERED = {
    "amendments": {"accepted_at": "now", "host": "x", "num_finished": 3, "differences": ["a"], "code": {"files": {}}},
    "retries": {"asked_at": "now", "epoch": 1, "indices": [1, 10**6]},
}


call: Any = cli_world.call


def ones(observations: Any) -> Any:
    return np.ones(len(observations), np.int64)


def places(data: Any, deepest: int = 3) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested data, as far as it is followed."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (key,)
        if deepest > 1:
            yield from ((key, *more) for more in places(value, deepest - 1))


def changed(data: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the data with another value in one place; without it, if the value is an ellipsis."""
    other = within = copy.deepcopy(data)
    for key in place[:-1]:
        within = within[key]
    if value is ...:
        del within[place[-1]]
    else:
        within[place[-1]] = value
    return other


def changes(data: dict[str, Any], extra: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield the data with something strange in one place, or without it, for each place; deep in it with one each."""
    for number, place in enumerate(places({**data, **dict.fromkeys(extra)})):
        for strange in [*STRANGE, ...] if len(place) < 2 else [STRANGE[number % len(STRANGE)], ...]:
            yield changed(data, place, strange)


def show(result: EvalResult) -> None:
    """Show a result as text, as JSON, as a page, and compared with itself."""
    json.dumps(result.to_dict(), allow_nan=False)
    assert str(result).encode()
    assert "<b>" not in render([Source("x", result)])
    with suppress(ComparisonError):
        comparison = compare(result, result)
        json.dumps(comparison.to_dict(), allow_nan=False)
        assert str(comparison).encode()


def is_shown_or_refused(folder: Path) -> None:
    """Load a result and show it; any other error than a refusal is raised."""
    with suppress(EvalError):
        show(load(folder))


@contextmanager
def little_memory() -> Iterator[None]:
    """What numpy and Python allocate meanwhile is little."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------ whatever stands where


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A result with something in every field."""
    found = Determinism(checked=3, mismatched=(2,), failed=(4,), failure="it broke")
    result = drawn_result(
        EPISODES, failed=(1,), info_keys=("distance", *AGENTS), determinism=found, audit_mismatches=(2,),
        return_bounds=(0.0, 1000.0),
    )  # fmt: skip
    result.table.infos[:] = 0.0
    result.save(tmp_path / "run")
    rewrite(tmp_path / "run", ("determinism", "first"), {"episode": 2, "step": 1, "what": "reward", "cause": "policy"})
    show(load(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with an episode that had a fault."""
    folder = tmp_path_factory.mktemp("strange") / "run"
    config = EvalConfig().environment(
        "rl_eval.testing:faulty", env_kwargs={"env": "two_length", "attempt_rates": [0.6]}
    )
    config.evaluation(num_episodes=EPISODES, return_bounds=(0.0, 1.0)).fault_tolerance(max_attempts_per_episode=2)
    evaluate(config, ones, output=folder)
    return folder


@pytest.fixture
def log(written: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(written, tmp_path / "log"))


def rewrite(folder: Path, place: tuple[Any, ...], value: Any) -> None:
    path = folder / RESULT_FILE
    path.write_text(json.dumps(changed(json.loads(path.read_text()), place, value)))


def rewrite_episodes(folder: Path, name: str, column: Any) -> None:
    """Replace a column, and the fingerprint and digest of the records if they can be read."""
    path = folder / EPISODES_FILE
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(name), name, column), path)
    with suppress(UsageError):
        _, records = read_folder(folder)
        rewrite(folder, ("fingerprint",), records.fingerprint())
        rewrite(folder, ("records_digest",), records.digest())


def with_checksum(path: Path, body: dict[str, Any], **first: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**first, "checksum": checksum(body), **body}))


def rewrite_segment(path: Path, header: dict[str, Any]) -> Path:
    """Write a segment with another header, under the name that fits its content; return its new path."""
    table, name = pq.read_table(path), SegmentName.parse(path.name)
    assert name is not None
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({b"rl_eval": json.dumps(header)}), sink)
    data = bytes(sink.getvalue().to_pybytes())
    path.unlink()
    path = path.with_name(str(name_of(data, name.epoch, name.number, name.kind)))  # type: ignore[arg-type]
    path.write_bytes(data)
    return path


def test_a_strangers_summary(folder: Path) -> None:
    data = json.loads((folder / RESULT_FILE).read_text())
    for strange in changes(data, COMPUTED):
        (folder / RESULT_FILE).write_text(json.dumps(strange))
        is_shown_or_refused(folder)


def test_a_strangers_summary_is_listed(folder: Path) -> None:
    """A complete result is, without being loaded."""
    data = json.loads((folder / RESULT_FILE).read_text()) | {"status": "complete"}
    for place in places({key: data[key] for key in LISTED}, deepest=2):
        for strange in [*STRANGE, ...]:
            (folder / RESULT_FILE).write_text(json.dumps(changed(data, place, strange)))
            [run] = list_runs(folder)
            assert json.dumps(run.to_dict(), allow_nan=False)
            assert " ".join([*run.cells, *run.cells.values()]).isprintable()


@pytest.mark.parametrize("name", [*COLUMNS, "info_distance", "info_return/a", "info_policy/a", "faults"])
def test_a_strangers_column(folder: Path, name: str) -> None:
    for column in COLUMNS_OF_OTHERS:
        rewrite_episodes(folder, name, column)
        is_shown_or_refused(folder)


@pytest.mark.parametrize("part", ["manifest", "episodes", "faults", "amendments", "retries", "owners"])
def test_a_strangers_log(log: Path, part: str) -> None:
    """Files whose checksums and names fit."""
    write: Callable[[dict[str, Any]], object]
    if part == "manifest":
        data = json.loads((log / "manifest.json").read_text())
        form = data.pop("format")
        write = lambda body: with_checksum(log / "manifest.json", body, format=form)  # noqa: E731
    elif part in NUMBERED:
        data = NUMBERED[part]
        write = lambda body: with_checksum(log / part / "000001.json", body)  # noqa: E731
    elif part == "owners":
        [path] = (log / part).iterdir()
        data = json.loads(path.read_text())
        write = lambda body: path.write_text(json.dumps(body))  # noqa: E731
    else:
        found = [next((log / "segments").glob(f"*{part}*"))]
        data = json.loads(pq.read_table(found[0]).schema.metadata[b"rl_eval"])
        write = lambda body: found.append(rewrite_segment(found[-1], body))  # noqa: E731
    data.pop("checksum", None)
    for strange in changes(data):
        write(strange)
        with suppress(EvalError):
            show(load(log)) if part == "manifest" else load(log)


def test_a_header_of_a_later_version_is_read(log: Path) -> None:
    """It may say more; what is known of it counts."""
    before = load(log)
    for path in list((log / "segments").iterdir()):
        rewrite_segment(path, json.loads(pq.read_table(path).schema.metadata[b"rl_eval"]) | {"more": {"than": "known"}})
    assert load(log).to_dict() == before.to_dict()


def test_a_retry_of_what_is_not_planned(log: Path) -> None:
    """With a saved result beside the log, of which retried episodes may differ."""
    before = load(log)
    before.save(log)
    with_checksum(log / "retries" / "000001.json", NUMBERED["retries"] | {"indices": [10**6]})
    assert load(log).fingerprint == before.fingerprint


GREAT = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1.7e308, -1.7e308, 1e200, 1e-170, 5e-324])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(GREAT, GREAT), min_size=1, max_size=25))
def test_returns_of_any_size_are_compared(pairs: list[tuple[float, float]]) -> None:
    """A p-value is one, or NaN; then there is no verdict, and nothing is shown."""
    difference = paired_difference(*np.array(pairs).T)
    assert 0 <= difference.p_value <= 1 or math.isnan(difference.p_value)
    verdict, shown = verdict_of(difference, 0.95), is_shown(difference, 0.95)
    assert "nan" not in verdict
    assert not (shown and (verdict.startswith("no ") or math.isnan(difference.p_value)))
    interval = difference.interval
    assert (interval.low <= interval.high) if interval.exists else interval.note


def test_differences_near_the_greatest_float_have_no_verdict(tmp_path: Path) -> None:
    for name, value in (("a", -1e307), ("b", 1e307)):
        result = drawn_result(30)
        result.table.rows["episode_return"][:20] = value
        result.save(tmp_path / name)
    sides = (tmp_path / "a", tmp_path / "b")
    assert call("compare", *sides, "--fail-on", "regression").exit_code == ExitCode.NO_ANSWER
    assert json.loads(call("compare", *sides, "--json").stdout)["difference"]["p_value"] is None


def test_a_name_that_is_not_utf8_is_shown(folder: Path) -> None:
    """With the bytes that are none as escapes; a result is saved under it, too."""
    path = folder.with_name(os.fsdecode(b"bad\xff"))
    load(folder).save(path)
    for command in (("show", path), ("show", path.parent)):
        outcome = call(*command)
        assert outcome.exit_code == 0, outcome.output
        assert "bad\\xff" in outcome.output
    assert call("report", path, "-o", path.with_name("page.html")).exit_code == 0
    (path / EPISODES_FILE).unlink()
    refused = call("show", path)
    assert refused.exit_code == ExitCode.USAGE
    assert "bad\\xff" in refused.stderr


# ------------------------------------------------------------------------------ what says that it is large


@pytest.mark.parametrize("planned", [10**12, 2 * 10**9, 10**8, MOST_UNRECORDED + EPISODES + 1])
def test_a_plan_of_far_more_episodes_than_records_is_refused(folder: Path, log: Path, planned: int) -> None:
    """Before any memory is taken for them."""
    rewrite(folder, ("plan", "num_episodes"), planned)
    body = json.loads((log / "manifest.json").read_text()) | {"num_episodes": planned}
    body.pop("checksum")
    with_checksum(log / "manifest.json", body, format=body.pop("format"))
    for path in (folder, log):
        with little_memory(), pytest.raises(UsageError):
            load(path)


def test_a_plan_of_more_episodes_than_records_is_read(tmp_path: Path) -> None:
    """It may have just begun."""
    begun = drawn_result(100_000, status="partial")
    begun.table.rows[10:] = np.zeros(1, ROW)
    begun.save(tmp_path)
    assert load(tmp_path).aggregates.count == 10


@pytest.mark.parametrize(("missing", "scalars"), [(MOST_UNRECORDED, 11), (2, 10**8), (1, 10_001)])
def test_info_scalars_count_too(missing: int, scalars: int) -> None:
    """They take as much memory as rows."""
    with pytest.raises(ValueError, match=f"{scalars:,}"):
        check_claim(missing + 5, 5, scalars)


def constant_rows(count: int) -> dict[str, pa.Array]:
    """Return columns of episodes that are all the same, which take hardly any bytes."""
    return episode_columns(np.broadcast_to(drawn_result(1).table.rows, count).copy(), np.zeros((count, 0)), ())


@pytest.mark.parametrize("planned", [EPISODES, 200_000])
def test_more_rows_than_planned_or_than_bytes_can_hold_are_refused(folder: Path, planned: int) -> None:
    pq.write_table(pa.table(constant_rows(200_000)), folder / EPISODES_FILE)
    rewrite(folder, ("plan", "num_episodes"), planned)
    with little_memory(), refused(UsageError, str(folder)) as caught:
        load(folder)
    assert "200,000" in str(caught.value)
    (folder / EPISODES_FILE).unlink()  # Not all of it is to be searched for planted secrets; so below.


def test_rows_that_compress_best_are_read(tmp_path: Path) -> None:
    """Failed episodes, all orders of a seating on one seed; there is room between them and what is refused."""
    plan = EpisodePlan(99_984, matchups=make_matchups("round_robin", list("abcd"), symmetric=True, seats=4))
    rows = np.zeros(len(plan), ROW)
    rows["index"], rows["seed"], rows["outcome"] = np.arange(len(plan)), plan.seeds, Outcome.FAILED
    table = EpisodeTable(len(plan), [f"info{number}" for number in range(20)])
    table.fill(rows)
    write_episodes(tmp_path / EPISODES_FILE, table)
    (tmp_path / RESULT_FILE).write_text(json.dumps({"plan": plan.to_dict(), "faults": []}))
    _, found = read_folder(tmp_path)
    assert found.fingerprint() == table.fingerprint()
    (tmp_path / EPISODES_FILE).unlink()


def segment(kind: Kind, columns: dict[str, pa.Array]) -> Segment:
    """Decode a segment of columns."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, metadata={"rl_eval": json.dumps({"format": FORMAT, "session": "me"})}), sink)
    data = bytes(sink.getvalue().to_pybytes())
    return decode(name_of(data, 1, 1, kind), data)


def repeated_fault(count: int) -> dict[str, pa.Array]:
    one = pa.table(fault_columns([make_fault(3)]))
    return {name: pa.repeat(one[name][0], count) for name in one.column_names}


@pytest.mark.parametrize(
    ("kind", "columns", "named"),
    [
        ("episodes", lambda: constant_rows(200_000), "200,000"),
        ("episodes", lambda: constant_rows(3) | {"length": pa.array(["1", "2", "3"])}, "length"),
        ("faults", lambda: repeated_fault(200_000), "200,000"),
        ("faults", lambda: repeated_fault(1_000_001), "1,000,001"),
    ],
)
def test_a_segment_that_claims_too_much_is_refused(kind: Kind, columns: Any, named: str) -> None:
    with little_memory(), pytest.raises(ValueError, match=named):
        segment(kind, columns())


def test_a_long_text_in_each_row_is_kept_once() -> None:
    """Of a megabyte in each of many rows the file has one."""
    words = pa.array(["".join(map(chr, np.random.default_rng(0).integers(0x4E00, 0x9000, 300_000)))])
    codes = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), words)
    faults = fault_columns([make_fault(number) for number in range(20_000)]) | {"traceback": codes}
    with little_memory():
        assert len({id(fault.traceback) for fault in segment("faults", faults).faults}) == 1


def test_any_number_of_faults_of_one_episode_is_read() -> None:
    """Each pardon is looked up, not searched for."""
    faults = [make_fault(0, attempt=attempt) for attempt in range(30_000)]
    table = EpisodeTable(1)
    table.fill(table.rows[:0], faults=faults)
    copied = table.copy()
    copied.fill(table.rows[:0], pardons=[Pardon(0, attempt, "why") for attempt in range(30_000)])
    pardoned = [replace(fault, charged=False, pardon="why") for fault in faults]
    assert (copied.faults[0], table.faults[0]) == (pardoned, faults)
