"""Environment variables that make a process compute floats the same way at every batch size.

MKL picks kernels by batch size, alignment and instruction set unless conditional numerical
reproducibility (``MKL_CBWR``) pins them; torch splits a sum by its number of threads. Both are read when
torch loads, so they are set where a process starts, and never in a process that is the caller's.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["reproducible_environment"]


def reproducible_environment() -> dict[str, str]:
    """Return the variables to start a runner's process with; an ``MKL_CBWR`` that the user exported stays."""
    mode = os.environ.get("MKL_CBWR") or f"{_instruction_set()},STRICT"
    return {"MKL_CBWR": mode, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _instruction_set() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "AVX2"
    return "AVX512" if "avx512f" in flags else "AVX2"
