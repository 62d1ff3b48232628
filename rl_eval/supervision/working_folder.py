"""Working directory of this process, which environments of this process may change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["current_folder", "working_in"]


def current_folder() -> str | None:
    """Return the working directory; None if it was removed."""
    with suppress(FileNotFoundError):
        return os.getcwd()  # noqa: PTH109 - Called in each time slice.
    return None


@contextmanager
def working_in(folder: str | None) -> Iterator[None]:
    """Work in a folder, and return to the present working directory at the end.

    Args:
        folder: Where to work; None for the present working directory.
    """
    former = current_folder()
    _change_to(folder)
    try:
        yield
    finally:
        _change_to(former)


def _change_to(folder: str | None) -> None:
    if folder is not None and folder != current_folder():
        with suppress(FileNotFoundError, NotADirectoryError):  # It was removed meanwhile.
            os.chdir(folder)
