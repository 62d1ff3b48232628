"""Loader of whole modules that ``torch.save(module, path)`` wrote, which are pickled objects."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_eval.errors import ConfigError

__all__ = ["load_module"]


def load_module(path: str) -> torch.nn.Module:
    """Load a module with its class, which can run code.

    Args:
        path: The file. The class of the module has to be importable.

    Raises:
        ConfigError: The file cannot be loaded, or is not a module.
    """
    try:
        loaded = torch.load(Path(path).expanduser(), map_location="cpu", weights_only=False)
    except (AttributeError, ImportError) as error:
        raise ConfigError(
            f"policy_kwargs.path: the class of the module in {path!r} cannot be imported: {error}. Run in the folder "
            "of its module. If a script defined the class, move it to a module, and save the weights alone with "
            "torch.save(policy.state_dict(), 'x.pt') for --policy torch:MODULE:CLASS@x.pt"
        ) from error
    except Exception as error:
        raise ConfigError(f"policy_kwargs.path: {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(loaded, torch.nn.Module):
        raise ConfigError(f"policy_kwargs.path: {path!r} has a {type(loaded).__name__}, not a torch.nn.Module")
    return loaded
