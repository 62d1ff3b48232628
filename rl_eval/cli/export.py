"""``rl-eval export``: the finished episodes of a run as a file that other tools read."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typing_extensions import assert_never

from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.show import Results
from rl_eval.errors import ConfigError

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult

__all__ = ["Format", "export"]


class Format(str, Enum):
    """File formats."""

    PARQUET = "parquet"
    CSV = "csv"
    JSON = "json"


def export(
    path: Results,
    format: Annotated[  # noqa: A002 - The name of the option.
        Format, typer.Option("--format", show_default=False, help="JSON has one object per line.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="By default the name of DIR in the current folder, and the format."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    debug: Debug = False,
) -> None:
    """Write one row per finished episode, with its faults."""
    with reported(debug):
        from rl_eval.results.loading import load

        target = _default_file(path, format) if output is None else output
        if target.exists() and not force:
            raise ConfigError(f"{target} exists: choose another file with --output, or overwrite it with --force")
        result = load(path)
        try:
            _write(result, format, target)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
        typer.echo(f"{len(result.episodes):,} of {len(result.plan):,} episodes in {target}")


def _default_file(path: str, format: Format) -> Path:  # noqa: A002
    """Return the name of a folder (or of that of a ``result.json``) with the ending of a format."""
    from rl_eval.log.storage import is_uri

    folder = Path(path.partition("?")[0].rstrip("/") if is_uri(path) else Path(path).absolute())
    folder = folder.parent if folder.name == "result.json" else folder
    return Path(f"{folder.name or 'episodes'}.{format.value}")


def _write(result: EvalResult, format: Format, target: Path) -> None:  # noqa: A002
    """Write the file whole or not at all."""
    from rl_eval.atomic_write import write_text

    match format:
        case Format.PARQUET:
            result.to_parquet(target)
        case Format.CSV:
            write_text(target, _to_csv(result))
        case Format.JSON:
            write_text(target, _to_json_lines(result))
        case _:
            assert_never(format)


def _to_csv(result: EvalResult) -> str:
    import pyarrow as pa
    from pyarrow import csv

    from rl_eval.results.report.files import episode_table

    sink = pa.BufferOutputStream()
    csv.write_csv(episode_table(result.table), sink)
    return bytes(sink.getvalue()).decode()


def _to_json_lines(result: EvalResult) -> str:
    from rl_eval.records.plain import plain
    from rl_eval.results.report.files import episode_table

    rows = episode_table(result.table).to_pylist()
    return "".join(json.dumps(plain(row | {"faults": json.loads(row["faults"])})) + "\n" for row in rows)
