"""Policies named on the command line: a reference, a scheme with a path, or a path whose kind is plain to see."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rl_eval.config.policy_schemes import PolicySource, forms, named_source, schemes
from rl_eval.config.references import dotted
from rl_eval.errors import ConfigError

__all__ = ["keys_of", "policy_source"]


def policy_source(text: str, given: Collection[str] = ()) -> PolicySource:
    """Return what ``random``, ``sb3:model.zip``, ``rllib:checkpoint``, ``pkg.module:attr`` or a path stands for.

    Args:
        text: The value of ``--policy``.
        given: Names of arguments that are given apart, and are not looked for.
    """
    if not text:
        raise ConfigError("--policy is empty, as where a variable of the shell is not set")
    path = Path(text).expanduser()
    if (source := named_source(text, given)) is not None:
        return source
    name, _, attribute = text.partition(":")
    if name.endswith(".py"):
        wanted = dotted(text if attribute else f"{name}:NAME")
        raise ConfigError(f"--policy {text}: name what makes the policy, in a module and not in a file: {wanted}")
    if path.exists():
        return _guess(path, given)
    if name and attribute and "/" not in name:
        return PolicySource(text, text)
    known = {"random": path.with_name("random"), **{str(one).removesuffix(".py"): one for one in path.parent.glob("*")}}
    close = [_as_policy(known[one]) for one in difflib.get_close_matches(str(path), known, n=1)]
    raise ConfigError(
        f"--policy {text}: there is no such file or folder, and it is none of random, {forms()} or pkg.module:attr"
        + (f": did you mean {close[0]!r}?" if close else "")
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


def _as_policy(path: Path) -> str:
    """Return how a file or folder is given as a policy: one of Python by what is in it."""
    return dotted(f"{path}:ATTR") if path.suffix == ".py" and not path.is_absolute() else str(path)


def _guess(path: Path, given: Collection[str]) -> PolicySource:
    """Return what a path plainly is."""
    found = [scheme for scheme in schemes().values() if scheme.recognises(path)]
    if len(found) != 1:
        if path.is_dir() and not found and (files := sorted(file.name for file in path.glob("*.zip"))):
            raise ConfigError(
                f"--policy {path}: its kind cannot be told, and it holds {', '.join(files)}: give one of them"
            )
        possible = ", ".join(scheme.named(path) for scheme in found) or forms()
        raise ConfigError(f"--policy {path}: its kind cannot be told: say it with one of {possible}")
    [scheme] = found
    return scheme.source("", path, given)
