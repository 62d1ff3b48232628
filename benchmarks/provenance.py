"""Provenance of a measurement: date, commit, machine and versions, as data and as a line of Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from benchmarks.contenders.base import versions
from benchmarks.scenarios import REPO

__all__ = ["line", "provenance"]

_MEASURED_CODE: Final = ("rl_eval", "benchmarks", "configs", ":!benchmarks/results")


def provenance() -> dict[str, Any]:
    """Say when, at which commit, on what machine and with which versions this process measures."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short=10", "HEAD") or "unknown",
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", *_MEASURED_CODE)),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
            "machine": platform.machine(),
            "system": platform.system(),
        },
        "versions": versions(),
    }


def line(found: Mapping[str, Any]) -> str:
    """Name machine, date, commit and versions of a written measurement, those of the peers included."""
    machine, changed = found["machine"], ", with uncommitted changes" if found["uncommitted_changes"] else ""
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {machine['system']}"
    ours, *others = _distinct([found["versions"], *(row["versions"] for row in found["rows"] if "versions" in row)])
    parts = [f"Measured on {found['started'][:10]} at commit `{found['commit']}`{changed}", where, _named(ours)]
    parts += [f"other contenders ran with {_named(other)}" for other in others]
    return "; ".join(parts) + "."


def _git(*arguments: str) -> str:
    """Answer of git, empty where this is no checkout."""
    done = subprocess.run(["git", "-C", str(REPO), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (text.partition(":")[2].strip() for text in lines if text.startswith("model name"))
    return next(models, platform.processor() or "unknown CPU")


def _distinct(several: list[dict[str, str]]) -> list[dict[str, str]]:
    return [one for place, one in enumerate(several) if one not in several[:place]]


def _named(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
