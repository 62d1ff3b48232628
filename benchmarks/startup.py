"""How long until the first number: the command line from process start, next to the imports it cannot avoid."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.runner import Row, run_command
from benchmarks.scenarios import REPO

__all__ = ["REFERENCE", "measure"]

REFERENCE: Final = 'python -c "import torch, gymnasium"'
_TIMEOUT_S: Final = 120.0
_HEAVY: Final = ("torch", "ray", "tensordict", "gymnasium")


def _cli() -> list[str]:
    """The ``rl-eval`` of this interpreter, installed or from the source tree."""
    script = Path(sys.executable).parent / "rl-eval"
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-m", "rl_eval"]


def _commands() -> dict[str, list[str]]:
    return {
        'python -c "pass"': [sys.executable, "-c", "pass"],
        REFERENCE: [sys.executable, "-c", "import torch, gymnasium"],
        "rl-eval --help": [*_cli(), "--help"],
        "rl-eval run configs/local.yaml": [*_cli(), "run", str(REPO / "configs" / "local.yaml")],
    }


def measure(repeat: int, progress: Callable[[str], None]) -> list[Row]:
    """Run every command ``repeat`` times, in turns, after one uncounted turn that warms the disk cache."""
    commands = _commands()
    seconds: dict[str, list[float]] = {label: [] for label in commands}
    failed: dict[str, str] = {}
    for turn in range(repeat + 1):
        progress(f"turn {turn} of {repeat}")
        for label, command in commands.items():
            if label in failed:
                continue
            done = run_command(command, _TIMEOUT_S)
            if done.code != 0:
                failed[label] = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
            elif turn:
                seconds[label].append(done.seconds)
    return [_row(label, seconds[label], failed.get(label)) for label in commands] + [_help_imports()]


def _row(label: str, seconds: list[float], error: str | None) -> Row:
    if error is not None:
        return {"label": label, "status": "error", "error": error}
    turns = [{"seconds": one} for one in seconds]
    return {"label": label, "status": "ok", "seconds": statistics.median(seconds), "turns": turns}


def _help_imports() -> Row:
    """Which heavy packages ``rl-eval --help`` imports, by the interpreter's own account."""
    python, *rest = _cli()
    label = "heavy packages imported by rl-eval --help"
    done = run_command([python, "-X", "importtime", *rest, "--help"], _TIMEOUT_S)
    if done.code != 0:
        return {"label": label, "status": "error", "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    imported = set(re.findall(r"\|\s+(\w+)$", done.stderr, flags=re.MULTILINE))
    return {"label": label, "status": "ok", "imports": [name for name in _HEAVY if name in imported]}
