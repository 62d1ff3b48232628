"""Output of commands: results alone on stdout, coloured on a terminal, and everything else on stderr.

Environments, policies, the libraries below them and Ray's driver print to stdout, which would spoil ``--json``.
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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no table, one line only.")]

_STDOUT, _STDERR = 1, 2
_READER_GONE: Final = 141
"""Exit code of a command whose reader went away: 128 plus SIGPIPE."""

_reserved: Final[list[TextIO]] = []
"""Where results go, while other output goes to stderr."""


def results() -> TextIO:
    """Return where results are printed."""
    return _reserved[0] if _reserved else sys.stdout


def print_report(report: Any) -> None:
    """Print a page, or a value that prints itself as one."""
    console = Console(file=results(), highlight=False)
    if console.is_terminal:
        with written():
            console.print(report)
    else:
        print_line(str(report))


def print_either(as_json: bool, described: Any, report: Any) -> None:
    """Print plain JSON values with ``--json``, and otherwise a line of text or what :func:`print_report` takes."""
    if as_json:
        print_json(described)
    elif isinstance(report, str):
        print_line(report)
    else:
        print_report(report)


def counted(count: int, noun: str) -> str:
    """Write a number of things, as in ``1 run`` or ``2,000 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def print_json(described: Any) -> None:
    """Print plain JSON values, of which schemas are in the docs."""
    print_line(json.dumps(described, indent=2, allow_nan=False))


def print_line(text: str = "", *, err: bool = False) -> None:
    """Print a line of a result, or one about it to stderr."""
    with written():
        typer.echo(text, file=None if err else results(), err=err)


def print_note(line: str) -> None:
    """Write a line to stderr, above a live display; secrets are replaced."""
    sys.stderr.write(f"{redact_text(line)}\n")  # typer.echo would write below the display, which then covers the line.


def flush_results() -> None:
    """Flush what was printed."""
    with written():
        results().flush()


@contextmanager
def written(path: str | Path = "stdout") -> Iterator[None]:
    """Raise a usage error where a file cannot be written, as to a full disk; not where a reader of stdout went away."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def results_descriptor() -> int | None:
    """Return the descriptor for child processes that print results; None for the stdout of this process."""
    with suppress(OSError):
        return _reserved[0].fileno() if _reserved else None
    return None


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Keep stdout for this package; send to stderr what other code or child processes print there.

    Raises:
        typer.Exit: The reader of the results went away.
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
    """Flush a stream; what was not written when a write failed would fail again whenever it is flushed."""
    try:
        stream.flush()
    except OSError:
        discard(stream.fileno())


def discard(descriptor: int) -> None:
    """Send to /dev/null what is written to a descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def _descriptor_of(stream: Any) -> Iterator[TextIO]:
    """Give stdout a descriptor of its own, and its former one to stderr; leave a stream without descriptor alone."""
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
