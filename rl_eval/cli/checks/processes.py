"""Whether two processes play the same episode, though hashes and addresses differ between them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import cloudpickle

from rl_eval.cli.checks.episodes import MAX_STEPS, Moment, Player, first_difference
from rl_eval.cli.checks.finding import Finding, note, ok, problem
from rl_eval.plan import EpisodePlan
from rl_eval.runners.environment import construct_env
from rl_eval.settings import EvalSettings

__all__ = ["check_processes"]

_TIMEOUT_S: Final = 120.0
_HASH_SEEDS: Final = ("1", "2")


def check_processes(settings: EvalSettings) -> Iterator[Finding]:
    """Let two processes with different ``PYTHONHASHSEED`` play the first episode."""
    max_steps = min(settings.evaluation.max_episode_steps or MAX_STEPS, MAX_STEPS)
    episode = EpisodePlan(1, settings.evaluation.seed)[0]
    try:
        asked = cloudpickle.dumps((settings.environment, settings.runners.num_runners, max_steps, episode))
        ours, theirs = _play_in_processes(asked)
    except Exception as error:
        # Whatever cannot be sent, imported or finished there has been judged here already.
        yield note(f"not compared between processes: {type(error).__name__}: {error}")
        return
    if difference := first_difference(ours, theirs):
        yield problem(
            f"two processes play different episodes: they differ in {difference}",
            "look for what differs between processes: the order of a set or of hash(), an id(), the clock, files",
        )
    else:
        yield ok(f"two processes with other hash seeds play equal episodes ({len(ours) - 1:,} steps compared)")


def _play_in_processes(asked: bytes) -> tuple[Sequence[Moment], Sequence[Moment]]:
    """Start both at once, since most of their time goes into imports.

    Raises:
        RuntimeError: One could not play.
        subprocess.TimeoutExpired: One did not come back.
    """
    with tempfile.TemporaryDirectory(prefix="rl-eval-doctor-") as folder:
        where = Path(folder)
        (where / "asked").write_bytes(asked)
        running = [_start(where, seed) for seed in _HASH_SEEDS]
        try:
            first, second = (_collect(where, seed, one) for seed, one in zip(_HASH_SEEDS, running, strict=True))
        finally:
            for one in running:
                one.kill()
                one.wait()
    return first, second


def _start(folder: Path, hash_seed: str) -> subprocess.Popen[bytes]:
    # Environments print, and sit on pipes that nobody reads.
    with (folder / f"stderr-{hash_seed}").open("wb") as errors:
        return subprocess.Popen(  # noqa: S603 -- Our own module, in this Python.
            [sys.executable, "-m", __name__, str(folder), hash_seed],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )


def _collect(folder: Path, hash_seed: str, process: subprocess.Popen[bytes]) -> Sequence[Moment]:
    if process.wait(_TIMEOUT_S):
        said = (folder / f"stderr-{hash_seed}").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1] if said else f"it ended with exit status {process.returncode}")
    answer: Sequence[Moment] = pickle.loads((folder / f"played-{hash_seed}").read_bytes())
    return answer


def _main(folder: Path, hash_seed: str) -> None:
    """Play, in a process of its own."""
    section, num_runners, max_steps, episode = cloudpickle.loads((folder / "asked").read_bytes())
    player = Player(construct_env(section, 0, 0, num_runners), max_steps)
    (folder / f"played-{hash_seed}").write_bytes(pickle.dumps(list(player.play(episode, 1))))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])
