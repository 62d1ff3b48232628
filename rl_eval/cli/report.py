"""``rl-eval report``: results as one HTML page that needs nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from rl_eval.atomic_write import write_text
from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, counted, print_json, print_line
from rl_eval.cli.shared import argument
from rl_eval.errors import ConfigError

if TYPE_CHECKING:
    from rl_eval.results.page.html import Source

__all__ = ["report"]

_BEGINNING = 2_000
"""Bytes in which a page of ours says what it is."""


def report(
    paths: Annotated[list[str], argument("DIR...", "Output folders, or run folders or URIs.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="An older report there is replaced.")
    ] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not a report, too.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write results as one HTML page: numbers, charts, faults, every episode; several are compared with the first."""
    with reported(debug):
        if not force:
            _check_replaceable(output)
        from rl_eval.results.page.html import render

        text = render([_source(path, output) for path in paths])
        try:
            write_text(output, text)
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
        size = len(text.encode())
        if as_json:
            print_json({"path": str(output), "results": len(paths), "bytes": size})
        else:
            print_line(f"{output}: {counted(len(paths), 'result')}, {size / 1000:,.0f} kB")


def _source(path: str, output: Path) -> Source:
    """Return a result under its own name, not that of a link to it, and with links to its videos from the page."""
    from rl_eval.results.loading import load
    from rl_eval.results.page.html import Source
    from rl_eval.results.videos import videos_of

    if Path(path).is_symlink():  # runs/latest leads elsewhere tomorrow.
        path = os.path.normpath(Path(path).parent / Path(path).readlink())
    result, beside = load(path), output.parent.resolve()
    files = videos_of(result, path).items()
    return Source(path, result, {index: quote(os.path.relpath(file.resolve(), beside)) for index, file in files})


def _check_replaceable(path: Path) -> None:
    """Make sure that a file is not there, or is a report."""
    from rl_eval.results.page.html import GENERATOR

    try:
        with path.open("rb") as file:
            ours = GENERATOR.encode() in file.read(_BEGINNING)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be replaced: {error.strerror or error}") from error
    if not ours:
        raise ConfigError(f"{path} exists and is not a report: choose another file with -o, or replace it with --force")
