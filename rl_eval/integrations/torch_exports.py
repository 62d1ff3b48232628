"""Exported modules of torch: TorchScript and torch.export, from files and as objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import torch

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.policy_files import reading
from rl_eval.policies.fixed_batch import note_on
from rl_eval.policies.module import ModulePolicy

_FREE: Final = "dynamic_shapes=({0: torch.export.Dim('batch')},) and an example of two rows"


def load_script(path: str) -> torch.nn.Module:
    """Load a module that ``torch.jit.save`` wrote. Its operators can read and write files, so trust its source.

    Raises:
        ConfigError: The file cannot be loaded.
    """
    with reading("path", path, "a module of TorchScript"):
        loaded: torch.nn.Module = torch.jit.load(Path(path).expanduser(), map_location="cpu")  # type: ignore[no-untyped-call]
    return loaded


def load_export(path: str) -> torch.nn.Module:
    """Load the module of a program that ``torch.export.save`` wrote. Loading can run code of the file.

    Raises:
        ConfigError: The file cannot be loaded.
    """
    with reading("path", path, "a program of torch.export"):
        return torch.export.load(Path(path).expanduser()).module()


def portable(value: Any) -> Any:
    """Return the module itself, which can be copied but not pickled.

    Raises:
        ConfigError: The object is an exported program.
    """
    if isinstance(value, torch.export.ExportedProgram):
        problem, fix = "policy.policy is an ExportedProgram, not a module", "Pass program.module()."
        raise ConfigError(problem, key="policy.policy", value=type(value).__name__, fix=fix)
    return value


def as_policy(
    value: Any, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> ModulePolicy:
    """Build the policy of a TorchScript module, or of the module of an exported program.

    Raises:
        ConfigError: The object is the program itself, or the action space is not supported.
    """
    size, notes = _batch(portable(value))
    how = section.deterministic, section.device
    chunks = section.chunk is not None
    return ModulePolicy(value, action_space, *how, chunks=chunks, batch=size, notes=notes)


def _batch(module: Any) -> tuple[int | None, tuple[str, ...]]:
    """Return the fixed size of a module's batch, or None if it is free, and the notes on it."""
    for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
        if node.op == "placeholder" and isinstance(size := node.meta["val"].shape[0], int):
            return size, (note_on(f"dimension 0 of the input {node.name!r}", size, _FREE),)
    return None, ()
