"""Logs of strangers, whose files fit their checksums and hold what this package never writes: shown, or refused."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import EvalError
from rl_eval.log.manifest import checksum
from rl_eval.log.segments import SegmentName, name_of
from rl_eval.results.loading import load
from tests.unit.strange_world import changes, is_shown_or_refused, ones


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


def test_a_retry_of_what_is_not_planned(log: Path) -> None:
    """With a saved result beside the log, of which retried episodes may differ."""
    before = load(log)
    before.save(log)
    path = log / "retries" / "000001.json"
    path.parent.mkdir(exist_ok=True)
    body = NUMBERED["retries"] | {"indices": [10**6]}
    path.write_text(json.dumps({"checksum": checksum(body), **body}))
    assert load(log).fingerprint == before.fingerprint


def test_a_strangers_claim(log: Path) -> None:
    """Whatever it says of the process that wrote the log."""
    [path] = (log / "owners").iterdir()
    for changed in changes(json.loads(path.read_text())):
        path.write_text(json.dumps(changed))
        with suppress(EvalError):
            load(log)
