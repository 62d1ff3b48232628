"""Number of torch's threads while runners compute in a process that is the caller's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["one_thread"]


@contextmanager
def one_thread(*, kept: bool = False) -> Iterator[None]:
    """Compute with one thread of torch, as runners in their own processes do.

    Small networks lose time to more threads, many times over on a busy machine, and the last bits of a sum depend on
    their number. Each thread of a process has a number of its own.

    Args:
        kept: Whether the calling thread keeps the one; by default it gets its former number back at the end.
    """
    torch: Any = sys.modules.get("torch")
    # Another thread may be importing it.
    if not hasattr(torch, "set_num_threads") or (former := torch.get_num_threads()) == 1:
        yield
        return
    try:
        torch.set_num_threads(1)
        # Torch remembers the number for threads that have not computed yet, and another thread restores it for them.
        restoring = threading.Thread(target=torch.set_num_threads, args=(former,))
        restoring.start()
        restoring.join()
        yield
    finally:
        if not kept:
            torch.set_num_threads(former)
