"""Conditions of a config: rows from a file or from the config itself, loaded once and then fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rl_eval.bounded_read import LARGE, read_named
from rl_eval.config.policy_sources import absolute
from rl_eval.errors import ConfigError, nearest
from rl_eval.records.parquet import parquet_columns
from rl_eval.records.plain import parse_json
from rl_eval.scheduling.conditions import ID, KEY, Conditions, make_conditions

_SOURCES: Final = ("file", "rows", "axes")
_OTHERS: Final = ("counts", "sha256")
"""Optional keys of a mapping. The config in a result has ``sha256``, the digest that the rows must have."""
_FIX: Final = (
    "Pass a file, a list of rows, or a mapping with file, rows or axes, such as {axes: {friction: [0.5, 1.0]}}, and "
    "optionally counts."
)


def load_conditions(given: Any) -> Conditions | None:
    """Return the conditions that a config sets, read from a file if the config names a file; None without conditions.

    Args:
        given: A path, a list of rows, or a mapping with exactly one of ``file``, ``rows`` and ``axes``, and optional
            ``counts`` and ``sha256``. A :class:`Conditions` object or None is returned unchanged.

    Raises:
        ConfigError: The value or the file is invalid, or the rows have another digest than ``sha256``.
    """
    if given is None or isinstance(given, Conditions):
        return given
    named = _as_mapping(given)
    unknown = [key for key in named if key not in (*_SOURCES, *_OTHERS)]
    if unknown or sum(key in named for key in _SOURCES) != 1:
        meant = f": {nearest(str(unknown[0]), (*_SOURCES, 'counts'))}" if unknown else " is invalid"
        raise ConfigError(f"{KEY}{meant}", key=KEY, value=given, fix=_FIX)
    rows = _read(Path(named["file"]).expanduser()) if "file" in named else named.get("rows")
    found = make_conditions(rows=rows, axes=named.get("axes"), counts=named.get("counts"))
    if (recorded := named.get("sha256", found.digest)) != found.digest:
        problem = f"{KEY}.sha256 is {recorded!r}, but the rows have {found.digest!r}"
        fix = "Restore the rows, or remove sha256 to use other conditions."
        raise ConfigError(problem, key=f"{KEY}.sha256", value=recorded, fix=fix)
    return found


def anchored_conditions(given: Any, folder: Path) -> Any:
    """Return the ``conditions`` value of a config. If it names a file, resolve a relative path against a folder."""
    named = _as_mapping(given)
    if not isinstance(file := named.get("file"), str):
        return given
    return {**named, "file": absolute(folder / Path(file).expanduser())}


def _as_mapping(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    return {"file" if isinstance(given, str | Path) else "rows": given}


def _read(path: Path) -> Any:
    """Return the rows of a file.

    Raises:
        ConfigError: The file is missing or damaged, or has another format.
    """
    import pyarrow as pa

    readers: Mapping[str, Callable[[Path], Any]] = {
        ".parquet": _rows_of_parquet,
        ".csv": _rows_of_csv,
        ".json": lambda path: parse_json(read_named(path, LARGE)),
    }
    if path.suffix not in readers:
        fix = f"Use a file with one of the suffixes {', '.join(readers)}."
        raise ConfigError(f"{KEY}: {path} has the suffix {path.suffix!r}", key=KEY, value=str(path), fix=fix)
    try:
        return readers[path.suffix](path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error}", key=KEY, value=str(path)) from error


def _rows_of_csv(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    ids_are_text = csv.ConvertOptions(column_types={ID: pa.string()})
    content: Any = pa.BufferReader(read_named(path, LARGE))
    return csv.read_csv(content, convert_options=ids_are_text).to_pylist()


def _rows_of_parquet(path: Path) -> Any:
    with parquet_columns(path) as columns:
        return columns.read_all().to_pylist()
