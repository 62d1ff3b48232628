"""Logs of strangers, whose files fit their checksums and hold what this package never writes: shown, or refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import EvalError
from rl_eval.log.manifest import checksum
from rl_eval.log.segments import SegmentName, name_of
from rl_eval.results.loading import load
from rl_eval.results.page.html import Source, render

STRANGE = [None, "<b>", -5, 10**30, 10**400, 0.5, [["a"]], {"a": 1}, "\ud800x", "a\nb\x1b[2J"]


def ones(observations: Any) -> Any:
    return np.ones(len(observations), np.int64)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strange") / "run"
    config = EvalConfig().environment(
        "rl_eval.testing:faulty", env_kwargs={"env": "two_length", "attempt_rates": [0.6]}
    )
    config.evaluation(num_episodes=8, return_bounds=(0.0, 1.0)).fault_tolerance(max_attempts_per_episode=2)
    evaluate(config, ones, run_dir=folder)
    return folder


@pytest.fixture
def log(written: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def places(data: Any, deepest: int = 3) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in nested data, as far as it is followed."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (key,)
        if deepest > 1:
            yield from ((key, *more) for more in places(value, deepest - 1))


def changes(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the data with something strange in one place, or without it, for each place; deep in it with one each."""
    for number, place in enumerate(places(data)):
        for strange in [*STRANGE, ...] if len(place) < 3 else [STRANGE[number % len(STRANGE)]]:
            changed = copy.deepcopy(data)
            within = changed
            for key in place[:-1]:
                within = within[key]
            if strange is not ...:
                within[place[-1]] = strange
            else:
                del within[place[-1]]
            yield changed


def is_shown_or_refused(log: Path) -> None:
    with suppress(EvalError):
        assert "<b>" not in render([Source("x", load(log))])


def test_a_strangers_manifest(log: Path) -> None:
    """Whatever stands where."""
    path = log / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("checksum")
    form = body.pop("format")
    for changed in changes(body):
        path.write_text(json.dumps({"format": form, "checksum": checksum(changed), **changed}))
        is_shown_or_refused(log)


@pytest.mark.parametrize("kind", ["episodes", "faults"])
def test_a_strangers_segment(log: Path, kind: str) -> None:
    """Whatever its header says."""
    path = next((log / "segments").glob(f"*{kind}*"))
    table, name = pq.read_table(path), SegmentName.parse(path.name)
    assert name is not None
    for changed in changes(json.loads(table.schema.metadata[b"rl_eval"])):
        path.unlink()
        data = parquet(table, changed)
        path = path.with_name(str(name_of(data, name.epoch, name.number, name.kind)))  # type: ignore[arg-type]
        path.write_bytes(data)
        is_shown_or_refused(log)


def parquet(table: pa.Table, header: dict[str, Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({b"rl_eval": json.dumps(header)}), sink)
    return bytes(sink.getvalue().to_pybytes())


def test_a_header_of_a_later_version_is_read(log: Path) -> None:
    """It may say more; what is known of it counts."""
    before = load(log)
    for path in (log / "segments").iterdir():
        table, name = pq.read_table(path), SegmentName.parse(path.name)
        assert name is not None
        data = parquet(table, {**json.loads(table.schema.metadata[b"rl_eval"]), "more": {"than": "is known"}})
        path.unlink()
        path.with_name(str(name_of(data, name.epoch, name.number, name.kind))).write_bytes(data)  # type: ignore[arg-type]
    assert load(log).to_dict() == before.to_dict()


NUMBERED = {
    "amendments": {"accepted_at": "now", "host": "x", "num_finished": 3, "differences": ["a"], "code": {"files": {}}},
    "retries": {"asked_at": "now", "epoch": 1, "indices": [1, 2]},
}


@pytest.mark.parametrize("folder", NUMBERED)
def test_a_strangers_amendment_or_retry(log: Path, folder: str) -> None:
    """Whatever it says."""
    path = log / folder / "000001.json"
    path.parent.mkdir(exist_ok=True)
    for changed in changes(NUMBERED[folder]):
        path.write_text(json.dumps({"checksum": checksum(changed), **changed}))
        is_shown_or_refused(log)


def test_a_strangers_claim(log: Path) -> None:
    """Whatever it says of the process that wrote the log."""
    [path] = (log / "owners").iterdir()
    for changed in changes(json.loads(path.read_text())):
        path.write_text(json.dumps(changed))
        is_shown_or_refused(log)
