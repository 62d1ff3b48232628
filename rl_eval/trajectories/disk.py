"""Room on disk for what is about to be memory-mapped: a write to a mapped page without room ends the process."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

__all__ = ["check_space"]


def check_space(folder: Path, num_bytes: int) -> None:
    """Make sure that a folder has room.

    Raises:
        OSError: It has not.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {num_bytes:,} bytes are needed, {free:,} are free")
