"""Guard of the global random generators: they stay as they are while somebody else's code runs."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np

__all__ = ["other_random_state", "random_state_kept"]


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the global generators as they were: initializing layers draws from them, and they may be a trainer's."""
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state() if torch else None  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        if torch:
            torch.random.set_rng_state(states[2])


@contextlib.contextmanager
def other_random_state() -> Iterator[None]:
    """Have the global generators draw other numbers for a while."""
    with random_state_kept():
        random.seed(random.random())
        np.random.seed(np.random.randint(2**31))  # noqa: NPY002
        if torch := sys.modules.get("torch"):
            torch.random.set_rng_state(torch.Generator().manual_seed(random.getrandbits(32)).get_state())
        yield
