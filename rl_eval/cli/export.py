"""``rl-eval export``: write the finished episodes of a run, or all their steps, in common file formats."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, get_args

import typer

from rl_eval.atomic_write import write_atomically
from rl_eval.cli.printing import AsJson, print_either, written
from rl_eval.cli.settings import Results, Trust, episodes_option, load_to_run, parse_episodes
from rl_eval.cli.shared import option, shown
from rl_eval.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from rl_eval.results.result import EvalResult


Format = Literal["parquet", "csv", "json", "minari", "npz", "tensordict"]
_OF_STEPS: Final = ("minari", "npz", "tensordict")


def export(
    path: Results,
    to: Annotated[
        Format | None,
        typer.Option(
            "--to",
            show_default=False,
            help="Format; minari, npz and tensordict rerun episodes to write every step. [default: suffix of --output]",
        ),
    ] = None,
    output: Annotated[
        str | None,
        option(
            "FILE",
            "File or folder; for minari the dataset id. [default for parquet, csv and json: the name of DIR plus the "
            "format]",
            "--output",
            "-o",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing parquet, csv or json file.")] = False,
    episodes: Annotated[str | None, episodes_option("Episodes to export, such as 3,7-9. [default: all]")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write one row per finished episode, with its faults; or rerun episodes and write every step."""
    ending = Path(output or "").suffix.removeprefix(".")
    kind = to or (ending if ending in get_args(Format) else None)
    if kind is None:
        known = ", ".join(get_args(Format))
        fix = f"Pass --to, or an --output with one of these suffixes: {known}."
        raise ConfigError("the export format is missing", key="--to", fix=fix)
    if kind in _OF_STEPS:
        from rl_eval.recording.export import export_trajectories

        if output is None or force:
            fix = "Pass a new --output, without --force."
            raise ConfigError(f"--to {kind} writes only to a new --output", key="--output", value=output, fix=fix)
        result = load_to_run(path, trust)
        indices = None if episodes is None else parse_episodes(episodes, len(result.plan))
        done = export_trajectories(result, kind, output, indices, trust=True)
        target, count, steps = shown(done.path), done.episodes, done.frames
    else:
        if trust:
            problem = f"--to {kind} runs no code, so it does not need --trust"
            raise ConfigError(problem, key="--trust", value=trust, fix="Omit --trust.")
        from rl_eval.results.loading import load

        file = Path(output) if output else _default_file(path, kind)
        if file.exists() and not force:
            fix = "Pass another --output, or --force to overwrite it."
            raise ConfigError(f"{file} already exists", key="--output", value=str(file), fix=fix)
        result = load(path)
        rows = _rows(result, episodes)
        with written(file):
            write_atomically(file, partial(_write, rows, kind))
        target, count, steps = str(file), len(rows), None
    described = {"path": target, "episodes": count, "planned": len(result.plan), "steps": steps}
    of_steps = "" if steps is None else f", {steps:,} steps,"
    print_either(as_json, described, f"{count:,} of {len(result.plan):,} episodes{of_steps} in {target}")


def _default_file(path: str, kind: str) -> Path:
    """Return the name of the run folder plus the suffix of a format; ``path`` is the folder or its ``result.json``."""
    from rl_eval.log.storage import absolute_place, is_uri

    folder = Path(path.partition("?")[0] if is_uri(path) else absolute_place(path))
    folder = folder.parent if folder.name == "result.json" else folder
    return Path(f"{folder.name or 'episodes'}.{kind}")


def _rows(result: EvalResult, episodes: str | None) -> pa.Table:
    """Return a row for each finished episode, or only for the chosen episodes.

    Raises:
        UsageError: A chosen episode has no record.
    """
    import pyarrow.compute as pc

    from rl_eval.recording.replay import recorded_episode
    from rl_eval.results.files import episode_table

    rows = episode_table(result.table)
    if episodes is None:
        return rows
    chosen = parse_episodes(episodes, len(result.plan))
    for index in chosen:
        recorded_episode(result, index)
    return rows.filter(pc.field("index").isin(chosen))


def _write(rows: pa.Table, kind: str, file: Path) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    from rl_eval.records.plain import plain
    from rl_eval.results.csv_text import csv_cell

    if kind == "parquet":
        parquet.write_table(rows, file)
    elif kind == "csv":
        text, columns = pa.string(), rows.columns
        cells = [pa.array(map(csv_cell, one.to_pylist()), text) if one.type == text else one for one in columns]
        csv.write_csv(pa.table(cells, rows.column_names), file)
    else:
        described = (plain(row | {"faults": json.loads(row["faults"])}) for row in rows.to_pylist())
        file.write_text("".join(f"{json.dumps(one)}\n" for one in described), encoding="utf-8")
