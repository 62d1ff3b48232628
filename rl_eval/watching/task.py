"""Task of a watcher: what all points of a curve have in common, and where in a config the checkpoint goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError
from rl_eval.records.plain import with_leaf
from rl_eval.results.source_code import code_of

__all__ = ["WEIGHTS", "check_key", "task_of", "with_checkpoint"]

WEIGHTS: Final = "policy.weights"
_KWARGS: Final = "policy.policy_kwargs."


def with_checkpoint(settings: EvalSettings, key: str, path: str | None) -> EvalSettings:
    """Return settings with a checkpoint's path at a dotted key of the policy section."""
    section = settings.policy
    if key == WEIGHTS:
        return with_values(settings, policy={"weights": path, "weights_key": path and section.weights_key})
    kwargs = with_leaf(section.policy_kwargs, key.removeprefix(_KWARGS).split("."), path)
    return with_values(settings, policy={"policy_kwargs": kwargs})


def check_key(key: str) -> str:
    """Return a dotted key at which a checkpoint's path can go.

    Raises:
        ConfigError: It is none.
    """
    if key == WEIGHTS or (key.startswith(_KWARGS) and all(key.removeprefix(_KWARGS).split("."))):
        return key
    raise ConfigError(f"--as {key}: a checkpoint goes to {WEIGHTS}, or to {_KWARGS}NAME, an argument of the factory")


def task_of(settings: EvalSettings, key: str, num_held_out: int) -> dict[str, Any]:
    """Return what the points of one curve have in common, by dotted key, and the digests of its ``code``."""
    settings = with_checkpoint(settings, key, None)
    return {
        **dict(_flat(settings.identity(), "")),
        **settings.plan().to_dict(),
        "held_out": num_held_out,
        "as": key,
        "code": code_of(settings),
    }


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
