"""Running statistics during an evaluation: they are used, and never updated.

TorchRL keeps them in transforms (``VecNormV2``, the older ``VecNorm``), which may sit in an environment or in a policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rl_eval.errors import ConfigError

__all__ = ["check_initialized", "freeze_normalizers", "normalizers_of", "uninitialized"]


def normalizers_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Find the normalizers among a module's submodules, by name."""
    for name, part in module.named_modules():
        if {base.__name__ for base in type(part).__mro__} & {"VecNormV2", "VecNorm"}:
            yield name, part


def freeze_normalizers(module: torch.nn.Module) -> None:
    """Keep statistics as they are, from now on."""
    for _, part in normalizers_of(module):
        part.freeze()


def uninitialized(normalizer: Any) -> bool:
    """Whether a normalizer has seen nothing yet: what it would compute is 0/0."""
    return not any(bool((count > 0).any()) for count in _counts(normalizer))


def _counts(normalizer: Any) -> list[torch.Tensor]:
    """Return how much a normalizer has seen, by input; one without memory of its own has seen enough."""
    if hasattr(normalizer, "_td"):
        stored = normalizer._td
        leaves = {} if stored is None else dict(stored.items(True, True))
        return [
            tensor
            for key, tensor in leaves.items()
            if str(key[-1] if isinstance(key, tuple) else key).endswith("_count")
        ]
    if not normalizer.stateful:
        return [torch.ones(())]
    count = normalizer._count
    if count is None:
        return []
    return [count] if isinstance(count, torch.Tensor) else list(count.values(True, True))


def check_initialized(module: torch.nn.Module, owner: str) -> None:
    """Make sure that every normalizer has statistics.

    Raises:
        ConfigError: One has none; it is named.
    """
    for name, part in normalizers_of(module):
        if uninitialized(part):
            raise ConfigError(
                f"{owner} has an uninitialized {type(part).__name__} ({name or 'itself'}): it would normalize by "
                "statistics of nothing. Train first, load its statistics, or send them with the weights"
            )
