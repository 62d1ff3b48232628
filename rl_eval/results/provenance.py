"""Provenance of a result: all that must be known to obtain it again."""

from __future__ import annotations

import datetime
import functools
import platform
import socket
import subprocess
import sys
from typing import Any, Final

from rl_eval.adapters import loader_of
from rl_eval.config.settings import EvalSettings
from rl_eval.log import Manifest
from rl_eval.redaction import redact_command
from rl_eval.results.source_code import code_of, package_version
from rl_eval.results.trust import sign, working_folder
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.weights import WeightsSnapshot

__all__ = ["manifest_of", "provenance"]

_PACKAGES: Final = ("rl-eval", "gymnasium", "mujoco", "numpy", "ray", "tensordict", "torch")


def provenance(settings: EvalSettings, weights: WeightsSnapshot | None, numerics: dict[str, Any]) -> dict[str, Any]:
    """Describe one evaluation as plain data."""
    library = loader_of(settings.policy.policy)
    loaders = library.distributions if library else ()
    described = {
        "config": settings.described(),
        "identity": settings.identity(),
        "weights": _described_weights(weights, settings.policy.file_digests),
        "numerics": dict(numerics),
        "packages": {name: version for name in (*_PACKAGES, *loaders) if (version := package_version(name))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "git_commit": _git_commit(),
        "command": redact_command(sys.argv),
        "finished_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return {**described, "folder": working_folder(), "signature": sign(described["config"])}


def _described_weights(weights: WeightsSnapshot | None, files: dict[str, str]) -> dict[str, Any]:
    described: dict[str, Any] = {"version": 0, "digest": None}
    if weights is not None:
        described = {"version": weights.version, "digest": weights.digest}
        described |= {"versions": dict(weights.versions)} if weights.versions else {}
    return described | ({"files": files} if files else {})


def manifest_of(settings: EvalSettings, plan: EpisodePlan, weights: WeightsSnapshot | None) -> Manifest:
    """Describe one evaluation for its log."""
    described = provenance(settings, weights, {})
    return Manifest(
        **plan.to_dict(),
        plan_fingerprint=plan.fingerprint,
        identity=described.pop("identity"),
        weights=described.pop("weights"),
        info_keys=settings.runners.runner_class.columns(settings),
        config=described.pop("config"),
        provenance=described,
        code=code_of(settings),
    )


@functools.cache
def _git_commit() -> str | None:
    """Commit of the working directory, with a ``+`` when files differ from it, as of the first evaluation.

    What this process has imported does not change with the folder, and an evaluation beside training must cost little.
    """
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=2,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None
