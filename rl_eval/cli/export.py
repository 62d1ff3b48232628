"""``rl-eval export``: the finished episodes of a run, or all their steps, as files that other tools read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

import typer
from typing_extensions import assert_never

from rl_eval.atomic_write import write_atomically, write_text
from rl_eval.cli.episodes import episodes_option, parse_episodes
from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, print_json, print_line
from rl_eval.cli.shared import option, shown
from rl_eval.cli.show import Results
from rl_eval.cli.trusting import Trust, load_to_run
from rl_eval.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from rl_eval.results.result import EvalResult

__all__ = ["Format", "Target", "export"]


Format = Literal["parquet", "csv", "json"]
"""File formats."""
Target = Literal["minari", "npz", "tensordict"]
"""What trajectories can be written as."""


def export(
    path: Results,
    format: Annotated[  # noqa: A002 - The name of the option.
        Format | None,
        typer.Option(
            "--format", show_default=False, help="By default what --output ends in. JSON has one object per line."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "By default the name of DIR in the current folder, and the format. With --to minari, the id of the "
            "data set.",
            "--output",
            "-o",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    trajectories: Annotated[
        bool, typer.Option("--trajectories", help="Run the episodes again, and write all their steps.")
    ] = False,
    to: Annotated[
        Target | None, typer.Option("--to", show_default=False, help="What trajectories are written as.")
    ] = None,
    episodes: Annotated[str | None, episodes_option("Which episodes, as in 3,7-9; by default all.")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write one row per finished episode, with its faults; or, with --trajectories, every step of them."""
    with reported(debug):
        say = _print_json if as_json else _print_text
        if trajectories:
            _check_given("--trajectories", needed={"--to": to, "--output": output}, useless={"--format": format})
            _check_given("--trajectories", useless={"--force": force or None})
            assert to is not None
            say(_export_trajectories(path, to, str(output), episodes, trust=trust))
            return
        without = {"--to": to, "--trust": trust or None}
        format = format or _format_of(output)  # noqa: A001 - The name of the option.
        _check_given("export without --trajectories", useless=without)
        if format is None:
            raise ConfigError(
                f"nothing names a format: give --format, or an --output that ends in .{', .'.join(get_args(Format))}"
            )
        say(_export_rows(path, format, output, episodes, force=force))


def _format_of(output: Path | None) -> Format | None:
    """Return the format that the name of a file tells; None if it tells none."""
    suffix = "" if output is None else output.suffix.removeprefix(".")
    return next((known for known in get_args(Format) if known == suffix), None)


class _Written(NamedTuple):
    """What was written where."""

    path: str
    episodes: int
    planned: int
    steps: int | None
    """Steps of all episodes; None where the rows are of episodes."""

    def __str__(self) -> str:
        steps = "" if self.steps is None else f", {self.steps:,} steps,"
        return f"{self.episodes:,} of {self.planned:,} episodes{steps} in {self.path}"


def _check_given(
    what: str, *, needed: Mapping[str, object] | None = None, useless: Mapping[str, object] | None = None
) -> None:
    """Make sure that options fit together."""
    if missing := [name for name, value in (needed or {}).items() if value is None]:
        raise ConfigError(f"{what} needs {' and '.join(missing)}")
    if given := [name for name, value in (useless or {}).items() if value is not None]:
        raise ConfigError(f"{what} has no use for {' and '.join(given)}: leave it out")


def _print_json(written: _Written) -> None:
    print_json(written._asdict())


def _print_text(written: _Written) -> None:
    print_line(str(written))


def _export_trajectories(path: str, to: Target, output: str, episodes: str | None, *, trust: bool) -> _Written:
    result = load_to_run(path, trust)
    indices = None if episodes is None else parse_episodes(episodes, len(result.plan))
    from rl_eval.trajectories.export import export_trajectories

    done = export_trajectories(result, to, output, indices, trust=True)
    return _Written(shown(done.path), done.episodes, len(result.plan), done.frames)


def _export_rows(
    path: str,
    format: Format,  # noqa: A002
    output: Path | None,
    episodes: str | None,
    *,
    force: bool,
) -> _Written:
    from rl_eval.results.loading import load

    target = _default_file(path, format) if output is None else output
    if target.exists() and not force:
        raise ConfigError(f"{target} exists: choose another file with --output, or overwrite it with --force")
    result = load(path)
    rows = _rows(result, episodes)
    try:
        _write(rows, format, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    return _Written(str(target), len(rows), len(result.plan), None)


def _default_file(path: str, format: Format) -> Path:  # noqa: A002
    """Return the name of a folder (or of that of a ``result.json``) with the ending of a format."""
    from rl_eval.log.storage import absolute_place, is_uri

    folder = Path(path.partition("?")[0] if is_uri(path) else absolute_place(path))
    folder = folder.parent if folder.name == "result.json" else folder
    return Path(f"{folder.name or 'episodes'}.{format}")


def _rows(result: EvalResult, episodes: str | None) -> pa.Table:
    """Return a row per finished episode, or per chosen one.

    Raises:
        UsageError: A chosen one has no record.
    """
    import pyarrow.compute as pc

    from rl_eval.results.replay import recorded_episode
    from rl_eval.results.report.files import episode_table

    rows = episode_table(result.table)
    if episodes is None:
        return rows
    chosen = parse_episodes(episodes, len(result.plan))
    for index in chosen:
        recorded_episode(result, index)
    return rows.filter(pc.field("index").isin(chosen))


def _write(rows: pa.Table, format: Format, target: Path) -> None:  # noqa: A002
    """Write the file whole or not at all."""
    match format:
        case "parquet":
            import pyarrow.parquet as pq

            write_atomically(target, lambda temporary: pq.write_table(rows, temporary))
        case "csv":
            write_text(target, _to_csv(rows))
        case "json":
            write_text(target, _to_json_lines(rows))
        case _:
            assert_never(format)


def _to_csv(rows: pa.Table) -> str:
    import pyarrow as pa
    from pyarrow import csv

    sink = pa.BufferOutputStream()
    csv.write_csv(rows, sink)
    return bytes(sink.getvalue()).decode()


def _to_json_lines(rows: pa.Table) -> str:
    from rl_eval.records.plain import plain

    return "".join(json.dumps(plain(row | {"faults": json.loads(row["faults"])})) + "\n" for row in rows.to_pylist())
