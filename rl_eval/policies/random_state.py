"""Guard of the global random generators: they stay as they are while other code runs."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


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


def seed_and_state() -> tuple[int, Any] | None:
    """Return seed and state of torch's global generator; None before torch is imported."""
    torch = sys.modules.get("torch")
    return None if torch is None else (torch.initial_seed(), torch.random.get_rng_state().tolist())
