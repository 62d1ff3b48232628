"""Waiting for what other threads and processes do."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

from rl_eval.supervision.processes import process_status


def eventually(
    condition: Callable[[], Any], limit_s: float = 120.0, process: subprocess.Popen[str] | None = None
) -> bool:
    """Wait for a condition that a process, if one is given, has to bring about; the limit is far beyond what it takes.

    Raises:
        AssertionError: The process ended before; this is what it printed.
    """
    end = time.monotonic() + limit_s
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def gone(pid: int) -> bool:
    """Whether a process has ended, if only its parent has not heard of it."""
    status = process_status(pid)
    return status is None or status.ended
