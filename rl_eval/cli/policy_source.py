"""Policies named on the command line: a reference, a scheme with a path, or a path whose kind is plain to see."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl_eval.config.policy_schemes import PolicySource, forms, named_source, schemes
from rl_eval.errors import ConfigError, nearest

__all__ = ["keys_of", "policy_source"]


def policy_source(text: str, given: Collection[str] = ()) -> PolicySource:
    """Return what ``random``, ``sb3:model.zip``, ``rllib:checkpoint``, ``pkg.module:attr`` or a path stands for.

    Args:
        text: The value of ``--policy``.
        given: Names of arguments that are given apart, and are not looked for.
    """
    path = Path(text).expanduser()
    if (source := named_source(text, given)) is not None:
        return source
    if path.exists():
        return _guess(path, given)
    name, colon, attribute = text.partition(":")
    if name and attribute and "/" not in name:
        return PolicySource(text, text)
    raise ConfigError(
        f"--policy {text}: there is no such file or folder, and it is none of random, {forms()} or pkg.module:attr"
        + (f": {nearest(name, [*schemes()])}" if colon else "")
    )


def keys_of(source: PolicySource) -> dict[str, Any]:
    """Return config keys, by dotted name, that replace all that a config file says of its policy's making."""
    return {
        "policy.policy": source.factory,
        "policy.policy_kwargs": dict(source.kwargs),
        "policy.weights": None,
        "policy.weights_key": None,
        **source.settings,
    }


def _guess(path: Path, given: Collection[str]) -> PolicySource:
    """Return what a path plainly is."""
    found = {name: scheme for name, scheme in schemes().items() if scheme.recognises(path)}
    if len(found) != 1:
        possible = ", ".join(f"{name}:{path}" for name in found) or forms()
        raise ConfigError(f"--policy {path}: its kind cannot be told: say it with one of {possible}")
    [scheme] = found.values()
    return scheme.source("", path, given)
