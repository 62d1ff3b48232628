"""Loader of whole modules, which ``torch.save(module, path)`` writes as pickle files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from rl_eval.errors import ConfigError
from rl_eval.integrations.policy_files import reading

_ADVICE: Final = (
    "The class of the module must be importable, so run in the folder of its source file. If a script defines the "
    "class, move the class to a Python module, and save only the weights with torch.save(policy.state_dict(), "
    "'x.pt'), for the policy torch:MODULE:CLASS@x.pt."
)


def load_module(path: str) -> torch.nn.Module:
    """Load a module that was saved with its class. Loading can run code of the file.

    Args:
        path: The file. The class of the module must be importable.

    Raises:
        ConfigError: The file cannot be loaded, or is not a module.
    """
    with reading("path", path, "a whole module", _ADVICE):
        loaded = torch.load(Path(path).expanduser(), map_location="cpu", weights_only=False)
    if not isinstance(loaded, torch.nn.Module):
        problem = f"policy_kwargs.path: {path!r} contains a {type(loaded).__name__}, not a torch.nn.Module"
        fix = "For weights alone, write the policy as torch:MODULE:ATTR@FILE."
        raise ConfigError(problem, key="policy.policy_kwargs.path", value=path, fix=fix)
    return loaded
