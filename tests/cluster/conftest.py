"""Other interpreters of this machine, with packages of their own."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Callable[..., str]]:
    """Return the Python of a new virtual environment with packages; skip the test if there is none."""
    with tempfile.TemporaryDirectory(prefix="rl_eval_other_") as folder:
        yield functools.cache(functools.partial(_installed, folder))


def _installed(folder: str, version: str, *packages: str) -> str:
    own = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    found = sys.executable if own else next(map(str, pyenv), None) or shutil.which(f"python{version}")
    if found is None:
        pytest.skip(f"left out: no Python {version}")
    python = Path(tempfile.mkdtemp(dir=folder)) / "bin" / "python"
    subprocess.run([found, "-m", "venv", python.parents[1]], check=True)
    ended = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *packages] if packages else ["true"], check=False
    )
    if ended.returncode:
        assert not own or "CI" not in os.environ
        pytest.skip(f"left out: no {packages} for Python {version}")
    return str(python)
