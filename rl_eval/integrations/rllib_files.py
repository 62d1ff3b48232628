"""Scheme ``rllib:PATH``: checkpoint folders of RLlib."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from rl_eval.config.policy_schemes import PolicyScheme, PolicySource, path_in

__all__ = ["SCHEMES"]


def _source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    path = path_in("rllib:checkpoint_000010", path)
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
