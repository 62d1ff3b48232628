"""Environment variables that make every process compute the same: floats at every batch size, and hashes.

MKL picks kernels by batch size, alignment and instruction set unless conditional numerical
reproducibility (``MKL_CBWR``) pins them; torch splits a sum by its number of threads; Python draws anew for each
process how it hashes texts, and so in which order a set of them comes, unless ``PYTHONHASHSEED`` says it. All are
read when torch or Python starts, so they are set where a process starts, and never in a process that is the caller's.

The command line chooses an MKL mode for its process. Runners have the mode of their driver, chosen or not, so that one
driver gets the same floats from its own process and from any number of runners.
"""

from __future__ import annotations

import os
from pathlib import Path


def reproducible_environment() -> dict[str, str]:
    """Return the variables that the command line starts its process with.

    An ``MKL_CBWR`` and a ``PYTHONHASHSEED`` that the user exported stay.
    """
    mode = os.environ.get("MKL_CBWR") or f"{_instruction_set()},STRICT"
    hash_seed = os.environ.get("PYTHONHASHSEED") or "0"
    return {"MKL_CBWR": mode, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": hash_seed}


def runner_environment() -> dict[str, str]:
    """Return the variables to start a runner's process with: the MKL mode of this process, empty if it has none.

    MKL reads an empty mode as none. It hides a mode that the runner's node may have.
    """
    return reproducible_environment() | {"MKL_CBWR": os.environ.get("MKL_CBWR", "")}


def _instruction_set() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "AVX2"
    return "AVX512" if "avx512f" in flags else "AVX2"
