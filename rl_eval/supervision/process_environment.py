"""Environment variables that make processes reproducible: equal floats at every batch size, and equal hashes.

MKL picks kernels by batch size, alignment and instruction set, unless ``MKL_CBWR`` fixes them. torch splits a sum by
its number of threads. Python hashes strings differently in each process, so sets of strings have another order, unless
``PYTHONHASHSEED`` is set. torch and Python read these variables when they start, so they are set for new processes, and
never in the caller's process.

The command line chooses an MKL mode for its process. Runners get the mode of the process that starts them, so that it
gets the same floats from its own process and from any number of runners.
"""

from __future__ import annotations

import os
from pathlib import Path


def reproducible_environment() -> dict[str, str]:
    """Return the variables of the command line's process.

    An ``MKL_CBWR`` and a ``PYTHONHASHSEED`` that the user exported stay.
    """
    mode = os.environ.get("MKL_CBWR") or f"{_instruction_set()},STRICT"
    hash_seed = os.environ.get("PYTHONHASHSEED") or "0"
    return {"MKL_CBWR": mode, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed}


def runner_environment() -> dict[str, str]:
    """Return the variables of a runner's process: with the MKL mode of this process, empty if it has none.

    MKL ignores an empty mode. It overrides a mode of the runner's node.
    """
    return reproducible_environment() | {"MKL_CBWR": os.environ.get("MKL_CBWR", "")}


def _instruction_set() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "AVX2"
    return "AVX512" if "avx512f" in flags else "AVX2"
