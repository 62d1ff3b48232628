"""Provenance of a result: the data to obtain the result again, and the code that a second run would import.

A result from another person can name any code. Reading, showing and comparing results never runs this code. A function
that runs episodes again with the config of a result first calls :func:`check_trust`, unless the caller trusts the code.
"""

from __future__ import annotations

import datetime
import functools
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rl_eval.adapters import loader_of
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import UntrustedError
from rl_eval.errors.redaction import redact_command
from rl_eval.policies.subject import Subject
from rl_eval.records.plain import leaves, plain
from rl_eval.results.source_code import code_of, package_version
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.weights import WeightsSnapshot

if TYPE_CHECKING:
    from rl_eval.log import Manifest


_PACKAGES: Final = ("rl-eval", "gymnasium", "mujoco", "numpy", "ray", "tensordict", "torch")
_NAMING: Final = re.compile(
    r"(.*\.)?(env|policy|weights|normalizer|filters)|.*_kwargs\..*|runners\.runtime_env\..*"
    r"|environment\.python(_path)?"
)
"""Config keys whose values are imported, loaded or run, even if a value has no colon, unlike a reference."""

_evaluated: Final[set[tuple[str, ...]]] = set()
"""Code that is named in the configs that this process has evaluated."""


def described_settings(settings: EvalSettings) -> dict[str, Any]:
    """Return the part of the provenance that describes the settings.

    Call it before the evaluation starts: episodes can change the attributes of a factory.
    """
    config = settings.described()
    _evaluated.add(_named_code(plain(config)))
    return {"config": config, "identity": settings.identity()}


def provenance(settings: EvalSettings, weights: WeightsSnapshot | None, numerics: dict[str, Any]) -> dict[str, Any]:
    """Return the weights, numerics, versions and machine of one evaluation, as plain data for the provenance."""
    library = loader_of(settings.policy.policy)
    loaders = library.distributions if library else ()
    return {
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


def check_trust(provenance: Mapping[str, Any]) -> None:
    """Check that this process has evaluated a config that names the same code as a result.

    Raises:
        UntrustedError: No config that this process has evaluated names the code; the message lists the code.
    """
    if (names := _named_code(provenance.get("config"))) not in _evaluated:
        problem = (
            f"to run these episodes again, rl_eval imports and calls code that the result names:{''.join(names)}\n"
        )
        fix = "If you trust the author of the result, pass trust=True (--trust)."
        raise UntrustedError(problem, key="trust", value=", ".join(name.strip() for name in names), fix=fix)


def _named_code(config: Any) -> tuple[str, ...]:
    """Return the texts in a config that may name code or files, or are arguments of code; one line per text."""
    return tuple(
        f"\n  {key} = {value!r}"
        for key, value in leaves(config)
        if isinstance(value, str) and (":" in value or _NAMING.fullmatch(key))
    )


def _described_weights(weights: WeightsSnapshot | None, files: dict[str, str]) -> dict[str, Any]:
    described: dict[str, Any] = {"version": 0, "digest": None}
    if weights is not None:
        described = {"version": weights.version, "digest": weights.digest}
        described |= {"versions": dict(weights.versions)} if weights.versions else {}
    return described | ({"files": files} if files else {})


def manifest_of(
    settings: EvalSettings, plan: EpisodePlan, weights: WeightsSnapshot | None, subject: Subject | None = None
) -> Manifest:
    """Return the manifest of one evaluation for its log."""
    from rl_eval.log import Manifest
    from rl_eval.runners import class_of

    described = described_settings(settings) | provenance(settings, weights, {})
    return Manifest(
        **plan.to_dict(),
        plan_fingerprint=plan.fingerprint,
        identity=described.pop("identity"),
        weights=described.pop("weights"),
        info_keys=class_of(settings).columns(settings),
        config=described.pop("config"),
        provenance=described,
        code=code_of(settings, subject),
    )


@functools.cache
def _git_commit() -> str | None:
    """Return the commit of the working directory at the first call, with a ``+`` if files differ from the commit.

    The commit is read once. Later changes of files do not change the imported code, and an evaluation during training
    must be cheap.
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
