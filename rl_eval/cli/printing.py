"""Output of commands: only results on stdout, coloured on a terminal; everything else on stderr.

Environments, policies, their libraries and Ray print to stdout, which would corrupt the output of ``--json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer
from rich.console import Console

from rl_eval.errors import UsageError
from rl_eval.errors.redaction import redact_text

ADVANCED: Final = "Advanced"
"""Heading of the options that few users need."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=ADVANCED)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print one line only: no progress, no table.")]

_STDOUT, _STDERR = 1, 2
_READER_GONE: Final = 141
"""Exit code of a command whose stdout was closed by its reader: 128 plus SIGPIPE."""

_reserved: Final[list[TextIO]] = []
"""Stream of results, while other output goes to stderr; empty outside of commands."""


def results() -> TextIO:
    """Return the stream on which results are printed."""
    return _reserved[0] if _reserved else sys.stdout


def print_report(report: Any) -> None:
    """Print a page, or an object that rich displays as a page."""
    console = Console(file=results(), highlight=False, emoji=False)
    if console.is_terminal:
        with written():
            console.print(report)
    else:
        print_line(str(report))


def print_either(as_json: bool, described: Any, report: Any) -> None:
    """Print plain JSON values with ``--json``; otherwise a line of text or a page."""
    if as_json:
        print_json(described)
    elif isinstance(report, str):
        print_line(report)
    else:
        print_report(report)


def print_json(described: Any) -> None:
    """Print plain JSON values; ``docs/json_schemas.yaml`` has their schemas."""
    print_line(json.dumps(described, indent=2, allow_nan=False))


def print_line(text: str = "", *, err: bool = False) -> None:
    """Print a line to the stream of results, or to stderr."""
    with written():
        typer.echo(text, file=None if err else results(), err=err)


def print_note(line: str) -> None:
    """Write a line to stderr, above a live display; secrets are masked."""
    sys.stderr.write(f"{redact_text(line)}\n")  # typer.echo writes below the display, which then hides the line.


def flush_results() -> None:
    """Flush the stream of results."""
    with written():
        results().flush()


@contextmanager
def written(path: str | Path = "stdout") -> Iterator[None]:
    """Raise a usage error if a file cannot be written, such as on a full disk. Do not convert a broken pipe error."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}", key=str(path)) from error


def results_descriptor() -> int | None:
    """Return the descriptor on which child processes print results; None for the stdout of this process."""
    with suppress(OSError):
        return _reserved[0].fileno() if _reserved else None
    return None


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Reserve stdout for results; send the output of other code and of child processes to stderr.

    Raises:
        typer.Exit: The reader closed stdout.
    """
    if _reserved:
        yield
        return
    with _descriptor_of(sys.stdout) as stream, redirect_stdout(sys.stderr):
        _reserved.append(stream)
        try:
            yield
        except BrokenPipeError:
            raise typer.Exit(_READER_GONE) from None
        finally:
            _reserved.clear()
            _flush_or_forget(stream)


def _flush_or_forget(stream: TextIO) -> None:
    """Flush a stream; if that fails, discard its output, since every later flush would fail again."""
    try:
        stream.flush()
    except OSError:
        discard(stream.fileno())


def discard(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def _descriptor_of(stream: Any) -> Iterator[TextIO]:
    """Yield stdout on a new descriptor, and redirect descriptor 1 to stderr; yield any other stream unchanged."""
    standard = False
    with suppress(OSError):
        standard = stream.fileno() == _STDOUT
    if not standard:
        yield stream
        return
    stream.flush()
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        with os.fdopen(kept, "w", encoding=stream.encoding, errors=stream.errors, closefd=False) as own:
            yield own
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
