"""Objects that the environments and the policy of one evaluator share inside a runner's process.

Normalizers of TorchRL live in environments, while weights are sent to policies. So what a trainer sends for an
environment travels with the weights, and the policy hands it to the environments of its scope: those that the same
evaluator made in the same process. The same way goes what a request may choose anew: its step limit, and how actions
are taken.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from rl_eval.errors import WeightsError
from rl_eval.integrations.torchrl.normalizers import check_initialized, normalizers_of, uninitialized

__all__ = ["Rules", "Scope", "forget_scope", "scope_of", "statistics_of"]

_SCOPES: Final[dict[str, Scope]] = {}

_PART: Final = re.compile(r"(\w+)(?:\[(\d+)\])?")


@dataclass(frozen=True)
class Rules:
    """Rules that travel with the weights of one request."""

    tensors: int | None = None
    """How many tensors of the policy are sent with it; None sends none, and the policy keeps those it has."""
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """State of transforms, by path from the environment, such as ``transform[0]``."""
    max_steps: int | None = None
    """Step limit of every episode; None leaves the configured one."""
    mode: str | None = None
    """How actions are taken; None leaves it."""


class Scope:
    """Environments of one evaluator in this process, and the rules that they have."""

    def __init__(self) -> None:
        self.rules = Rules()
        self._environments: weakref.WeakSet[Any] = weakref.WeakSet()
        self._statistics: dict[str, Mapping[str, Any]] = {}
        self._checked = False

    def adopt(self, env: Any) -> None:
        """Take a new environment in, and give it what the others have."""
        self._environments.add(env)
        self._checked = False
        for path, state in self._statistics.items():
            _load(env, path, state)

    def obey(self, rules: Rules) -> None:
        """Follow the rules of a request.

        Raises:
            WeightsError: Statistics do not fit a transform of the environment.
        """
        for path, state in rules.statistics.items():
            for env in self._environments:
                _load(env, path, state)
        self._statistics |= rules.statistics
        self.rules = rules
        self._checked = False

    def latest(self) -> Any:
        """Return an environment of the scope, for policies that are built from one."""
        return next(iter(self._environments), None)

    def check(self) -> None:
        """Make sure, once, that every normalizer has statistics.

        Raises:
            ConfigError: One has none.
        """
        if not self._checked:
            for env in self._environments:
                if isinstance(env, torch.nn.Module):
                    check_initialized(env, "the evaluation environment")
            self._checked = True


def scope_of(token: str) -> Scope:
    """Return the scope of an evaluator in this process."""
    return _SCOPES.setdefault(token, Scope())


def forget_scope(token: str) -> None:
    """Drop the scope of an evaluator that has ended."""
    _SCOPES.pop(token, None)


def statistics_of(path: str, source: Any) -> dict[str, Any]:
    """Copy the state of a transform that a trainer sends.

    Args:
        path: Name that it is sent under, for messages.
        source: The transform, or its state dict.

    Raises:
        WeightsError: It has no statistics yet, or is none of these.
    """
    if isinstance(source, torch.nn.Module):
        for name, normalizer in normalizers_of(source):
            if uninitialized(normalizer):
                raise WeightsError(
                    f"weights_dict[{path!r}] holds an uninitialized {type(normalizer).__name__} {name}: it has seen "
                    "nothing yet. Collect at least one batch before the first evaluation"
                )
        source = source.state_dict()
    elif hasattr(source, "flatten_keys"):
        source = source.flatten_keys(".").to_dict()
    if not isinstance(source, Mapping):
        raise WeightsError(f"weights_dict[{path!r}] is a {type(source).__name__}: give the transform or its state dict")
    return {name: _copied(value) for name, value in source.items()}


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _load(env: Any, path: str, state: Mapping[str, Any]) -> None:
    try:
        _part_of(env, path).load_state_dict(state)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise WeightsError(
            f"weights_dict['env.{path}'] does not fit the evaluation environment ({type(error).__name__}: {error}): "
            "give the transform itself, under the path that it has there"
        ) from error


def _part_of(env: Any, path: str) -> Any:
    found = env
    for name in path.split("."):
        match = _PART.fullmatch(name)
        if match is None:
            raise AttributeError(name)
        found = getattr(found, match[1])
        if match[2] is not None:
            found = found[int(match[2])]
    return found
