"""Check that two processes play the same episode, though hashes and addresses differ between them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import cloudpickle
import numpy as np

from rl_eval.cli.checks.episodes import Player, Trace, first_difference, for_player
from rl_eval.cli.checks.finding import Finding, note, ok, problem
from rl_eval.config.settings import EvalSettings
from rl_eval.records.episode import Lease
from rl_eval.scheduling.plan import EpisodePlan

__all__ = ["check_processes"]

_TIMEOUT_S: Final = 120.0
_HASH_SEEDS: Final = ("1", "2")


def check_processes(settings: EvalSettings) -> Iterator[Finding]:
    """Let two processes with different ``PYTHONHASHSEED`` play the first episode of a single agent."""
    if settings.runners.runner_class.several_agents:
        return
    lease = Lease(0, EpisodePlan(1, settings.evaluation.seed)[0].seed, 1, 0)
    try:
        asked = cloudpickle.dumps((for_player(settings), lease))
        with ThreadPoolExecutor(len(_HASH_SEEDS)) as both:  # Most of their time goes into imports.
            ours, theirs = both.map(partial(_play, asked), _HASH_SEEDS)
    except Exception as error:
        # Whatever cannot be sent, imported or finished there has been judged here already.
        yield note(f"not compared between processes: {type(error).__name__}: {error}")
        return
    if difference := first_difference(ours, theirs):
        yield problem(
            f"two processes play different episodes: they differ in {difference}",
            "look for what differs between processes: the order of a set or of hash(), an id(), the clock, files; "
            "rl-eval and its runners start with PYTHONHASHSEED=0, a script that evaluates in its own process may not",
        )
    else:
        yield ok(f"two processes with other hash seeds play equal episodes ({len(ours) - 1:,} steps compared)")


def _play(asked: bytes, hash_seed: str) -> Trace:
    """Play in another process; an error says that it could not, or did not come back."""
    with tempfile.TemporaryDirectory(prefix="rl-eval-doctor-") as folder, tempfile.TemporaryFile() as errors:
        played = Path(folder) / "trace.npy"
        ended = subprocess.run(  # noqa: S603 -- Our own module, in this Python.
            [sys.executable, "-m", __name__, played],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            input=asked,
            stdout=subprocess.DEVNULL,
            stderr=errors,  # No pipe: what an environment starts may hold its end open.
            timeout=_TIMEOUT_S,
            check=False,
        )
        if ended.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(said[-1] if said else f"it ended with exit status {ended.returncode}")
        return np.asarray(np.load(played))


if __name__ == "__main__":
    asked_settings, asked_lease = cloudpickle.load(sys.stdin.buffer)
    np.save(sys.argv[1], Player(asked_settings).played(asked_lease))
