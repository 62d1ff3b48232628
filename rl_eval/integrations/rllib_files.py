"""Scheme ``rllib:PATH``: checkpoint folders of RLlib."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from rl_eval.config.policy_schemes import PolicyScheme, PolicySource
from rl_eval.errors import ConfigError

__all__ = ["SCHEMES"]


def _source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    if path is None:
        raise ConfigError("the policy 'rllib:' lacks a path, as in rllib:checkpoint_000010")
    return PolicySource(
        "rl_eval.integrations.rllib:load_policy",
        f"a checkpoint of RLlib, {path}",
        {"path": str(path.resolve())},
        {"policy.actions": "none"},  # RLlib's own connectors map them.
        pickled=str(path),
    )


def _recognises(path: Path) -> bool:
    return path.is_dir() and (path / "rllib_checkpoint.json").exists()


SCHEMES: Final = {"rllib": PolicyScheme("rllib:PATH", _source, _recognises)}
