"""Environment variables that make processes reproducible: equal floats at every batch size, and equal hashes.

Unless ``MKL_CBWR`` is set, MKL chooses kernels by batch size, alignment and instruction set. torch splits a sum by its
number of threads. Unless ``PYTHONHASHSEED`` is set, Python hashes strings differently in each process, so sets of
strings have another order. torch and Python read these variables when they start. So the variables are set for new
processes, and never in the caller's process.

The command line sets an MKL mode for its own process. Runners get the mode of the process that starts them. So floats
are the same in this process and on any number of runners.
"""

from __future__ import annotations

import os
from pathlib import Path


def reproducible_environment() -> dict[str, str]:
    """Return the variables of the command line's process.

    If the user has set ``MKL_CBWR`` or ``PYTHONHASHSEED``, the variable does not change.
    """
    mode = os.environ.get("MKL_CBWR") or f"{_instruction_set()},STRICT"
    hash_seed = os.environ.get("PYTHONHASHSEED") or "0"
    return {"MKL_CBWR": mode, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed}


def runner_environment() -> dict[str, str]:
    """Return the variables of a runner's process, with the MKL mode of this process.

    If this process has no mode, the mode is empty. MKL ignores an empty mode. An empty mode also replaces a mode that
    is set on the runner's node.
    """
    return reproducible_environment() | {"MKL_CBWR": os.environ.get("MKL_CBWR", "")}


def _instruction_set() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "AVX2"
    return "AVX512" if "avx512f" in flags else "AVX2"
