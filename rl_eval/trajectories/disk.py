"""Reservation of disk space for memory-mapped files: a write to a mapped page without room ends the process."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["reserve"]


def reserve(folder: Path) -> None:
    """Have the disk give all mapped files of a folder their room.

    Raises:
        OSError: It has none left.
    """
    for file in folder.rglob("*.memmap"):
        with file.open("r+b") as opened:
            if size := file.stat().st_size:
                os.posix_fallocate(opened.fileno(), 0, size)
