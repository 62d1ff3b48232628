"""Standard output, for results alone.

Environments, policies, the libraries below them and Ray's driver print to stdout, and ``--json`` would be no JSON then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, Final, TextIO

import typer

from rl_eval.errors import UsageError

__all__ = ["flush_results", "print_line", "reserved_stdout", "results", "results_descriptor", "written"]

_STDOUT: Final = 1
_STDERR: Final = 2
_READER_GONE: Final = 141
"""Exit code of a command whose reader went away: 128 plus SIGPIPE, as programs have it that the signal ends."""

_reserved: Final[list[TextIO]] = []
"""Where results go, while other output goes to stderr."""


def results() -> TextIO:
    """Return where results are printed."""
    return _reserved[0] if _reserved else sys.stdout


@contextmanager
def written() -> Iterator[None]:
    """Raise a usage error where results cannot be written, as to a full disk; not where their reader went away."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"stdout cannot be written: {error.strerror or error}") from error


def print_line(text: str = "", *, err: bool = False) -> None:
    """Print a line of a result, or one about it to stderr."""
    with written():
        typer.echo(text, file=None if err else results(), err=err)


def flush_results() -> None:
    """Flush what was printed."""
    with written():
        results().flush()


def results_descriptor() -> int | None:
    """Return the descriptor for child processes that print results; None for the stdout of this process."""
    with suppress(OSError):
        return _reserved[0].fileno() if _reserved else None
    return None


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Send to stderr what anybody but this package prints, in Python or below it, and child processes too.

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
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextmanager
def _descriptor_of(stream: Any) -> Iterator[TextIO]:
    """Give a stream a descriptor of its own, and its former one to stderr; leave one alone that is no descriptor."""
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
