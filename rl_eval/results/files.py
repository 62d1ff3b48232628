"""Files of a result: ``result.json`` for the summary, ``episodes.parquet`` for the records.

The Parquet file has text for outcomes and null for "not reported". A loaded table has the same bits as the
saved table, except for the bits of NaNs. The JSON file is strict JSON and contains every fault, including those of
episodes that never finished. A reader sees the old file or the new one, never a partial one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from pydantic import Field

from rl_eval.atomic_write import write_atomically
from rl_eval.bounded_read import LARGE, read_bytes
from rl_eval.errors import UsageError
from rl_eval.records.episode import COLUMNS, EpisodeTable, Fault
from rl_eval.records.parquet import TEXTS, episode_columns, episode_names, parquet_columns, read_episodes
from rl_eval.records.plain import check_claim, damage, parse_json, plain, typed
from rl_eval.scheduling.plan import MAX_EPISODES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


FORMAT: Final = 1
"""Version of ``result.json``; other versions are rejected."""

RESULT_FILE: Final = "result.json"
EPISODES_FILE: Final = "episodes.parquet"

_FAULT_FIELDS: Final = tuple(field.name for field in fields(Fault))
_encode: Final = json.JSONEncoder(allow_nan=False).encode
"""Function that returns JSON on one line. ``json.dumps`` would be slower, because it builds an encoder for every
fault."""


@dataclass(frozen=True, slots=True)
class _Plan:
    num_episodes: Annotated[int, Field(ge=1, le=MAX_EPISODES)]


@dataclass(frozen=True, slots=True)
class _Summary:
    """Fields of ``result.json`` that are needed to build the table of records."""

    plan: _Plan
    faults: list[Fault]


def fault_values(fault: Fault) -> dict[str, Any]:
    """Return a fault as plain JSON values. ``asdict`` copies every value, which takes seconds for many faults."""
    return {name: plain(getattr(fault, name)) for name in _FAULT_FIELDS}


def json_text(described: Mapping[str, Any]) -> str:
    """Return a description as JSON, with one line per entry and per fault."""
    faults = ",\n    ".join(_encode(fault) for fault in described["faults"])
    text = json.dumps({**described, "faults": []}, indent=2, allow_nan=False)
    if not faults:
        return text + "\n"
    return text.removesuffix("[]\n}") + f"[\n    {faults}\n  ]\n}}\n"


def check_format(data: Mapping[str, Any]) -> None:
    """Reject a description of another format version."""
    if data.get("format") != FORMAT:
        found = data.get("format")
        raise UsageError(f"the result has format {found!r}; this version reads {FORMAT}", key="format", value=found)


def check_ours(folder: Path) -> None:
    """Check that a save into a folder would replace only files of a result.

    Raises:
        UsageError: A file does not belong to a result.
    """
    for path, is_ours in ((folder / RESULT_FILE, is_summary), (folder / EPISODES_FILE, _is_episodes)):
        if path.exists() and not is_ours(path):
            problem = f"{path} exists and is not the result of an evaluation"
            raise UsageError(problem, key=str(path), fix="Choose another folder, or remove this file.")


def is_log_folder(folder: Path) -> bool:
    """Return whether a folder contains an evaluation log.

    At least two names of a log must exist, because one name may belong to another program.
    """
    found = sum((folder / name).is_dir() for name in ("owners", "segments"))
    return found == 2 or (found == 1 and (folder / "manifest.json").is_file())


def is_summary(path: Path) -> bool:
    """Return whether a file is the summary of a result."""
    return bool(summary_in(path))


def summary_in(path: Path) -> dict[str, Any]:
    """Return the summary of a result in a file; empty if the file is missing or is not a summary."""
    try:
        data = read_summary(path)
    except UsageError:
        return {}
    return data if {"format", "fingerprint", "plan", "provenance"} <= data.keys() else {}


def _is_episodes(path: Path) -> bool:
    """Whether a file has the columns of episodes. An interrupted save may leave this file without ``result.json``."""
    import pyarrow as pa

    try:
        with parquet_columns(path) as columns:
            return {"index", "seed", "episode_return"} <= set(columns.names)
    except (OSError, pa.ArrowException):
        return False


def check_fingerprint(what: str, stored: str, actual: str) -> None:
    """Check that the fingerprint of records or of a plan equals the saved fingerprint."""
    if stored != actual:
        problem = f"the {what} has fingerprint {actual[:16]}, but the result was saved with {str(stored)[:16]}"
        raise UsageError(problem, key=what, value=str(stored))


def write_episodes(path: str | os.PathLike[str], table: EpisodeTable) -> None:
    """Write one row per finished episode to a Parquet file."""
    import pyarrow.parquet as pq

    episodes = episode_table(table)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            pq.write_table(episodes, file)

    write_atomically(path, write)


def episode_frame(table: EpisodeTable) -> pd.DataFrame:
    """Return one row per finished episode as a pandas frame. The success columns can be null.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        fix = "Run pip install 'rl-eval[pandas]', or read the file of to_parquet() with another tool."
        raise UsageError("to_frame() needs the package pandas", key="pandas", fix=fix) from error
    import pyarrow as pa

    return episode_table(table).to_pandas(types_mapper={pa.bool_(): pd.BooleanDtype()}.get)


def read_folder(path: str | os.PathLike[str]) -> tuple[dict[str, Any], EpisodeTable]:
    """Read the two files of a result.

    Args:
        path: The folder, or the ``result.json`` in it.

    Returns:
        The summary, and the records with all faults.

    Raises:
        UsageError: A file is missing or damaged; the message names it.
    """
    folder = Path(path).parent if Path(path).name == RESULT_FILE else Path(path)
    data = read_summary(folder / RESULT_FILE)
    try:
        summary = typed(_Summary, data)
        table = _read_episodes(folder / EPISODES_FILE, summary.plan.num_episodes)
        for fault in summary.faults:
            table.add_fault(fault)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder} is damaged: {damage(error)}", key=str(folder)) from error
    return data, table


def episode_table(table: EpisodeTable) -> pa.Table:
    """Return one row per finished episode as an Arrow table. Faults are JSON text."""
    import pyarrow as pa

    positions = np.flatnonzero(table.filled)
    rows = table.rows[positions]
    parts = (table.faults.get(index, []) for index in rows["index"].tolist())
    faults = pa.array([_encode([fault_values(fault) for fault in each]) for each in parts], pa.string())
    conditions = (
        {"condition": pa.array([table.conditions[place] for place in positions.tolist()])} if table.conditions else {}
    )
    return pa.table(episode_columns(rows, table.infos[positions], table.info_keys) | conditions | {"faults": faults})


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``result.json``.

    Raises:
        UsageError: The file is missing or damaged.
    """
    try:
        data = parse_json(read_bytes(path, LARGE).decode())
    except FileNotFoundError as error:
        folder = path.parent
        if not folder.exists():
            fix = "Pass the folder of an evaluation."
            raise UsageError(f"folder {str(folder)!r} does not exist", key=str(folder), fix=fix) from error
        problem = f"{str(folder)!r} is not the folder of an evaluation: it has neither {path.name} nor a log"
        fix = f"Run rl-eval show {folder} to see the evaluations in its subfolders."
        raise UsageError(problem, key=str(folder), fix=fix) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}", key=str(path)) from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} is damaged: it contains a {type(data).__name__}, not an object", key=str(path))
    return data


def _read_episodes(path: Path, num_episodes: int) -> EpisodeTable:
    import pyarrow as pa

    if not path.exists():
        raise UsageError(f"{path} does not exist, but the result in the same folder needs its records", key=str(path))
    try:
        with parquet_columns(path, TEXTS) as columns:
            names = episode_names(columns.names)
            if columns.num_rows > num_episodes:
                raise ValueError(f"{path.name} has {columns.num_rows:,} rows for a plan of {num_episodes:,} episodes")
            check_claim(num_episodes, columns.num_rows, len(names) - len(COLUMNS))
            episodes = columns.read(names)
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path} is damaged: {error}", key=str(path)) from error
    return _to_table(episodes, num_episodes)


def _to_table(episodes: pa.Table, num_episodes: int) -> EpisodeTable:
    rows, infos, keys = read_episodes(episodes)
    indices = rows["index"]
    if len(np.unique(indices)) != len(indices) or ((indices < 0) | (indices >= num_episodes)).any():
        raise ValueError(f"episodes appear twice or lie outside a plan of {num_episodes}")
    table = EpisodeTable(num_episodes, keys)
    table.fill(rows, infos)
    return table
